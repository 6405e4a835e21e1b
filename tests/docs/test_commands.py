"""Commands and options in the documentation are those that the programs have.

Fenced commands of README.md and docs/ run in a scratch folder, file by file and in their order, with
these changes and no others, so that they take seconds on a CPU:
  - models are a random one of three layers (REPLACED), the user's texts are a few documents of the
    embedded corpora, and bundles that no command before has made are one made for the test
  - SMALL: options for little text behind commands that do not have them already
  - SERVED: Python that serves takes the embedded model and its bundle, the CPU, and few tokens
Commands that build, need a GPU, or stand in other files are read against --help alone.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unittest

import numpy

from support.checkpoints import QWEN3_MINI, qwen3_tensors, write_checkpoint
from support.gguf_files import Type, write_model
from support.markdown_files import markdown_files
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest, run

PROGRAMS = ("oscar-calibrate", "oscar-eval", "oscar-bundle", "oscar-bench")
REPLACED = {"/models/my-qwen3": "model", "/models/my-qwen3-vl": "model", "tiny-gqa": "model", "qwen3-8b": "tiny",
            "/models/my-qwen3.Q8_0.gguf": "model.gguf"}
SMALL = {"oscar-calibrate": ("--max-tokens 4096", "--sequence-length 512", "--device cpu"),
         "oscar-eval": ("--max-tokens 1024", "--sequence-length 1024", "--device cpu",
                        "--needle-lengths 600", "--needle-prompts 2", "--separators off")}
SERVED = {'"/models/my-qwen3"': repr(str(SOURCE / "datasets/tiny-gqa")), '"cuda"': '"cpu"',
          '"my-qwen3.h5"': repr(str(SOURCE / "rotation_zoo/tiny-gqa/tiny-gqa.h5")), "200": "4",
          "32768": "512"}
# Scripts that are run; any other is only looked up, with its options.
RUN_SCRIPTS = ("make_random_checkpoint.py",)
FOREIGN_OPTIONS = {"--long-prefill-token-threshold": "vLLM's", "--kv-cache-dtype": "vLLM's", "--no-enable-chunked-prefill": "vLLM's",
                   "--enable-prefix-caching": "vLLM's", "--max-model-len": "vLLM's",
                   "--load-format": "vLLM's", "--attention-backend": "vLLM's",
                   "--tensor-parallel-size": "vLLM's", "--pipeline-parallel-size": "vLLM's",
                   "--data-parallel-size": "vLLM's", "--kv-offloading-size": "vLLM's", "--kv-transfer-config": "vLLM's", "--enable-expert-parallel": "vLLM's",
                   "--speculative-config": "vLLM's", "--index-url": "pip's", "--enable-lora": "vLLM's",
                   "--language-model-only": "vLLM's", "--disable-hybrid-kv-cache-manager": "vLLM's",
                   "--gpu-memory-utilization": "vLLM's", "--kv-cache-memory-bytes": "vLLM's", "--enforce-eager": "vLLM's",
                   "--no-enable-prefix-caching": "vLLM's", "--model-impl": "vLLM's", "--kv-cache-dtype-skip-layers": "vLLM's",
                   "--prefix-match-unit": "vLLM's", "--mamba-cache-mode": "vLLM's", "--gdn-prefill-backend": "vLLM's",
                   "--max-num-batched-tokens": "vLLM's", "--use_cache": "lm-eval's",
                   "--scheduler-cls": "vLLM's", "--worker-cls": "vLLM's", "--enable-cumem-allocator": "vLLM's",
                   "--disable-log-stats": "vLLM's", "--config": "vLLM's",
                   "--gtest_filter": "GoogleTest's",
                   "--install": "CMake's", "--prefix": "CMake's", "--test-dir": "CTest's",
                   "--help": "of every program"}
FOREIGN_COMMANDS = ("ctest",)
SCRIPT_FOLDERS = ("scripts/", "studies/", "benchmarks/", "datasets/")
PACKAGE = ["python", "-m", "oscar_int2"]


def commands(text):
    """Commands of a fenced block, each as its words; empty when the block is something else."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if line.strip()]
    found = [words for words in found if words]
    is_command = [words[0].startswith(SCRIPT_FOLDERS) or words[:3] == PACKAGE
                  or words[0] in PROGRAMS + FOREIGN_COMMANDS for words in found]
    if not any(is_command):
        return []
    assert all(is_command), f"neither a command nor output: {text}"
    return found


def fenced_commands(file):
    return [words for block in file.blocks() if block.language in ("", "sh")
            for words in commands_of(block)]


def commands_of(block):
    try:
        return commands(block.text)
    except ValueError:  # output with a lone quote
        return []


def options_of(words):
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def written_by(words):
    """The bundle that an oscar-bundle command makes, if any."""
    if "-o" in words:
        return words[words.index("-o") + 1]
    return words[3] if words[:2] == ["oscar-bundle", "strip"] else None


class Help:
    """The options of programs and scripts, each asked once."""

    def __init__(self):
        self.known = {}

    def of(self, *command):
        if command not in self.known:
            result = run(*command, "--help")
            assert result.returncode == 0, result.stderr
            self.known[command] = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", result.stdout))
        return self.known[command]

    def of_package(self, name):
        """The options of a command of the Python package; none where there is no such command."""
        result = subprocess.run([sys.executable, *PACKAGE[1:], name, "--help"], capture_output=True, text=True,
                                env=os.environ | {"PYTHONPATH": str(SOURCE / "python")})
        assert result.returncode == 0, result.stderr
        return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", result.stdout))

    def of_command(self, words):
        if words[:3] == PACKAGE:
            return self.of_package(words[3])
        if words[0].startswith(SCRIPT_FOLDERS):
            return set(re.findall(r"--[a-z][\w-]*", (SOURCE / words[0]).read_text()))
        with_subcommand = words[0] in ("oscar-bundle", "oscar-bench")
        return self.of(*words[:2]) if with_subcommand else self.of(words[0])

    def all(self):
        found = set()
        for program in PROGRAMS:
            if (BIN / program).exists():
                text = run(program, "--help").stdout
                found |= self.of(program)
                for name in re.findall(r"^  ([a-z]+) {2,}\S", text.partition("Subcommands:")[2],
                                       re.MULTILINE):
                    found |= self.of(program, name)
        scripts = [script for folder in SCRIPT_FOLDERS for script in (SOURCE / folder).rglob("*")]
        for script in (*scripts, *(SOURCE / "python/oscar_int2/commands").iterdir()):
            if script.suffix in (".py", ".sh"):
                found |= set(re.findall(r"--[a-z][\w-]*", script.read_text()))
        return found


BUILT = unittest.skipUnless((BIN / "oscar-eval").exists(), "the programs are built without torch")


@BUILT
class Options(unittest.TestCase):
    """Read against --help."""

    @classmethod
    def setUpClass(cls):
        cls.help = Help()
        cls.files = markdown_files()

    def check(self, words, place):
        if words[0] in FOREIGN_COMMANDS or not (BIN / words[0]).exists() and words[0] in PROGRAMS:
            return  # oscar-bench is built with CUDA only
        if words[0].startswith(SCRIPT_FOLDERS):
            self.assertTrue(os.access(SOURCE / words[0], os.X_OK), f"{place}: {words[0]}")
        unknown = set(options_of(words[4 if words[:3] == PACKAGE else 1:])) - self.help.of_command(words)
        self.assertEqual(unknown, set(), f"{place}: {shlex.join(words)}")

    def test_fenced_commands_name_options_that_exist(self):
        count = 0
        for file in self.files:
            for words in fenced_commands(file):
                self.check(words, file.name)
                count += 1
        self.assertGreater(count, 30)  # they are found at all

    def test_the_quickstarts_commands_name_options_that_exist(self):
        text = (SOURCE / "scripts" / "quickstart.sh").read_text().replace("\\\n", " ")
        found = [shlex.split(line) for line in text.splitlines()
                 if line.strip().startswith("build/bin/")]
        self.assertGreaterEqual(len(found), 3)
        for words in found:
            self.check([words[0].rpartition("/")[2], *words[1:]], "scripts/quickstart.sh")

    def test_options_in_prose_exist(self):
        known = self.help.all() | set(FOREIGN_OPTIONS)
        if not (BIN / "oscar-bench").exists():
            for source in (SOURCE / "apps" / "bench").glob("*.cpp"):
                known |= set(re.findall(r"--[a-z][\w-]*", source.read_text()))
            known |= set(re.findall(r"--[a-z][\w-]*", (SOURCE / "apps/oscar-bench.cpp").read_text()))
        for file in self.files:
            for span in file.code_spans():
                for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                    self.assertIn(option, known, f"{file.name}: {span}")


@BUILT
class Commands(ProgramTest):
    """README.md and docs/, run."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.files = {file.name: file for file in markdown_files()}

    def setUp(self):
        super().setUp()
        for name in ("datasets", "scripts", "benchmarks"):
            (self.folder / name).symlink_to(SOURCE / name)
        write_checkpoint(self.folder / "model", {"max_position_embeddings": 131072})
        for name, kind in (("model.gguf", Type.Q8_0), ("my-qwen3.F16.gguf", Type.F16)):
            write_model(self.folder / name, QWEN3_MINI, qwen3_tensors(QWEN3_MINI), lambda _: kind,
                        numpy.random.default_rng(0))
        documents = (SOURCE / "datasets/tiny-gqa/calibration.jsonl").read_text().splitlines()
        (self.folder / "chat.jsonl").write_text("\n".join(documents[:8]) + "\n")
        (self.folder / "code.jsonl").write_text("\n".join(documents[8:16]) + "\n")
        for place in (self.folder, self.folder / "model"):
            shutil.copy(SOURCE / "datasets/tiny-gqa/heldout.jsonl", place / "heldout.jsonl")
        numpy.save(self.folder / "chat.npy",
                   numpy.random.default_rng(0).integers(0, 256, 8192, numpy.int32))
        self.said = ""  # by all commands of a file

    def execute(self, words):
        result = subprocess.run(words, capture_output=True, text=True, cwd=self.folder, timeout=120,
                                env=ENVIRONMENT | {"PATH": f"{BIN}:{os.environ['PATH']}",
                                                    "PYTHONPATH": str(BIN.parent / "python")})
        self.assertEqual(result.returncode, 0, shlex.join(words) + "\n" + result.stderr)
        self.said += result.stdout

    def put_bundle(self, name):
        """A bundle that is read before any command has made it."""
        if not (self.folder / name).exists():
            self.execute(["oscar-calibrate", "model", "chat.jsonl", name, "--search", "off",
                          *" ".join(SMALL["oscar-calibrate"]).split()])

    def run_small(self, words):
        words = [REPLACED.get(word, word) for word in words]
        for option in SMALL.get(words[0], ()):
            if option.split()[0] not in options_of(words):
                words += option.split()
        if words[:3] == PACKAGE:
            return
        if words[0].startswith(SCRIPT_FOLDERS):
            if words[0].rpartition("/")[2] in RUN_SCRIPTS:
                self.execute([sys.executable, *words])
        elif words[0] != "oscar-bench":
            if words[0] != "oscar-calibrate":
                for bundle in set(re.findall(r"[\w-]+\.h5", shlex.join(words))) - {written_by(words)}:
                    self.put_bundle(bundle)
            self.execute(words)

    def run_file(self, name):
        for block in self.files[name].blocks():
            if block.language == "python":
                text = block.text
                if "import oscar_int2" in text:
                    for shown, run_here in SERVED.items():
                        text = text.replace(shown, run_here)
                self.execute([sys.executable, "-c", text])
            elif block.language in ("", "sh"):
                for words in commands_of(block):
                    self.run_small(words)

    def test_the_readmes_commands_run_and_show_its_table(self):
        self.run_file("README.md")
        table = next(block.text for block in self.files["README.md"].blocks()
                     if block.text.startswith("method "))
        shown = [line.split() for line in self.said.splitlines()]
        head, last = table.splitlines()[0].split(), table.splitlines()[-2].split()
        self.assertTrue(any(line[:len(head)] == head for line in shown), head)
        self.assertTrue(last in shown, last)
        self.assertTrue(json.loads((self.folder / "my-qwen3.json").read_text())["needle"])

    def test_commands_on_calibration_run(self):
        self.run_file("docs/calibration.md")

    def test_commands_on_evaluation_run(self):
        self.run_file("docs/evaluation.md")

    def test_commands_on_serving_run(self):
        self.run_file("docs/serving.md")

    def test_commands_on_exchange_run(self):
        self.run_file("docs/exchange.md")

    def test_commands_on_llama_cpp_run(self):
        self.run_file("docs/llama-cpp.md")

    def test_commands_on_models_and_results_run(self):
        self.run_file("docs/models.md")
        self.run_file("docs/results.md")

    def test_no_page_with_commands_is_left_out(self):
        tested = {"README.md", *(f"docs/{page}.md" for page in
                                 ("calibration", "evaluation", "serving", "exchange", "llama-cpp",
                                  "models", "results"))}
        for name, file in self.files.items():
            if name == "README.md" or name.startswith("docs/"):
                self.assertEqual(bool(fenced_commands(file)), name in tested, name)


if __name__ == "__main__":
    unittest.main()
