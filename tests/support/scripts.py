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
    script, out, err = load(path), io.StringIO(), io.StringIO()
    with unittest.mock.patch.object(sys, "argv", [str(path), *map(str, arguments)]), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = script.main() or 0
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
    return types.SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
