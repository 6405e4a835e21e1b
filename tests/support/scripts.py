"""Calling a script in the process of a test, which has already imported what takes seconds to."""
import contextlib
import importlib.util
import io
import sys
import types
import unittest.mock


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(path, *arguments):
    """What a process would leave: returncode, stdout and stderr."""
    script = load(path)
    with unittest.mock.patch.object(sys, "argv", [str(path), *map(str, arguments)]):
        return ended(script.main)


def run_command(module, *arguments):
    """The same of a command of `python -m oscar_int2`."""
    return ended(module.main, list(map(str, arguments)))


def ended(main, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(*arguments) or 0
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
    return types.SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
