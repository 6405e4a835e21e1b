"""Runs the programs of the toolkit and keeps of their reports what the study shows."""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

from . import plan

SCHEMA = "tiny-gqa-study-1"
KEPT_OF_REPORT = ("command", "tokens", "first_position", "quantizer", "kl_floor", "unit_tokens", "rows")
KEPT_OF_METHOD = {"top1": ("mean",), "units": ("kl", "nll"), "niah": ("rate", "low", "high"),
                  "bpe": ("32768", "131072")}


class Failed(Exception):
    """A program did not do what was asked; the message is what it said."""


class Bench:
    """Where the programs, the checkpoints and the corpora are, and how many programs run side by side."""

    def __init__(self, programs: pathlib.Path, source: pathlib.Path, work: pathlib.Path, device: str, jobs: int):
        self.programs, self.work, self.device, self.jobs = programs, work, device, jobs
        self.model = source / "datasets" / "tiny-gqa"
        self.planter = source / "scripts" / "plant_outliers.py"
        self.started = time.monotonic()
        self.environment = dict(os.environ, OMP_WAIT_POLICY="PASSIVE", OSCAR_DATASETS=str(source / "datasets"))
        if jobs > 1:
            self.environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
        for name in ("oscar-calibrate", "oscar-bundle", "oscar-eval"):
            if not (programs / name).exists():
                raise Failed(f"{programs / name} is missing: build the toolkit first, or say where it is with --bin")

    def call(self, title: str, *command) -> None:
        """Runs one program to its end and says how long it took. Throws Failed."""
        began = time.monotonic()
        result = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=self.environment)
        now = time.monotonic()
        if result.returncode != 0:
            raise Failed(f"{title}: {' '.join(map(str, command))}\n{result.stderr.strip()}")
        print(f"{now - self.started:6.1f} s  {title} ({now - began:.1f} s)", flush=True)

    def together(self, tasks: list) -> list:
        """Runs all functions, `jobs` at a time; returns the messages of those that failed."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            failures = [future.exception() for future in [pool.submit(task) for task in tasks]]
        for failure in failures:
            if failure and not isinstance(failure, Failed):
                raise failure
        return [str(failure) for failure in failures if failure]

    def folder(self, sigma: str) -> pathlib.Path:
        """The checkpoint with outliers of `sigma`."""
        return self.model if sigma == plan.SHIPPED else self.work / f"model-{sigma}"

    def bundle(self, name: str, sigma: str) -> pathlib.Path:
        return self.work / f"{name}-{sigma}.h5"


def plant(bench: Bench, sigma: str) -> None:
    if sigma != plan.SHIPPED:
        options = ["--undo"] if float(sigma) == 0 else ["--sigma", sigma]
        bench.call(f"outliers of sigma {sigma}", sys.executable, bench.planter, bench.model, bench.folder(sigma), *options)


def calibrate(bench: Bench, scale: plan.Scale, name: str, sigma: str, options) -> None:
    limit = ["--max-tokens", scale.calibration_tokens] if scale.calibration_tokens else []
    bench.bundle(name, sigma).unlink(missing_ok=True)  # of an earlier run in the same folder
    bench.call(f"calibrate {name}, sigma {sigma}", bench.programs / "oscar-calibrate", bench.folder(sigma),
               bench.model / "calibration.jsonl", bench.bundle(name, sigma), *options, *limit, "--chunk-len",
               scale.chunk_len, "--device", bench.device, "--force", "--quiet")


def fit(bench: Bench, name: str, sigma: str) -> None:
    bench.bundle(name, sigma).unlink(missing_ok=True)
    bench.call(f"fit {name}, sigma {sigma}", bench.programs / "oscar-bundle", "fit", bench.bundle("statistics", sigma),
               "-o", bench.bundle(name, sigma), *plan.BUNDLES[name].options, "--no-statistics", "--force")


def evaluate(bench: Bench, scale: plan.Scale, run: plan.Run) -> dict:
    """Command, format and what the study shows of one run, less methods whose bundle failed."""
    names = [name for name in run.bundles() if bench.bundle(name, run.sigma).exists()]
    methods = [m for m in run.methods if set(plan.Run(run.name, (m,)).bundles()) <= set(names)]
    bundles = ["--bundle", bench.bundle("default", run.sigma)] if "default" in names else []
    for name in names:
        bundles += ["--bundle", f"{name}={bench.bundle(name, run.sigma)}"]
    limit = ["--max-tokens", scale.tokens] if scale.tokens else []
    out = bench.work / f"{run.name.replace(' ', '-')}.json"
    bench.call(f"evaluate {run.name}: {len(methods)} methods", bench.programs / "oscar-eval", bench.folder(run.sigma),
               "--corpus", bench.model / "heldout.jsonl", *bundles, "--compare", ",".join(methods), *run.options,
               *limit, "--chunk-len", scale.chunk_len, "--device", bench.device, "--separators", run.separators or "off",
               "--keep-units", "--quiet", "--json", out, "--force")
    report = json.loads(out.read_text(encoding="utf-8"))
    return shortened(report | report["separators"] if run.separators else report)


def shortened(report: dict) -> dict:
    kept = {key: report[key] for key in KEPT_OF_REPORT if key in report}
    kept["methods"] = {name: {part: {key: method[part][key] for key in keys if key in method[part]}
                              for part, keys in KEPT_OF_METHOD.items() if part in method}
                       for name, method in report["methods"].items()}
    return kept | {"device": report["device"], "tool": report["tool"]}


def measure(bench: Bench, scale: plan.Scale) -> tuple:
    """The study's figures (the document of README.md) and the messages of what failed."""
    planned = plan.runs(scale)
    wanted = plan.wanted_bundles(planned)
    failures = bench.together([lambda s=sigma: plant(bench, s) for sigma in wanted])
    tasks = []
    for sigma, names in wanted.items():
        statistics = ("--statistics-only", "--objective-v", "energy")
        tasks.append(lambda s=sigma: calibrate(bench, scale, "statistics", s, statistics))
        tasks += [lambda n=name, s=sigma: calibrate(bench, scale, n, s, plan.BUNDLES[n].options)
                  for name in names if plan.BUNDLES[name].searched]
    failures += bench.together(tasks)
    failures += bench.together([lambda n=name, s=sigma: fit(bench, n, s) for sigma, names in wanted.items()
                                for name in names if not plan.BUNDLES[name].searched])
    reports = {}

    def keep(run: plan.Run) -> None:
        reports[run.name] = evaluate(bench, scale, run)

    failures += bench.together([lambda r=run: keep(r) for run in planned])
    study = {"schema": SCHEMA, "calibration_tokens": scale.calibration_tokens,
             "seconds": round(time.monotonic() - bench.started), "bundles": {
                 name: {"options": " ".join(bundle.options), "searched": bundle.searched}
                 for name, bundle in plan.BUNDLES.items() if any(name in names for names in wanted.values())}}
    for run in planned:
        if run.name in reports:
            report = reports[run.name]
            study["device"], study["tool"] = report.pop("device"), report.pop("tool")
            study.setdefault("runs", {})[run.name] = report
    return study, failures


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
