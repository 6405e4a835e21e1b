"""--help of every program and subcommand fits a terminal of 80 columns and describes every option."""
import functools
import re
import unittest

from support.programs import BIN, run

COLUMNS = 80


@functools.cache  # every test asks for nearly all of them
def help_of(*command):
    result = run(*command, "--help")
    assert result.returncode == 0, result.stderr
    return result.stdout


def subcommands(text):
    """Names in the list that a program's help ends with."""
    return re.findall(r"^  ([a-z]+) {2,}\S", text.partition("Subcommands:")[2], re.MULTILINE)


def commands():
    for program in ("oscar-bundle", "oscar-calibrate", "oscar-eval", "oscar-bench"):
        if program == "oscar-bench" and not (BIN / program).exists():
            continue  # it is built with CUDA only
        yield (program,)
        for name in subcommands(help_of(program)):
            yield (program, name)


class Help(unittest.TestCase):
    def test_no_line_is_longer_than_a_terminal(self):
        for command in commands():
            with self.subTest(" ".join(command)):
                text = help_of(*command)
                self.assertEqual([line for line in text.splitlines() if len(line) > COLUMNS], [])

    def test_a_model_may_be_the_small_one_that_a_script_fetches(self):
        takes_models = {("oscar-calibrate",), ("oscar-eval",), ("oscar-bundle", "import"),
                        ("oscar-bench", "calibrate")}
        for command in takes_models & set(commands()):
            with self.subTest(" ".join(command)):
                text = " ".join(help_of(*command).split())
                self.assertIn("qwen2.5-coder-1.5b, once python -m oscar_int2 fetch NAME has fetched it", text)
                self.assertIn("tiny-gqa", text)

    def test_every_option_and_argument_is_described(self):
        for command in commands():
            lines = help_of(*command).splitlines()
            for line, following in zip(lines, [*lines[1:], ""]):
                if re.match(r"  (-|[A-Z]+ )", line):
                    described = len(line[26:].strip()) > 0 or following.startswith(" " * 28)
                    self.assertTrue(described, f"{' '.join(command)}: {line}")

    def test_options_that_studies_alone_need_come_last_in_a_group_of_their_own(self):
        """A serving team can stop reading there."""
        fit = {"--method", "--objective-v", "--granularity", "--row-weights", "--center",
               "--key-centers", "--rounding", "--scale-correction"}
        for command, expected in ((("oscar-calibrate",), fit), (("oscar-bundle", "fit"), fit),
                                  (("oscar-eval",), {"--keep-units", "--layer-errors"})):
            with self.subTest(" ".join(command)):
                last = help_of(*command).partition("\nFor studies:\n")[2]
                group, _, rest = last.partition("\n\n")
                self.assertEqual(set(re.findall(r"^  (--[a-z-]+)", group, re.MULTILINE)), expected)
                self.assertNotRegex(rest, r"(?m)^  --")

    def test_the_subcommands_are_found(self):
        self.assertIn("inspect", subcommands(help_of("oscar-bundle")))
        self.assertIn("report", subcommands(help_of("oscar-bundle")))


if __name__ == "__main__":
    unittest.main()
