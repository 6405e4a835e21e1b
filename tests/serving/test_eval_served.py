#!/usr/bin/env python3
"""benchmarks/eval_served.py on the CPU: its figures, the sequences that it leaves out, and short ones."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

from serving_case import BIN, BUNDLE, MODEL, SOURCE, held_out_ids


class EvalServed(unittest.TestCase):
    def run_script(self, ids, *options):
        with tempfile.TemporaryDirectory() as folder:
            file, report = pathlib.Path(folder) / "ids.npy", pathlib.Path(folder) / "report.json"
            np.save(file, ids)
            command = [sys.executable, SOURCE / "benchmarks/eval_served.py", MODEL, BUNDLE, file,
                       "--device", "cpu", "--json", report, *options]
            result = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                                    env=os.environ | {"PYTHONPATH": str(BIN.parent / "python")})
            return result, json.loads(report.read_text()) if report.exists() else None

    def test_all_sequences_count_but_those_of_an_unfinished_batch(self):
        ids = np.array(held_out_ids(3 * 340)).reshape(3, 340)
        result, figures = self.run_script(ids, "--rows", 2)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("the last 1 of 3 sequences are left out", result.stderr)
        first = 64 + 256
        self.assertEqual(figures["tokens"], 2 * (340 - first - 1))
        # .0054 over long held-out text; here few rows are INT2.
        self.assertGreater(figures["kl"], 1e-5)
        self.assertLess(figures["kl"], 1e-2)
        self.assertLess(abs(figures["perplexity"] / figures["perplexity_bf16"] - 1), .02)

    def test_sequences_too_short_to_count_are_refused(self):
        result, figures = self.run_script(np.array(held_out_ids(200))[None])
        self.assertEqual((result.returncode, figures), (1, None))
        self.assertIn("sequences of 200 tokens have none behind the first that counts, at position 321",
                      result.stderr)


if __name__ == "__main__":
    unittest.main()
