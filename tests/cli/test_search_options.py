"""oscar-calibrate's --search beside options that leave parts to it: no request is dropped."""
import unittest

from support.programs import ProgramTest


class SearchOptions(ProgramTest):
    def setUp(self):
        super().setUp()
        self.corpus = self.folder / "corpus.txt"
        self.corpus.write_text("two bits a number\n" * 40)

    def arguments(self, options):
        return ["tiny-gqa", self.corpus, self.folder / "out.h5", "--device", "cpu", "--dry-run",
                *options]

    def test_a_search_of_nothing_is_a_usage_error(self):
        fixed = ["--method", "balanced", "--granularity", "per-head", "--center", "on", "--clip",
                 ".95,.96", "--rounding", "shaped", "--scale-correction", "metric"]
        for options in (["--preset", "paper"], ["--preset", "released"], fixed):
            with self.subTest(options=options):
                self.refuse("oscar-calibrate", self.arguments([*options, "--search", "on"]),
                            "--search on", "nothing is left to search", "--clip search", code=2)

    def test_there_is_one_search_with_no_effort_to_choose(self):
        for word in ("quick", "full"):
            with self.subTest(word):
                self.refuse("oscar-calibrate", self.arguments(["--search", word]), "--search", word,
                            "{on,off}", code=2)

    def test_a_part_left_to_a_search_that_is_off_is_a_usage_error(self):
        for option, word in (("--clip", "search"), ("--method", "auto"),
                             ("--method", "orthogonal"), ("--center", "auto"),
                             ("--granularity", "auto"), ("--row-weights", "auto"), ("--rounding", "auto"),
                             ("--scale-correction", "auto")):
            with self.subTest(option):
                self.refuse("oscar-calibrate",
                            self.arguments([option, word, "--search", "off"]),
                            f"{option} {word}", "--search is off", code=2)

    def test_sums_alone_leave_nothing_to_search_and_must_be_written(self):
        self.refuse("oscar-calibrate", self.arguments(["--statistics-only", "--search", "on"]),
                    "--statistics-only --search on", "fits nothing", code=2)
        self.refuse("oscar-calibrate", self.arguments(["--statistics-only", "--no-statistics"]),
                    "--statistics-only --no-statistics", "nothing to write", code=2)

    def test_what_can_be_done_is_not_refused(self):
        for options in (["--search", "off"], ["--preset", "paper"],
                        ["--preset", "paper", "--search", "off"],
                        ["--preset", "paper", "--clip", "search", "--search", "on"],
                        ["--clip", "off", "--method", "auto", "--search", "on"],
                        ["--method", "orthogonal"],
                        ["--statistics-only"], ["--statistics-only", "--search", "off"]):
            with self.subTest(options):
                self.run_ok("oscar-calibrate", *self.arguments(options))


if __name__ == "__main__":
    unittest.main()
