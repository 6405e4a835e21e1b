"""The C++ programs from Python: where they are, and running one with progress, its own errors, and Ctrl-C."""
import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from .commands.checkout import CHECKOUT
from .errors import OscarError

_log = logging.getLogger("oscar_int2")
_BESIDE = pathlib.Path(__file__).resolve().parent / "bin"  # where a wheel has them
DONE, USAGE, STOPPED = 0, 2, 130  # exit codes


def find(name: str) -> str:
    """The path of a program: in $OSCAR_BIN, beside the package, in a checkout's build/bin, or in PATH.

    Raises OscarError where it is in none of them.
    """
    folders = [os.environ.get("OSCAR_BIN"), _BESIDE, CHECKOUT and CHECKOUT / "build" / "bin"]
    for folder in filter(None, folders):
        if os.access(pathlib.Path(folder) / name, os.X_OK):
            return str(pathlib.Path(folder) / name)
    found = shutil.which(name)
    if found is None:
        raise OscarError(f"{name} is not installed: it is in none of $OSCAR_BIN, {_BESIDE}, PATH\n  hint: scripts/build.sh "
                         "builds it in a checkout, and OSCAR_BIN names the folder")
    return found


@functools.cache
def _helped(*program: str) -> dict:
    """The options in a program's --help: {name without dashes: (the rest of its line, the lines below)}."""
    path = find(program[0])
    text = subprocess.run([path, *program[1:], "--help"], capture_output=True, text=True, check=True, env=_environment(path)).stdout
    found = re.findall(r"^  (?:-\w,)?--([a-z0-9-]+)(\n| .*\n)((?: {8,}.*\n)*)", text, re.MULTILINE)
    return {name: (line, more) for name, line, more in found}


def switched(*program: str) -> dict:
    """The options in a program's --help, by name without dashes: whether they are flags, and whether their value may be off."""
    return {name: (line == "\n" or line.startswith("  "), bool(re.search(r"(?<![\w-])off(?![\w-])", line + more)))
            for name, (line, more) in _helped(*program).items()}


def _taken(name: str, *program: str) -> str:
    """What an option that is no flag takes, as its --help has it: its choices, or the sentence that describes it."""
    line, more = _helped(*program)[name]
    choices = re.search(r"\{([^}]*)\}", line)
    if choices:
        return ", ".join(f'"{choice}"' for choice in choices[1].split(","))
    kind, *said = f"{line} {more}".split()
    return f"{kind.split(':')[0]}, " + " ".join(said)


@functools.cache
def _values(*program: str) -> dict:
    """{option: the words that its help lists as values}; None of a flag."""
    flags, common = switched(*program), {"on", "off", "auto", "cpu", "cuda"}
    return {name: None if flags[name][0] else common.union(re.split("[{},|=:]+", line.split()[0]),
                                                           re.findall(r"[a-z][\w.-]*[\d_][\w.-]*", more))
            for name, (line, more) in _helped(*program).items()}


_KEYWORDS = {"output": "out", "for": "for_"}  # of options that Python calls otherwise
# Where an error is, or begins, an option stands for what it is called, and else for its use.
_OPTION = re.compile(r"(where: +)?--([a-z][a-z0-9-]*)(?:([ =])(?!--)([\w./:,=+-]*[\w/]))?(?=(:)?)")


def _is_value(word, values) -> bool:
    """Whether a word behind an option is its value, and not the next word of the sentence."""
    return word in values or "/" in word or "." in word or bool(re.fullmatch(r"[A-Z0-9][A-Z0-9:,_-]*(=[A-Z]+)?", word))


def _keyword(found, values) -> str:
    """One option of a text, and the value behind it, as a keyword argument. An option that `values` does not know is of
    another tool, and stays."""
    where, name, between, value, colon = found.groups(default="")
    if name not in values:
        return found[0]
    keyword, behind = where + _KEYWORDS.get(name, name.replace("-", "_")), between + value
    if values[name] is None:
        return f"{keyword}=True{behind}"
    if value and (between == "=" or _is_value(value, values[name])):
        if "=" in value:  # NAME=FILE
            return keyword + '={{"{}": "{}"}}'.format(*value.split("=", 1))
        return f"{keyword}={value}" if re.fullmatch("[A-Z0-9].*", value) else f'{keyword}="{value}"'
    return keyword + ("" if where or colon else "=") + behind


def in_python(text: str, *program: str) -> str:
    """What a program says, in the words of Python: --max-tokens becomes max_tokens=, --device cpu device="cpu", --force
    force=True, and OUT out."""
    values = {}
    for of in (("oscar-eval",), ("oscar-calibrate",), program):
        with contextlib.suppress(OscarError):  # one that is not installed
            values |= {name: words if words is None else words | (values.get(name) or set())
                       for name, words in _values(*of).items()}
    text = text.replace("Run with --help for more information.", f"`{' '.join(program)} -h` lists the options, with - for _")
    text = re.sub(r"unknown option --([\w-]+)", lambda found: "unknown option " + found[1].replace("-", "_"), text)
    text = _OPTION.sub(lambda found: _keyword(found, values), text)
    text = re.sub(r"(?<![\w/.-])(MODEL|CORPUS|OUT)(?![\w/.-])", lambda found: found[0].lower(), text)
    names = {"oscar-calibrate": "calibrate", "oscar-eval": "evaluate"}
    return re.sub(r'\b(oscar-calibrate|oscar-eval) (\w+=(?:"[^"]*"|\w*))',
                  lambda found: f"{names[found[1]]}(..., {found[2]})", text)


def options(program: tuple, values: dict) -> list:
    """Keyword arguments as options of a program, such as ("oscar-bundle", "fit"): `max_tokens=4096` is --max-tokens=4096, True a
    flag, False no flag or the value off, a list is joined by commas, a dict is JSON. `for_` is --for. None is left out. Raises
    ValueError for a False that turns nothing off, and for a True of what is no flag."""
    words = []
    for name, value in values.items():
        option = "--" + name.rstrip("_").replace("_", "-")
        if value is True:
            if not switched(*program).get(option[2:], (True, True))[0]:
                raise ValueError(f"{name}=True: {name} of {' '.join(program)} takes a value: {_taken(option[2:], *program)}")
            words.append(option)
        elif value is False:
            flag, takes_off = switched(*program).get(option[2:], (False, True))  # a program says itself what it does not know
            if not flag and not takes_off:
                raise ValueError(f"{name}=False: {name} of {' '.join(program)} takes a value, and none that is off")
            words += [] if flag else [option + "=off"]
        elif isinstance(value, dict):
            words.append(f"{option}={json.dumps(value)}")
        elif isinstance(value, (list, tuple)):
            words.append(f"{option}={','.join(map(str, value))}")
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def _environment(program: str):
    """The environment of a program. Raises OscarError where it is a wheel's and this Python has another torch than it needs."""
    if pathlib.Path(program).parent != _BESIDE:
        return os.environ
    import oscar_int2_programs

    try:
        return oscar_int2_programs.environment_with_torch(pathlib.Path(program).name)
    except SystemExit as refused:
        raise OscarError(str(refused)) from None


class Bars:
    """A bar of tqdm for each stage of a program; without tqdm, a line of the log when a stage ends."""

    def __init__(self, shown: bool):
        self.bar = self.make = None
        if shown:
            try:
                from tqdm.auto import tqdm
                self.make = tqdm
            except ImportError:
                pass

    def show(self, told: dict) -> None:
        if self.make and self.bar is None:
            self.bar = self.make(total=told["total"] or None, desc=told["stage"], unit=" " + told["unit"], unit_scale=True)
        if self.bar is not None:
            self.bar.update(told["done"] - self.bar.n)
        if told["ended"]:
            _log.info("%s: %s %s", told["stage"], f"{told['done']:,}", told["unit"])
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _follow(process, bars: Bars, say) -> list:
    """Reads standard error to its end; returns the lines that are no progress."""
    said = []
    for line in process.stderr:
        line = line.rstrip("\n")
        if line.startswith("{"):
            told = json.loads(line)
            if "note" in told:
                _log.info(say(told["note"]))
            elif "warning" in told:
                _log.warning(say(told["warning"]))
            else:
                bars.show(told)
        elif line.startswith("warning: "):
            _log.warning(say(line.removeprefix("warning: ")))
        else:
            said.append(line)
    return said


def run(name: str, words: list, progress: bool = False, say=str) -> str:
    """Runs a program to its end and returns what it wrote to standard output. `say`: what is made of its notes, warnings and
    errors.

    Its notes and warnings go to the logger `oscar_int2`. Ctrl-C (KeyboardInterrupt) is handed on: the program saves what it
    has, and KeyboardInterrupt is raised with its last words. Raises ValueError for arguments that it refuses, and OscarError
    for all else that ends it.
    """
    program = find(name)
    environment = _environment(program) | {"OSCAR_PROGRESS": "json", "OSCAR_PYTHON": os.environ.get("OSCAR_PYTHON") or sys.executable}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        # A session of its own, so that Ctrl-C of the terminal reaches it once, by us.
        process = subprocess.Popen([program, *map(str, words)], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE,
                                   text=True, encoding="utf-8", env=environment, start_new_session=True)
        bars, said, interrupted = Bars(progress), [], False
        try:
            try:
                said += _follow(process, bars, say)
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
                said += _follow(process, bars, say)
            status = process.wait()
        except BaseException:  # a second Ctrl-C
            process.kill()
            process.wait()
            raise
        finally:
            bars.close()
            process.stderr.close()
        words_of_it = say("\n".join(said).strip().removeprefix("error: "))
        if interrupted or status == STOPPED:
            raise KeyboardInterrupt(words_of_it)
        if status != DONE:
            raise (ValueError if status == USAGE else OscarError)(words_of_it or f"{name} ended with status {status}")
        out.seek(0)
        return out.read()


def run_for_json(name: str, words: list, progress: bool = False, say=str, file=None) -> tuple:
    """(what the program writes with --json, what it prints). `file`: where it is kept; None: nowhere."""
    with tempfile.TemporaryDirectory(prefix="oscar-") as folder:
        file = pathlib.Path(file or pathlib.Path(folder, "out.json"))
        printed = run(name, [*words, f"--json={file}"], progress, say)
        return json.loads(file.read_text(encoding="utf-8")), printed
