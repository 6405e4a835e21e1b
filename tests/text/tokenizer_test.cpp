// The tokenizer on its own: order of steps, flags of added tokens, refusals, hostile files.
#include "oscar/text/tokenizer.h"

#include <chrono>
#include <cstdio>
#include <functional>

#include "tiny_tokenizer.h"

namespace {

using namespace oscar;
using oscar::data_test::contains;
using oscar::data_test::error_of;
using oscar::data_test::Folder;
using oscar::data_test::tiny_tokenizer;
using Ids = std::vector<int32_t>;
using nlohmann::json;

Tokenizer load(const json& file) {
  const Folder folder;
  return Tokenizer::from_file(folder.write("tokenizer.json", file.dump()));
}

Tokenizer with_token(const json& flags) {
  json file = tiny_tokenizer();
  json token = {{"id", 260}, {"content", "<x>"}, {"special", false}, {"normalized", false}};
  token.update(flags);
  file["added_tokens"].push_back(token);
  return load(file);
}

std::string refusal(const std::function<void(json&)>& change) {
  json file = tiny_tokenizer();
  change(file);
  return error_of([&] { load(file); });
}

TEST(Tokenizer, MergesLowestRankFirstAndDecodesBack) {
  const Tokenizer t = load(tiny_tokenizer());
  EXPECT_EQ(t.encode("the th", false), (Ids{257, ' ', 256}));
  EXPECT_EQ(t.encode("the", true), (Ids{258, 257}));
  EXPECT_EQ(t.encode("", true), (Ids{258}));
  EXPECT_EQ(t.decode({258, 257, 259}, true), "the");
  EXPECT_EQ(t.decode({258, 257, 259}, false), "<bos>the<eos>");
  EXPECT_EQ(t.decode({-5, 257, 100000}, true), "the");
  EXPECT_EQ(t.vocab_size(), 260);
  EXPECT_EQ(t.token_id("<eos>"), 259);
  EXPECT_EQ(t.token_id("th"), 256);
  EXPECT_EQ(t.token_id("nothing"), std::nullopt);
}

TEST(Tokenizer, MergesMayBePairs) {
  json file = tiny_tokenizer();
  file["model"]["merges"] = json::array({{"t", "h"}, {"th", "e"}});
  EXPECT_EQ(load(file).encode("the", false), (Ids{257}));
}

TEST(Tokenizer, IgnoreMergesTakesWholeWordsOfTheVocabulary) {
  json file = tiny_tokenizer();
  file["model"]["merges"] = json::array();
  EXPECT_EQ(load(file).encode("the", false), (Ids{'t', 'h', 'e'}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(load(file).encode("the", false), (Ids{257}));
}

TEST(Tokenizer, LongWordsMergeAsShortOnesDo) {
  const Tokenizer t = load(tiny_tokenizer());
  std::string word;
  Ids expected;
  for (int i = 0; i < 1000; ++i) {
    word += "thethx";
    expected.insert(expected.end(), {257, 256, 'x'});
  }
  EXPECT_EQ(t.encode(word, false), expected);
}

TEST(Tokenizer, AMegabyteOfOneWordIsNotQuadratic) {
  const Tokenizer t = load(tiny_tokenizer());
  const std::string word(1 << 20, 't');
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(t.encode(word, false).size(), word.size());
  // Quadratic merging would take hours; a loaded machine with sanitizers takes seconds.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

TEST(Tokenizer, AddedTokensTakeWhiteSpaceOnTheSidesTheyStrip) {
  EXPECT_EQ(with_token(json::object()).encode("a <x> b", false), (Ids{'a', ' ', 260, ' ', 'b'}));
  EXPECT_EQ(with_token({{"lstrip", true}}).encode("a \n<x> b", false), (Ids{'a', 260, ' ', 'b'}));
  EXPECT_EQ(with_token({{"rstrip", true}}).encode("a <x>\t b", false), (Ids{'a', ' ', 260, 'b'}));
}

TEST(Tokenizer, SingleWordTokensStandAlone) {
  const Tokenizer t = with_token({{"single_word", true}});
  EXPECT_EQ(t.encode("<x>", false), (Ids{260}));
  EXPECT_EQ(t.encode("a<x>", false), (Ids{'a', '<', 'x', '>'}));
  EXPECT_EQ(t.encode("-<x>.", false), (Ids{'-', 260, '.'}));
}

TEST(Tokenizer, TheLongestAddedTokenWins) {
  json file = tiny_tokenizer();
  for (const auto& [id, content] : {std::pair{260, "<x"}, std::pair{261, "<x>"}}) {
    file["added_tokens"].push_back({{"id", id}, {"content", content}, {"normalized", false}});
  }
  EXPECT_EQ(load(file).encode("<x><x", false), (Ids{261, 260}));
}

TEST(Tokenizer, NormalizedTokensAreFoundInNormalisedText) {
  json file = tiny_tokenizer();
  file["normalizer"] = {{"type", "NFC"}};
  file["added_tokens"].push_back({{"id", 260}, {"content", "\u00e9x"}, {"normalized", true}});
  EXPECT_EQ(load(file).encode("xe\u0301x", false), (Ids{'x', 260}));
  EXPECT_EQ(load(tiny_tokenizer()).encode("e\u0301", false).size(), 3u);
}

TEST(Tokenizer, PrefixSpaceIsAddedOnce) {
  json file = tiny_tokenizer();
  file["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(load(file).encode("a", false), (Ids{' ', 'a'}));
  EXPECT_EQ(load(file).encode(" a", false), (Ids{' ', 'a'}));
}

TEST(Tokenizer, PostProcessorsNest) {
  json file = tiny_tokenizer();
  json outer = file["post_processor"];
  outer["single"] = {{{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", "<eos>"}}}}};
  outer["special_tokens"] = {{"<eos>", {{"ids", {259}}}}};
  file["post_processor"] = {
      {"type", "Sequence"},
      {"processors", {{{"type", "ByteLevel"}}, file["post_processor"], outer}}};
  EXPECT_EQ(load(file).encode("a", true), (Ids{258, 'a', 259}));
}

TEST(Tokenizer, BytesThatTheVocabularyLacksAreLeftOutAndCounted) {
  json file = tiny_tokenizer();
  for (const char* symbol : {"h", "\u0104", "th", "the"}) file["model"]["vocab"].erase(symbol);
  file["model"]["merges"] = file["added_tokens"] = json::array();
  file["post_processor"] = nullptr;
  const Tokenizer t = load(file);
  int64_t lost = 5;
  EXPECT_EQ(t.encode("the \x04hat", false, &lost), (Ids{'t', 'e', ' ', 'a', 't'}));
  EXPECT_EQ(lost, 5 + 3);
  EXPECT_EQ(t.encode("the", false, &lost), (Ids{'t', 'e'}));  // now a word that is known
  EXPECT_EQ(lost, 5 + 3 + 1);
}

// Characters a to c, a mark for spaces, an unknown token, and byte tokens of some bytes.
json text_tokenizer(const std::vector<int>& bytes) {
  json file = tiny_tokenizer();
  file["model"]["vocab"] = {{"<unk>", 0}, {"a", 1}, {"b", 2}, {"c", 3}, {"_", 4}, {"ab", 5}};
  file["model"]["merges"] = {"a b"};
  file["model"]["unk_token"] = "<unk>";
  for (const int byte : bytes) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", static_cast<unsigned>(byte));
    file["model"]["vocab"][name] = 100 + byte;
  }
  file["model"]["byte_fallback"] = !bytes.empty();
  file["added_tokens"] = json::array();
  file["post_processor"] = file["pre_tokenizer"] = nullptr;
  return file;
}

TEST(Tokenizer, UnknownCharactersBecomeTheUnknownTokenEachOrTogether) {
  json file = text_tokenizer({});
  EXPECT_EQ(load(file).encode("aXYb", false), (Ids{1, 0, 0, 2}));
  file["model"]["fuse_unk"] = true;
  EXPECT_EQ(load(file).encode("aXYb", false), (Ids{1, 0, 2}));
  file["model"]["unk_token"] = "<none>";
  const Tokenizer t = load(file);
  EXPECT_EQ(t.encode("abc", false), (Ids{5, 3}));
  EXPECT_TRUE(contains(error_of([&] { t.encode("abX", false); }), "<none>"));
}

TEST(Tokenizer, UnknownCharactersBecomeTheTokensOfTheirBytes) {
  const Tokenizer t = load(text_tokenizer({0xC3, 0xA9}));
  EXPECT_EQ(t.encode("a\u00e9b", false), (Ids{1, 100 + 0xC3, 100 + 0xA9, 2}));
  EXPECT_EQ(t.encode("a\u00e8b", false), (Ids{1, 0, 2}));  // not all of its bytes have one
}

TEST(Tokenizer, NormalizersRunInTheirOrder) {
  json file = text_tokenizer({});
  file["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Lowercase"}},
        {{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}},
        {{"type", "Prepend"}, {"prepend", " "}},
        {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "_"}}}}};
  EXPECT_EQ(load(file).encode("  AB C ", false), (Ids{4, 5, 4, 3, 4}));
  EXPECT_EQ(load(file).encode("", false), Ids{});
}

TEST(Tokenizer, ATextThatANormalizerMakesMuchLongerIsAnError) {
  json file = text_tokenizer({});
  json steps = json::array();
  for (int i = 0; i < 40; ++i) {
    steps.push_back({{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  }
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
  const Tokenizer t = load(file);
  EXPECT_EQ(t.encode("b", false), Ids{2});
  EXPECT_TRUE(contains(error_of([&] { t.encode("aaaa", false); }), "much longer"));
}

TEST(Tokenizer, MetaspacePutsAMarkWhereItsSchemeSays) {
  json file = text_tokenizer({});
  const auto ids = [&](const char* scheme, const char* text) {
    file["pre_tokenizer"] = {
        {"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", scheme}};
    file["added_tokens"] = {{{"id", 6}, {"content", "<x>"}, {"normalized", false}}};
    return load(file).encode(text, false);
  };
  EXPECT_EQ(ids("always", "a<x>a b"), (Ids{4, 1, 6, 4, 1, 4, 2}));
  EXPECT_EQ(ids("first", "a<x>a b"), (Ids{4, 1, 6, 1, 4, 2}));
  EXPECT_EQ(ids("first", "<x>a"), (Ids{6, 1}));
  EXPECT_EQ(ids("never", "a b"), (Ids{1, 4, 2}));
  EXPECT_EQ(ids("always", " a"), (Ids{4, 1}));
}

TEST(Tokenizer, ADocumentWithoutSpacesIsCutWhereNoMergeJoins) {
  json file = text_tokenizer({});
  std::string text;
  Ids expected;
  for (int i = 0; i < 200'000; ++i) {
    text += i % 7 == 3 ? "aX" : "ab_";
    const Ids ids = i % 7 == 3 ? Ids{1, 0} : Ids{5, 4};
    expected.insert(expected.end(), ids.begin(), ids.end());
  }
  EXPECT_EQ(load(file).encode(text, false), expected);
}

TEST(Tokenizer, IsMadeOfADocumentInMemoryToo) {
  const Tokenizer t = Tokenizer::from_json(tiny_tokenizer(), "made here");
  EXPECT_EQ(t.encode("the", false), (Ids{257}));
  EXPECT_TRUE(
      contains(error_of([] { Tokenizer::from_json(json::array(), "made here"); }), "made here"));
}

TEST(Tokenizer, IdsMayBeFarApart) {
  json file = tiny_tokenizer();
  file["model"]["vocab"]["the"] = 16'000'000;  // a table by id would take 128 MB
  const Tokenizer t = load(file);
  EXPECT_EQ(t.encode("the th", false), (Ids{16'000'000, ' ', 256}));
  EXPECT_EQ(t.decode({16'000'000, 15'999'999, 257, 256}, true), "theth");
  EXPECT_EQ(t.vocab_size(), 16'000'001);
}

TEST(Tokenizer, OnlyByteLevelDecodersDecode) {
  json file = tiny_tokenizer();
  for (const json& decoder : {json(nullptr), json{{"type", "WordPiece"}}, json(3)}) {
    file["decoder"] = decoder;
    const Tokenizer t = load(file);
    EXPECT_EQ(t.encode("the", false), (Ids{257}));
    EXPECT_TRUE(contains(error_of([&] { t.decode({257}, true); }), "decoder"));
  }
}

TEST(Tokenizer, InvalidUtf8IsAnErrorWithItsOffset) {
  const Tokenizer t = load(tiny_tokenizer());
  EXPECT_TRUE(contains(error_of([&] { t.encode("abc\xed\xa0\x80", false); }), "byte 3"));
  EXPECT_TRUE(contains(error_of([&] { t.encode("\xc0\xaf", false); }), "byte 0"));
  EXPECT_TRUE(contains(error_of([&] { t.encode("abcdefgh\xe2\x82", false); }), "byte 8"));
}

TEST(Tokenizer, BytesThatFormNoCharacterDecodeToTheReplacementCharacter) {
  const Tokenizer t = load(tiny_tokenizer());
  EXPECT_EQ(t.decode({0xE2, 0x82, 'a', 0xFF}, true), "\uFFFDa\uFFFD");
}

TEST(Tokenizer, WhatIsNotImplementedIsRefusedByNameWithTheWayOut) {
  struct Case {
    const char* name;
    std::function<void(json&)> change;
  };
  const Case cases[] = {
      {"model 'Unigram'", [](json& f) { f["model"]["type"] = "Unigram"; }},
      {"dropout", [](json& f) { f["model"]["dropout"] = 0.1; }},
      {"end_of_word_suffix", [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }},
      {"key 'novelty'", [](json& f) { f["model"]["novelty"] = 1; }},
      {"normalizer 'StripAccents'",
       [](json& f) {
         f["normalizer"] = {{"type", "StripAccents"}};
       }},
      {"more than 64 normalizers",
       [](json& f) {
         const json step = {{"type", "Prepend"}, {"prepend", "a"}};
         f["normalizer"] = {{"type", "Sequence"}, {"normalizers", json(65, step)}};
       }},
      {"pre-tokenizer 'BertPreTokenizer'",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "BertPreTokenizer"}};
       }},
      {"more than 16 pre-tokenizers",
       [](json& f) {
         const json step = {{"type", "Whitespace"}};
         f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", json(65, step)}};
       }},
      {"prepend_scheme 'last'",
       [](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "last"}};
       }},
      {"'first' behind a normalizer",
       [](json& f) {
         f["normalizer"] = {{"type", "NFC"}};
         f["pre_tokenizer"] = {
             {"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "first"}};
       }},
      {"post-processor 'BertProcessing'",
       [](json& f) {
         f["post_processor"] = {{"type", "BertProcessing"}};
       }},
      {"behavior 'Sideways'",
       [](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Sideways"}};
       }},
      {"an empty String pattern",
       [](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"String", ""}}}, {"behavior", "Isolated"}};
       }},
      {"pattern 'Wish'",
       [](json& f) {
         f["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Wish", "a"}}}, {"content", "b"}};
       }},
  };
  for (const Case& c : cases) {
    const std::string text = refusal(c.change);
    EXPECT_TRUE(contains(text, c.name));
    EXPECT_TRUE(contains(text, "python -m oscar_int2 prepare-corpus")) << c.name;
  }
}

TEST(Tokenizer, TruncationAndPaddingOfTheFileAreLeftAlone) {
  json file = tiny_tokenizer();
  const Ids whole = load(file).encode("the theory", false);
  file["truncation"] = {{"max_length", 3}, {"strategy", "LongestFirst"}};
  file["padding"] = {{"strategy", {{"Fixed", 64}}}, {"pad_id", 0}};
  EXPECT_EQ(load(file).encode("the theory", false), whole);
}

TEST(Tokenizer, PatternsThatTheEnginesReadDifferentlyAreRefused) {
  for (const char* pattern :
       {"\\w+", "\\bx", "a.b", "^a", "[a&&b]", "[[a]]", "(?<=a)b", "\\p{Han}", "\\p{^L}", "a{1,2}+",
        "a{,2}", "\\x{61}", "(?i:[a-z])", "(?i:\\p{Lu})", "(?m:a)", "[]a]"}) {
    const std::string text = refusal([&](json& f) {
      f["pre_tokenizer"] = {
          {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
    });
    EXPECT_TRUE(contains(text, "regular expression construct")) << pattern;
  }
}

TEST(Tokenizer, PatternsThatDoNotCompileOrMatchNothingAreErrors) {
  for (const auto& [pattern, message] :
       {std::pair{"(a", "does not compile"}, std::pair{"a)", "does not compile"},
        std::pair{"a*", "can match nothing"}, std::pair{"a|", "can match nothing"},
        std::pair{"[a", "regular expression"}}) {
    const std::string text = refusal([p = pattern](json& f) {
      f["pre_tokenizer"] = {
          {"type", "Split"}, {"pattern", {{"Regex", p}}}, {"behavior", "Isolated"}};
    });
    EXPECT_TRUE(contains(text, message)) << pattern;
  }
}

TEST(Tokenizer, HostileFilesAreErrors) {
  struct Case {
    const char* part;
    std::function<void(json&)> change;
  };
  const Case cases[] = {
      {"model", [](json& f) { f.erase("model"); }},
      {"model.vocab", [](json& f) { f["model"].erase("vocab"); }},
      {"model.vocab", [](json& f) { f["model"]["vocab"] = json::object(); }},
      {"model.vocab", [](json& f) { f["model"]["vocab"] = json::array({1}); }},
      {"model.merges", [](json& f) { f["model"].erase("merges"); }},
      {"one token for each id", [](json& f) { f["model"]["vocab"]["zz"] = 256; }},
      {"a token id from 0", [](json& f) { f["model"]["vocab"]["zz"] = -1; }},
      {"a token id from 0", [](json& f) { f["model"]["vocab"]["zz"] = 4294967296; }},
      {"a token id from 0", [](json& f) { f["model"]["vocab"]["zz"] = 1e300; }},
      {"a token id from 0", [](json& f) { f["model"]["vocab"]["zz"] = "1"; }},
      {"one character",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "__"}};
       }},
      {"an empty one", [](json& f) { f["model"]["merges"] = {" t"}; }},
      {"an empty one",
       [](json& f) {
         f["model"]["vocab"][""] = 258;
         f["model"]["merges"] = json::array({json::array({"t", ""})});
       }},
      {"two tokens with one space", [](json& f) { f["model"]["merges"] = {"t h e"}; }},
      {"tokens of the vocabulary", [](json& f) { f["model"]["merges"] = {"th q"}; }},
      {"a pair of tokens", [](json& f) { f["model"]["merges"] = {3}; }},
      {"true or false", [](json& f) { f["model"]["ignore_merges"] = "yes"; }},
      {"a content and an id of its own",
       [](json& f) { f["added_tokens"].push_back(f["added_tokens"][0]); }},
      {"a content and an id of its own", [](json& f) { f["added_tokens"][0]["content"] = ""; }},
      {"another id than", [](json& f) { f["added_tokens"][1]["id"] = 300; }},
      {"added_tokens", [](json& f) { f["added_tokens"] = 3; }},
      {"an entry for '<bos>'",
       [](json& f) { f["post_processor"]["special_tokens"] = json::object(); }},
      {"ids of known tokens",
       [](json& f) { f["post_processor"]["special_tokens"]["<bos>"]["ids"] = {9999}; }},
      {"pretokenizers",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Sequence"}};
       }},
      {"type", [](json& f) { f["pre_tokenizer"] = 3; }},
  };
  for (const Case& c : cases) EXPECT_TRUE(contains(refusal(c.change), c.part));
  const Folder folder;
  for (const char* text : {"", "{", "[]", "{\"model\": \"\xff\"}"}) {
    const std::string path = folder.write("tokenizer.json", text);
    EXPECT_TRUE(contains(error_of([&] { Tokenizer::from_file(path); }), "malformed")) << text;
  }
}

TEST(Tokenizer, MergesInACircleEnd) {
  // A merge only joins: whatever the order of the list, each one shortens the word.
  json file = tiny_tokenizer();
  file["model"]["vocab"]["ht"] = 258;
  file["model"]["vocab"]["tht"] = 259;
  file["model"]["merges"] = {"th t", "h t", "t h", "t ht", "th t"};
  file["added_tokens"] = json::array();
  file["post_processor"] = nullptr;
  EXPECT_EQ(load(file).encode("thththt", false), (Ids{259, 258, 258}));
}

}  // namespace
