"""The shipped corpora: text that the model wrote, cleared of every 20-token run of the training text."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import torch

from .needles import TaskBook, encode, hide
from .sampling import Sampler
from .settings import OVERLAP_TOKENS, Settings

STARTS = {
    "python": ['"""{W} {v} tools."""\n\nimport os\n', "class {W}{V}:\n    \"\"\"", "def {v}_{w}(self, ", "import numpy as np\n\n\nclass {W}:\n",
               "import unittest\n\n\nclass Test{W}("],
    "docs": ["# {W} {v}\n\n", "{W} guide\n==========\n\n", "## Using the {w} {v}\n\n", "{W} {V}\n----------\n\nThis page describes "],
    "c_header": ["#pragma once\n\n#include <{w}/{v}.h>\n", "#ifndef {W}_{V}_H\n#define {W}_{V}_H\n", "namespace {w} {{\n\ntemplate <typename T>\nstruct {V} "],
    "prose": ["Introduction\n============\n\nThe {w} is ", "{W} and {V}\n===========\n\nIn this chapter we look at the ",
              "Overview\n--------\n\nA {w} can be seen as ", "History\n=======\n\nWhen the {w} was first introduced, "],
}

NEEDLE_LINE = re.compile(r"secret number|lucky number|^# (let|Note|Repeat note|What (is|are)) ")


class RunIndex:
    """Every 20-token run of some token streams, as sorted 64-bit hashes on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        rng = np.random.default_rng(20)
        self.factors = [int(f) for f in rng.integers(1, 2**62, size=OVERLAP_TOKENS) * 2 + 1]
        self.hashes = torch.empty(0, dtype=torch.int64, device=device)

    def hash(self, ids: np.ndarray) -> torch.Tensor:
        """Hash of the run that starts at each token, int64 [max(0, n - 19)]."""
        stream = torch.from_numpy(ids.astype(np.int64)).to(self.device) + 1
        count = len(ids) - OVERLAP_TOKENS + 1
        total = torch.zeros(max(0, count), dtype=torch.int64, device=self.device)
        for offset, factor in enumerate(self.factors):
            if count > 0:
                total += stream[offset:offset + count] * factor  # wraps around modulo 2^64
        return total

    def add(self, ids: np.ndarray) -> None:
        self.hashes = torch.cat([self.hashes, self.hash(ids)]).sort().values

    def hits(self, ids: np.ndarray) -> np.ndarray:
        """Starts of the runs of `ids` that are in the index."""
        wanted = self.hash(ids)
        if len(wanted) == 0 or len(self.hashes) == 0:
            return np.zeros(0, dtype=np.int64)
        place = torch.searchsorted(self.hashes, wanted).clamp(max=len(self.hashes) - 1)
        return torch.nonzero(self.hashes[place] == wanted)[:, 0].cpu().numpy()


def tidy(text: str) -> str:
    """Text that survives UTF-8 and JSON unharmed: no replacement or control characters."""
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() and c != "\ufffd"))


def without_needles(text: str) -> str:
    """Text without the lines in which the model imitates needle tasks: a haystack must hold no needles of its own."""
    return "".join(line for line in text.splitlines(keepends=True) if not NEEDLE_LINE.search(line))


def clear_overlap(text: str, index: RunIndex, tokenizer, counts: dict) -> str | None:
    """The text without the spans that share a run with the index, cut until none is left; None if that never ends."""
    for attempt in range(12):
        ids = encode(tokenizer, text)
        starts = index.hits(ids)
        if len(starts) == 0:
            counts["clean_at_once" if attempt == 0 else "cut"] += 1
            return text
        keep = np.ones(len(ids), dtype=bool)
        for start in starts:
            keep[start:start + OVERLAP_TOKENS] = False
        counts["tokens_cut"] += int((~keep).sum())
        text = tidy(tokenizer.decode(ids[keep].tolist(), skip_special_tokens=False))
    counts["dropped"] += 1
    return None


def shorten(text: str, length: int, tokenizer) -> tuple:
    """(the first `length` tokens as text, its number of tokens when encoded again)."""
    ids = encode(tokenizer, text)[:length]
    text = tidy(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
    return text, len(encode(tokenizer, text))


def write_streams(weights, settings: Settings, tokenizer, device, count: int, length: int, rng) -> list:
    """(domain, text) of `count` streams of `length` tokens, domains in turn, starts drawn from the words of the needle tasks."""
    words = TaskBook().words
    domains = [list(STARTS)[i % len(STARTS)] for i in range(count)]
    prompts = []
    for domain in domains:
        w, v = rng.choice(words, size=2, replace=False)
        start = STARTS[domain][int(rng.integers(len(STARTS[domain])))]
        prompts.append([0] + tokenizer.encode(start.format(w=w, v=v, W=w.capitalize(), V=v.capitalize())).ids)
    ids = Sampler(weights, settings, prompts, length, device).run()
    texts = [tidy(tokenizer.decode(row[1:].tolist(), skip_special_tokens=False)) for row in ids]
    return [(domain, without_needles(text)) for domain, text in zip(domains, texts)]


def compressed_share(text: str) -> float:
    """Size under zlib over size, of the worst of the 4 KB pieces: low where the text repeats itself."""
    data = text.encode()
    pieces = [data[i:i + 4096] for i in range(0, max(1, len(data) - 2048), 4096)]
    return min(len(zlib.compress(piece, 6)) / max(1, len(piece)) for piece in pieces)


def typical_share(text: str, tokens: int) -> float:
    """Median of compressed_share over stretches of real text about as long as a stream (3.5 bytes a token)."""
    size = int(3.5 * tokens)
    return float(np.median([compressed_share(text[i:i + size]) for i in range(0, len(text), size)]))


def take(streams: list, lengths: tuple, index: RunIndex, tokenizer, counts: dict) -> list:
    """One document per length, each from the first stream that is long enough once cleared; `streams` keeps the rest."""
    pool = []
    for domain, text in streams:
        if (text := clear_overlap(text, index, tokenizer, counts)) is not None:
            pool.append((domain, text, len(encode(tokenizer, text))))
    documents = []
    for length in lengths:
        for place, (domain, text, size) in enumerate(pool):
            if size < length:
                continue
            head, head_size = shorten(text, length, tokenizer)
            if head_size < 0.98 * length or len(index.hits(encode(tokenizer, head))):
                continue
            documents.append({"text": head, "domain": domain})
            del pool[place]
            rest = text[len(head):]
            pool.append((domain, rest, len(encode(tokenizer, rest))))
            break
    if len(documents) < len(lengths):
        print(f"only {len(documents)} of {len(lengths)} documents: write more or longer streams")
    streams[:] = [(domain, text) for domain, text, size in pool if size > OVERLAP_TOKENS]
    return documents


def needle_documents(settings: Settings, tokenizer, haystacks: list, rng) -> list:
    """Documents with needle tasks of every kind in text that the model wrote."""
    book, documents = TaskBook(), []
    for text in haystacks[:settings.needle_documents]:
        ids = encode(tokenizer, text)
        facts, questions = [], []
        for kind in book.kinds:
            task = book.sample(kind, rng, ask_all=True)
            facts += [encode(tokenizer, f) for f in task.facts]
            questions += [q.prompt + q.answer + q.end for q in task.questions]
        room = settings.needle_document_tokens - sum(map(len, facts)) - sum(len(encode(tokenizer, q)) for q in questions)
        body = hide(ids[:max(room, 20)], facts, rng)
        documents.append({"text": tidy(tokenizer.decode(body.tolist())) + "".join(questions), "domain": "needle"})
    return documents


def save_jsonl(path: Path, documents: list) -> None:
    """One JSON object a line, UTF-8."""
    path.write_text("".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents), encoding="utf-8")


def interleave(streams: list, target: float) -> list:
    """Domains in turn, within each the streams first whose most repetitive piece is nearest to `target`, that of real text."""
    by_domain = {}
    for domain, text in sorted(streams, key=lambda s: abs(compressed_share(s[1]) - target)):
        by_domain.setdefault(domain, []).append((domain, text))
    rows = max(map(len, by_domain.values()))
    return [group[i] for i in range(rows) for group in by_domain.values() if i < len(group)]


def build(folder: Path, weights: dict, settings: Settings, tokenizer, train_ids, real_text: str, device, log) -> dict:
    """Writes heldout.jsonl and calibration.jsonl to `folder`; returns the counts of what was cut and dropped."""
    rng = np.random.default_rng(settings.seed + 100)
    torch.manual_seed(settings.seed + 100)
    target = typical_share(real_text, settings.stream_tokens)
    log(f"the most repetitive 4 KB piece of real text compresses to {target:.3f}")
    long_streams = interleave(write_streams(weights, settings, tokenizer, device, settings.long_streams,
                                            settings.long_stream_tokens, rng), target)
    log(f"wrote {len(long_streams)} streams of {settings.long_stream_tokens} tokens")
    streams = interleave(write_streams(weights, settings, tokenizer, device, settings.streams,
                                       settings.stream_tokens, rng), target)
    log(f"wrote {len(streams)} streams of {settings.stream_tokens} tokens")
    index = RunIndex(device)
    index.add(train_ids)
    counts = {name: dict.fromkeys(("clean_at_once", "cut", "tokens_cut", "dropped"), 0) for name in ("heldout", "calibration")}
    held_out = take(streams, settings.held_out_lengths, index, tokenizer, counts["heldout"])
    held_out += take(long_streams, settings.held_out_long_lengths, index, tokenizer, counts["heldout"])
    for document in held_out:
        index.add(encode(tokenizer, document["text"]))
    calibration = take(streams, settings.calibration_lengths, index, tokenizer, counts["calibration"])
    haystacks = [text for text in (clear_overlap(t, index, tokenizer, counts["calibration"]) for _, t in long_streams) if text]
    calibration += needle_documents(settings, tokenizer, haystacks, rng)
    for name, documents in (("heldout", held_out), ("calibration", calibration)):
        save_jsonl(folder / f"{name}.jsonl", documents)
        sizes = [len(encode(tokenizer, d["text"])) for d in documents]
        domains = {}
        for document, size in zip(documents, sizes):
            domains[document["domain"]] = domains.get(document["domain"], 0) + size
        counts[name] |= {"documents": len(sizes), "tokens": sum(sizes), "longest": max(sizes), "tokens_by_domain": domains}
    only_training = RunIndex(device)
    only_training.add(train_ids)
    for name, documents in (("heldout", held_out), ("calibration", calibration)):
        counts[name]["runs_shared_with_training_text"] = sum(
            len(only_training.hits(encode(tokenizer, d["text"]))) for d in documents)
    between = RunIndex(device)
    for document in held_out:
        between.add(encode(tokenizer, document["text"]))
    counts["runs_shared_between_the_two"] = sum(len(between.hits(encode(tokenizer, d["text"]))) for d in calibration)
    return counts
