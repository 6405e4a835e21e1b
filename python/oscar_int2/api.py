"""Calibration and evaluation from Python, by the same programs as on the command line, to the same bytes.

Every function takes the options of its program as keyword arguments: --max-tokens is `max_tokens`, --for is `for_`. False turns
one off, or is refused. The programs' --help and docs/calibration.md say what they do. Errors name the keywords.
"""
import contextlib
import inspect
import json as json_text
import os
import pathlib
import re
import tempfile

import numpy as np

from . import corpora, programs
from .bundle import Bundle, load
from .errors import OscarError


def _path(value) -> str:
    """A path, a name, or a loaded bundle's file, as a word of a command line."""
    if isinstance(value, Bundle):
        value.require_as_in_file()
        return value.path
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise TypeError(f"expected a path or a name, not {type(value).__name__}")


# Options of programs by which they write no bundle and measure nothing.
_WITHOUT_RESULT = ("dry_run", "help", "version")


def _require_result(program, options):
    """Raises ValueError for an option by which a program makes nothing that a function could return."""
    for name in _WITHOUT_RESULT:
        if options.get(name):
            shown = "--" + name.replace("_", "-")
            instead = ", or plan() for the memory of a cache" if name == "dry_run" else ""
            raise ValueError(f"{name}={options[name]!r}: with {shown}, {program} makes nothing to return. Run "
                             f"`{program} ... {shown}` itself{instead}")


@contextlib.contextmanager
def _corpus(value):
    """(CORPUS of a command line, {temporary file: what it is called}): a path, several, paths with weights, or what lies in
    memory."""
    with corpora.as_files(value) as files:
        if isinstance(files, dict):
            yield ",".join(f"{_path(path)}:{weight}" for path, weight in files.items()), {}
        elif isinstance(files, (list, tuple)):
            yield ",".join(map(_path, files)), {}
        else:
            yield _path(files), {} if files is value else {files: "corpus"}


def _sayer(program, names):
    """What makes of a text of a program one of Python. `names`: {temporary file: what it is called}."""
    def say(text):
        for file, name in names.items():
            text = text.replace(str(file), name)
        return programs.in_python(text, *program)
    return say


def _run(program, words, values, progress=False, names=()):
    """Runs a program, such as ("oscar-bundle", "fit"), with these words and keyword arguments."""
    words = [*program[1:], *words, *programs.options(program, values)]
    return programs.run(program[0], words, progress, _sayer(program, dict(names)))


def _run_for_json(program, words, values, progress=False, names=(), file=None):
    """The same: (its JSON document, what it prints). `file`: where the document is kept, if anywhere."""
    if file is not None and _path(file) == "-":
        raise ValueError("json is \"-\": the figures are what is returned; give a file, or leave it out")
    words = [*program[1:], *words, *programs.options(program, values)]
    return programs.run_for_json(program[0], words, progress, _sayer(program, dict(names)), file)


_EVAL_ENGINES = ("simulate", "reference", "kernel")  # --engine of oscar-eval


def _in_transformers(model, engine, more=()) -> bool:
    """Whether a run is one of the engine "transformers". `more`: engines of the program, beside "oscar"."""
    if engine not in (None, "oscar", "transformers", *more):
        raise ValueError(f"engine is {engine!r}, expected \"oscar\" or \"transformers\""
                         + "".join(f", or \"{name}\"" for name in more))
    loaded = hasattr(model, "named_parameters")
    if loaded and engine not in (None, "transformers"):
        raise ValueError(f"a loaded model runs in transformers; give its folder for engine=\"{engine}\"")
    return loaded or engine == "transformers"


def _require_options(run, program, options):
    """Raises ValueError for an option that `run`, of the engine "transformers", does not take: it names the engine that has
    it."""
    known = {name for name, one in inspect.signature(run).parameters.items() if one.kind is one.KEYWORD_ONLY}
    takes = f"engine=\"transformers\" takes {', '.join(sorted(known - {'progress'} | {'force'}))}"
    for name in sorted(set(options) - known):
        if name.rstrip("_").replace("_", "-") in programs.switched(program):
            raise ValueError(f"{name} is an option of engine=\"oscar\", the program {program}, and not of "
                             "engine=\"transformers\". Leave it out, or give a folder as the model and engine=\"oscar\"; " + takes)
        raise ValueError(f"unknown option {name}; {takes}")


def _in_one(corpus):
    """A corpus of the engine "transformers". Raises ValueError for weights."""
    if isinstance(corpus, dict):
        raise ValueError("engine=\"transformers\" takes a corpus without weights: a list of paths")
    return corpus


@contextlib.contextmanager
def _layers_shown(stage, shown):
    """progress(layer, layers) of oscar_int2.calibration, as a bar and a line of the log."""
    bars, told = programs.Bars(shown), {"stage": stage, "unit": "layers", "ended": False}

    def progress(layer, layers):
        told.update(done=layer, total=layers)
        bars.show(told)

    try:
        yield progress
        bars.show(told | {"done": told["total"], "ended": True})
    finally:
        bars.close()


def calibrate(model, corpus, out, *, engine: str | None = None, progress: bool = True, **options) -> Bundle | pathlib.Path:
    """Calibrates a model on a corpus and writes the bundle `out` (oscar-calibrate).

    engine: "oscar", the families of docs/models.md, or "transformers", whatever that library runs: options
    are then those of oscar_int2.calibration.calibrate. A model that is loaded already runs in transformers.

    model: a Hugging Face folder, a .gguf file, or a name. corpus: a file or folder of text or token ids, a list of these, or
    {path: weight}; "self:N" lets the model write N tokens. (The engine "transformers" takes neither of the last two.) What lies
    in memory goes in as it is: texts, [str] or rows as lines of .jsonl hold them, [{"messages": [...]}], also as a DataFrame of
    pandas or a Dataset of datasets; token ids as integers, [tokens] or [rows, tokens], rows of any length, which are kept
    apart. A list of strings is texts if one has a blank in it and is no file. Options are oscar-calibrate's, such as
    max_tokens=262144, device="cuda", force=True, resume=True.

    Returns the bundle; with statistics_only=True, the path of the statistics file, which fit() takes. Notes and warnings, with
    the verdict on the text, go to the logger `oscar_int2`. Raises ValueError for options that the program refuses, and for
    those by which it writes nothing, such as dry_run; OscarError for all else. Ctrl-C saves a checkpoint beside `out`;
    `resume=True` goes on.
    """
    _require_result("oscar-calibrate", options)
    made = pathlib.Path if options.get("statistics_only") else load
    if _in_transformers(model, engine):
        from .calibration import calibrate as run
        _require_options(run, "oscar-calibrate", options)
        with _layers_shown("calibrate", progress) as told:
            run(model, _in_one(corpus), out, progress=told, **options)
        return made(out)
    with _corpus(corpus) as (text, names):
        _run(("oscar-calibrate",), [_path(model), text, _path(out)], options, progress, names)
    return made(out)


def fit(statistics, out, **options) -> Bundle:
    """Fits transforms anew from a file that holds statistics, without the model, and writes `out` (oscar-bundle fit).

    statistics: a bundle or a statistics file. Options are those of `oscar-bundle fit`, such as preset="paper".
    """
    _require_result("oscar-bundle fit", options)
    _run(("oscar-bundle", "fit"), [_path(statistics), f"--output={_path(out)}"], options)
    return load(out)


def _numbers(name, given):
    """float64 of an argument, an array or a tensor. Raises ValueError for complex numbers."""
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        given = (given if given.is_complex() else given.double()).numpy()
    found = np.asarray(given)
    if np.iscomplexobj(found):
        raise ValueError(f"{name} holds complex numbers ({found.dtype}), expected real ones")
    return found.astype(np.float64)


def _matrices(name, given):
    """float64 [layers, heads, d, d] or [layers, d, d] of an argument. Raises ValueError for complex numbers and, naming layer
    and head, for a matrix that is not finite or has no inverse."""
    found = _numbers(name, given)
    if found.ndim not in (3, 4) or found.shape[-1] != found.shape[-2]:
        raise ValueError(f"{name} is {list(found.shape)}, expected [layers, heads, d, d] or [layers, d, d]")
    finite, d = np.isfinite(found).all((-2, -1)), found.shape[-1]
    ranks = np.linalg.matrix_rank(np.where(finite[..., None, None], found, 0))
    for place in map(tuple, np.argwhere(ranks < d)):
        where = f"{name}: the matrix of layer {place[0]}" + (f", head {place[1]}," if len(place) > 1 else "")
        if not finite[place]:
            raise ValueError(f"{where} holds a number that is not finite")
        what = f"has rank {ranks[place]} of {d}" if found[place].any() else "is zero"
        raise ValueError(f"{where} {what}. A row x is stored as x M, so M is orthogonal, or has an inverse")
    return found


def _centers(given, shape):
    """float64 [layers, heads, 2, d] of key centers, [layers, 2, d] for all heads. `shape`: of the matrices of keys."""
    found = _numbers("k_centers", given)
    d, layers = shape[-1], shape[0]
    if found.ndim not in (3, 4) or found.shape[0] != layers or found.shape[-2:] != (2, d):
        raise ValueError(f"k_centers is {list(found.shape)}, expected [{layers}, heads, 2, {d}] or [{layers}, 2, {d}]")
    if not np.isfinite(found).all():
        raise ValueError("k_centers holds a number that is not finite")
    return found


def import_rotation(keys, values, model, out, *, k_centers=None, **options) -> Bundle:
    """Makes a bundle of matrices of your own and writes it to `out` (oscar-bundle import).

    keys, values: arrays or tensors [layers, heads, d, d] or [layers, d, d], one matrix for all heads. A row x is stored as
    x M. They need not be orthogonal, but have an inverse. model: the model that they are for. k_centers: two centers of each
    head's keys before RoPE, [layers, heads, 2, d], the `k_centres` of lib/oscar/bundle/SCHEMA.md. Options are those of
    `oscar-bundle import`: statistics=FILE writes rows as a calibration does. Raises ValueError naming the layer of a matrix
    that is not finite or has no inverse.
    """
    _require_result("oscar-bundle import", options)
    arrays = {"k_rotation": _matrices("keys", keys), "v_rotation": _matrices("values", values)}
    if k_centers is not None:
        arrays["k_centres"] = _centers(k_centers, arrays["k_rotation"].shape)
    with tempfile.TemporaryDirectory(prefix="oscar-") as folder:
        file = pathlib.Path(folder, "rotations.npz")
        np.savez(file, **arrays)
        _run(("oscar-bundle", "import"), [file, f"--model={_path(model)}", f"--output={_path(out)}"], options,
             names={file: "keys and values"})
    return load(out)


def plan(model, *, json=None, **options) -> dict:
    """What a model's cache takes in BF16, FP8 and 2 bits, and how much of it fits (oscar-bundle plan), as a dictionary.

    Options: gpu_memory="80G", context=65536, users=32, tp=2, weights="16G", utilization=0.9. json: a file that keeps it, too.
    """
    _require_result("oscar-bundle plan", options)
    return _run_for_json(("oscar-bundle", "plan"), [_path(model)], options, file=json)[0]


def evaluate(model, bundle=None, *, corpus, json=None, engine: str | None = None, progress: bool = True, **options) -> "Evaluation":
    """Compares a bundle with the model as it is, and with other caches (oscar-eval).

    bundle: a path, a loaded Bundle, or {name: path} of several. The program reads the file: a Bundle that was edited, or whose
    file has changed since, raises BundleError. corpus: as in calibrate(), text that calibration has not seen. json: a file that
    keeps the report, too; beside it lies what a stopped run has counted, from which resume=True goes on. Options are
    oscar-eval's, such as max_tokens=65536, compare=["bf16", "bundle"], tasks=["ppl", "niah"], html="report.html", force=True.

    engine: "oscar", or one of its engines: "simulate", "reference" or "kernel" (oscar-eval --engine). "transformers", or a
    loaded model, runs one bundle in transformers: perplexity, KL and top-1 agreement; options are then those of
    oscar_int2.calibration.evaluate, and force.
    """
    _require_result("oscar-eval", options)
    if _in_transformers(model, engine, _EVAL_ENGINES):
        return _evaluate_in_transformers(model, bundle, corpus, json, progress, **options)
    if json is None and options.get("resume"):
        raise ValueError("resume=True goes on from what lies beside the report: give json=, as in the run that was stopped")
    if engine in _EVAL_ENGINES:
        options["engine"] = engine
    words = [_path(model)]
    if isinstance(bundle, dict):
        words += [f"--bundle={name}={_path(file)}" for name, file in bundle.items()]
    elif bundle is not None:
        words.append(f"--bundle={_path(bundle)}")
    with _corpus(corpus) as (text, names):
        try:
            report, printed = _run_for_json(("oscar-eval",), [*words, f"--corpus={text}"], options, progress, names, json)
        except KeyboardInterrupt:
            if json is not None:
                raise
            raise KeyboardInterrupt("stopped on request; nothing was kept. With json=FILE what was counted lies beside it, and "
                                    "resume=True goes on") from None
    return Evaluation(report, _table(printed, json))


def _table(printed, json):
    """What oscar-eval prints, without a report that is not kept, and with Python's way to the page."""
    if json is None:
        printed = re.sub(r"(?m)^wrote \S*/out\.json(\n|, )", lambda found: "wrote " if found[1] == ", " else "", printed)
    return re.sub(r"(?m)^next( +)oscar-bundle report .*?(\\\n.*)?$", r'next\1save_html("REPORT.html") draws the page', printed)


def _evaluate_in_transformers(model, bundle, corpus, json, progress, force=False, **options):
    from .calibration.evaluation import evaluate as run
    if not isinstance(bundle, (str, os.PathLike, Bundle)):
        raise ValueError("engine=\"transformers\" compares one bundle with the model; give its path")
    _require_options(run, "oscar-eval", options)
    if json is not None and os.path.exists(_path(json)) and not force:
        raise OscarError(f"{json} exists already; choose another name, or replace it with force=True")
    with _layers_shown("evaluate", progress) as told:
        found = run(model, bundle, _in_one(corpus), progress=told, **options)
    kl = {"mean": found["kl"], "se": found["kl_se"]}
    file = bundle.path if isinstance(bundle, Bundle) else bundle
    report = {"tokens": found["tokens"], "first_position": found["first_position"],
              "resampling_units": found["units"], "sequences": found["sequences"],
              "repeated_share": found["repeated_share"], "cautions": found["cautions"],
              "bundle": {"file": os.path.basename(file), "overlap": found["overlap"], "convergence": found["convergence"]},
              "methods": {
        "bf16": {"ppl": {"mean": found["perplexity"], "se": found["perplexity_se"]}},
        "bundle": {"ppl": {"mean": found["int2_perplexity"], "se": found["int2_perplexity_se"]}, "kl": kl,
                   "top1": {"mean": found["top1"]}}}}
    if json is not None:
        pathlib.Path(json).write_text(json_text.dumps(report, indent=2) + "\n", encoding="utf-8")
    return Evaluation(report)


_COLUMNS = ("text", "method", "metric", "against", "layer", "head", "position", "length", "kind", "depth", "mean", "se", "low",
            "high")
_ERRORS = {"mean": "mean", "rate": "mean", "se": "se", "low": "low", "high": "high"}


class Evaluation:
    """What evaluate() measured.

    `report` is the JSON document that lib/oscar/eval/SCHEMA.md describes; str() is the program's table.
    """

    def __init__(self, report: dict, table: str = ""):
        self.report, self.table = report, table

    @property
    def methods(self) -> list:
        """Names of what was compared, "bf16" first."""
        return list(self.report["methods"])

    def rows(self) -> list:
        """Every figure as a dictionary with the keys text, method, metric, against, layer, head, position, length, kind, depth,
        mean, se, low and high; None where one does not apply.

        text: "as is", or "separators", with a separator as every N-th token. against: the method whose KL kl_difference
        subtracts. position: the first token of a stretch.
        length: tokens of a prompt, or the context that `bits` is for.
        """
        found = []
        for text, part in (("as is", self.report), ("separators", self.report.get("separators") or {})):
            for method, figures in part.get("methods", {}).items():
                found += [dict.fromkeys(_COLUMNS) | {"text": text, "method": method} | row
                          for row in _rows_of(figures, part.get("positions", []))]
        return found

    def frame(self):
        """rows() as a pandas DataFrame; without pandas, as the list that rows() is."""
        try:
            import pandas
        except ImportError:
            return self.rows()
        return pandas.DataFrame(self.rows(), columns=list(_COLUMNS))

    def save_html(self, path, *, force: bool = False) -> None:
        """Draws the report as one HTML page (oscar-bundle report). force: replace a file that is there. Raises OscarError for
        the figures of engine="transformers"."""
        if "schema" not in self.report:
            raise OscarError("a page is drawn from a report of oscar-eval, and engine=\"transformers\" gives figures alone; "
                             "evaluate with engine=\"oscar\" for a page")
        with tempfile.TemporaryDirectory(prefix="oscar-") as folder:
            file = pathlib.Path(folder, "report.json")
            file.write_text(json_text.dumps(self.report), encoding="utf-8")
            _run(("oscar-bundle", "report"), [file, f"--output={_path(path)}"], {"force": force}, names={file: "the report"})

    def __str__(self):
        cautions = [f"CAUTION: {one['sentence']}" for one in self.report.get("cautions", [])]
        return self.table or "\n".join([repr(self), *cautions])

    def __repr__(self):
        kls = {name: figures.get("kl", {}).get("mean") if name != "bf16" else None for name, figures in self.report["methods"].items()}
        said = ", ".join(name if kl is None else f"{name} KL {kl:.4g}" for name, kl in kls.items())
        said += "".join(f"; caution: {one['kind']}" for one in self.report.get("cautions", []))
        return f"<Evaluation of {self.report.get('tokens', 0):,} tokens: {said}>"


def _figure(metric: str, values: dict, **places) -> dict:
    return {"metric": metric} | {column: values[key] for key, column in _ERRORS.items() if key in values} | places


def _rows_of(figures: dict, positions: list):
    """Rows of one method on one text."""
    for metric in ("nll", "ppl", "nll_increase", "kl", "kl_difference", "top1"):
        if metric in figures:
            against = {"against": figures[metric]["against"]} if "against" in figures[metric] else {}
            yield _figure(metric, figures[metric], **against)
    for length, bits in figures.get("bpe", {}).items():
        yield {"metric": "bits", "length": int(length), "mean": bits}
    kl = figures.get("kl", {})
    for percent, value in kl.get("percentiles", {}).items():
        yield {"metric": f"kl_p{percent}", "mean": value}
    for position, value in zip(positions, kl.get("by_position", [])):
        yield {"metric": "kl", "position": position, "mean": value}
    for layer, value in enumerate(figures.get("output_nmse", [])):
        yield {"metric": "output_nmse", "layer": layer, "mean": value}
    by_head = {"output_nmse": figures.get("output_nmse_heads", [])}
    by_head |= {f"layer_error_{side}": values for side, values in figures.get("layer_errors", {}).items()}
    for metric, layers in by_head.items():
        for layer, heads in enumerate(layers):
            for head, value in enumerate(heads):
                yield {"metric": metric, "layer": layer, "head": head, "mean": value}
    needles = figures.get("niah")
    if needles:
        yield _figure("needles", needles)
        yield _figure("needle_margin", needles["margin"])
        for kind, values in needles.get("kinds", {}).items():
            yield _figure("needles", values, kind=kind)
        for cell in needles.get("cells", []):
            yield {"metric": "needles", "length": cell["length"], "depth": cell["depth"], "mean": cell["passed"] / cell["prompts"]}
        if "generated" in needles:
            yield _figure("needles_generated", needles["generated"])
