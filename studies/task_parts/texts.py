"""Tokens of prompts, and the held-out text that they hide things in."""
import json
import pathlib
import random


class Tokens:
    """Counts a model's tokens. `tokenizer` has encode() and apply_chat_template() as transformers' have."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def chat(self, messages: list, tools=None) -> list:
        """Ids of a chat up to where the model answers."""
        return self.ids(self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))


class Haystack:
    """Lines of text with their tokens, to cut pieces of a length from."""

    def __init__(self, documents: list, tokens: Tokens):
        self.lines = [line for text in documents for line in (text.rstrip() + "\n\n").splitlines(keepends=True)]
        self.counts = [tokens.count(line) for line in self.lines]

    def take(self, budget: int, generator: random.Random) -> list:
        """Consecutive lines of at most `budget` tokens from a random one on; the last is followed by the first."""
        taken, left = [], budget
        place = generator.randrange(len(self.lines))
        while self.counts[place] <= left:
            left -= self.counts[place]
            taken.append(self.lines[place])
            place = (place + 1) % len(self.lines)
        return taken


def documents(path: pathlib.Path) -> list:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def between_paragraphs(lines: list) -> list:
    """Places where something may be put into text: before a line that follows an empty one."""
    return [i for i in range(1, len(lines)) if not lines[i - 1].strip() and lines[i].strip()]


def between_definitions(lines: list) -> list:
    """Places where a function may be put into Python: before a top-level one that follows an empty line."""
    starts = ("def ", "class ", "async def ", "@")
    return [i for i in range(1, len(lines)) if not lines[i - 1].strip() and lines[i].startswith(starts)]


def planted(lines: list, places: list, items: list, fractions: list) -> str:
    """The lines with each item before the place nearest to its fraction of them."""
    at = {}
    for item, fraction in zip(items, fractions):
        place = min(places, key=lambda p: abs(p - fraction * len(lines))) if places else int(fraction * len(lines))
        at.setdefault(place, []).append(item)
    return "".join("".join(at.get(i, [])) + line for i, line in enumerate(lines + [""]))


def spread(count: int, generator: random.Random) -> list:
    """`count` fractions in random order, one from each equal part of a text."""
    fractions = [(i + generator.random()) / count for i in range(count)]
    generator.shuffle(fractions)
    return fractions


def filled(tokens: Tokens, haystack: Haystack, length: int, generator: random.Random, build) -> tuple:
    """(messages, their tokens): build(lines) with as many lines of the haystack as `length` tokens hold."""
    budget = length - len(tokens.chat(build([])))
    lines = haystack.take(budget, generator)
    messages = build(lines)
    count = len(tokens.chat(messages))
    while count > length:  # what was planted may cut a token in two
        lines = lines[:-max(1, len(lines) * (count - length) // length)]
        messages = build(lines)
        count = len(tokens.chat(messages))
    return messages, count


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def code_blocks(text: str) -> list:
    """Contents of the fenced blocks of an answer, in order; one that was cut off counts."""
    parts = ("\n" + text).split("\n```")
    blocks = [part.partition("\n")[2] for part in parts[1::2]]
    return blocks
