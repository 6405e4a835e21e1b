"""What programs and libraries ask of the loader: no search in the current folder, and hardened."""
import json
import os
import re
import subprocess
import unittest

from support.programs import BIN

BUILD = BIN.parent
FORTIFIED = ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")


def elf_files():
    """All programs and shared libraries of the build."""
    found = [path for path in BIN.iterdir() if path.is_file()]
    found += (BUILD / "python").rglob("*.so") if (BUILD / "python").exists() else []
    return sorted(path for path in found if path.read_bytes()[:4] == b"\x7fELF")


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, path], check=True, capture_output=True,
                          text=True).stdout


class BuiltFiles(unittest.TestCase):
    def setUp(self):
        self.files = elf_files()
        self.assertIn("oscar-bundle", [path.name for path in self.files])

    def test_libraries_are_looked_for_in_absolute_folders_alone(self):
        for path in self.files:
            with self.subTest(path.name):
                dynamic = readelf("-d", path)
                self.assertNotIn("(RPATH)", dynamic)
                for paths in re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic):
                    for folder in paths.split(":"):
                        self.assertTrue(folder.startswith("/"), paths)

    def test_each_library_is_found(self):
        # Also from a virtual environment inside the project, which CMake's own path leaves out.
        for path in self.files:
            if not path.suffix:
                with self.subTest(path.name):
                    loaded = subprocess.run(["ldd", path], check=True, capture_output=True,
                                            text=True, env={"PATH": os.environ["PATH"]}).stdout
                    self.assertNotIn("not found", loaded)

    def test_the_package_is_named_once_as_a_plugin_of_vllm(self):
        # Of an older version nothing stays behind: vLLM would load the plugin once more.
        names = [path.name for path in (BUILD / "python").glob("*.dist-info")]
        self.assertLessEqual(len(names), 1, names)

    def test_tables_are_read_only_and_every_address_is_random(self):
        for path in self.files:
            with self.subTest(path.name):
                dynamic, segments = readelf("-d", path), readelf("-l", path)
                self.assertIn("GNU_RELRO", segments)
                flags = "".join(re.findall(r"FLAGS_1\)(.*)", dynamic))
                self.assertIn("NOW", flags)
                self.assertNotIn("TEXTREL", dynamic)
                self.assertRegex(segments, r"GNU_STACK.* RW +0x")
                if not path.suffix:
                    self.assertIn("PIE", flags)

    def test_stacks_are_guarded_and_calls_of_the_c_library_fortified(self):
        for path in self.files:
            if path.name in ("oscar-bundle", "oscar-calibrate", "oscar-eval", "oscar-bench"):
                with self.subTest(path.name):
                    self.assertTrue("__stack_chk_fail" in readelf("--dyn-syms", path))
        commands = json.loads((BUILD / "compile_commands.json").read_text())
        own = [entry["command"] for entry in commands
               if re.search(r"/(lib|apps)/.*\.(cpp|cxx)$", entry["file"])]
        self.assertGreater(len(own), 10)
        for command in own:
            for option in FORTIFIED:
                self.assertIn(option, command)


if __name__ == "__main__":
    unittest.main()
