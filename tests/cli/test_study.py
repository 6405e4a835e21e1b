#!/usr/bin/env python3
"""The command of the study, run on a few tokens: what it measures, keeps and draws, and how it fails."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
SCRIPT = SOURCE / "studies" / "study.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


class Study(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_a_few_tokens_go_all_the_way_to_the_page(self):
        out = self.folder / "out"
        command = ("tiny-gqa", out, "--bin", os.environ["OSCAR_BIN"], "--device", "cpu", "--quick", "--steps", "groups",
                   "--calibration-tokens", 2048, "--tokens", 1024, "--sequence-length", 512, "--work", self.folder / "work")
        result = run(*command)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(sorted(p.name for p in out.iterdir()), ["README.md", "study.html", "study.json"])
        study = json.loads((out / "study.json").read_text())
        self.assertEqual(list(study["runs"]), ["group 32"])
        run_of_32 = study["runs"]["group 32"]
        self.assertEqual(run_of_32["tokens"], 2 * (512 - 320))
        self.assertEqual(sum(run_of_32["unit_tokens"]), run_of_32["tokens"])
        methods = run_of_32["methods"]
        self.assertEqual(set(methods), {"bf16", "hadamard-clip", "perhead", "unsearched", "default"})
        for method in methods.values():
            self.assertEqual({name: sorted(part) for name, part in method.items()},
                             {"top1": ["mean"], "units": ["kl", "nll"], "bpe": ["131072", "32768", "8192"]})
        ours, theirs = (sum(methods[name]["units"]["kl"]) for name in ("default", "hadamard-clip"))
        self.assertLess(ours, theirs)
        self.assertEqual(study["bundles"]["default"], {"options": "", "searched": True, "text": "calibration"})
        self.assertEqual(set(study["bundles"]), {"perhead", "unsearched", "default"})
        text = (out / "README.md").read_text()
        self.assertIn("tiny-gqa OUT --quick --steps groups --tokens 1024 --calibration-tokens 2048", text)
        self.assertNotIn(str(self.folder), text + (out / "study.html").read_text())
        # A second call makes nothing again and draws the same.
        again = run(*command)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(len(again.stdout.splitlines()), 1, again.stdout)
        self.assertEqual(json.loads((out / "study.json").read_text()), study)

    def test_missing_programs_and_unknown_steps_are_said(self):
        result = run("tiny-gqa", self.folder / "out", "--bin", self.folder, "--work", self.folder / "work")
        self.assertEqual(result.returncode, 1)
        self.assertIn("oscar-calibrate is missing", result.stderr)
        self.assertFalse((self.folder / "out").exists())
        result = run("tiny-gqa", self.folder / "out", "--steps", "main,nosuch")
        self.assertEqual(result.returncode, 2)
        self.assertIn("planting", result.stderr)

    def test_what_a_program_said_is_passed_on(self):
        for name in ("oscar-calibrate", "oscar-bundle", "oscar-eval"):
            (self.folder / name).write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 1\n")
            (self.folder / name).chmod(0o755)
        result = run("tiny-gqa", self.folder / "out", "--bin", self.folder, "--work", self.folder / "work",
                     "--steps", "windows")
        self.assertEqual(result.returncode, 1)
        self.assertIn("calibrate default", result.stderr)
        self.assertIn("no such luck", result.stderr)
        self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    unittest.main()
