"""Options and commands that errors, hints and texts name: each exists where it can be read."""
import os
import re
import subprocess
import sys
import unittest

from support.programs import BIN, SOURCE, run

# Programs that can print what a folder says; any of them where it is not named.
PRINTED_BY = {"lib/oscar/calibrate": {"oscar-calibrate"},
              "lib/oscar/eval/report": {"oscar-eval", "oscar-bundle"}, "lib/oscar/eval": {"oscar-eval"},
              "apps/oscar-calibrate.cpp": {"oscar-calibrate", "oscar-eval"},  # and the command that comes next
              "apps/oscar-eval.cpp": {"oscar-eval"},
              "apps/oscar-bundle.cpp": {"oscar-bundle"}, "apps/bundle": {"oscar-bundle"},
              "apps/oscar-bench.cpp": {"oscar-bench"}, "apps/bench": {"oscar-bench"}}
# Options of other programs, which texts tell the user to pass there.
FOREIGN = {"--kv-cache-dtype": "vLLM's and SGLang's", "--language-model-only": "vLLM's", "--model-path": "SGLang's",
           "--kv-cache-quant-group-size": "SGLang's", "--prefill-attention-backend": "SGLang's",
           "--decode-attention-backend": "SGLang's", "--merge": "llama-gguf-split's",
           "--local-dir": "hf's", "--print-man-page": "hidden, for cmake",
           "--print-completion": "hidden, for cmake"}

STRING = re.compile(r'R"\w*\((.*?)\)\w*"|"((?:[^"\\\n]|\\.)*)"', re.S)
COMMENT = re.compile(r"//[^\n]*|#include[^\n]*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
# Custom properties of style sheets look the same: defined with a colon, used in var().
PROPERTY = re.compile(r"var\((--[a-z0-9-]+)\)|(--[a-z0-9-]+):")


def help_of(*command):
    result = run(*command, "--help")
    assert result.returncode == 0, result.stderr
    return result.stdout


def commands_of(text):
    return re.findall(r"^  ([a-z-]+) {2,}\S", text, re.MULTILINE)


def options_of(program):
    """Of the program and its commands."""
    text = help_of(program)
    commands = commands_of(text.partition("Subcommands:")[2])
    return set(OPTION.findall(text)).union(
        *(OPTION.findall(help_of(program, command)) for command in commands))


def literals(path):
    text = re.sub(r"'(?:\\.|[^'\\\n])'", "0", path.read_text())  # a quote as a character opens nothing
    # A "//" within a string is an address and no comment.
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"|' + COMMENT.pattern,
                  lambda match: match[0] if match[0].startswith('"') else "", text)
    for match in STRING.finditer(text):
        yield match[1] or match[2] or ""


class NamedOptions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        names = sorted(p.name for p in BIN.glob("oscar-*") if not p.name.startswith("oscar-test-"))
        cls.options = {name: options_of(name) for name in names}

    def test_help_is_read(self):
        self.assertIn("--max-tokens", self.options["oscar-calibrate"])
        self.assertIn("--needle-depths", self.options["oscar-eval"])
        self.assertIn("--exit-code", self.options["oscar-bundle"])  # of a command

    def test_every_option_that_a_text_names_exists(self):
        files = sorted(path for folder in ("lib", "apps") for path in (SOURCE / folder).rglob("*")
                       if path.suffix in (".cpp", ".h"))
        found, unknown = 0, []
        for path in files:
            name = str(path.relative_to(SOURCE))
            programs = next((programs for start, programs in PRINTED_BY.items()
                             if name.startswith(start)), set(self.options))
            if not programs & set(self.options):
                continue  # oscar-bench is not part of every build
            for text in literals(path):
                # "oscar-bundle fit --clip ...", "calibrate again without --no-statistics"
                named = programs | {p for p in self.options if p in text or
                                    (p == "oscar-calibrate" and "calibrate" in text.lower())}
                known = set(FOREIGN).union(*(self.options[p] for p in named & set(self.options)))
                properties = {word for match in PROPERTY.findall(text) for word in match}
                for option in set(OPTION.findall(text)) - properties:
                    found += 1
                    if option not in known:
                        unknown.append(f"{name}: {option} in {text[:80]!r}")
        self.assertEqual(unknown, [])
        self.assertGreater(found, 100)

    def test_every_command_that_a_text_names_exists(self):
        package = subprocess.run([sys.executable, "-S", "-m", "oscar_int2", "--help"], capture_output=True, text=True,
                                 env=os.environ | {"PYTHONPATH": str(SOURCE / "python")}, check=True).stdout
        known = {r"oscar-bundle": commands_of(help_of("oscar-bundle").partition("Subcommands:")[2]),
                 r"-m oscar_int2": commands_of(package)}
        found, unknown = 0, []
        for path in sorted(path for folder in ("lib", "apps", "python/oscar_int2") for path in (SOURCE / folder).rglob("*")
                           if path.suffix in (".cpp", ".h", ".py")):
            texts = [path.read_text()] if path.suffix == ".py" else literals(path)
            for text in texts:
                for name, commands in known.items():
                    for command in re.findall(name + r" ([a-z][a-z-]*)", text):
                        found += 1
                        if command not in commands:
                            unknown.append(f"{path.relative_to(SOURCE)}: {name} {command}")
                for script in re.findall(r"(?:scripts|studies|benchmarks)/[a-z_]+\.(?:sh|py)", text):
                    found += 1
                    if not (SOURCE / script).is_file():
                        unknown.append(f"{path.relative_to(SOURCE)}: {script}")
        self.assertEqual(unknown, [])
        self.assertGreater(found, 60)


if __name__ == "__main__":
    unittest.main()
