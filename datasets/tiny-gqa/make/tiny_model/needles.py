"""Needle tasks: datasets/needle/tasks.json turned into facts, questions and answers. The C++ evaluator reads the same file."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NEEDLE_FOLDER = Path(__file__).resolve().parents[3] / "needle"


@dataclass
class Question:
    """`prompt` ends where the model must go on with `answer`; `end` closes the line."""

    prompt: str
    answer: str
    end: str


@dataclass
class Task:
    """Facts in the order in which they stand in the haystack, and questions about them."""

    facts: list
    questions: list


class TaskBook:
    """The task kinds and words of datasets/needle."""

    def __init__(self, folder: Path = NEEDLE_FOLDER):
        book = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
        if book["format"] != "oscar-needle-tasks-1":
            raise ValueError(f"{folder}/tasks.json: unknown format {book['format']!r}")
        self.kinds = book["kinds"]
        self.words = (folder / book["words"]).read_text(encoding="utf-8").split()
        self.shares = {name: kind["train_share"] for name, kind in self.kinds.items()}

    def sample(self, name: str, rng: np.random.Generator, ask_all: bool = False, keys: int | None = None) -> Task:
        """One task of kind `name`; `ask_all` asks about every group (denser training), `keys` overrides their number."""
        kind = self.kinds[name]
        num_groups = keys or kind["keys"]
        names = list(rng.choice(self.words, size=num_groups * kind["chain"], replace=False))
        groups = [self._group(kind, names[i * kind["chain"]:(i + 1) * kind["chain"]], rng) for i in range(num_groups)]
        order = rng.permutation([i for i, group in enumerate(groups) for _ in group])
        waiting = [iter(group) for group in groups]
        facts = [kind["fact"].format(key=key, value=value) for key, value in (next(waiting[i]) for i in order)]
        asked = rng.permutation(num_groups)
        size = min(kind["asked"], num_groups)
        batches = [asked[i:i + size] for i in range(0, num_groups - size + 1, size)]
        return Task(facts, [self._question(kind, [groups[i] for i in b]) for b in (batches if ask_all else batches[:1])])

    def _group(self, kind, names, rng):
        """(key, value) pairs: several values of one key, or a chain of keys that ends in one number."""
        if kind["chain"] > 1:
            values = [self._value(kind["value"], rng)] + names[:-1]
            return list(zip(names, values))
        return [(names[0], self._value(kind["value"], rng)) for _ in range(kind["values_per_key"])]

    def _value(self, spec, rng):
        if spec["type"] == "words":
            return " ".join(rng.choice(self.words, size=spec["count"], replace=False))
        low = 10 ** (spec["digits"] - 1)
        return str(rng.integers(low, 10 * low))

    @staticmethod
    def _question(kind, groups):
        keys = kind["key_join"].join(group[-1][0] for group in groups)
        pairs = [pair for group in groups for pair in (reversed(group) if kind["chain"] > 1 else group)]
        answer = kind["answer_join"].join(kind["answer_item"].format(key=key, value=value) for key, value in pairs)
        return Question(kind["question"].format(keys=keys), answer, kind["end"])


def encode(tokenizer, text: str) -> np.ndarray:
    """Token ids of one piece, uint16 [n]."""
    return np.array(tokenizer.encode(text).ids, dtype=np.uint16)


def hide(haystack: np.ndarray, facts: list, rng: np.random.Generator) -> np.ndarray:
    """Token ids of the haystack with each fact (ids) at a random place, in the given order."""
    places = np.sort(rng.integers(0, len(haystack) + 1, size=len(facts)))
    pieces, last = [], 0
    for place, fact in zip(places, facts):
        pieces += [haystack[last:place], fact]
        last = place
    return np.concatenate(pieces + [haystack[last:]])


def training_piece(book: TaskBook, name: str, tokenizer, haystack: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Haystack with facts, then every question answered. The secret-number kind varies its number of keys (1 to 4)."""
    keys = int(rng.integers(1, 5)) if name == "multikey" else None
    task = book.sample(name, rng, ask_all=True, keys=keys)
    hidden = hide(haystack, [encode(tokenizer, fact) for fact in task.facts], rng)
    asked = [encode(tokenizer, q.prompt + q.answer + q.end) for q in task.questions]
    return np.concatenate([hidden] + asked)


def prompt_and_answer(book: TaskBook, name: str, tokenizer, text_ids: np.ndarray, length: int, rng: np.random.Generator):
    """(ids of exactly `length` tokens that end with the question, ids of the answer): an evaluation prompt."""
    task = book.sample(name, rng)
    facts = [encode(tokenizer, fact) for fact in task.facts]
    question = task.questions[0]
    prompt, answer = encode(tokenizer, question.prompt), encode(tokenizer, question.answer)
    room = length - len(prompt) - sum(map(len, facts))
    start = int(rng.integers(0, len(text_ids) - room + 1))
    return np.concatenate([hide(text_ids[start:start + room], facts, rng), prompt]), answer
