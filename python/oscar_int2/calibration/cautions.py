"""What to beware of in an evaluation of a model that ran in transformers, in the words of oscar-eval
(lib/oscar/eval/report/report_data.cpp)."""
import json

import h5py

from .shared_text import NOTABLE_REPEATS, caution

UNIT_TOKENS, FEWEST_UNITS = 512, 8  # of a standard error: report_data.h; docs/mathematics.md, 14.5
GUESSING = 1e-3  # kGuessing of report_data.cpp
NO_VERDICT = "the file keeps no verdict on it"  # kNoVerdict of lib/oscar/fit/convergence.h


def stored_convergence(path):
    """What the bundle at `path` says of its calibration text, without its tables, as reports of oscar-eval have it
    (lib/oscar/eval/SCHEMA.md, `convergence`); None where it says nothing."""
    try:
        with h5py.File(path, "r") as file:
            found = json.loads(file.attrs.get("convergence", b"null"))
    except (OSError, ValueError):  # a bundle in memory, whose file has gone; or garbled
        return None
    return {name: value for name, value in found.items() if name not in ("layers", "splits")} if isinstance(found, dict) else None


def cautions_of(found, format, name):
    """[{kind, sentence}] of what evaluate() found over bundle `name` of this CacheFormat."""
    said = {"few-tokens": few_tokens(found), "repeated-text": repeated_text(found),
            "other-cache": early(found["first_position"], format, name), "shared-text": caution(found["overlap"], name),
            "little-text": little_text(found["convergence"], name), "predicts-nothing": predicts_nothing(found)}
    return [{"kind": kind, "sentence": sentence} for kind, sentence in said.items() if sentence]


def has_few_units(units, repeated_share):
    """Whether an evaluation has no intervals: too few units, copies left out."""
    return round(units * (1 - repeated_share)) < FEWEST_UNITS


def repeated_text(found):
    if found["repeated_share"] <= NOTABLE_REPEATS:
        return None
    return (f"{found['repeated_share']:.0%} of the evaluation's text repeats itself: copies say nothing new, and intervals are too "
            "narrow; leave them out")


def few_tokens(found):
    if not has_few_units(found["units"], found["repeated_share"]):
        return None
    pieces, sequences = (f"{number} {what}{'s' if number != 1 else ''}" for number, what in (
        (found["units"], "piece"), (found["sequences"], "sequence")))
    copies = " with copies" if repeated_text(found) else ""
    return (f"the evaluation counts {found['tokens']:,} tokens{copies} in {pieces} of at most {UNIT_TOKENS} tokens ({sequences}), "
            f"too few for 95% intervals; use {FEWEST_UNITS} sequences or {FEWEST_UNITS * UNIT_TOKENS:,} tokens and more")


def predicts_nothing(found):
    """Of a model that guesses, or gives every token the same probability: no cache makes it worse."""
    mean, error, vocabulary = found["perplexity"], found["perplexity_se"], found["vocab_size"]
    alike = error == 0 and not repeated_text(found)  # copies are alike in any model
    if mean < vocabulary * (1 - GUESSING) and not alike:
        return None
    return (f"the model itself predicts nothing: BF16 perplexity {mean:.4g}{' on every piece of text' if alike else ''}, "
            f"vocabulary {vocabulary:,}")


def early(first, format, name):
    """Of a first position whose token reads no 2-bit row."""
    reader = format.sink_tokens + format.recent_tokens + format.demote_block - 1
    if first >= reader:
        return None
    return (f"the figures are not those of {name} as it is served: the evaluation counts tokens that read no INT2 row: "
            f"first_position {first}, not {reader} or later")


def little_text(record, name):
    """Of a bundle whose calibration text was not enough, or could not be judged."""
    record = record or {}
    if "problem" in record or not isinstance(record.get("enough"), bool):
        return f"the calibration text of {name} could not be judged: {record.get('problem', NO_VERDICT)}"
    if record["enough"]:
        return None
    fall, needed = record.get("fall_per_doubling"), record.get("tokens_needed")
    return (f"the calibration text of {name} is not enough"
            + (f": predicted loss still falls by {fall:.1%} per doubling" if fall is not None else "")
            + (f"; use about {needed:.0f} tokens" if needed is not None else ""))
