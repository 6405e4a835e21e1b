"""Generated text that is hard on tokenizers."""
import random
import unicodedata

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


def generate(seed, count, added, fragments=12):
    rng = random.Random(seed)
    return ["".join(fragment(rng, added) for _ in range(rng.randint(0, fragments)))
            for _ in range(count)]


def unicode_sweep():
    """Every assigned character, and every mark, among marks of low and high combining class."""
    decomposed = {unicodedata.normalize("NFD", c) for c in ASSIGNED}
    lone = ["".join(ASSIGNED[i:i + 64]) for i in range(0, len(ASSIGNED), 64)]
    marks = [f"a{m}\u0334\u0301{m}\u0316e{m}\u0301" for m in MARKS]
    return lone + marks + sorted(decomposed - set(ASSIGNED))
