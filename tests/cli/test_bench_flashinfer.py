#!/usr/bin/env python3
"""benchmarks/bench_flashinfer.py where it can not time anything: options, comparison, and what it says."""
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch

from support.scripts import load, run_main

SCRIPT = pathlib.Path(os.environ["OSCAR_SOURCE"]) / "benchmarks" / "bench_flashinfer.py"


class BenchFlashInfer(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_script(self, *arguments, module=None):
        """Runs it with a FlashInfer that is this text, or with one that can't be imported."""
        text = "raise ImportError('left out by this test')" if module is None else module
        (self.folder / "flashinfer.py").write_text(text)
        environment = dict(os.environ, PYTHONPATH=str(self.folder), CUDA_VISIBLE_DEVICES="")
        return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                              env=environment, timeout=300)

    def test_points_are_batch_times_context(self):
        script = load(SCRIPT)
        self.assertEqual(script.parse_points("1x32K,8x100K,3x1000"),
                         [(1, 32768), (8, 102400), (3, 1000)])
        for bad in ("", "8", "8x", "x8K", "0x8K", "8x0", "8x32k", "8x32K,"):
            with self.assertRaisesRegex(Exception, "BATCHxCONTEXT"):
                script.parse_points(bad)

    def test_wrong_options_are_usage_errors(self):
        for arguments, word in ((("--points", "8x"), "8x32K"), (("--kernels", "cuda,nosuch"), "xqa"),
                                (("--replays", "many"), "--replays")):
            result = run_main(SCRIPT, *arguments)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(word, result.stderr)

    def test_without_flashinfer_it_says_how_to_get_it(self):
        result = self.run_script("--csv", self.folder / "out.csv")
        self.assertEqual(result.returncode, 1)
        self.assertIn("pip install flashinfer-python", result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertFalse((self.folder / "out.csv").exists())

    def test_without_a_device_it_says_so(self):
        result = self.run_script(module="__version__ = 'stand-in'")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no CUDA device", result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_every_kernel_and_type_has_a_name(self):
        script = load(SCRIPT)
        self.assertEqual(script.KERNELS, ("cuda", "tensor", "fa3", "xqa"))
        self.assertEqual({name: dtype.itemsize for name, dtype in script.DTYPES.items()},
                         {"bf16": 2, "fp8": 1})
        self.assertEqual(script.DTYPES["bf16"], torch.bfloat16)

    def test_ratios_to_the_times_of_oscar_bench_are_by_point(self):
        script = load(SCRIPT)
        table = self.folder / "oscar.csv"
        with open(table, "w", newline="") as out:
            out.write("# " + json.dumps({"device": "D"}) + "\n")
            csv.writer(out).writerows([("batch", "context", "int2_us", "int2_windows_us"),
                                       (8, 32768, 10.0, 12.5), (1, 32768, 5.0, "")])
        record, rows = script.read_oscar(table)
        self.assertEqual(record, {"device": "D"})
        row = {"flashinfer_bf16_us": "50", "flashinfer_fp8_us": ""}
        script.compare(row, rows[8, 32768])
        self.assertEqual((row["bf16_over_int2"], row["bf16_over_int2_windows"]), ("5", "4"))
        self.assertEqual(row["fp8_over_int2"], "")
        script.compare(row, rows[1, 32768])
        self.assertEqual((row["bf16_over_int2"], row["bf16_over_int2_windows"]), ("10", ""))


if __name__ == "__main__":
    unittest.main()
