"""The wheel is the whole product: installed in a fresh environment without compilers it calibrates, evaluates and
serves, and needs nothing of the system but the runtimes of C and C++."""
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

from support.programs import BIN, SOURCE

sys.path.insert(0, str(SOURCE / "scripts"))
from pack_programs import PROGRAMS, SYSTEM

MODEL = SOURCE / "datasets" / "tiny-gqa"
SERVED = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import oscar_int2.transformers
folder, bundle = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
oscar_int2.transformers.apply(model, bundle)
ids = tokenizer("word " * 420, return_tensors="pt")
model.generate(**ids, max_new_tokens=16, do_sample=False)
print(oscar_int2.status(model))
"""


def execute(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


def succeed(*command, **options):
    result = execute(*command, **options)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        succeed(SOURCE / "scripts" / "build_wheel.sh", cls.folder / "dist", "--build", BIN.parent)
        cls.wheel, = (cls.folder / "dist").glob("*.whl")
        cls.environment = cls.folder / "environment"
        succeed(sys.executable, "-m", "venv", "--without-pip", cls.environment)
        cls.python = cls.environment / "bin" / "python"
        succeed(sys.executable, "-m", "pip", "--python", cls.python, "install", "--no-deps", "--no-index", cls.wheel)
        cls.packages = pathlib.Path(succeed(cls.python, "-c", "import sysconfig as s; print(s.get_path('purelib'))").strip())
        # What its dependencies would install, of this Python.
        cls.torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
        for entry in cls.torch.parent.iterdir():
            if not (cls.packages / entry.name).exists():
                (cls.packages / entry.name).symlink_to(entry)
        cls.package = cls.packages / "oscar_int2"

    def execute(self, *command, **environment):
        """With nothing in PATH but the environment's own programs."""
        bare = {"PATH": str(self.environment / "bin"), "HOME": str(self.folder), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return execute(self.environment / "bin" / command[0], *command[1:], env=bare | environment, cwd=self.folder)

    def succeed(self, *command):
        result = self.execute(*command)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def test_calibrates_evaluates_and_serves(self):
        began, bundle = time.monotonic(), self.folder / "tiny-gqa.h5"
        self.succeed("oscar-calibrate", MODEL, MODEL / "calibration.jsonl", bundle, "--max-tokens", 8192, "--device", "cpu")
        self.assertIn("is sound", self.succeed("oscar-bundle", "verify", bundle))
        table = self.succeed("oscar-eval", MODEL, "--bundle", bundle, "--corpus", MODEL / "heldout.jsonl", "--max-tokens",
                             4096, "--compare", "bf16,bundle", "--tasks", "ppl,niah", "--needle-lengths", 400,
                             "--needle-prompts", 2, "--separators", "off", "--device", "cpu")
        self.assertRegex(table, r"(?m)^bundle +2\.\d+|^bundle +3\.\d+")
        self.assertRegex(self.succeed("python", "-c", SERVED, MODEL, bundle), r"[1-9]\d* tokens held in 2 bits")
        print(f"calibrated, evaluated and served in {time.monotonic() - began:.0f} s")

    def test_needs_only_torch_and_the_runtimes_of_c_and_cpp(self):
        files = [path for path in self.package.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
        carried = {path.name for path in files}
        self.assertLess({"oscar-calibrate", "oscar-eval", "oscar-bundle", "liboscar_int2_ops.so", "libopenblas.so.0"}, carried)
        for path in files:
            with self.subTest(path.name):
                dynamic = succeed("readelf", "-d", path)
                for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
                    self.assertTrue(SYSTEM.match(name) or name in carried or (self.torch / "lib" / name).exists(), name)
                for paths in re.findall(r"\((?:RUN|R)PATH\).*\[(.*)\]", dynamic):
                    for folder in paths.split(":"):
                        self.assertTrue(folder.startswith("$ORIGIN"), paths)
                if path.parent.name == "bin":
                    found = dict(re.findall(r"^\s*(\S+) => (\S+)", succeed("ldd", path, env={"PATH": os.environ["PATH"]}), re.M))
                    for name in found.keys() & carried:  # before the system's own
                        self.assertEqual(pathlib.Path(found[name]).resolve(), (self.package / "libs" / name).resolve())
                    self.assertNotIn("not found", found)

    def test_another_torch_is_refused_by_name(self):
        pinned = importlib.metadata.version("torch").partition("+")[0]
        for version, words in (("2.99.0", f"built with torch {pinned}, and this Python has 2.99.0"),):
            other = self.folder / version
            info = other / f"torch-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            for name in ("oscar-calibrate", "oscar-eval"):
                result = self.execute(name, "--help", PYTHONPATH=str(other))
                self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
                self.assertIn(words, result.stderr)
                self.assertIn(f"pip install torch=={pinned}", result.stderr)
            self.assertEqual(self.execute("oscar-bundle", "--help", PYTHONPATH=str(other)).returncode, 0)

    def test_a_torch_elsewhere_is_found(self):
        beside = self.packages / "torch"
        beside.rename(self.packages / "torch-away")
        self.addCleanup((self.packages / "torch-away").rename, beside)
        result = self.execute("oscar-calibrate", "--help", PYTHONPATH=str(self.torch.parent))
        self.assertEqual(result.returncode, 0, result.stderr)
        result = self.execute("oscar-calibrate", "--help")
        self.assertEqual(result.returncode, 1)
        self.assertIn("this Python has none", result.stderr)

    def test_text_is_read_by_the_python_that_the_wheel_is_in(self):
        text = self.folder / "text.json"
        text.write_text(json.dumps([{"text": "a few words of no importance " * 200}]))
        told, hook = self.folder / "told", self.packages / "sitecustomize.py"
        hook.write_text(f"import sys\nprint(sys.orig_argv, file=open({str(told)!r}, 'a'))\n")
        self.addCleanup(hook.unlink)
        result = self.execute("oscar-calibrate", MODEL, text, self.folder / "read.h5", "--device", "cpu", "--dry-run",
                              PATH="/nowhere")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(told.read_text(), rf"'{self.environment}/bin/python[^']*', '-m', 'oscar_int2', 'render'")

    def test_a_program_that_a_wheel_lacks_is_refused_by_name(self):
        program = self.package / "bin" / "oscar-eval"
        program.rename(program.with_suffix(".away"))
        self.addCleanup(program.with_suffix(".away").rename, program)
        result = self.execute("oscar-eval", "--help")
        self.assertEqual(result.returncode, 1)
        self.assertIn("does not hold it", result.stderr)

    def test_man_pages_and_completion_lie_where_man_and_bash_look(self):
        share = self.environment / "share"
        for path in (self.package / "bin").iterdir():
            self.assertIn(".SH", (share / "man" / "man1" / f"{path.name}.1").read_text())
            self.assertIn(f"-F _{path.name.replace('-', '_')}",
                          (share / "bash-completion" / "completions" / path.name).read_text())

    def test_its_name_and_its_extras_say_what_it_is(self):
        cuda = "OSCAR_WITH_CUDA:BOOL=ON" in (BIN.parent / "CMakeCache.txt").read_text()
        self.assertRegex(self.wheel.name, r"^oscar_int2-[\d.]+\+" + (r"cu\d\d\d" if cuda else "cpu") + r"-py3-none-manylinux_2_\d\d_\w+\.whl$")
        self.assertEqual({path.name for path in (self.package / "bin").iterdir()}, set(PROGRAMS[:4 if cuda else 3]))
        info, = self.packages.glob("oscar_int2-*.dist-info")
        metadata = (info / "METADATA").read_text()
        pinned = importlib.metadata.version("torch").partition("+")[0]
        self.assertRegex(metadata, rf'Requires-Dist: torch=={re.escape(pinned)}; extra == .tools.')
        licences = {path.name for path in (info / "licenses").rglob("*")}
        self.assertLess({"LICENSE", "THIRD_PARTY_NOTICES.md"}, licences)
        if pathlib.Path("/var/lib/dpkg").exists():
            self.assertLess({"libhdf5-dev", "libopenblas0-pthread", "libgfortran5"}, licences)

    def test_locked_and_pinned_torch_are_the_same(self):
        locked = re.search(r'"torch==([\d.]+)"', (SOURCE / "scripts" / "locked" / "pyproject.toml").read_text())[1]
        self.assertIn(f'tools = ["torch=={locked}"]', (SOURCE / "python" / "pyproject.toml").read_text())


if __name__ == "__main__":
    unittest.main()
