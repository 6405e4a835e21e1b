"""Runs of oscar-calibrate that are killed or stopped in every stage, and resumed, give the bytes of
one that was left alone."""
import os
import pty
import re
import signal
import subprocess
import time
import unittest

from support import checkpoints
from support.programs import BIN, ENVIRONMENT, ProgramTest

# What the terminal says when a stage begins. The last one is what is left to do after the search:
# the bundle is put together, written beside OUT, renamed, and the checkpoint removed.
STAGES = {"opening": rb"", "collecting": rb"collecting statistics:", "energies": rb"second pass:",
          "judging": rb"judging the text:", "searching": rb"searching:",
          "writing": rb"searching: [\d,]+ token-layers in"}
# Shares of what each stage takes when it is left alone; a resumed stage may be over before.
MOMENTS = {"opening": (.3, .9), "collecting": (0, .25, .5, .75, .95), "energies": (0, .5, .9),
           "judging": (0, .5), "searching": (0, .2, .4, .6, .8, .95), "writing": (0, .3, .6)}
# Windows so small that short chunks can be held back.
OPTIONS = ["--chunk-len", 256, "--sink", 4, "--recent", 16, "--max-tokens", 6144,
           "--checkpoint-every", 1]


class Watched:
    """A run on a terminal, where a stage is announced when it begins."""

    def __init__(self, command):
        self.terminal, stderr = pty.openpty()
        self.began = time.monotonic()
        self.process = subprocess.Popen([str(word) for word in command], env=ENVIRONMENT,
                                        stdout=subprocess.DEVNULL, stderr=stderr)
        os.close(stderr)
        self.said = b""

    def read(self):
        """More of what the run says; False once it has ended."""
        try:
            self.said += os.read(self.terminal, 4096)
            return True
        except OSError:
            return False

    def wait_for(self, stage):
        while not re.search(STAGES[stage], self.said) and self.read():
            pass
        return time.monotonic()

    def finish(self):
        while self.read():
            pass
        os.close(self.terminal)
        return self.process.wait(timeout=60)


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

    def run_alone(self, out, *options):
        """Seconds that each stage takes; the bytes of the bundle."""
        run = Watched(self.command(out, *options))
        begins = {stage: run.wait_for(stage) for stage in STAGES if stage != "opening"}
        self.assertEqual(run.finish(), 0, run.said.decode())
        if not re.search(STAGES["energies"], run.said):
            del begins["energies"]
        times = sorted(begins.values())
        times = [run.began, *times, time.monotonic()]
        stages = ["opening", *sorted(begins, key=begins.get)]
        return ({stage: end - begin for stage, begin, end in zip(stages, times, times[1:])},
                out.read_bytes())

    def stop(self, stage, seconds, with_signal, options):
        """One run that is stopped so long after the stage has begun; whether it was soon enough."""
        run = Watched(self.command(self.out, "--resume", *options))
        if stage != "opening":
            run.wait_for(stage)
        time.sleep(seconds)
        run.process.send_signal(with_signal)
        code = run.finish()
        self.assertIn(code, (0, -with_signal, 130 if with_signal == signal.SIGTERM else 0),
                      run.said.decode())
        return code != 0

    def expect_the_same_bytes(self, with_signal, *options):
        seconds, whole = self.run_alone(self.folder / "whole.h5", *options)
        stopped = {}
        for stage, shares in MOMENTS.items():
            for share in shares if stage in seconds else ():
                said = f"{stage}, {share:.0%} of {seconds[stage]:.2f} s"
                if self.stop(stage, share * seconds[stage], with_signal, options):
                    stopped[stage] = stopped.get(stage, 0) + 1
                if self.out.exists():  # complete, whether or not the run lived to say so
                    self.assertEqual(self.out.read_bytes(), whole, said)
                    self.out.unlink()
        self.run_ok(*self.command(self.out, "--resume", *options))
        self.assertEqual(self.out.read_bytes(), whole)
        self.assertEqual({path.name for path in self.folder.iterdir()},
                         {"model", "text.txt", "whole.h5", "out.h5"})
        print(f"{self.id()}: stopped {stopped}")
        # A busy machine may be past a moment before the signal comes; most must have been in time.
        self.assertGreaterEqual(sum(stopped.values()), 12, stopped)
        self.assertLessEqual({"opening", "collecting", "searching"}, set(stopped), stopped)

    def test_killed_at_eighteen_moments(self):
        self.expect_the_same_bytes(signal.SIGKILL)

    def test_stopped_at_twenty_one_moments_with_a_second_pass(self):
        self.expect_the_same_bytes(signal.SIGTERM, "--objective-v", "energy")


if __name__ == "__main__":
    unittest.main()
