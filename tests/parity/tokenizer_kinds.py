"""Small tokenizers with the components of published families, trained on text of the repository."""
import functools
import json
import os
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split

from parity import tokenizer_text

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
NEMO = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "[gMASK]"]
# Bytes that the vocabulary of `smollm2` cannot write.
MISSING = [0, 4, 5, 6, 7, 0x7F, 0xB7, 0xE0, 0xF3]
BYTE_TOKENS = [f"<0x{b:02X}>" for b in range(256)]


def isolated(pattern):
    return Split(Regex(pattern), behavior="isolated")


def bytes_behind(*steps):
    """A byte-level pre-tokenizer behind others that cut."""
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "qwen": lambda: bytes_behind(isolated(QWEN)),
    "llama3": lambda: bytes_behind(isolated(LLAMA3)),
    "glm4": lambda: bytes_behind(isolated(LLAMA3)),
    "smollm2": lambda: Sequence([Digits(individual_digits=True),
                                 ByteLevel(add_prefix_space=False, use_regex=True)]),
    "mistral-nemo": lambda: bytes_behind(isolated(NEMO)),
    "deepseek": lambda: bytes_behind(*map(isolated, DEEPSEEK), Digits(individual_digits=True)),
}
KINDS = [*PRE_TOKENIZERS, "llama2", "gemma"]


@functools.lru_cache(maxsize=None)
def repository_text():
    """Lines of documentation and headers, and generated ones in other scripts."""
    files = sorted([*SOURCE.glob("docs/*.md"), *SOURCE.glob("lib/oscar/*/*.h")])
    lines = [line for f in files for line in f.read_text(encoding="utf-8").splitlines(True)]
    return lines + tokenizer_text.generate(17, 3000, ["x"])


def trained(pre_tokenizer, alphabet, vocab_size=3000, normalizer=None):
    """The model, as in tokenizer.json, of a tokenizer trained on the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    text = repository_text()
    if alphabet is not None:  # nothing else is to come into the vocabulary
        left_out = {b for b in range(256) if byte_character(b) not in alphabet}
        text = [t for t in text if left_out.isdisjoint(t.encode())]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, initial_alphabet=alphabet or [],
        limit_alphabet=500, max_token_length=16))
    model = json.loads(tokenizer.to_str())["model"]
    assert len(model["merges"]) > vocab_size // 2, len(model["merges"])
    return model


def byte_character(byte):
    """The character that byte-level BPE writes for a byte."""
    printable = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def sentencepiece_model(model):
    """The same tokens behind <unk>, <s>, </s> and a token for every byte."""
    first = ["<unk>", "<s>", "</s>", *BYTE_TOKENS]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    vocab = {t: i for i, t in enumerate(first + [t for t in tokens if t not in first])}
    return {**model, "vocab": vocab, "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}


def with_model(tokenizer, model):
    return Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "model": model}))


@functools.lru_cache(maxsize=None)
def byte_level_model(name):
    alphabet = ByteLevel.alphabet()
    if name == "smollm2":
        alphabet = sorted(set(alphabet) - {byte_character(b) for b in MISSING})
    return trained(PRE_TOKENIZERS[name](), alphabet)


def byte_level(name):
    model = {**byte_level_model("llama3" if name == "glm4" else name),
             "ignore_merges": name in ("llama3", "mistral-nemo")}
    tokenizer = Tokenizer(models.BPE())
    if name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return with_model(tokenizer, model)


def sentencepiece(name):
    tokenizer = Tokenizer(models.BPE())
    replace = normalizers.Replace(" ", "\u2581")
    if name == "llama2":
        model = trained(Metaspace(prepend_scheme="always"), None)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    else:
        model = trained(None, None, normalizer=replace)  # tokens may span words
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = Split(" ", behavior="merged_with_previous")
    return with_model(tokenizer, sentencepiece_model(model))


def make(name):
    """A tokenizer of the kind, and contents of its added tokens to put into text."""
    tokenizer = byte_level(name) if name in PRE_TOKENIZERS else sentencepiece(name)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([
        AddedToken("<think>", normalized=False),
        AddedToken("<left>", lstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=False),
        AddedToken("<both>", lstrip=True, rstrip=True, normalized=True),
        AddedToken("alone", single_word=True, normalized=True),
        AddedToken("e\u0301t", normalized=True),   # found composed where the text is normalised
        AddedToken("<thinking>", normalized=True),
        AddedToken("<think", normalized=False)])
    begins = {"llama3": ["<|endoftext|>"], "glm4": ["[gMASK]", "<|im_start|>"], "llama2": ["<s>"],
              "gemma": ["<s>"], "deepseek": ["<|im_start|>"]}.get(name, [])
    parts = [processors.ByteLevel(trim_offsets=False)] if name == "llama3" else []
    if begins:
        parts.append(processors.TemplateProcessing(
            single=" ".join([*begins, "$A"]),
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in begins]))
    else:
        parts.append(processors.ByteLevel(trim_offsets=False))
    tokenizer.post_processor = parts[0] if len(parts) == 1 else processors.Sequence(parts)
    return tokenizer


ADDED = [*SPECIAL, "<think>", "<left>", "<right>", "<both>", "alone", "e\u0301t", "\u00e9t",
         "<thinking>", "<think"]


def component_documents():
    """Yields (name, tokenizer.json) with every component and setting of its own.

    All have one vocabulary: characters and merges without spaces, half of the byte tokens.
    """
    model = trained(pre_tokenizers.Whitespace(), None, vocab_size=1500)
    marks = {c: len(model["vocab"]) + i for i, c in enumerate(" \u2581\n") if c not in model["vocab"]}
    model["vocab"] |= marks
    model["unk_token"] = "<unk>"
    base = json.loads(Tokenizer(models.BPE()).to_str())
    plain = sentencepiece_model(model)
    kept = {t: i for t, i in plain["vocab"].items() if t not in BYTE_TOKENS[0x80:0xC8]}
    half = {**plain, "vocab": kept}
    for fuse in (True, False):
        for fallback in (True, False):
            for vocab in (plain, half):
                yield f"unk fuse={fuse} fallback={fallback} vocabulary={len(vocab['vocab'])}", {
                    **base, "model": {**vocab, "fuse_unk": fuse, "byte_fallback": fallback}}
    yield "nothing for the unknown", {**base, "model": {**half, "unk_token": None}}
    yield "whole words first", {**base, "model": {**half, "ignore_merges": True},
                                "pre_tokenizer": {"type": "WhitespaceSplit"}}

    def normalizer(steps):
        return {**base, "model": half, "normalizer": {"type": "Sequence", "normalizers": steps}}

    for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        yield form, normalizer([{"type": form}])
    for left in (True, False):
        for right in (True, False):
            yield f"strip {left} {right}", normalizer(
                [{"type": "Strip", "strip_left": left, "strip_right": right}])
    for pattern in ({"String": "th"}, {"Regex": r"\s+"}, {"Regex": r"\p{Lu}|[,.]+"}):
        for content in ("", "_", "\u2581a"):
            yield f"replace {pattern} {content}", normalizer(
                [{"type": "Replace", "pattern": pattern, "content": content}])
    yield "many", normalizer([{"type": "Prepend", "prepend": " x"}, {"type": "NFKC"},
                              {"type": "Lowercase"}, {"type": "Prepend", "prepend": "\u2581"}])

    def pre_tokenizer(*steps):
        return {**base, "model": half,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}

    behaviors = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    for behavior in behaviors:
        yield f"punctuation {behavior}", pre_tokenizer({"type": "Punctuation", "behavior": behavior})
        for invert in (True, False):
            for pattern in ({"String": " "}, {"Regex": r"\s|\p{N}{1,3}"}, {"Regex": r"\s+$"}):
                yield f"split {pattern} {behavior} {invert}", pre_tokenizer(
                    {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})
    for individual in (True, False):
        yield f"digits {individual}", pre_tokenizer(
            {"type": "Digits", "individual_digits": individual})
    for name in ("Whitespace", "WhitespaceSplit"):
        yield name, pre_tokenizer({"type": name})
    metaspace = {"type": "Metaspace", "replacement": "\u2581"}
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            step = {**metaspace, "prepend_scheme": scheme, "split": split}
            yield f"metaspace {scheme} {split}", pre_tokenizer(step)
            yield f"digits, metaspace {scheme} {split}", pre_tokenizer(
                {"type": "Digits", "individual_digits": True}, step)
    yield "older metaspace", pre_tokenizer({**metaspace, "add_prefix_space": True})
    bytes_first = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                   "use_regex": True}
    falcon = pre_tokenizer({"type": "Punctuation", "behavior": "Contiguous"}, bytes_first,
                           {"type": "Digits", "individual_digits": False},
                           {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"},
                            "behavior": "Isolated", "invert": False})
    for unknown in ("<unk>", None):
        yield f"steps behind bytes, {unknown}", {**falcon, "model": {**half, "unk_token": unknown}}
    yield "bytes in front", {**pre_tokenizer(bytes_first), "model": half}
