"""Runs the programs of the toolkit, once each, and keeps of their reports what the study shows."""
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

from . import layers, predictions
from .vocabulary import Plan, Run, Size

SCHEMA = "oscar-study-1"
PROGRAMS = ("oscar-calibrate", "oscar-bundle", "oscar-eval")
KEPT_OF_REPORT = ("command", "tokens", "first_position", "longest_sequence", "quantizer", "kl_floor", "unit_tokens", "rows")
KEPT_OF_METHOD = {"top1": ("mean",), "units": ("kl", "nll"), "niah": ("rate", "low", "high", "cells", "kinds"),
                  "bpe": ("8192", "32768", "131072")}
STATISTICS = "statistics"
GPU_MEMORY = "24G"  # of each program where several run side by side


class Failed(Exception):
    """A program did not do what was asked; the message is what it said."""


class Later(Exception):
    """There was no time left to begin."""


class Bench:
    """Where programs, checkpoints, corpora and results are. What a program has made is not made again."""

    def __init__(self, programs: pathlib.Path, source: pathlib.Path, work: pathlib.Path, device: str, jobs: int,
                 gpu: bool = False, within: float = 0):
        self.programs, self.source, self.work, self.device = programs, source, work, device
        self.jobs, self.gpu, self.within = jobs, gpu, within
        self.planter = source / "datasets" / "tiny-gqa" / "make" / "plant_outliers.py"
        self.started = time.monotonic()
        self.environment = dict(os.environ, OMP_WAIT_POLICY="PASSIVE", OSCAR_DATASETS=str(source / "datasets"))
        if jobs > 1:
            self.environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
        for name in PROGRAMS:
            if not (programs / name).exists():
                raise Failed(f"{programs / name} is missing: build the toolkit first, or say where it is with --bin")
        self.digests = {str(programs / name): hashlib.sha256((programs / name).read_bytes()).hexdigest()
                        for name in PROGRAMS}
        version = hashlib.sha256("".join(self.digests.values()).encode()).hexdigest()
        self._elapsed = work / f"elapsed-{version[:12]}"
        self._before = float(self._elapsed.read_text()) if self._elapsed.exists() else 0.0

    def seconds(self) -> float:
        """That this call and earlier ones with these programs have taken to the end of what they made."""
        return float(self._elapsed.read_text()) if self._elapsed.exists() else 0.0

    def make(self, title: str, out: pathlib.Path, command: list, inputs=()) -> None:
        """Runs a command that writes `out`, unless it did so before, by the same program from the same `inputs` (files
        made here). Says how long it took. Throws Failed, or Later."""
        words = [str(word) for word in command]
        key = "\n".join([self.digests.get(words[0], ""), *words, *(self._record(path).read_text() for path in inputs)])
        key = hashlib.sha256(key.encode()).hexdigest()
        record = self._record(out)
        if out.exists() and record.exists() and record.read_text() == key:
            return
        began = time.monotonic()
        if self.within and began - self.started > self.within:
            raise Later(title)
        record.unlink(missing_ok=True)
        result = subprocess.run(words, capture_output=True, text=True, env=self.environment, cwd=self.source)
        now = time.monotonic()
        if result.returncode != 0:
            raise Failed(f"{title}: {' '.join(words)}\n{result.stderr.strip()}")
        record.write_text(key)
        self._elapsed.write_text(f"{self._before + now - self.started:.1f}")
        print(f"{now - self.started:6.1f} s  {title} ({now - began:.1f} s)", flush=True)

    def has_made(self, out: pathlib.Path) -> bool:
        return self._record(out).exists()

    @staticmethod
    def _record(path: pathlib.Path) -> pathlib.Path:
        """Of a file that was made, what it was made by."""
        return path.parent / f"{path.name}.made"

    def program(self, name: str) -> pathlib.Path:
        return self.programs / name

    def find(self, pattern: str, fetch) -> pathlib.Path:
        """The one path of this name or pattern under the source folder."""
        found = sorted(self.source.glob(pattern))
        if len(found) != 1:
            hint = f": run {fetch} first" if fetch else ""
            raise Failed(f"{pattern}: expected one file, found {len(found)}{hint}")
        return found[0]

    def machine(self) -> list:
        """Options that decide where a program runs. Programs side by side share the memory."""
        shared = ["--gpu-memory", GPU_MEMORY] if self.jobs > 1 and self.gpu else []
        return ["--device", self.device, *shared]


class Study:
    """One plan on one bench."""

    def __init__(self, bench: Bench, plan: Plan, size: Size):
        self.bench, self.plan, self.size = bench, plan, size
        self.model = bench.find(plan.model, plan.fetch)

    # Files.
    def folder(self, variant: str) -> pathlib.Path:
        return self.bench.work / f"model-{variant}" if variant else self.model

    def bundle(self, name: str, variant: str) -> pathlib.Path:
        return self.bench.work / f"{name.replace(' ', '-')}{'-' if variant else ''}{variant}.h5"

    def report(self, run: Run) -> pathlib.Path:
        return self.bench.work / f"run-{run.key().replace(',', '').replace(' ', '-')}.json"

    def text_of(self, name: str) -> str:
        return self.plan.bundles[name].text or next(iter(self.plan.calibration))

    def statistics(self, text: str) -> str:
        """Name of the file of sums of a calibration text."""
        return f"{STATISTICS}-{text}"

    def needs(self, item) -> list:
        """What has to be made before an item: a Run, or the (name, variant) of a file."""
        if isinstance(item, Run):
            needed = [(name, item.variant) for name in item.bundles(self.plan.bundles)]
            own = [(item.text, "")] if self.plan.texts[item.text].corpus == "self" else []
            return needed + own or ([("model", item.variant)] if item.variant else [])
        name, variant = item
        if name in self.plan.bundles and not self.plan.bundles[name].searched:
            return [(self.statistics(self.text_of(name)), variant)]
        return [("model", variant)] if variant and name != "model" else []

    def without(self, run: Run, missing: set) -> Run:
        """The run without the methods that need one of the `missing` bundles."""
        methods = [m for m in run.methods
                   if not missing & set(dataclasses.replace(run, methods=(m,)).bundles(self.plan.bundles))]
        if not methods:
            raise Failed("")
        return dataclasses.replace(run, methods=tuple(methods))

    # Programs.
    def plant(self, variant: str) -> None:
        options = ["--undo"] if float(variant) == 0 else ["--sigma", variant]
        if not self.bench.has_made(self.folder(variant)):
            shutil.rmtree(self.folder(variant), ignore_errors=True)  # what another version planted
        self.bench.make(f"outliers of sigma {variant}", self.folder(variant),
                        [sys.executable, self.bench.planter, self.model, self.folder(variant), *options])

    def corpus(self, text: str) -> str:
        """Of a calibration text, as the programs take it."""
        parts = [part.partition(":") for part in self.plan.calibration[text].corpus.split(",")]
        return ",".join(f"{self.bench.find(path, self.plan.fetch)}{mark}{weight}" for path, mark, weight in parts)

    def calibrate(self, name: str, variant: str, text: str, options, tokens: int = 0) -> None:
        tokens = tokens or self.size.calibration_tokens
        limit, corpus = ["--max-tokens", tokens] if tokens else [], self.corpus(text)
        planted = [self.folder(variant)] if variant else []
        self.bench.make(f"calibrate {name} {variant}".strip(), self.bundle(name, variant), [
            self.bench.program("oscar-calibrate"), self.folder(variant), corpus, self.bundle(name, variant), *options,
            *limit, "--sequence-length", self.size.sequence_length, *self.bench.machine(), "--force", "--quiet"], planted)

    def fit(self, name: str, variant: str) -> None:
        sums = self.bundle(self.statistics(self.text_of(name)), variant)
        self.bench.make(f"fit {name} {variant}".strip(), self.bundle(name, variant), [
            self.bench.program("oscar-bundle"), "fit", sums, "-o", self.bundle(name, variant),
            *self.plan.bundles[name].options, "--no-statistics", "--force"], [sums])

    def write_chat(self, text: str) -> None:
        """Ids of what the model writes by itself."""
        ids = self.bench.work / f"{text}.npy"
        self.bench.make(f"write {text}", ids, [
            self.bench.program("oscar-calibrate"), self.model, f"self:{self.size.tokens}", self.bench.work / "none.h5",
            "--dry-run", "--tokens-out", ids, "--sequence-length", self.size.sequence_length, *self.bench.machine(), "--force",
            "--quiet"])

    def evaluate(self, run: Run) -> None:
        bundles, inputs = [], []
        for name in run.bundles(self.plan.bundles):
            path = self.bundle(name, run.variant)
            inputs.append(path)
            bundles += ["--bundle", path] if name == "default" else []
            bundles += ["--bundle", f"{name}={path}"]
        tokens = run.tokens or self.size.tokens
        limit = ["--max-tokens", tokens] if tokens else []
        text = self.plan.texts[run.text].corpus
        own = self.bench.work / f"{run.text}.npy"
        if text == "self":
            inputs.append(own)
        elif run.variant and not inputs:
            inputs.append(self.folder(run.variant))
        self.bench.make(f"evaluate {run.key()}: {len(run.methods)} methods", self.report(run), [
            self.bench.program("oscar-eval"), self.folder(run.variant), "--corpus",
            own if text == "self" else self.bench.find(text, self.plan.fetch), *bundles, "--compare",
            ",".join(run.methods), *run.options, *limit, "--sequence-length", run.sequence_length or self.size.sequence_length,
            *self.bench.machine(), "--separators", run.gap if run.separated else "off", "--keep-units", "--quiet",
            "--json", self.report(run), "--force"], inputs)

    def make(self, item) -> None:
        """One item of which all needs are there."""
        if isinstance(item, Run):
            return self.evaluate(item)
        name, variant = item
        if name == "model":
            return self.plant(variant)
        if name.startswith(STATISTICS):
            return self.calibrate(name, variant, name.removeprefix(f"{STATISTICS}-"),
                                  ("--statistics-only", "--objective-v", "energy"))
        if name in self.plan.texts:
            return self.write_chat(name)
        bundle = self.plan.bundles[name]
        return self.calibrate(name, variant, self.text_of(name), bundle.options, bundle.tokens) if bundle.searched \
            else self.fit(name, variant)


class Outcome:
    """What has come of the study so far: the document, what failed and what is left for another call."""

    def __init__(self, study: Study, arguments: str):
        plan, size = study.plan, study.size
        self.lock, self.failures, self.left = threading.Lock(), [], []
        self.document = {"schema": SCHEMA, "model": plan.name, "arguments": arguments,
                         "calibration_tokens": size.calibration_tokens, "bundles": {}, "predicted": {}, "runs": {}}


def read_report(outcome: Outcome, study: Study, run: Run) -> None:
    """Adds a run's figures to the document, and those of the same text with separators."""
    report = json.loads(study.report(run).read_text(encoding="utf-8"))
    document = outcome.document
    document["device"], document["tool"] = report["device"], report["tool"]
    where = {"text": run.text, "variant": run.variant}
    if report.get("channels") and "map" in document:
        for facts, layer in zip(document["map"], report["channels"]["layers"]):
            for side in ("key", "value"):
                facts[side]["peak"] = (layer[side] or {}).get("peak_before", [])
    if run.name:
        document["runs"][run.name] = shortened(report) | where
    if run.separated:
        document["runs"][run.separated] = shortened(report | report["separators"]) | where


def shortened(report: dict) -> dict:
    """Of errors layer by layer the mean, and all of the method whose map is drawn."""
    kept = {key: report[key] for key in KEPT_OF_REPORT if key in report}
    kept["methods"] = {name: {part: {key: method[part][key] for key in keys if key in method[part]}
                              for part, keys in KEPT_OF_METHOD.items() if part in method}
                       for name, method in report["methods"].items()}
    for name, method in report["methods"].items():
        if "layer_errors" in method:
            kept["methods"][name]["error"] = predictions.mean(method["layer_errors"]["both"])
            if name == layers.METHOD:
                kept["methods"][name]["layer_errors"] = method["layer_errors"]
    return kept


def ask_bundle(bench: Bench, command: str, *paths: pathlib.Path) -> dict:
    """What a sub-command of oscar-bundle says of files, as JSON. Throws Failed."""
    result = subprocess.run([str(bench.program("oscar-bundle")), command, *map(str, paths), "--json", "-"],
                            capture_output=True, text=True, env=bench.environment)
    if result.returncode != 0:
        raise Failed(f"oscar-bundle {command} {' '.join(map(str, paths))}\n{result.stderr.strip()}")
    return json.loads(result.stdout)


def add_coverage(outcome: Outcome, study: Study) -> None:
    """How well `oscar-bundle coverage` says that each calibration text stands for the others."""
    crossed = study.plan.crossed
    if len(crossed) > 1 and all(name in outcome.document["bundles"] for name in crossed.values()):
        told = ask_bundle(study.bench, "coverage", *(study.bundle(name, "") for name in crossed.values()))
        outcome.document["coverage"] = {"texts": list(crossed), "key": told["key"], "value": told["value"]}


def measure(study: Study, runs: list, keep, arguments: str = "") -> Outcome:
    """Makes what `runs` need and the runs themselves, as many side by side as the bench says, in their order.
    `keep(document)` is called behind each run."""
    outcome, futures = Outcome(study, arguments), {}
    order = [name for run in runs for name in (run.name, run.separated)]

    def make(item, needs: list) -> None:
        missing = set()
        for need in needs:
            failure = futures[need].exception()
            if isinstance(item, Run) and isinstance(failure, Failed) and need[0] in study.plan.bundles:
                missing.add(need[0])  # the other methods are measured
            elif failure:
                raise Failed("") if isinstance(failure, Failed) else Later("")
        if isinstance(item, Run):
            item = study.without(item, missing)
        study.make(item)
        with outcome.lock:
            if isinstance(item, Run):
                read_report(outcome, study, item)
                outcome.document["runs"] = {name: outcome.document["runs"][name] for name in order
                                            if name in outcome.document["runs"]}
                outcome.document["seconds"] = round(study.bench.seconds())
                keep(outcome.document)
            elif item[0] in study.plan.bundles:
                add_bundle(outcome, study, *item)

    def submit(pool, item) -> None:
        if item in futures:
            return
        needs = study.needs(item)
        for need in needs:
            submit(pool, need)
        futures[item] = pool.submit(make, item, needs)

    with concurrent.futures.ThreadPoolExecutor(study.bench.jobs) as pool:
        for run in runs:  # calibrations take longest and begin first
            for need in study.needs(run):
                submit(pool, need)
            submit(pool, run)
    add_coverage(outcome, study)
    for item, future in futures.items():
        failure = future.exception()
        if isinstance(failure, Failed):
            outcome.failures += [str(failure)] if str(failure) else []
        elif isinstance(failure, Later):
            outcome.left += [item.key()] if isinstance(item, Run) else []
        elif failure:
            raise failure
    return outcome


def add_bundle(outcome: Outcome, study: Study, name: str, variant: str) -> None:
    bundle = study.plan.bundles[name]
    outcome.document["bundles"][name] = {"options": " ".join(bundle.options), "searched": bundle.searched,
                                         "text": study.text_of(name)}
    if bundle.searched:
        inspected = ask_bundle(study.bench, "inspect", study.bundle(name, variant))
        outcome.document["predicted"].setdefault(variant or predictions.SHIPPED, {}).update(
            predictions.predicted(name, inspected))
        if name == layers.METHOD and not variant:
            outcome.document["map"] = predictions.map_of(inspected)


def dump(value, depth: int = 0) -> str:
    """JSON that reads well: objects down to the methods have a line for each key; numbers have six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, dict) or depth == 4:
        return json.dumps(rounded(value), ensure_ascii=False)
    pad = " " * depth
    lines = [f"{pad} {json.dumps(key, ensure_ascii=False)}: {dump(entry, depth + 1)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{pad}}}"


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value
