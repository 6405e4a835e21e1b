"""Runs of oscar-eval that several processes share give the report of one, also when a process was
killed on the way and another number continued."""
import os
import signal
import unittest

from support import checkpoints
from support.processes import SharedRuns
from support.programs import BIN

# Three batches of prompts.
NEEDLES = ["--tasks", "ppl,niah", "--needle-lengths", "300,420", "--needle-prompts", 40]


class SharedEvaluation(SharedRuns):
    one = None  # the report of one process

    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model", {"num_hidden_layers": 2})
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(300)))

    def command(self, out, *options):
        """Three batches of each text: all have work left when the first text is counted."""
        return [BIN / "oscar-eval", self.model, "--device", "cpu", "--corpus", self.text,
                "--compare", "hadamard-clip", "--sequence-length", "512", "--max-tokens", "12K",
                "--sink", "4", "--recent", "16", "--json", self.folder / out,
                *map(str, [*NEEDLES, *options])]

    def report_of_one(self):
        if SharedEvaluation.one is None:
            SharedEvaluation.one = self.bytes_of("one.json", "--quiet")
        return SharedEvaluation.one

    def expect_report_of_one(self, *options):
        """After a run that has ended early."""
        one = self.report_of_one()
        checkpoint = self.folder / "out.json.checkpoint"
        self.assertTrue(checkpoint.exists())
        self.assertEqual(self.bytes_of("out.json", "--quiet", "--resume", *options), one)
        self.assertFalse(checkpoint.exists())

    def test_any_number_of_processes_writes_the_same_report(self):
        options = ["--needle-generate", "--layer-errors", "--keep-units", "--quiet"]
        one = self.bytes_of("one.json", *options)
        self.assertEqual(self.bytes_of("two.json", *options, "--gpus", 2), one)
        self.assertEqual(self.bytes_of("three.json", *options, "--gpus=3"), one)
        self.assertEqual(self.bytes_of("two.json", *options, "--resume", "--gpus", 2), one)
        self.assertEqual({path.name for path in self.folder.iterdir()},
                         {"one.json", "two.json", "three.json", "model", "text.txt"})

    def test_a_killed_process_is_named_and_another_number_continues(self):
        parent, ids = self.start_parent(3, "out.json")
        os.kill(ids[2], signal.SIGKILL)  # at its first batch: later it can be ahead of the first
        self.report_of_one()  # meanwhile: the others wait 10 seconds for a sign of the third
        code, said = self.end_of(parent)
        self.assertEqual(code, 1, said)
        self.assertIn("process 2 of 3 has ended", said)
        self.assertIn("--resume", said)
        self.assertFalse((self.folder / "out.json").exists())
        self.expect_report_of_one("--gpus", 2)

    def test_when_the_first_is_killed_the_others_say_so(self):
        self.expect_word_of_a_lost_first("out.json")

    def test_a_stop_is_said_once_and_one_process_continues(self):
        parent, _ = self.start_parent(2, "out.json")
        self.wait_for_line(parent, "perplexity: ")  # the first text is counted
        parent.send_signal(signal.SIGTERM)
        code, said = self.end_of(parent)
        self.assertEqual(code, 130, said)
        self.assertEqual(said.count("stopped on request"), 1, said)
        self.expect_report_of_one()

    def test_a_process_of_another_run_is_refused(self):
        self.expect_refusal_of_another_run("out.json")

    def test_mistakes_are_said_once(self):
        for options, code, word in ((["--position-offset", 10**6], 1, "--position-offset"),
                                    (["--bundle", "none.h5"], 1, "none.h5"),
                                    (["--host-memory", "3X"], 2, "--host-memory")):
            with self.subTest(word):
                result = self.run_one("out.json", "--gpus", 2, *options)
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertEqual(result.stderr.count(word), 1, result.stderr)

    def test_a_dry_run_says_how_many_processes_it_counts_on(self):
        result = self.run_one("out.json", "--dry-run", "--gpus", 2)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("; 2 processes"), 1, result.stdout)


if __name__ == "__main__":
    unittest.main()
