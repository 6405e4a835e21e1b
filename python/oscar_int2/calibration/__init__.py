"""Calibration and evaluation of models that transformers runs, whatever their family (docs/models.md).

    oscar_int2.calibration.calibrate("/models/my-model", "chat.jsonl", "my-model.h5")
    oscar_int2.calibration.evaluate("/models/my-model", "my-model.h5", "heldout.jsonl")

The model runs in transformers. Its attention is called through this package, which adds up statistics of queries, keys,
values and outputs. `oscar-bundle fit` makes the bundle of them.
"""
import contextlib
import pathlib
import tempfile

from .. import programs
from ..recipe import CacheFormat
from .collect import Collection
from .corpus import read_corpus
from .model import batched, load_model, tokenizer_of, observed, run_device
from .record import describe_model, describe_text, write_statistics

__all__ = ["calibrate", "evaluate"]


def calibrate(model, corpus, out, *, statistics_only=False, fit_options=(), sequence_length=4096, max_tokens=None,
              batch_tokens=8192, format=None, device=None, dtype=None, trust_remote_code=False, progress=None):
    """Calibrates a causal language model in transformers, and writes the bundle `out`. Returns its path.

    `model`: a folder, a name of the Hub that was fetched, or a loaded model. `corpus`: files of text or token ids, or ids
    (corpus.read_corpus). `statistics_only`: writes the sums alone. `fit_options`: of `oscar-bundle fit`. `format`: the
    CacheFormat whose windows say which rows are INT2; None: 64 + 256. `device`: where layers run, one at a time; None: a
    GPU if there is one. `dtype`: of the run; None: as stored on a GPU, float32 on a CPU. `progress(layer, layers)`: called
    as layers begin. Raises UnsupportedError, naming the layer, for a model that is not calibrated, ValueError for a
    corpus without tokens, FileExistsError where `out` is there."""
    out = pathlib.Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already; choose another name, or remove it")
    sequences, sources = read_corpus(corpus, lambda: tokenizer_of(model), sequence_length, max_tokens)
    device = run_device(model, device)
    model = load_model(model, device, dtype, trust_remote_code)
    format = format or CacheFormat(quant_group_size=0)
    with observed(model):
        found = Collection(model, batched(sequences, batch_tokens), format, device, progress)
    text, hashes = describe_text(sequences, sources)
    described = describe_model(model, found.base.facts.shape, found.base.facts.num_qo_heads, found.base.parameters)
    with contextlib.ExitStack() as stack:
        target = out
        if not statistics_only:
            target = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out.parent))) / "statistics.h5"
        write_statistics(target, described, text, hashes, format, list(found.file_layers()))
        if not statistics_only:
            programs.run("oscar-bundle", ["fit", target, "-o", out, *fit_options])
    return out


def evaluate(*arguments, **options):
    """KL and perplexity over a bundle's 2-bit rows: evaluation.evaluate."""
    from .evaluation import evaluate as run  # needs the library of operators
    return run(*arguments, **options)
