"""Outputs of oscar-bench, by the one measurement that needs no GPU."""
import json
import subprocess
import unittest

from support import checkpoints
from support.programs import BIN, ENVIRONMENT, ProgramTest, run


@unittest.skipUnless((BIN / "oscar-bench").exists(), "oscar-bench is built with CUDA only")
class OscarBench(ProgramTest):
    def setUp(self):
        super().setUp()
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(20)))
        self.command = [BIN / "oscar-bench", "calibrate", self.text, "--model",
                        checkpoints.write_checkpoint(self.folder / "model")]

    def test_files_are_replaced_with_force_only(self):
        json_file, csv_file = self.folder / "a.json", self.folder / "a.csv"
        outputs = ["--json", json_file, "--csv", csv_file]
        csv_file.write_text("mine")
        result = run(*self.command, *outputs)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("--force", result.stderr)
        self.assertEqual(result.stdout, "")  # before the work
        self.assertEqual((json_file.exists(), csv_file.read_text()), (False, "mine"))
        self.assertEqual(run(*self.command, *outputs, "--force").returncode, 0)
        record, = json.loads(json_file.read_text())["records"]
        self.assertGreater(record["forward"]["tokens_per_second"], 0)
        self.assertIn("forward", csv_file.read_text().splitlines()[1])

    def test_inputs_are_not_replaced(self):
        before = self.text.read_bytes()
        result = run(*self.command, "--json", self.text, "--force")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(self.text.read_bytes(), before)

    def test_a_dash_is_standard_output_without_the_table(self):
        result = run(*self.command, "--json", "-")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(json.loads(result.stdout)["records"]), 1)

    def test_closed_messages_change_nothing(self):
        words = " ".join(f"'{word}'" for word in self.command)
        result = subprocess.run(f"{words} 2>&-", shell=True, env=ENVIRONMENT, capture_output=True)
        self.assertEqual(result.returncode, 0)
        self.assertIn(b"forward alone", result.stdout)


if __name__ == "__main__":
    unittest.main()
