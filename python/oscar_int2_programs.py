"""Where the commands oscar-bench, oscar-bundle, oscar-calibrate and oscar-eval of the wheel enter.

The programs are C++ and lie in oscar_int2/bin. This module lies beside the package: importing the package
imports torch, and a command starts in a tenth of that time.
"""
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys

PACKAGE = pathlib.Path(__file__).with_name("oscar_int2")
WITHOUT_TORCH = ("oscar-bundle",)


def refuse(name, what, hint):
    sys.exit(f"{name}: {what}\n  hint: {hint}")


def pinned_torch():
    """The version of torch that the programs were built with: the extra `tools` asks for it."""
    needs = importlib.metadata.requires("oscar-int2") or ()
    return next(pin[1] for need in needs if (pin := re.match(r"torch==([\d.]+).*extra == .tools.", need)))


def environment_with_torch(name):
    """The environment in which the loader finds the torch of this Python. Ends the process if it is another version:
    programs use torch's C++ interface, which differs between versions."""
    pinned = pinned_torch()
    hint = f"pip install torch=={pinned}"
    found = importlib.util.find_spec("torch")
    if found is None:
        refuse(name, f"it needs torch {pinned}, and this Python has none", hint)
    version = importlib.metadata.version("torch")
    if version.partition("+")[0] != pinned:
        refuse(name, f"it was built with torch {pinned}, and this Python has {version}", hint)
    folder = pathlib.Path(found.origin).parent
    if folder == PACKAGE.parent / "torch":
        return os.environ  # the program looks there by itself
    paths = [str(folder / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def main():
    name = pathlib.Path(sys.argv[0]).name
    program = PACKAGE / "bin" / name
    if not program.exists():
        refuse(name, f"the wheel {importlib.metadata.version('oscar-int2')} does not hold it",
               "the programs are in wheels of scripts/build_wheel.sh, and oscar-bench in those for CUDA only")
    environment = os.environ if name in WITHOUT_TORCH else environment_with_torch(name)
    # By it programs render chats and read further kinds of text.
    os.execve(program, sys.argv, environment | {"OSCAR_PYTHON": os.environ.get("OSCAR_PYTHON") or sys.executable})
