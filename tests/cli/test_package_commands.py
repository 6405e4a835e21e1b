"""python -m oscar_int2: its commands, and that they start where neither torch nor the library is."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from support.programs import BIN, SOURCE

NEED_TORCH = {"doctor"}


def run(*words, python=("-S",), path=SOURCE / "python"):
    """Without packages, unless `python` says otherwise."""
    return subprocess.run([sys.executable, *python, "-m", *words], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(path)}, timeout=120)


class PackageCommands(unittest.TestCase):
    def test_without_a_command_they_are_listed(self):
        for words in ((), ("no-such-command",)):
            result = run("oscar_int2", *words)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            names = re.findall(r"^  ([a-z-]+) {2,}\S", result.stderr, re.MULTILINE)
            self.assertEqual(names, ["answers", "calibrate", "check", "dequantize", "doctor", "evaluate", "fetch", "lm-eval", "prepare-corpus", "publish",
                                     "render", "zoo"])
        self.assertEqual(run("oscar_int2", "--help").returncode, 0)
        for name in set(names) - NEED_TORCH:
            with self.subTest(name):
                result = run("oscar_int2", name, "--help")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn(f"usage: python -m oscar_int2 {name}", result.stdout)

    def test_dequantize_says_what_to_do_with_a_folder(self):
        with tempfile.TemporaryDirectory() as folder:
            said = run("oscar_int2", "dequantize", folder, "out").stderr
            self.assertIn(f"{folder} is a folder, and this takes a .gguf file; a Hugging Face folder is served as it is", said)
            pathlib.Path(folder, "m.gguf").touch()
            self.assertIn(f"takes a .gguf file: {folder}/m.gguf", run("oscar_int2", "dequantize", folder, "out").stderr)

    def test_another_package_under_m_has_all_names(self):
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "server")
            package.mkdir()
            (package / "__init__.py").write_text("import oscar_int2\nprint(oscar_int2.load, oscar_int2.ops)\n")
            (package / "__main__.py").touch()
            result = run("server", python=(), path=f"{BIN.parent / 'python'}{os.pathsep}{folder}")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("function load", result.stdout)


if __name__ == "__main__":
    unittest.main()
