"""Calibration and evaluation of models that transformers runs, whatever their family (docs/models.md).

    oscar_int2.calibration.calibrate("/models/my-model", "chat.jsonl", "my-model.h5")
    oscar_int2.calibration.evaluate("/models/my-model", "my-model.h5", "heldout.jsonl")

The model runs in transformers. Its attention is called through this package, which adds up statistics of queries, keys,
values and outputs, and keeps the rows of held-back text. `oscar-calibrate` searches on these and makes the bundle.
"""
import contextlib
import logging
import pathlib
import sys
import tempfile

import torch

from .. import programs
from ..recipe import CacheFormat
from .collect import Collection
from .corpus import read_corpus, with_recall
from .held_back import HeldBackRows, Split, hold_back
from .layers import is_spread
from .model import (batched, check_group, config_of, load_model, observed, require_one_rope, require_stated_rope, run_device,
                    sequence_tokens, tokenizer_of)
from .record import describe_model, describe_text, write_statistics

__all__ = ["calibrate", "evaluate"]
_log = logging.getLogger("oscar_int2")


def calibrate(model, corpus, out, *, search="on", statistics_only=False, fit_options=(), sequence_length=None,
              max_tokens=None, batch_tokens=8192, format=None, device=None, dtype=None, trust_remote_code=False,
              recall="auto", force=False, progress=None):
    """Calibrates a causal language model in transformers, and writes the bundle `out`. Returns its path.

    `model`: a folder, a name of the Hub that was fetched, or a loaded model. `corpus`: files of text or token ids, texts, or ids
    (corpus.read_corpus). `search`: "on" holds text back, whose rows lie beside `out` until clipping is chosen by them; "off"
    takes the recipe's values. `statistics_only`: writes the sums alone. `fit_options`: of `oscar-bundle fit`, with a search
    also words that leave a part to it. `sequence_length`: tokens of a sequence; None: the model's context, 4096 at most.
    `format`: the CacheFormat of the bundle, whose windows say which rows are INT2; None: 64 + 256, a head as its group.
    `device`: where layers run, one at a time; None: a GPU if there is one. `dtype`: of the run; None: as stored on a GPU,
    float32 on a CPU. The bundle records the fingerprint of the model's files if the weights that ran are seen to be theirs;
    else a warning says so, by the logger `oscar_int2`. `force`: replaces `out` if it is there. `recall`: "on" lets the second half
    of every second sequence repeat stretches of its first, "auto" that of text, not of ids. `progress(layer, layers)`:
    called as layers begin. Why nothing is searched, of all layers or of one, and that no sequence has a 2-bit row, goes to the
    logger `oscar_int2`. Raises UnsupportedError, naming the layer, for a model that is not calibrated, or that turns keys
    otherwise than its config says; ValueError for a corpus without tokens, sequences beyond the model's context and those that
    LongRoPE turns differently; FileExistsError where `out` is there; OSError where the disk has no room for rows."""
    if search not in ("on", "off"):
        raise ValueError(f"search is {search!r}, expected \"on\" or \"off\"")
    out = pathlib.Path(out)
    if recall not in ("auto", "on", "off"):
        raise ValueError(f'recall is {recall!r}, expected "auto", "on" or "off"')
    if out.exists() and not force:
        raise FileExistsError(f"{out} exists already; choose another name, or replace it with force=True")
    force_option = ["--force"] if force else []
    if statistics_only and fit_options:
        raise ValueError("fit_options are of the fit, which statistics_only leaves out")
    config, format = config_of(model, trust_remote_code), format or CacheFormat(quant_group_size=0)
    check_group(format, config)
    sequence_length = sequence_tokens(config, sequence_length)
    sequences, sources = read_corpus(corpus, lambda: tokenizer_of(model), sequence_length, max_tokens)
    sequences, recalled = with_recall(sequences, sources, recall, sequence_length, format)
    lengths = [len(ids) for ids in sequences]
    require_one_rope(config, lengths)
    device = run_device(model, device)
    own_model = not isinstance(model, torch.nn.Module)
    model = load_model(model, device, dtype, trust_remote_code)
    require_stated_rope(model)
    if max(lengths) <= format.sink_tokens + format.recent_tokens:
        _log.warning(f"no sequence is longer than the exact windows ({format.sink_tokens} + {format.recent_tokens} tokens): no "
                     "row is in 2 bits, so rows are weighted evenly and keys have no centers; use longer sequences")
    split = Split(list(range(len(lengths))), [])
    if search == "on" and not statistics_only:
        split, reason = hold_back(lengths, format)
        if reason:
            _log.warning(reason)
    with contextlib.ExitStack() as stack:
        folder, rows = None, None
        if not statistics_only:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out.parent)))
        batches = batched([sequences[i] for i in split.fit], batch_tokens)
        if split.held:
            first = len(batches)
            batches += batched([sequences[i] for i in split.held], batch_tokens)
            rows = HeldBackRows(folder, split.held, batches, first)
        with observed(model):
            found = Collection(model, batches, format, device, progress, rows)
        text, hashes = describe_text(sequences, sources, recalled)
        described = describe_model(model, found.base.facts.shape, found.base.facts.num_qo_heads, found.base.parameters,
                                   own_model)

        def write(path, all_text):
            write_statistics(path, described, text, hashes, format, list(found.file_layers(all_text)))

        if statistics_only:
            write(out, True)
            return out
        sums = folder / "statistics.h5"
        write(sums, True)
        if rows is None:
            programs.run("oscar-bundle", ["fit", sums, "-o", out, *force_option, *fit_options])
            return out
        write(folder / "fitted.h5", False)
        rows.finish(lengths, list(found.searched_layers()))
        # A GPU is the search's once the model has left it.
        free_gpu = own_model and device != "cpu" and not is_spread(model)
        del found
        if free_gpu:
            torch.cuda.empty_cache()
        programs.run("oscar-calibrate", [folder, "recorded", out, "--device", "auto" if free_gpu else "cpu", *force_option,
                                         *fit_options], progress=progress is not None and sys.stderr.isatty())
    return out


def evaluate(*arguments, **options):
    """KL and perplexity over a bundle's 2-bit rows: evaluation.evaluate."""
    from .evaluation import evaluate as run  # needs the library of operators
    return run(*arguments, **options)
