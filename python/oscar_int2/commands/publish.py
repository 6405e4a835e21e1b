"""Makes one folder of a bundle, to hand on or to upload; it appears whole or not at all.

The folder: README.md (card), NAME.h5 (publish profile), NAME.serving.h5, evaluation.json and .html,
exports/BACKEND/ for each backend that can take the bundle or its portable variant, index.json (the same
for programs), SHA256SUMS.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from .. import programs
from ..errors import OscarError
from . import published

CAUTIONS = ("shared-text", "little-text", "few-tokens", "repeated-text", "predicts-nothing")
HUB_NAME = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
FILE_NAME = re.compile(r"[A-Za-z0-9._-]+")


def fail(words):
    print(f"publish: {words}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """Whose errors are ours."""

    def error(self, message):
        lacking = re.fullmatch(r"argument ([^/:]+).*: expected one argument", message)
        fail(f"{lacking[1]} needs a value" if lacking else f"{message} (--help)")


def parse(words):
    parser = Parser(prog="python -m oscar_int2 publish", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="MODEL BUNDLE",
                        help="the bundle's model, a folder, a .gguf file or tiny-gqa; and the bundle")
    parser.add_argument("--eval", action="append", default=[], metavar="REPORT.json", dest="reports",
                        help="a JSON report of oscar-eval on this bundle: the card's figures. Without one it has none")
    parser.add_argument("--answers", metavar="ANSWERS.json", help="what python -m oscar_int2 answers --json wrote with "
                        "this bundle or its serving profile, for card and page")
    parser.add_argument("--base-model", metavar="ORG/NAME", help="on Hugging Face, the model")
    parser.add_argument("--repo", metavar="ORG/NAME", help="on Hugging Face, where the folder shall go")
    parser.add_argument("--rope-scaling", metavar="JSON", help="where the model was calibrated with it")
    parser.add_argument("--no-exports", action="store_true", help="no files of other backends")
    parser.add_argument("--allow", action="append", default=[], metavar="CAUTION",
                        help="publish with this caution on the card: shared-text (calibration and evaluation share "
                        "text), little-text (the calibration text is not enough, or could not be judged), "
                        "few-tokens (the evaluation has too few for intervals), repeated-text (it counts copies) or "
                        "predicts-nothing (the model itself guesses)")
    parser.add_argument("-o", "--out", metavar="DIR", help="the folder to make")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        option = next((word for word in unknown if word.startswith("-")), None)
        fail(f"there is no option {option} (--help)" if option else "give MODEL, BUNDLE and -o DIR (--help)")
    for caution in arguments.allow:
        if caution not in CAUTIONS:
            fail(f"--allow takes {', '.join(CAUTIONS[:-1])} or {CAUTIONS[-1]}, not {caution}")
    if len(arguments.places) != 2 or not arguments.out:
        fail("give MODEL, BUNDLE and -o DIR (--help)")
    if os.path.lexists(arguments.out.rstrip("/")):
        fail(f"{arguments.out.rstrip('/')} exists already; choose another name, or remove it")
    if arguments.repo and not HUB_NAME.fullmatch(arguments.repo):
        fail(f"--repo is ORG/NAME, not {arguments.repo}")
    return arguments


def find_tool():
    try:
        return programs.find("oscar-bundle")
    except OscarError as error:
        return fail(error)


class Tool:
    """oscar-bundle, which says itself what is wrong."""

    def __init__(self, path):
        self.path, self.names = path, {}  # of copies, and of what is made: what the user calls it

    def said(self, text):
        for copy, name in self.names.items():
            text = text.replace(str(copy), str(name))
        return text

    def run(self, *words):
        """Its standard output. Ends the run where it fails; what it says of a copy is said of the user's file."""
        result = subprocess.run([self.path, *map(str, words)], capture_output=True, text=True, check=False)
        sys.stderr.write(self.said(result.stderr))
        if result.returncode != 0:
            raise SystemExit(result.returncode if result.returncode > 0 else 1)
        return result.stdout

    def verify(self, bundle):
        """Its output is shown where the bundle is not sound."""
        result = subprocess.run([self.path, "verify", bundle], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.stderr.write(result.stdout + result.stderr)
            raise SystemExit(1)


def add_reports(tool, folder, reports, answers):
    """evaluation.json, evaluation-2.json and so on with their pages; the programs' options for them."""
    options = []
    for number, report in enumerate(reports, 1):
        file = folder / f"evaluation{'' if number == 1 else f'-{number}'}.json"
        tool.names[file] = report
        shutil.copyfile(report, file)
        tool.run("report", file, *answers, "-o", file.with_suffix(".html"))  # refuses what is no report
        published.require_whole(json.loads(file.read_text()), report)
        options += ["--eval", file]
    return options


def add_exports(tool, folder, bundle, inspection, reports):
    """exports/BACKEND for each backend that can take the bundle; the card's option for them."""
    backends = published.able(inspection)
    if not backends:
        return []
    (folder / "exports").mkdir()
    for backend in backends:
        tool.run("export", bundle, "--for", backend, "--reduce", *reports, "-o", folder / "exports" / backend)
    return ["--exports", folder / "exports"]


def refuse_cautions(card, allowed):
    refused = published.refused_cautions(card, allowed)
    for kind, sentence in refused:
        print(f"publish: {sentence}\n  hint: --allow {kind} publishes it with this caution on the card",
              file=sys.stderr)
    if refused:
        raise SystemExit(2)


def fill(tool, folder, name, arguments):
    """All files of the folder."""
    model, bundle = arguments.places
    tool.verify(bundle)
    whole = folder / f"{name}.h5"
    tool.names = {whole: bundle}
    tool.run("strip", bundle, whole, "--profile", "publish")
    tool.run("strip", bundle, folder / f"{name}.serving.h5", "--profile", "serving")
    answers = ["--answers", arguments.answers] if arguments.answers else []
    card = [whole, "--model", model, *answers, "-o", folder / "README.md"]
    if arguments.rope_scaling:
        card += ["--rope-scaling", arguments.rope_scaling]
    if arguments.base_model:
        card += ["--base-model", arguments.base_model]
    reports = add_reports(tool, folder, arguments.reports, answers)
    card += reports
    inspection = json.loads(tool.run("inspect", whole, *reports, "--json", "-"))
    if not arguments.no_exports:
        card += add_exports(tool, folder, whole, inspection, reports)
    tool.run("card", *card)
    published.carry_warnings(folder)
    refuse_cautions(folder / "README.md", arguments.allow)
    published.write_folder(folder, name, inspection, arguments.base_model)


def finish(folder):
    """Readable for all, and on the disk."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644)
    subprocess.run(["sync", "-f", folder], check=True)


def announce(target, name, repo):
    size = subprocess.run(["du", "-sh", target], capture_output=True, text=True, check=True).stdout.split("\t")[0]
    print(f"published   {target}, {size}")
    for path in sorted(str(path.relative_to(target)) for path in pathlib.Path(target).rglob("*") if path.is_file()):
        print(f"file        {path}")
    print(f"check       cd {target} && sha256sum --check SHA256SUMS")
    print(f"upload      hf upload {repo or f'ORG/{name}'} {target} .")


def main(words):
    arguments = parse(words)
    tool = Tool(find_tool())
    name = pathlib.Path(arguments.places[1]).name.removesuffix(".h5")
    if not FILE_NAME.fullmatch(name):
        fail("the bundle's name becomes that of files: letters, digits, . _ -")
    target = arguments.out.rstrip("/")
    parent = os.path.dirname(target) or "."
    if not os.path.isdir(parent):
        fail(f"there is no folder {parent}")
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".publish.", suffix=".tmp", dir=parent))
    try:
        fill(tool, scratch, name, arguments)
        finish(scratch)
        scratch.rename(target)
    except OSError as error:
        sys.exit(f"publish: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    announce(target, name, arguments.repo)
    return 0
