"""Options, commands and command lines that errors, hints and texts name: each exists where it can be read, and parses."""
import functools
import os
import re
import subprocess
import sys
import tempfile
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
FOREIGN = {"--kv-cache-dtype": "vLLM's and SGLang's", "--language-model-only": "vLLM's",
           "--model": "vLLM's, where its server is called as a module", "--model-path": "SGLang's",
           "--kv-cache-quant-group-size": "SGLang's", "--prefill-attention-backend": "SGLang's",
           "--decode-attention-backend": "SGLang's", "--merge": "llama-gguf-split's",
           "--local-dir": "hf's", "--print-man-page": "hidden, for cmake",
           "--print-completion": "hidden, for cmake"}

STRING = re.compile(r'R"\w*\((.*?)\)\w*"|("(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*)', re.S)
COMMENT = re.compile(r"//[^\n]*|#include[^\n]*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
# Custom properties of style sheets look the same: defined with a colon, used in var().
PROPERTY = re.compile(r"var\((--[a-z0-9-]+)\)|(--[a-z0-9-]+):")


@functools.cache
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
    """Strings as the compiler joins and reads them."""
    text = re.sub(r"'(?:\\.|[^'\\\n])'", "0", path.read_text())  # a quote as a character opens nothing
    # A "//" within a string is an address and no comment.
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"|' + COMMENT.pattern,
                  lambda match: match[0] if match[0].startswith('"') else "", text)
    for match in STRING.finditer(text):
        yield match[1] or re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1],
                                 re.sub(r'"\s*"', "", match[2])[1:-1])


def sources():
    return sorted(path for folder in ("lib", "apps") for path in (SOURCE / folder).rglob("*") if path.suffix in (".cpp", ".h"))


class CommandLine:
    """A command that a text names, as far as its words are those of a command line: "oscar-bundle strip IN OUT makes" has
    four. What is wrong with its options is in `problems`."""

    PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_.,=/:-]*|\{[^ ]*\}[^ ]*|-?[0-9][^ ]*|-|[^ ]*[./][^ ]+")  # FILE, {}, .5, -, a.h5
    VALUES = {"--for": "sglang-v1", "--clip": "0.9,0.9", "--rope-scaling": "{}", "--base-model": "org/model", "N": "1"}

    def __init__(self, program, text):
        self.words, self.problems = [program], []
        rest = text.replace("\\\n", " ").partition("\n")[0].partition("`")[0]
        words = rest.split()
        self.at_end = rest == text and rest.endswith((" ", "="))  # the runtime adds a value
        if words and words[0] in commands_of(help_of(program).partition("Subcommands:")[2]):
            self.words.append(words.pop(0))
        self.known = options_with_values(*self.words)
        while words:
            word = words.pop(0)
            bare = word.rstrip(",.;:)")
            if bare.startswith("-") and bare != "-":
                self.take_option(bare, words if bare == word else [])
            elif self.PLACEHOLDER.fullmatch(word):
                self.words.append("1" if word == "N" else "absent")
            else:
                return
            if bare != word:
                return

    def take_option(self, option, behind):
        if option not in self.known:
            return self.problems.append(f"no option {option}")
        self.words.append(option)
        values = self.known[option]
        if values is None:
            return
        if not behind:
            if not self.at_end:
                self.problems.append(f"{option} without its value")
            return self.words.append(self.VALUES.get(option, "absent"))
        value = behind.pop(0).rstrip(",.;:)")
        fixed = value in values or option == "--compare" and value in help_of(self.words[0]).partition("METHODS")[2]
        if not self.PLACEHOLDER.fullmatch(value) and not fixed:
            self.problems.append(f"{option} without its value")
        if not fixed:
            value = self.VALUES.get(option, self.VALUES.get(value, "absent"))
        self.words.append(value)

    def refused(self, folder):
        """What the program says where it does not take the line; nothing where only files are missing, or words that the
        text leaves to the reader."""
        done = subprocess.run([BIN / self.words[0], *self.words[1:]], capture_output=True, text=True, cwd=folder, timeout=60)
        assert done.returncode != 0, f"{self.words}: it ran"  # there are no files
        return "" if done.returncode == 1 or "is required" in done.stderr else done.stderr.strip()


@functools.cache
def options_with_values(*command):
    """Of --help: each option with the words of its lines, or None where it takes no value."""
    found, option = {}, None
    for line in help_of(*command).splitlines():
        if match := re.match(r"  ((?:-\w,)?--[a-z][\w-]*|-\w)(.*)", line):
            names, (value, _, described) = match[1].split(","), match[2].partition("  ")
            option = set(re.findall(r"[\w.-]+", value + described)) if value.strip() else None
            found |= dict.fromkeys(names, option)
        elif option is not None and line.startswith(" " * 28):
            option.update(re.findall(r"[\w.-]+", line))
    return found


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
        found, unknown = 0, []
        for path in sources():
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

    def test_every_command_line_that_a_text_names_parses(self):
        """Its options are those of that command, the ones that take a value have one, and the program takes the line."""
        found, wrong = 0, []
        with tempfile.TemporaryDirectory() as folder:
            for path in sources():
                for text in literals(path):
                    for match in re.finditer(f"({'|'.join(self.options)})(?![\\w-])", text):
                        line = CommandLine(match[0], text[match.end():])
                        if len(line.words) + len(line.problems) < (3 if line.words[1:] and match[0] == "oscar-bundle" else 2):
                            continue  # the program is named, or one of its commands
                        found += 1
                        said = line.problems or ([refused] if (refused := line.refused(folder)) else [])
                        wrong += [f"{path.relative_to(SOURCE)}: {match[0]}{text[match.end():][:60]!r}: {what}" for what in said]
        self.assertEqual(wrong, [])
        self.assertGreater(found, 10)

    def test_a_placeholder_does_not_look_like_a_file(self):
        """HELDOUT is to be replaced, HELDOUT.jsonl may be there."""
        named = [f"{path.relative_to(SOURCE)}: {text[:80]!r}" for path in sources() for text in literals(path)
                 if re.search(r"\b[A-Z]{3,}\.(?:h5|html|json|jsonl|txt)\b", text)]
        self.assertEqual(named, [])

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
