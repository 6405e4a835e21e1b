"""Runs of oscar-calibrate that are killed or stopped in every stage, and resumed, give the bytes of
one that was left alone. OSCAR_KILLS=N: at N random moments (support/stops.py)."""
import signal
import unittest

from support import checkpoints
from support.programs import BIN, ProgramTest
from support.stops import StoppedRuns

# What the terminal says when a stage begins. The last one is what is left to do after the search:
# the bundle is put together, written beside OUT, renamed, and the checkpoint removed.
STAGES = {"opening": rb"", "collecting": rb"collecting statistics:", "energies": rb"second pass:",
          "judging": rb"judging the text:", "searching": rb"searching:",
          "writing": rb"searching: [\d,]+ token-layers in"}
# Shares of what each stage takes when it is left alone; a resumed stage may be over before.
MOMENTS = {"opening": (.3, .9), "collecting": (0, .25, .5, .75, .95), "energies": (0, .5, .9),
           "judging": (0, .5), "searching": (0, .2, .4, .6, .8, .95), "writing": (0, .3, .6)}
# Windows so small that short sequences can be held back.
OPTIONS = ["--sequence-length", 256, "--sink", 4, "--recent", 16, "--max-tokens", 6144,
           "--checkpoint-every", 1]


class KillAndResume(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(400)))
        self.out = self.folder / "out.h5"

    def command(self, out, *options):
        return [BIN / "oscar-calibrate", "--device", "cpu", self.model, self.text, out, *OPTIONS,
                *options]

    def expect_the_same_bytes(self, with_signal, *options):
        runs = StoppedRuns(self, STAGES, lambda out, *more: self.command(out, *options, *more),
                           self.out)
        runs.expect_the_same_bytes(runs.moments(MOMENTS, with_signal))
        stopped = {stage for stage, _ in runs.stopped}
        self.assertLessEqual({"opening", "collecting", "searching"}, stopped)

    def test_killed_at_eighteen_moments(self):
        self.expect_the_same_bytes(signal.SIGKILL)

    def test_stopped_at_twenty_one_moments_with_a_second_pass(self):
        self.expect_the_same_bytes(signal.SIGTERM, "--objective-v", "energy")


if __name__ == "__main__":
    unittest.main()
