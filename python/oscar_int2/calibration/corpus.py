"""Text or token ids to sequences for transformers' engine."""
import collections
import hashlib
import logging
import pathlib
import tempfile

import numpy as np

from ..commands.prepare_corpus import files_of, read
from ..corpora import in_memory, kind_of, rows_of, write_rows

PADDING_RUN, PADDING_SHARE = 32, 0.05  # lib/oscar/text/packing.h, as are these
SHORTEST_STRETCH, LONGEST_STRETCH, RECALL_WINDOWS = 6, 24, 4
_log = logging.getLogger("oscar_int2")


def read_corpus(corpus, tokenizer, sequence_length, max_tokens=None):
    """(sequences, sources) of a corpus: lists of int64 arrays, and what /corpus says of where they came from.

    `corpus`: paths joined by commas, or a list of them: token ids (.npy, .h5 with a dataset `tokens`; one stream, or rows
    that are kept apart) or text (.txt, .jsonl, a folder of these); or what lies in memory: texts, or ids, [tokens] or
    [rows, tokens] (corpora.kind_of).
    `tokenizer`: a function that makes one, called for text alone. Streams are cut every sequence_length tokens.
    Raises ValueError."""
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}, expected 2 or more")
    corpus = in_memory(corpus)
    kind = kind_of(corpus)
    if isinstance(corpus, (str, pathlib.Path)):
        corpus = str(corpus).split(",")
    if kind == "ids":
        rows = rows_of(corpus)
        digest = hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()
        parts = [({"name": "token ids", "sha256": digest}, rows)]
    elif kind == "rows":
        with tempfile.TemporaryDirectory(prefix="oscar-") as folder:
            parts = [_read(write_rows(corpus, folder), tokenizer)]
    else:
        parts = [_read(pathlib.Path(path), tokenizer) for path in corpus]
    sequences, sources, left = [], [], max_tokens
    for source, rows in parts:
        taken = []
        for row in rows:
            row = row if left is None else row[:left - sum(map(len, taken))]
            taken += [row[i:i + sequence_length] for i in range(0, len(row), sequence_length)]
        taken = [row for row in taken if len(row) > 1]
        left = None if left is None else left - sum(map(len, taken))
        sources.append(source | {"tokens": sum(map(len, taken))})
        sequences += taken
    if not sequences:
        raise ValueError(f"{'the corpus' if kind != 'files' else corpus}: no tokens")
    if any(source.get("kind") != "text" for source in sources) and (said := padding_warning(sequences)):
        _log.warning(said)
    return sequences, sources


def with_recall(sequences, sources, recall, sequence_length, format):
    """(sequences, what was repeated) as --recall of oscar-calibrate has them: "auto" repeats stretches of text, not of ids."""
    text = any(source.get("kind") == "text" for source in sources)
    long_enough = sequence_length >= RECALL_WINDOWS * (format.sink_tokens + format.recent_tokens)
    if recall == "on" or (recall == "auto" and text and long_enough):
        return repeat_stretches(sequences)
    return sequences, ""


def repeat_stretches(sequences, seed=0):
    """As repeat_stretches() of lib/oscar/text/packing.h has it, to the same ids: (sequences, what was done in words)."""
    random, made, repeated = _split_mix(seed), list(sequences), 0
    for s in range(1, len(made), 2):
        half, to = len(made[s]) - len(made[s]) // 2, len(made[s]) - len(made[s]) // 2
        if len(made[s]) < 4 * LONGEST_STRETCH:
            continue
        ids = made[s] = made[s].copy()
        repeated += len(ids) - half
        while to < len(ids):
            stretch = min(SHORTEST_STRETCH + random(LONGEST_STRETCH - SHORTEST_STRETCH + 1), len(ids) - to)
            first = random(half - stretch + 1)
            ids[to:to + stretch] = ids[first:first + stretch]
            to += stretch
    if not repeated:
        return sequences, ""
    return made, (f"the second half of every second sequence repeats stretches of {SHORTEST_STRETCH} to {LONGEST_STRETCH} "
                  f"tokens of its first, {repeated} tokens in all")


def _split_mix(seed):
    """SplitMix64 of lib/oscar/text/corpus.h: a function that draws from [0, bound)."""
    state, mask = seed, 2**64 - 1

    def below(bound):
        nonlocal state
        while True:
            state = (state + 0x9E3779B97F4A7C15) & mask
            value = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
            value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
            value ^= value >> 31
            if value >= 2**64 % bound:  # smaller ones would favour some
                return value % bound
    return below


def padding_warning(sequences):
    """As padding_warning() of lib/oscar/text/packing.h has it; None where nothing looks like padding."""
    in_runs = collections.Counter()
    for ids in sequences:
        begins = np.flatnonzero(np.diff(ids, prepend=-1))
        lengths = np.diff(begins, append=len(ids))
        for run in np.flatnonzero(lengths >= PADDING_RUN):
            in_runs[ids[begins[run]]] += lengths[run]
    for token, count in in_runs.most_common(1):
        share = count / sum(map(len, sequences))
        if share > PADDING_SHARE:
            return (f"{100 * share:.0f}% of the corpus is token {token} in runs of {PADDING_RUN} or more, which looks like "
                    "padding: leave it out of the ids")
    return None


def _read(path, tokenizer):
    """(source, streams or rows of ids) of one file."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; a corpus is .npy or .h5 (token ids), .txt, .jsonl, or a folder of text")
    if path.suffix in (".npy", ".h5"):
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        else:
            import h5py
            with h5py.File(path, "r") as file:
                ids = file["tokens"][()]
        if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
            raise ValueError(f"{path}: expected token ids, [tokens] or [rows, tokens] of integers; found {ids.dtype} "
                             f"{list(ids.shape)}")
        return ({"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
                [row.astype(np.int64) for row in np.atleast_2d(ids)])
    digest = hashlib.sha256()
    for file in files_of(path):
        digest.update(file.read_bytes())
    ids, count = read(tokenizer(), path, strict=False)
    return ({"name": path.name, "sha256": digest.hexdigest(), "kind": "text", "documents": count},
            [np.array(ids, dtype=np.int64)])
