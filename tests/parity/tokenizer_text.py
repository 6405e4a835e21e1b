"""Generated text that is hard on tokenizers, and small BPE tokenizers trained on it."""
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

# Newer characters are a documented limit (PCRE2 10.42 knows Unicode 14).
assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version

ASSIGNED = [chr(c) for c in range(0x110000)
            if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
MARKS = [c for c in ASSIGNED if unicodedata.category(c).startswith("M")]
DIGITS = [c for c in ASSIGNED if unicodedata.category(c).startswith("N")]
SPACES = [c for c in ASSIGNED if c.isspace()] + ["\u180e", "\u200b", "\u0085"]
EMOJI = ["\U0001F468\u200d\U0001F469\u200d\U0001F467", "\U0001F44D\U0001F3FD", "\u2764\ufe0f",
         "\U0001F1E9\U0001F1EA", "\U0001F600"]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'M",
                "'lL", "'D", "'\u017f", "\u2019s", "'", "''"]
WORDS = ("the of and to in is that for it as was with be by on not he his but at are this have "
         "attention cache rotation token model don we they Hello WORLD int return def None "
         "naïve Straße ça żółć привет мир γειά 你好 世界 こんにちは 안녕하세요 "
         "مرحبا שלום नमस्ते ไทย").split()
PUNCTUATION = list(".,;:!?()[]{}<>/\\|-_=+*&^%$#@~`\"") + ["...", "://", "->", "\u2014", "\u300c"]

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GLM4 = LLAMA3


def whitespace(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return " " * rng.randint(1, 9)
    if kind == 1:
        return rng.choice(["\n", "\r\n", "\n\n", "\r\n\r\n", "\t", "\r", " \n", "\n  "])
    return "".join(rng.choice(SPACES if kind == 2 else " \t\r\n") for _ in range(rng.randint(1, 6)))


def fragment(rng, added):
    kind = rng.randrange(14)
    if kind < 4:
        return rng.choice(["", " "]) + rng.choice(WORDS)
    if kind == 4:
        return whitespace(rng)
    if kind == 5:
        return rng.choice(WORDS) + rng.choice(CONTRACTIONS)
    if kind == 6:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 7)))
    if kind == 7:
        return "".join(rng.choice(DIGITS) for _ in range(rng.randint(1, 5)))
    if kind == 8:
        return rng.choice("aeioucnsAEO가ᄀカ") + "".join(
            rng.choice(MARKS) for _ in range(rng.randint(1, 4)))
    if kind == 9:
        return rng.choice(EMOJI)
    if kind == 10:
        return rng.choice(["", " ", "  ", "a", "\n", "é"]) + rng.choice(added) + \
            rng.choice(["", " ", "\t ", "s", "1", "_"])
    if kind == 11:
        return "".join(rng.choice(PUNCTUATION) for _ in range(rng.randint(1, 3)))
    if kind == 12:
        return "".join(rng.choice(ASSIGNED) for _ in range(rng.randint(1, 4)))
    return unicodedata.normalize(rng.choice(["NFC", "NFD"]), rng.choice(WORDS))


def generate(seed, count, added):
    rng = random.Random(seed)
    return ["".join(fragment(rng, added) for _ in range(rng.randint(0, 12)))
            for _ in range(count)]


def unicode_sweep():
    """Every assigned character, and every mark, among marks of low and high combining class."""
    decomposed = {unicodedata.normalize("NFD", c) for c in ASSIGNED}
    lone = ["".join(ASSIGNED[i:i + 64]) for i in range(0, len(ASSIGNED), 64)]
    marks = [f"a{m}\u0334\u0301{m}\u0316e{m}\u0301" for m in MARKS]
    return lone + marks + sorted(decomposed - set(ASSIGNED))


def train(name):
    """A tokenizer with the pre-tokenizer, normaliser and post-processor of a model family."""
    pattern = {"qwen": QWEN, "llama3": LLAMA3, "glm4": GLM4}[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    if name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(generate(17, 20000, ["x"]), trainer)
    special = {"qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
               "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>"],
               "glm4": ["[gMASK]", "<sop>", "<|user|>"]}[name]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([
        AddedToken("<think>", normalized=False),
        AddedToken("<left>", lstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=False),
        AddedToken("<both>", lstrip=True, rstrip=True, normalized=True),
        AddedToken("alone", single_word=True, normalized=True),
        AddedToken("e\u0301t", normalized=True),   # found composed where the text is normalised
        AddedToken("<thinking>", normalized=True),
        AddedToken("<think", normalized=False)])
    byte_level = processors.ByteLevel(trim_offsets=False)
    if name == "qwen":
        tokenizer.post_processor = byte_level
    elif name == "llama3":
        tokenizer.post_processor = processors.Sequence([byte_level, processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[
                ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))])])
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[gMASK] <sop> $A", special_tokens=[
                (t, tokenizer.token_to_id(t)) for t in ("[gMASK]", "<sop>")])
    added = special + ["<think>", "<left>", "<right>", "<both>", "alone", "e\u0301t", "\u00e9t",
                       "<thinking>", "<think"]
    return tokenizer, added
