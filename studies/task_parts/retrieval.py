"""Tasks of finding: needles among many keys, keys of several values, word frequency, variables, and verbatim quotes."""
import ast
import random
import re

from . import rules
from .texts import between_paragraphs, filled, planted, spread, user

COLOURS = ("amber", "black", "copper", "crimson", "green", "indigo", "ivory", "silver", "teal", "violet", "white", "yellow")


def _keys(count: int, generator: random.Random) -> list:
    pairs = [f"{colour} {noun}" for colour in COLOURS for noun in rules.WORDS]
    return generator.sample(pairs, count)


def _numbers(count: int, generator: random.Random) -> list:
    return [str(number) for number in generator.sample(range(1_000_000, 10_000_000), count)]


def _in_text(tokens, length: int, haystack, generator: random.Random, items: list, question: str) -> list:
    """A prompt of text with a paragraph for each item, in random places."""
    fractions = spread(len(items), generator)

    def build(lines):
        text = planted(lines, between_paragraphs(lines), [item + "\n\n" for item in items], fractions)
        return user(f"Some facts are hidden in the following text. Remember them.\n\n{text.rstrip()}\n\n{question}")

    return filled(tokens, haystack, length, generator, build)[0]


def keys_prompt(tokens, length: int, haystack, generator: random.Random, keys: int) -> dict:
    """One of many keys is asked for."""
    names, numbers = _keys(keys, generator), _numbers(keys, generator)
    items = [f"The access code of the {name} is {number}." for name, number in zip(names, numbers)]
    question = f"What is the access code of the {names[0]}? Answer with the number alone."
    return {"messages": _in_text(tokens, length, haystack, generator, items, question), "max_tokens": 32, "expected": numbers[:1]}


def values_prompt(tokens, length: int, haystack, generator: random.Random) -> dict:
    """Four values of one key, among four other keys of one value."""
    names, numbers = _keys(5, generator), _numbers(8, generator)
    items = [f"One of the access codes of the {name} is {number}." for name, number in zip(names[:1] * 4 + names[1:], numbers)]
    question = f"What are the four access codes of the {names[0]}? Answer with the numbers alone, separated by commas."
    return {"messages": _in_text(tokens, length, haystack, generator, items, question), "max_tokens": 96, "expected": numbers[:4]}


def variables_prompt(tokens, length: int, haystack, generator: random.Random) -> dict:
    """Two chains of assignments; the five variables of one are asked for."""
    names = ["".join(generator.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 5)) for _ in range(10)]
    while len(set(names)) < 10:
        names = ["".join(generator.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 5)) for _ in range(10)]
    first, second = _numbers(2, generator)
    chains = [_chain(names[:5], first), _chain(names[5:], second)]
    # Each chain stays in order; the two are mixed.
    items, turns = [], [0] * 5 + [1] * 5
    generator.shuffle(turns)
    for turn in turns:
        items.append(chains[turn].pop(0))
    fractions = sorted(spread(len(items), generator))

    def build(lines):
        text = planted(lines, between_paragraphs(lines), [item + "\n\n" for item in items], fractions)
        return user(f"Assignments of variables are hidden in the following text. Follow them.\n\n{text.rstrip()}\n\n"
                    f"Five variables have the value {first}, directly or by way of other variables. Which? "
                    "Answer with the five names alone, separated by commas.")

    return {"messages": filled(tokens, haystack, length, generator, build)[0], "max_tokens": 96, "expected": names[:5]}


def _chain(names: list, number: str) -> list:
    return [f"VAR {names[0]} = {number}"] + [f"VAR {name} = VAR {before}" for before, name in zip(names, names[1:])]


def words_prompt(tokens, length: int, generator: random.Random) -> dict:
    """A long list of made-up words, three of which are there far more often than all others."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    made = list({"".join(generator.choice(syllables) for _ in range(3)): None for _ in range(240)})

    def build(words):
        return user(f"Read the following list of words and count how often each is in it.\n\n{' '.join(words)}\n\n"
                    "Which three words are most frequent in the list above? Answer with the three words alone, separated by commas.")

    # Of 100 words 16, 13 and 10 are the three; no other word is one of them.
    counts = {word: tokens.count(" " + word) for word in made}
    weights = [16, 13, 10] + [61 / (len(made) - 3)] * (len(made) - 3)
    words, left = [], length - len(tokens.chat(build([])))
    for word in generator.choices(made, weights, k=length):
        left -= counts[word]
        if left < 0:
            break
        words.append(word)
    while len(tokens.chat(build(words))) > length:
        words.pop()
    return {"messages": build(words), "max_tokens": 48, "expected": made[:3]}


# What an answer may name: numbers (no numbering of a list), variables, made-up words.
_NUMBER, _VARIABLE, _MADE_UP = r"\d{3,}", r"\b[A-Z]{5}\b", r"\b(?:[bdfgklmnprstvz](?:an|el|or|[aeiou])){3}\b"


def score_listed(answer: str, expected: list) -> float:
    """Share of the expected words among the first as many that the answer names: what is wrong takes a place."""
    shape = _NUMBER if expected[0].isdigit() else _VARIABLE if expected[0].isupper() else _MADE_UP
    answer = re.sub(r"\b(\d),(\d{3}),(\d{3})\b", r"\1\2\3", answer)
    named = list(dict.fromkeys(re.findall(shape, answer)))
    return len(set(named[:len(expected)]) & set(expected)) / len(expected)


# Quotes

TRIES = 1000  # pieces of text, until one has something to quote


def code_quote_prompt(tokens, length: int, haystack, generator: random.Random) -> dict:
    """A function of the haystack whose name is there once is to be quoted."""
    found = {}

    def build(lines):
        text = "".join(lines).rstrip()
        # Until a target is chosen, the longest name that may be asked for.
        name = found.get("name", "a" * 40)
        return user(f"Here is the code of a project.\n```python\n{text}\n```\n\n"
                    f"Quote the whole function or method `{name}` from the code above, from its line with `def` to its last line, "
                    "word for word, and nothing else, in one Python code block.")

    for _ in range(TRIES):
        found.clear()
        lines = haystack.take(length - len(tokens.chat(build([]))), generator)
        functions = [f for f in _functions("".join(lines).splitlines()) if tokens.count(f[1]) <= 400]
        if functions:
            found["name"], quote = generator.choice(functions)
            return {"messages": build(lines), "max_tokens": 512, "expected": quote}
    raise ValueError(f"{length} tokens of this code never have a whole function to quote")


def _functions(lines: list) -> list:
    """(name, source) of functions of 6 to 25 lines whose name is defined once: by indentation, since a piece of code need not parse."""
    found = []
    for i, line in enumerate(lines):
        match = re.match(r"( *)(?:async )?def (\w+)\(", line)
        if not match:
            continue
        indent, end = len(match[1]), i + 1
        while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent
                                    or lines[end].lstrip().startswith(")")):
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        source = "\n".join(text[indent:] for text in lines[i:end])
        if 6 <= end - i <= 25 and end < len(lines) and sum(f"def {match[2]}(" in text for text in lines) == 1 and "```" not in source:
            try:
                ast.parse(source)
                found.append((match[2], source))
            except SyntaxError:
                pass
    return found


def text_quote_prompt(tokens, length: int, haystack, generator: random.Random) -> dict:
    """A paragraph that is found by its first words is to be quoted."""
    def build(lines, start="word " * 8):
        return user(f"Here is a text.\n\n{''.join(lines).rstrip()}\n\n"
                    f"Quote the paragraph of the text above that begins with \"{start}\", word for word and whole, and nothing else.")

    for _ in range(TRIES):
        lines = haystack.take(length - len(tokens.chat(build([]))) - 16, generator)
        text = "".join(lines)
        paragraphs = [paragraph.strip("\n") for paragraph in text.split("\n\n")[1:-1]]
        paragraphs = [p for p in paragraphs if 40 <= len(p.split()) <= 160 and p[0].isalpha() and p.count("\n") >= 2
                      and text.count(" ".join(p.split("\n")[0].split()[:6])) == 1]
        if paragraphs:
            quote = generator.choice(paragraphs)
            messages = build(lines, " ".join(quote.split("\n")[0].split()[:6]))
            if len(tokens.chat(messages)) <= length:
                return {"messages": messages, "max_tokens": 400, "expected": quote}
    raise ValueError(f"{length} tokens of this text never have a paragraph to quote")


def _same(text: str) -> str:
    """Text without what an answer may change: marks around it, indentation of the whole, ends of lines."""
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return "\n".join(line[indent:] for line in lines).strip()


def score_code_quote(answer: str, expected: str) -> float:
    fenced = re.search(r"```\w*\n(.*?)(?:\n```|$)", answer, re.DOTALL)
    return float(_same(fenced[1] if fenced else answer) == _same(expected))


def score_text_quote(answer: str, expected: str) -> float:
    """Lines may be broken elsewhere; quotation marks or a fence may stand around the whole."""
    words = re.sub(r"^```\w*\n|\n```$", "", answer.strip()).split()
    text = " ".join(words)
    wanted = " ".join(expected.split())
    return float(wanted in (text, text.strip('"'), text.strip('“”')))


