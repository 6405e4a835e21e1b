// Corpora: policies, order, shares, counts, and every error with its place.
#include "oscar/text/corpus.h"

#include <algorithm>
#include <set>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/io/hdf5.h"
#include "oscar/io/npy.h"
#include "oscar/model/checkpoint/text.h"
#include "tiny_tokenizer.h"

namespace {

using namespace oscar;
using oscar::data_test::contains;
using oscar::data_test::error_of;
using oscar::data_test::Folder;
using Sequences = std::vector<std::vector<int32_t>>;

constexpr int32_t kBos = 258, kEos = 259;

struct Fixture {
  Folder folder;
  Tokenizer tokenizer =
      Tokenizer::from_file(folder.write("tokenizer.json", data_test::tiny_tokenizer().dump()));
  CorpusOptions options = {.sequence_length = 4, .vocab_size = 260, .eos_token_ids = {kEos}};

  TokenSequences load(const std::string& argument) const {
    return load_corpus(argument, &tokenizer, options);
  }
  std::string ids(const std::string& name, const std::vector<uint64_t>& shape,
                  const std::vector<int32_t>& values) const {
    write_npy_int32(folder / name, shape, values);
    return (folder / name).string();
  }
};

std::vector<int32_t> counting(int32_t count) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back(i % 250);
  return ids;
}

TEST(CorpusArgument, HasPathsWeightsAndSelf) {
  const auto parts = parse_corpus_argument("a/chat.jsonl:0.5,b.npy:2,self:1K:1");
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[0].path, "a/chat.jsonl");
  EXPECT_EQ(parts[0].weight, 0.5);
  EXPECT_EQ(parts[1].weight, 2.0);
  EXPECT_EQ(parts[2].self_tokens, 1024);
  EXPECT_FALSE(parse_corpus_argument("a:b/c.txt")[0].has_weight);
}

TEST(CorpusArgument, RefusesWhatItCannotMean) {
  for (const char* bad :
       {"", "a.npy,", ",a.npy", "a.npy:", "a.npy:x", "a.npy:0", "a.npy:-1", "a.npy:inf",
        "a.npy:nan", "self:0", "self:x", "self:", "self:-3", "a.npy:1,b.npy", ":1"}) {
    EXPECT_TRUE(contains(error_of([&] { parse_corpus_argument(bad); }), "CORPUS")) << bad;
    EXPECT_THROW(parse_corpus_argument(bad), UsageError) << bad;
  }
}

TEST(Corpus, OneDimensionalIdsAreOneStreamWithAShorterLastSequence) {
  const Fixture s;
  const auto result = s.load(s.ids("a.npy", {10}, counting(10)));
  EXPECT_EQ(result.sequences, (Sequences{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}}));
  EXPECT_EQ(result.record.tokens, 10);
  EXPECT_EQ(result.record.sources[0].kind, "ids_1d");
  EXPECT_EQ(result.record.sources[0].sha256, sha256_of_file(s.folder / "a.npy"));
  EXPECT_EQ(result.record.chat_template, "none");
}

TEST(Corpus, ALastSequenceOfOneTokenIsDroppedAndCounted) {
  const Fixture s;
  const auto result = s.load(s.ids("a.npy", {9}, counting(9)));
  EXPECT_EQ(result.sequences.size(), 2u);
  EXPECT_EQ(result.record.sources[0].tokens_read, 9);
  EXPECT_EQ(result.record.sources[0].tokens_used, 8);
  ASSERT_EQ(result.record.sources[0].dropped.size(), 1u);
  EXPECT_EQ(result.record.sources[0].dropped[0], "tokens in a last chunk of fewer than 2: 1");
}

TEST(Corpus, RowsAreKeptApartAndSplitWhenTooLong) {
  const Fixture s;
  const auto result = s.load(s.ids("a.npy", {2, 6}, counting(12)));
  EXPECT_EQ(result.sequences, (Sequences{{0, 1, 2, 3}, {4, 5}, {6, 7, 8, 9}, {10, 11}}));
  EXPECT_EQ(result.record.sources[0].kind, "ids_2d");
  EXPECT_EQ(result.record.sources[0].documents_read, 2);
}

TEST(Corpus, TextBeginsWithBosAndEndsWithEos) {
  const Fixture s;
  const auto result = s.load(s.folder.write("a.txt", "the ab"));
  EXPECT_EQ(result.sequences, (Sequences{{kBos, 257, ' ', 'a'}, {'b', kEos}}));
  EXPECT_TRUE(contains(result.record.bos_eos_policy, "EOS 259"));
}

TEST(Corpus, EosIsNotWrittenTwice) {
  const Fixture s;
  EXPECT_EQ(s.load(s.folder.write("a.txt", "a<eos>")).sequences, (Sequences{{kBos, 'a', kEos}}));
}

TEST(Corpus, JsonLinesHoldTextOrPromptAndCompletion) {
  Fixture s;
  s.options.sequence_length = 100;
  const auto result = s.load(s.folder.write(
      "a.jsonl",
      "{\"text\": \"x\"}\r\n\n{\"prompt\": \"y\", \"completion\": \"z\"}\n{\"text\": \"\"}\n"
      "{\"text\": \" \\n\\t\"}"));
  ASSERT_EQ(result.sequences.size(), 1u);
  const std::set<int32_t> ids(result.sequences[0].begin(), result.sequences[0].end());
  EXPECT_EQ(ids, (std::set<int32_t>{kBos, kEos, 'x', 'y', 'z'}));
  EXPECT_EQ(result.sequences[0].size(), 7u);
  EXPECT_EQ(result.record.sources[0].documents_read, 4);
  EXPECT_EQ(result.record.sources[0].documents_used, 2);
  EXPECT_EQ(result.record.sources[0].dropped, std::vector<std::string>{"empty documents: 2"});
  s.options.strict = true;
  const std::string said =
      error_of([&] { s.load(s.folder.write("b.jsonl", "{\"text\": \"x\"}\n{\"text\": \" \"}")); });
  EXPECT_TRUE(contains(said, "line 2") && contains(said, "its text is empty")) << said;
}

TEST(Corpus, RowsThatMayHoldMoreThanTheirTextAreLeftToTheReaderOfChats) {
  for (const char* row :
       {R"({"text": "a", "answer": "b"})", R"({"prompt": "a", "chosen": "b"})",
        R"({"prompt": "a", "completion": "b", "system": "s"})",
        R"({"prompt": "a", "completion": "b", "input": "i"})",
        R"({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]})",
        R"({"question": "a", "answer": "b"})"}) {
    EXPECT_FALSE(read_plain_jsonl(row)) << row;
  }
  for (const char* row : {R"({"text": "a", "question": "b", "system": "s"})",
                          R"({"prompt": "a", "completion": "b", "system": null})"}) {
    EXPECT_TRUE(read_plain_jsonl(row)) << row;
  }
  const auto empty = read_plain_jsonl(R"({"prompt": "a", "completion": " "})");
  ASSERT_TRUE(empty && empty->size() == 1);
  EXPECT_EQ(empty->front().error, "'prompt' needs 'completion' beside it");
}

TEST(Corpus, ConversationsAreRenderedByTheModelsTemplate) {
  Fixture s;
  s.options.sequence_length = 1000;
  s.options.chat_template = {
      .texts =
          {{"default",
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}},
      .special_tokens = {{"bos_token", "<b>"}}};
  const auto result = s.load(s.folder.write(
      "a.jsonl",
      R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]})"));
  ASSERT_EQ(result.sequences.size(), 1u);
  auto expected = s.tokenizer.encode("<b>[user]q[assistant]r", false);
  expected.push_back(kEos);
  EXPECT_EQ(result.sequences[0], expected);
  EXPECT_EQ(result.record.chat_template, s.options.chat_template.name());
  EXPECT_TRUE(contains(result.record.chat_template, "the model's own ("));
}

TEST(Corpus, ChatsWithoutATemplateAreRefusedWithTheWayOut) {
  const Fixture s;
  const std::string path =
      s.folder.write("a.jsonl", R"({"messages": [{"role": "assistant", "content": "r"}]})");
  const std::string said = error_of([&] { s.load(path); });
  for (const char* word : {"a.jsonl", "line 1", "no chat template", "chat_template.jinja"}) {
    EXPECT_TRUE(contains(said, word)) << said;
  }
}

TEST(Corpus, RowsWithoutADocumentAreLeftOutAndCountedOrEndAStrictRun) {
  Fixture s;
  s.options.sequence_length = 1000;
  const std::string path = s.folder.write("a.jsonl",
                                          "{\"text\": \"x\"}\n{\"text\": \n\n{\"title\": 1}\n"
                                          "{\"prompt\": \"a\"}\n[1]\n{\"text\": \"y\"}\n");
  const auto result = s.load(path);
  EXPECT_EQ(result.record.sources[0].documents_used, 2);
  EXPECT_EQ(result.record.sources[0].dropped,
            std::vector<std::string>{"rows without a document: 4"});
  const auto notes = corpus_warnings(result.record);
  ASSERT_EQ(notes.size(), 1u);
  for (const char* word : {"a.jsonl: left out rows without a document: 4", "line 2: ",
                           "line 4: no 'messages'", "line 5: 'prompt' needs 'completion'"}) {
    EXPECT_TRUE(contains(notes[0], word)) << notes[0];
  }
  const auto latin_1 =
      s.load(s.folder.write("b.jsonl", "{\"text\": \"x\"}\n{\"text\": \"\xe9\"}\n"));
  EXPECT_TRUE(contains(corpus_warnings(latin_1.record)[0], "b.jsonl > ")) << "the command";
  s.options.strict = true;
  EXPECT_TRUE(contains(error_of([&] { s.load(path); }), "line 2"));
}

TEST(Corpus, AFolderNamesTheFileOfARowAndLeavesOutFilesWithoutDocuments) {
  Fixture s;
  s.options.sequence_length = 1000;
  const std::filesystem::path folder = s.folder / "texts";
  s.folder.write("texts/a.jsonl", "{\"text\": \"x\"}\n{\"title\": 1}\n");
  s.folder.write("texts/b.jsonl", "{\"title\": 1}\n{\"title\": 2}\n");
  s.folder.write("texts/c.jsonl", "{\"text\": \"y\"}\n[1]\n");
  const auto result = s.load(folder.string());
  EXPECT_EQ(result.record.sources[0].documents_used, 2);
  const auto notes = corpus_warnings(result.record);
  ASSERT_EQ(notes.size(), 1u);
  for (const char* word : {"rows without a document: 4", "a.jsonl, line 2: no 'messages'",
                           "b.jsonl, line 1: no 'messages'"}) {
    EXPECT_TRUE(contains(notes[0], word)) << notes[0];
  }
  EXPECT_EQ(result.record.sources[0].dropped.back(), "files of which no row holds a document: 1");
  s.options.strict = true;
  EXPECT_TRUE(contains(error_of([&] { s.load(folder.string()); }), "a.jsonl, line 2"));
  s.options.strict = false;
  std::filesystem::remove(folder / "a.jsonl");
  std::filesystem::remove(folder / "c.jsonl");
  EXPECT_TRUE(contains(error_of([&] { s.load(folder.string()); }), "b.jsonl, line 1"));
}

TEST(Corpus, NullColumnsAndAByteOrderMarkChangeNothing) {
  const Fixture s;
  const auto plain = s.load(s.folder.write("a.jsonl", R"({"text": "xyz"})"));
  const auto nulls = s.load(s.folder.write(
      "b.jsonl", "\xef\xbb\xbf{\"messages\": null, \"prompt\": null, \"text\": \"xyz\"}"));
  EXPECT_EQ(nulls.sequences, plain.sequences);
  EXPECT_EQ(s.load(s.folder.write("c.txt", "\xef\xbb\xbfxyz")).sequences, plain.sequences);
  EXPECT_TRUE(contains(
      error_of([&] { s.load(s.folder.write("d.txt", std::string("\xff\xfex\0", 4))); }), "UTF-16"));
  EXPECT_TRUE(
      contains(error_of([&] { s.load(s.folder.write("e.jsonl", std::string("{\0\"\0t\0", 6))); }),
               "e.jsonl > " + (s.folder / "e-utf8.jsonl").string()));
}

TEST(Corpus, DocumentOrderFollowsTheSeedAlone) {
  Fixture s;
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += "{\"text\": \"" + std::to_string(i) + "\"}\n";
  const std::string path = s.folder.write("a.jsonl", lines);
  const auto first = s.load(path), again = s.load(path);
  EXPECT_EQ(first.record.tokens_sha256, again.record.tokens_sha256);
  s.options.seed = 1;
  const auto other = s.load(path);
  EXPECT_NE(first.record.tokens_sha256, other.record.tokens_sha256);
  EXPECT_EQ(first.record.tokens, other.record.tokens);
}

TEST(Corpus, ShuffleIsTheSameOnEveryPlatform) {
  SplitMix64 random(1234567);
  EXPECT_EQ(random.next(), 6457827717110365317ULL);
  EXPECT_EQ(random.next(), 3203168211198807973ULL);
  auto order = shuffled_order(1000, 3);
  EXPECT_NE(order, shuffled_order(1000, 4));
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) ASSERT_EQ(order[i], i);
}

TEST(Corpus, WeightsSetTheSharesOfTheLargestTotalThatNoPartIsShortOf) {
  const Fixture s;
  const auto a = s.ids("a.npy", {100}, std::vector<int32_t>(100, 1));
  const auto b = s.ids("b.npy", {100}, std::vector<int32_t>(100, 2));
  const auto result = s.load(a + ":3," + b + ":1");
  EXPECT_EQ(result.record.sources[0].tokens_used, 100);
  // A third of 100, less the one token that would be a sequence of its own.
  EXPECT_EQ(result.record.sources[1].tokens_used, 32);
  EXPECT_EQ(result.record.tokens, 132);
  // The first third holds its share of both.
  int64_t of_b = 0;
  for (size_t i = 0; i < 12; ++i) of_b += result.sequences[i][0] == 2;
  EXPECT_EQ(of_b, 3);
}

TEST(Corpus, WithoutWeightsEveryPartIsUsedWhole) {
  const Fixture s;
  const auto result =
      s.load(s.ids("a.npy", {100}, counting(100)) + "," + s.ids("b.npy", {8}, counting(8)));
  EXPECT_EQ(result.record.tokens, 108);
}

TEST(Corpus, MaxTokensCutsTheLastSequence) {
  Fixture s;
  s.options.max_tokens = 10;
  const auto result = s.load(s.ids("a.npy", {100}, counting(100)));
  EXPECT_EQ(result.record.tokens, 10);
  EXPECT_EQ(result.sequences.back().size(), 2u);
  EXPECT_EQ(result.record.sequences_read, 25);
  EXPECT_EQ(result.record.sequences_used, 3);
  EXPECT_EQ(result.record.sources[0].dropped[0],
            "tokens beyond the part's share or max_tokens: 90");
}

TEST(Corpus, AFolderIsReadInTheOrderOfNames) {
  const Fixture s;
  s.folder.write("c/readme.md", "not a corpus");
  s.ids("c/b.npy", {2}, {5, 6});
  s.ids("c/a.npy", {2}, {7, 8});
  const auto result = s.load((s.folder / "c").string());
  EXPECT_EQ(result.sequences, (Sequences{{7, 8}, {5, 6}}));
  EXPECT_EQ(result.record.sources[0].kind, "folder");
  EXPECT_EQ(result.record.sources[0].name, "c");
  EXPECT_EQ(result.record.sources[0].dropped[0], "other files in the folder: 1");
}

TEST(Corpus, LinksThatLeadOutOfAFolderAreNotRead) {
  const Fixture s, elsewhere;
  const auto secret = elsewhere.folder.write("key.txt", "secret");
  std::filesystem::create_directory(s.folder / "c");
  s.ids("c/a.npy", {2}, {7, 8});
  std::filesystem::create_symlink(secret, s.folder / "c" / "notes.txt");
  const auto result = s.load((s.folder / "c").string());
  EXPECT_EQ(result.sequences, (Sequences{{7, 8}}));
  EXPECT_EQ(result.record.sources[0].dropped[0], "links that lead out of the folder: 1");
  std::filesystem::remove(s.folder / "c" / "a.npy");
  EXPECT_TRUE(contains(error_of([&] { s.load((s.folder / "c").string()); }), "not read"));
}

TEST(Corpus, Hdf5HoldsIdsInTokensOrInItsOnlyDataset) {
  const Fixture s;
  const auto write = [&](const char* name, const std::vector<hdf5::Dataset>& datasets) {
    AtomicFile file(s.folder / name);
    hdf5::Writer writer(file);
    for (const auto& dataset : datasets) writer.write(hdf5::view(dataset));
    writer.close();
    file.commit();
    return (s.folder / name).string();
  };
  const std::vector<int32_t> ids = {1, 2, 3}, rows = {1, 2, 3, 4};
  EXPECT_EQ(s.load(write("a.h5", {{"/x", {3}, ids}})).sequences, (Sequences{{1, 2, 3}}));
  EXPECT_EQ(s.load(write("b.h5", {{"/tokens", {2, 2}, rows}, {"/x", {3}, ids}})).sequences,
            (Sequences{{1, 2}, {3, 4}}));
  EXPECT_TRUE(contains(error_of([&] {
                         s.load(write("c.h5", {{"/x", {3}, ids}, {"/y", {3}, ids}}));
                       }),
                       "/x, /y"));
  EXPECT_TRUE(contains(error_of([&] {
                         s.load(write("d.h5", {{"/tokens", {1}, std::vector<float>{1}}}));
                       }),
                       "/tokens"));
}

TEST(Corpus, OfHdf5IdsOnlyAsManyAreReadAsMaxTokensCanUse) {
  Fixture s;
  const auto write = [&](const char* name, const hdf5::Shape& shape) {
    AtomicFile out(s.folder / name);
    hdf5::Writer writer(out);
    std::vector<int32_t> ids = counting(6000);
    ids.back() = 999;  // outside the vocabulary, and never looked at
    writer.write(hdf5::view(hdf5::Dataset{"/tokens", shape, ids}));
    writer.close();
    out.commit();
    return (s.folder / name).string();
  };
  for (const hdf5::Shape& shape : {hdf5::Shape{6000}, hdf5::Shape{1200, 5}, hdf5::Shape{2000, 3}}) {
    const std::string path = write("ids.h5", shape);
    s.options.max_tokens = 100;
    const auto result = s.load(path);
    EXPECT_EQ(result.record.sources[0].dropped.front().find("token ids not needed"), 0u);
    // The same as of a file that is read whole.
    const std::string whole = s.ids("ids.npy", shape, counting(6000));
    EXPECT_EQ(result.sequences, s.load(whole).sequences);
    EXPECT_EQ(s.load(path + ":1," + path + ":3").sequences,
              s.load(whole + ":1," + whole + ":3").sequences);
    s.options.max_tokens = 0;
    EXPECT_TRUE(contains(error_of([&] { s.load(path); }), "outside the vocabulary"));
  }
}

TEST(Corpus, ErrorsNameFileAndPlace) {
  Fixture s;
  const auto error = [&](const std::string& path) { return error_of([&] { s.load(path); }); };
  const auto text = [&](const std::string& name, const std::string& content) {
    return error(s.folder.write(name, content));
  };
  EXPECT_TRUE(contains(text("a.txt", "ab\xff"), "a.txt, byte 2"));
  EXPECT_TRUE(contains(text("a.txt", "ab\xff"), "iconv -f LATIN1 -t UTF-8 "));
  s.options.strict = true;
  const std::string utf8 = text("a.jsonl", "{\"text\": \"x\"}\n{\"text\": \"\xc3(\"}");
  EXPECT_TRUE(contains(utf8, "a.jsonl, line 2"));
  EXPECT_TRUE(contains(utf8, "the line, byte 10"));
  EXPECT_TRUE(contains(text("b.jsonl", "{\"text\": \"x\"}\n\n{\"text\": "), "b.jsonl, line 3"));
  EXPECT_TRUE(contains(text("c.jsonl", "[1]"), "c.jsonl, line 1"));
  s.options.strict = false;
  EXPECT_TRUE(contains(text("d.jsonl", "{\"title\": 1, \"body\": \"x\"}"),
                       "'text' or 'content'; the row has 'title', 'body'"));
  EXPECT_TRUE(contains(text("e.jsonl", "{\"text\": 3}"), "line 1: 'text' is not text"));
  EXPECT_TRUE(
      contains(text("f.jsonl", "{\"prompt\": \"x\"}"), "'prompt' needs 'completion' beside it"));
  EXPECT_TRUE(contains(text("empty.txt", ""), "corpus is empty"));
  EXPECT_TRUE(contains(text("empty.jsonl", "\n\n"), "corpus is empty"));
  EXPECT_TRUE(contains(text("a.parquet", "x"), ".parquet"));
  EXPECT_TRUE(contains(text("noextension", "x"), "no extension"));
  const std::string in = (s.folder / "").string();
  EXPECT_TRUE(contains(text("n.md", "x"), "cp " + in + "n.md " + in + "n.txt"));
  EXPECT_TRUE(contains(text("t.csv", "text\nx\n"), "< " + in + "t.csv > " + in + "t.jsonl"));
  EXPECT_TRUE(
      contains(text("g.jsonl", "\x1f\x8b\x08"), "mv " + in + "g.jsonl " + in + "g.jsonl.gz"));
  EXPECT_TRUE(contains(text("u.json", "[{\"text\": \"\xe9\"}]"), "> " + in + "u-utf8.json"));
  EXPECT_TRUE(contains(text("p.txt", "PK\x03\x04"), "unzip " + in + "p.txt"));
  EXPECT_TRUE(contains(text("l.jsonl", "[\n {\"text\": \"x\"}\n]\n"), "a list, not lines"));
  EXPECT_TRUE(
      contains(text("l.jsonl", "[{\"text\": 1}]"), "mv " + in + "l.jsonl " + in + "l.json"));
  EXPECT_TRUE(contains(text("i.jsonl", "{\"input_ids\": [1], \"n\": 2, \"x\": null}"),
                       "the row has 'input_ids', 'n' (token ids are read from .npy and .h5)"));
  EXPECT_TRUE(contains(error((s.folder / "absent.npy").string()), "does not exist"));
  EXPECT_TRUE(contains(error(s.ids("big.npy", {3}, {0, 1, 260})), "big.npy, position 2"));
  EXPECT_TRUE(contains(error(s.ids("neg.npy", {2, 2}, {0, 1, -1, 3})), "row 1, column 0"));
  EXPECT_TRUE(contains(error(s.ids("one.npy", {1}, {1})), "corpus is empty"));
  EXPECT_TRUE(contains(error("self:10"), "self:N"));
  s.folder.write("none/readme.md", "");
  EXPECT_TRUE(contains(error((s.folder / "none").string()), "holds no corpus file"));
}

TEST(Corpus, ConversationsThatCannotBeRenderedAreNamedByLine) {
  Fixture s;
  s.options.chat_template.texts = {
      {"default",
       "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no ' + "
       "m.role) }}{% endif %}{{ m.content }}{% endfor %}"}};
  const std::string path =
      s.folder.write("a.jsonl",
                     "{\"messages\": []}\n{\"messages\": [\"x\"]}\n"
                     "{\"messages\": [{\"role\": \"critic\", \"content\": \"x\"}]}\n"
                     "{\"messages\": [{\"role\": \"assistant\", \"content\": \"fine\"}]}\n");
  const auto result = s.load(path);
  EXPECT_EQ(result.record.sources[0].documents_used, 1);
  const auto notes = corpus_warnings(result.record);
  ASSERT_EQ(notes.size(), 1u);
  for (const char* word : {"rows without a document: 3", "line 1: ", "line 2: message 1",
                           "line 3: the chat template refuses it: no critic"}) {
    EXPECT_TRUE(contains(notes[0], word)) << notes[0];
  }
}

TEST(Corpus, BytesThatTheVocabularyCannotWriteAreCounted) {
  const Fixture s;
  nlohmann::json file = data_test::tiny_tokenizer();
  file["model"]["vocab"].erase("x");
  file["model"]["vocab"]["zz"] = static_cast<int>('x');
  const Tokenizer tokenizer = Tokenizer::from_json(file, "test");
  const auto result = load_corpus(s.folder.write("a.txt", "axbxcd"), &tokenizer, s.options);
  EXPECT_EQ(result.record.sources[0].lost_bytes, 2);
  EXPECT_EQ(result.record.sources[0].dropped,
            std::vector<std::string>{"bytes of text that the vocabulary cannot write: 2"});
}

TEST(Corpus, OnlyTextNeedsATokenizer) {
  const Folder folder;
  folder.write("ids/a.npy", "");
  folder.write("ids/b.h5", "");
  folder.write("mixed/a.npy", "");
  folder.write("mixed/b.jsonl", "");
  const std::string ids = (folder / "ids").string(), mixed = (folder / "mixed").string();
  for (const std::string& corpus : {ids, ids + "/a.npy:1,self:10:1", std::string("absent.npy")}) {
    EXPECT_FALSE(reads_text(corpus)) << corpus;
  }
  for (const std::string& corpus : {mixed, mixed + "/b.jsonl", ids + ",absent.txt"}) {
    EXPECT_TRUE(reads_text(corpus)) << corpus;
  }
}

TEST(Corpus, TextWithoutATokenizerIsAnError) {
  const Fixture s;
  const std::string path = s.folder.write("a.txt", "x");
  EXPECT_TRUE(
      contains(error_of([&] { load_corpus(path, nullptr, s.options); }), "needs a tokenizer"));
}

TEST(Corpus, AVocabularySmallerThanTheTokenizersIsAnError) {
  Fixture s;
  s.options.vocab_size = 100;
  const std::string path = s.folder.write("a.txt", "x");
  EXPECT_TRUE(contains(error_of([&] { s.load(path); }), "outside the model's vocabulary"));
}

TEST(Corpus, PackedDocumentsMakeOneStream) {
  const Fixture s;
  const auto result =
      pack_documents({{1, 2, 3}, {4, 5, 6}}, {.name = "self", .kind = "self"}, s.options);
  EXPECT_EQ(result.sequences, (Sequences{{1, 2, 3, 4}, {5, 6}}));
  EXPECT_EQ(result.record.sources[0].documents_used, 2);
  EXPECT_EQ(result.record.sources[0].tokens_used, 6);
}

TEST(Corpus, TheDigestCoversLengthsAndIds) {
  const Fixture s;
  const auto result = pack_documents({{1, 258}}, {.name = "self", .kind = "self"}, s.options);
  EXPECT_EQ(result.record.tokens_sha256, sha256_of(std::string("\2\0\0\0\1\0\0\0\2\1\0\0", 12)));
}

TEST(Corpus, SequencesAreWrittenAsATableOrAsAStreamWithAWarning) {
  const Fixture s;
  TokenSequences sequences;
  sequences.sequences = {{1, 2}, {3, 4}};
  EXPECT_EQ(write_sequences_npy(sequences, s.folder / "t.npy"), "");
  EXPECT_EQ(s.load((s.folder / "t.npy").string()).sequences, sequences.sequences);
  sequences.sequences.push_back({5, 6, 7});
  EXPECT_TRUE(contains(write_sequences_npy(sequences, s.folder / "u.npy"), "differ in length"));
  EXPECT_EQ(read_npy_integers(s.folder / "u.npy").shape, std::vector<uint64_t>{7});
}

}  // namespace
