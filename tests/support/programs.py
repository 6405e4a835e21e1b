"""Calling the programs from tests."""
import os
import pathlib
import subprocess
import tempfile
import unittest

BIN = pathlib.Path(os.environ["OSCAR_BIN"])
SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
# Equal inputs give equal bytes only with a fixed date and thread count.
ENVIRONMENT = os.environ | {"SOURCE_DATE_EPOCH": "1700000000", "OMP_NUM_THREADS": "1"}


def run(program, *arguments, timeout=600):
    return subprocess.run([BIN / program, *map(str, arguments)], capture_output=True, text=True,
                          env=ENVIRONMENT, timeout=timeout)


class ProgramTest(unittest.TestCase):
    """A test with a scratch folder, `self.folder`."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def run_ok(self, program, *arguments):
        result = run(program, *arguments)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def refuse(self, program, arguments, *words, code=1):
        """The program fails with `code`, says all `words`, and leaves no new file behind."""
        before = set(self.folder.rglob("*"))
        result = run(program, *arguments)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertEqual(set(self.folder.rglob("*")), before)
