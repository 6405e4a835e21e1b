"""A small sample of a text's token n-grams, kept as hashes: enough to notice that an evaluation reads the text that a
bundle was made from. As lib/oscar/text/ngram_fingerprint.h, whose numbers and rule these are."""
import math

import h5py
import numpy as np

NGRAM, CAPACITY = 13, 8192  # lib/oscar/bundle/SCHEMA.md, /corpus/ngram_hashes
RULE = "smallest of ngram_hash 1"
NOTABLE = 0.01  # shares above this are cautioned of
STRETCH, NOTABLE_REPEATS = 64, 0.2  # kRepeatedTokens and kNotableRepeats of lib/oscar/text/repeats.h
_BASE = 0x9E3779B97F4A7C15


def ngram_hashes(sequences, largest=None, capacity=CAPACITY):
    """int64, ascending and distinct: hashes of the n-grams within sequences, the `capacity` smallest, or all up to
    `largest`."""
    found = np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        for ids in sequences:
            if len(ids) < NGRAM:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids).astype(np.uint64), NGRAM)
            number = np.zeros(len(windows), np.uint64)
            for column in windows.T:
                number = number * np.uint64(_BASE) + column + np.uint64(1)
            number += np.uint64(_BASE)
            number = (number ^ number >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            number = (number ^ number >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            number = (number ^ number >> np.uint64(31)) >> np.uint64(1)
            if largest is not None:
                number = number[number <= np.uint64(largest)]
            found = np.unique(np.concatenate((found, number)))[:capacity]
    return found.astype(np.int64)


def repeated_share(sequences):
    """Share of the stretches of STRETCH tokens, within sequences, that an earlier one equals."""
    found = [np.zeros(0, np.uint64)]
    with np.errstate(over="ignore"):
        for ids in sequences:
            digits, number = np.asarray(ids).astype(np.uint64) + np.uint64(1), np.uint64(0)
            for first in range(STRETCH if len(ids) >= STRETCH else 0):
                number = number * np.uint64(_BASE) + digits[first:len(ids) - STRETCH + 1 + first]
            if len(ids) >= STRETCH:
                found.append(number)
    hashes = np.concatenate(found)
    return 1 - len(np.unique(hashes)) / len(hashes) if len(hashes) else 0.0


def stored_hashes(path):
    """What the bundle at `path` holds of its text; empty where it holds nothing, or by another rule."""
    try:
        with h5py.File(path, "r") as file:
            stored = file.get("corpus/ngram_hashes")
            made = {} if stored is None else dict(stored.attrs)
            if (made.get("ngram"), made.get("capacity"), made.get("rule")) == (NGRAM, CAPACITY, RULE.encode()):
                return stored[()]
    except OSError:  # a bundle in memory, whose file has gone
        pass
    return np.zeros(0, np.int64)


def overlap(known, sequences):
    """How many of a text's distinct n-grams are in the one of which `known` are the stored hashes, as the reports of
    oscar-eval say it (lib/oscar/eval/SCHEMA.md, `overlap`): `known` (False: it can't be told) and `ngram`, `sampled`,
    `found`, `share`, and its interval's `low` and `high`."""
    if not len(known):
        return {"known": False}
    hashes = ngram_hashes(sequences, known[-1] if len(known) == CAPACITY else None, None)
    sampled, found = len(hashes), int(np.isin(hashes, known, assume_unique=True).sum())
    if not sampled:
        return {"known": False, "ngram": NGRAM, "sampled": 0}
    low, high = _wilson_interval(found, sampled)
    return {"known": True, "ngram": NGRAM, "sampled": sampled, "found": found, "share": found / sampled, "low": low,
            "high": high}


def caution(found, name):
    """The sentence on a notable overlap() with the text of bundle `name`; None where there is none."""
    if not found["known"] or found["low"] <= NOTABLE:
        return None
    return (f"{found['share']:.0%} of the evaluation's {NGRAM}-grams are in the calibration text of {name}: the figures "
            "flatter the bundle; evaluate on other text")


def _wilson_interval(found, sampled):
    z, p = 1.959963984540054, found / sampled
    center = (p + z * z / (2 * sampled)) / (1 + z * z / sampled)
    half = z / (1 + z * z / sampled) * math.sqrt(p * (1 - p) / sampled + z * z / (4 * sampled * sampled))
    return max(0.0, center - half), min(1.0, center + half)
