"""Standard error that fails stops nothing; standard output that fails is said and counts."""
import os
import pathlib
import subprocess
import unittest

from support import checkpoints
from support.bundle_case import make_file
from support.programs import BIN, ENVIRONMENT, ProgramTest

# Opened here, for writing; no program is told its name.
FULL = pathlib.Path("/dev/full")


def run(*command, **streams):
    return subprocess.run([str(word) for word in command], env=ENVIRONMENT, timeout=300, **streams)


def closed(number):
    return {"preexec_fn": lambda: os.close(number)}


class BrokenStreams(ProgramTest):
    def setUp(self):
        super().setUp()
        self.bundle = make_file(self.folder / "a.h5")
        self.stripped = self.folder / "b.h5"

    def strip(self):
        return [BIN / "oscar-bundle", "strip", self.bundle, self.stripped, "--force"]

    def test_output_that_is_not_taken_is_said_and_counts(self):
        commands = [["--help"], ["inspect", self.bundle], ["inspect", self.bundle, "--json", "-"],
                    ["verify", self.bundle], ["backends"]]
        for arguments in commands:
            with self.subTest(arguments), FULL.open("wb") as full:
                result = run(BIN / "oscar-bundle", *arguments, stdout=full, stderr=subprocess.PIPE)
                self.assertEqual(result.returncode, 1)
                self.assertIn(b"No space left", result.stderr)
        for program in ("oscar-calibrate", "oscar-eval"):
            with self.subTest(program), FULL.open("wb") as full:
                result = run(BIN / program, "--help", stdout=full, stderr=subprocess.PIPE)
                self.assertEqual(result.returncode, 1)
                self.assertIn(b"standard output", result.stderr)

    def test_a_closed_output_counts_and_no_file_takes_its_place(self):
        result = run(BIN / "oscar-bundle", "backends", stderr=subprocess.PIPE, **closed(1))
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"standard output", result.stderr)
        result = run(*self.strip(), stderr=subprocess.PIPE, **closed(1))
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"standard output", result.stderr)
        self.assertEqual(run(BIN / "oscar-bundle", "verify", self.stripped,
                             stdout=subprocess.DEVNULL).returncode, 0)

    def test_a_reader_that_has_seen_enough_ends_the_program_without_a_word(self):
        reading, writing = os.pipe()
        os.close(reading)
        result = run(BIN / "oscar-bundle", "inspect", self.bundle, stdout=writing,
                     stderr=subprocess.PIPE)
        os.close(writing)
        self.assertEqual((result.returncode, result.stderr), (1, b""))

    def test_messages_that_nobody_takes_change_no_exit_code_and_no_file(self):
        missing = self.folder / "missing.h5"
        for name, streams in (("closed", closed(2)), ("full", {"stderr": FULL.open("wb")})):
            with self.subTest(name):
                result = run(BIN / "oscar-bundle", "inspect", missing, **streams)
                self.assertEqual(result.returncode, 1)
                result = run(BIN / "oscar-bundle", "no-such-command", **streams)
                self.assertEqual(result.returncode, 2)
                self.assertEqual(run(*self.strip(), stdout=subprocess.DEVNULL, **streams).returncode, 0)
                self.assertEqual(run(BIN / "oscar-bundle", "verify", self.stripped,
                                     stdout=subprocess.DEVNULL).returncode, 0)

    def test_a_run_goes_on_when_its_messages_find_no_reader(self):
        model = checkpoints.write_checkpoint(self.folder / "model")
        text = self.folder / "text.txt"
        text.write_text("".join(checkpoints.sample_text()))
        reading, writing = os.pipe()
        os.close(reading)
        result = run(BIN / "oscar-calibrate", model, text, self.stripped, "--max-tokens", 512,
                     "--sequence-length", 256, "--device", "cpu", "--search", "off", stderr=writing,
                     stdout=subprocess.DEVNULL)
        os.close(writing)
        self.assertEqual(result.returncode, 0)
        self.assertTrue(self.stripped.exists())


if __name__ == "__main__":
    unittest.main()
