"""oscar-eval within --host-memory: the figures of a run with plenty, and a peak below the limit."""
import os
import re
import subprocess
import unittest

from support import checkpoints
from support.programs import BIN, ENVIRONMENT, ProgramTest, run

MIB = 1 << 20


class EvalMemory(ProgramTest):
    methods = "identity,identity-clip,hadamard,hadamard-clip,random-clip"

    def setUp(self):
        super().setUp()
        # Hidden states weigh: 2 KiB a token and method.
        self.model = checkpoints.write_checkpoint(
            self.folder / "model", {"hidden_size": 512, "num_hidden_layers": 2})
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(120)))

    def command(self, tokens, *options):
        return [BIN / "oscar-eval", self.model, "--device", "cpu", "--corpus", self.text, "--compare",
                self.methods, "--sequence-length", 512, "--max-tokens", tokens, "--sink", 4, "--recent", 16,
                "--quiet", *options]

    def needed(self, tokens):
        """GiB of the smallest limit that is not refused."""
        result = run(*self.command(tokens, "--host-memory", "1M"))
        self.assertEqual(result.returncode, 1, result.stderr)
        for words in ("not enough memory for one layer and one batch", "--host-memory", "--compare"):
            self.assertIn(words, result.stderr)
        return float(re.search(r"at least ([\d.]+) GiB", result.stderr)[1]) + .01  # rounded

    def peak(self, tokens, *options):
        process = subprocess.Popen([str(word) for word in self.command(tokens, *options)],
                                   env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        return usage.ru_maxrss * 1024

    def test_the_smallest_limit_gives_the_bytes_of_plenty(self):
        tokens = 10240  # three batches
        self.methods = "identity,random-clip"
        reports = []
        for name, options in {"plenty": [], "tiny": ["--host-memory", f"{self.needed(tokens)}G"],
                              "gpu": ["--gpu-memory", "1M"]}.items():  # of no use on the CPU
            report = self.folder / f"{name}.json"
            self.assertEqual(run(*self.command(tokens, "--json", report, *options)).returncode, 0)
            reports.append(report.read_bytes())
        self.assertEqual(reports[0], reports[1])
        self.assertEqual(reports[0], reports[2])

    def test_the_peak_stays_below_the_limit(self):
        tokens = 12288
        limit = self.needed(tokens) * 1024 * MIB
        kept = self.peak(tokens, "--host-memory", int(limit))
        print(f"{self.id()}: limit {limit / MIB:.0f} MiB, peak {kept / MIB:.0f} within it")
        self.assertLessEqual(kept, limit)
        # No far-fetched one: what is counted is there.
        self.assertLessEqual(limit, 1.3 * kept)


if __name__ == "__main__":
    unittest.main()
