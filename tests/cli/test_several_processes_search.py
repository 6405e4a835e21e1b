"""A calibration whose search several processes share gives the bytes of one, also when a process was
killed in the search and another number continued."""
import os
import signal
import unittest

from support import checkpoints
from support.processes import SharedRuns
from support.programs import BIN, SOURCE

TINY = SOURCE / "datasets" / "tiny-gqa"
# A search of all parts.
LONG = [word for name in ("method", "center", "granularity", "rounding", "scale-correction")
        for word in (f"--{name}", "auto")]


class SharedSearch(SharedRuns):
    """Three layers, of which two are searched: the one between them is local."""
    one = None  # the bytes of one process with a long search

    def setUp(self):
        super().setUp()
        config = checkpoints.GEMMA3_MINI | {"num_hidden_layers": 3, "sliding_window_pattern": 2,
                                            "layer_types": ["full_attention", "sliding_attention",
                                                            "full_attention"]}
        self.model = checkpoints.write_checkpoint(self.folder / "model", config,
                                                  checkpoints.gemma3_tensors(config))
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(60)))

    def command(self, out, *options):
        return [BIN / "oscar-calibrate", "--device", "cpu", self.model, self.text,
                self.folder / out, "--sequence-length", "256", "--sink", "4", "--recent", "16",
                "--max-tokens", "4096", "--batch-tokens", "256", *map(str, options)]

    def start_search(self, out):
        """A long one, of all parts, at its beginning, shared by two."""
        parent, ids = self.start_parent(2, out, *LONG)
        self.wait_for_line(parent, "collecting statistics: ")
        return parent, ids

    def bytes_of_one(self):
        if SharedSearch.one is None:
            SharedSearch.one = self.bytes_of("one.h5", "--quiet", *LONG)
        return SharedSearch.one

    def expect_bytes_of_one(self, out, *options):
        """After the search that was started has ended early."""
        self.assertEqual(self.bytes_of(out, "--quiet", *LONG, "--resume", *options), self.bytes_of_one())

    def test_any_number_of_processes_writes_the_same_bytes(self):
        one = self.bytes_of("one.h5", "--quiet")
        self.assertEqual(self.bytes_of("two.h5", "--quiet", "--gpus", 2), one)
        self.assertEqual(self.bytes_of("four.h5", "--quiet", "--gpus", 4), one)  # one searches nothing

    def test_energies_too(self):
        options = ["--quiet", "--objective-v", "energy"]
        self.assertEqual(self.bytes_of("three.h5", *options, "--gpus", 3),
                         self.bytes_of("one.h5", *options))

    def test_layers_of_the_embedded_model_too(self):
        from parity.tiny_transformers import first_layers
        model = first_layers(TINY, 4, self.folder / "tiny")  # two of one process
        (model / "tokenizer.json").symlink_to(TINY / "tokenizer.json")

        def command(out, *options):
            return [BIN / "oscar-calibrate", "--device", "cpu", model, TINY / "calibration.jsonl",
                    self.folder / out, "--sequence-length", "160", "--sink", "4", "--recent", "16",
                    "--max-tokens", "1280", "--batch-tokens", "160", "--quiet",
                    *map(str, options)]
        self.command = command
        self.assertEqual(self.bytes_of("three.h5", "--gpus", 3), self.bytes_of("one.h5"))

    def test_a_process_killed_in_the_search_is_named_and_another_number_continues(self):
        parent, ids = self.start_search("out.h5")
        os.kill(ids[1], signal.SIGKILL)
        self.bytes_of_one()  # meanwhile: the first waits 10 seconds for a sign of the other
        code, said = self.end_of(parent)
        self.assertEqual(code, 1, said)
        self.assertIn("process 1 of 2 has ended", said)
        self.assertIn("--resume", said)
        self.expect_bytes_of_one("out.h5", "--gpus", 3)

    def test_a_stop_in_the_search_is_said_once_and_one_process_continues(self):
        parent, _ = self.start_search("out.h5")
        parent.send_signal(signal.SIGTERM)
        code, said = self.end_of(parent)
        self.assertEqual(code, 130, said)
        self.assertEqual(said.count("stopped on request"), 1, said)
        self.assertIn("the search begins again", said)
        self.expect_bytes_of_one("out.h5")

    def test_what_is_finished_already_is_left_alone(self):
        one = self.bytes_of("out.h5", "--quiet")
        self.assertEqual(self.bytes_of("out.h5", "--quiet", "--resume", "--gpus", 2), one)

    def test_a_dry_run_says_how_many_processes_it_counts_on(self):
        result = self.run_one("out.h5", "--dry-run", "--gpus", 2)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("; 2 processes"), 1, result.stdout)
        self.assertFalse((self.folder / "out.h5").exists())


if __name__ == "__main__":
    unittest.main()
