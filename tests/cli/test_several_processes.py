"""Runs of oscar-calibrate that several processes share give the bytes of one, also when a process
was killed on the way and another number continued."""
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import h5py
import numpy as np

from parity.tiny_transformers import first_layers
from support.processes import PATIENCE, SharedRuns
from support.programs import BIN, ENVIRONMENT, SOURCE

TINY, LAYERS = SOURCE / "datasets" / "tiny-gqa", 4
# Eight blocks.
OPTIONS = ["--sequence-length", 128, "--sink", 4, "--recent", 16, "--max-tokens", 4096,
           "--batch-tokens", 512, "--statistics-only", "--quiet"]


def size_of_terms(dataset):
    """What a dataset of statistics would be if nothing in it cancelled: positive and negative rows do in a
    sum of w x, whose terms come to at most sqrt(sum of w, times sum of w x^2)."""
    folder, name = dataset.parent, dataset.name.rsplit("/", 1)[1]
    if not name.endswith("_sum"):
        return np.abs(dataset[()]).max()
    rows = name.removesuffix("_sum").replace("k_sink", "k_attended")
    squares = np.diagonal(folder[f"{rows}_moment"][()], axis1=1, axis2=2).max()
    count = "count_q" if name in ("q_sum", "attn_out_sum") else "count_kv"
    return np.sqrt(squares * np.max(folder.get(f"{rows}_weight", folder[count])[()]))


class SeveralProcesses(SharedRuns):
    one = None  # the bytes of one process

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.model = first_layers(TINY, LAYERS, pathlib.Path(scratch.name) / "model")
        (cls.model / "tokenizer.json").symlink_to(TINY / "tokenizer.json")

    def command(self, out, *options):
        return [BIN / "oscar-calibrate", "--device", "cpu", self.model, TINY / "calibration.jsonl",
                self.folder / out, *map(str, OPTIONS), *map(str, options)]

    def bytes_of_one(self):
        if SeveralProcesses.one is None:
            SeveralProcesses.one = self.bytes_of("one.h5")
        return SeveralProcesses.one

    def test_any_number_of_processes_writes_the_same_bytes(self):
        one = self.bytes_of_one()
        self.assertEqual(self.bytes_of("two.h5", "--gpus", 2), one)
        self.assertEqual(self.bytes_of("three.h5", "--gpus=3"), one)
        self.assertLessEqual({path.name for path in self.folder.iterdir()},
                             {"one.h5", "two.h5", "three.h5"})

    @unittest.skipIf(shutil.which("nvidia-smi"), "there may be a GPU")
    def test_gpus_that_are_not_there_are_not_passed_over_in_silence(self):
        command = [BIN / "oscar-calibrate", self.model, TINY / "calibration.jsonl", self.folder / "two.h5",
                   *(str(option) for option in OPTIONS if option != "--quiet"), "--gpus", "2"]
        result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("no GPU was found: 2 processes share the CPU", result.stderr)
        self.assertRegex(result.stdout, r"device +cpu, fp32; 2 processes")

    def test_the_number_of_threads_moves_sums_by_no_millionth(self):
        """And not at all where MKL cuts products alike for both numbers."""
        one = self.bytes_of_one()
        (self.folder / "one.h5").write_bytes(one)
        result = self.run_one("three.h5", OMP_NUM_THREADS="3", MKL_DYNAMIC="FALSE")
        self.assertEqual(result.returncode, 0, result.stderr)
        compared = []

        def compare(name, object):
            if isinstance(object, h5py.Dataset) and object.dtype.kind == "f":
                a, b = object[()], three[name][()]
                self.assertLessEqual(np.abs(a - b).max(), 1e-6 * size_of_terms(object), name)
                compared.append(name)

        with h5py.File(self.folder / "one.h5") as file, h5py.File(self.folder / "three.h5") as three:
            file.visititems(compare)
        self.assertGreater(len(compared), LAYERS * 8)  # of each layer the sums of q, k, v and o, at least
        print(f"{self.id()}: equal bytes: {one == (self.folder / 'three.h5').read_bytes()}")

    def test_a_killed_process_is_named_and_another_number_continues(self):
        processes = self.start(2, "out.h5")
        self.wait_until_at_work(processes[1].pid)
        processes[1].kill()
        killed = time.monotonic()
        code, said = self.end_of(processes[0])
        self.assertLess(time.monotonic() - killed, 20)
        self.assertEqual(code, 1, said)
        self.assertIn("process 1 of 2 has ended", said)
        self.assertIn("--resume", said)
        self.assertTrue((self.folder / "out.h5.checkpoint").exists())
        self.assertEqual(self.bytes_of("out.h5", "--resume", "--gpus", 3),
                         self.bytes_of_one())

    def test_processes_that_were_all_killed_are_named_by_their_parent(self):
        parent, ids = self.start_parent(2, "out.h5")
        for signal_of_all in (signal.SIGSTOP, signal.SIGKILL):  # none sees how another ends
            for pid in ids:
                os.kill(pid, signal_of_all)
        code, said = self.end_of(parent)
        self.assertEqual(code, 1, said)
        self.assertIn("process 0 of 2 was ended by signal 9", said)
        self.assertIn("--resume", said)

    def test_a_parent_whose_children_nobody_waits_for_ends_too(self):
        """SIGCHLD ignored, as some supervisors leave it."""
        result = subprocess.run(self.command("out.h5", "--gpus", 2), capture_output=True, text=True,
                                env=ENVIRONMENT, timeout=4 * PATIENCE,
                                preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual((self.folder / "out.h5").read_bytes(), self.bytes_of_one())

    def test_when_the_first_is_killed_the_others_say_so(self):
        self.expect_word_of_a_lost_first("out.h5")

    def test_a_stop_of_all_saves_a_checkpoint_that_one_process_continues(self):
        parent, _ = self.start_parent(2, "out.h5")
        parent.send_signal(signal.SIGTERM)
        code, said = self.end_of(parent)
        self.assertEqual(code, 130, said)
        self.assertEqual(said.count("stopped on request"), 1, said)
        self.assertEqual(self.bytes_of("out.h5", "--resume"), self.bytes_of_one())

    def test_signals_to_the_group_that_its_launcher_passes_on_are_one_stop(self):
        processes = self.start(2, "out.h5")
        for process in processes:
            self.wait_until_at_work(process.pid)
        for pause in (.02, 0):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            time.sleep(pause)
        for process in processes:
            self.assertEqual(self.end_of(process)[0], 130)
        self.assertTrue((self.folder / "out.h5.checkpoint").exists())
        self.assertEqual(self.bytes_of("out.h5", "--resume"), self.bytes_of_one())

    def test_a_process_of_another_run_is_refused(self):
        self.expect_refusal_of_another_run("out.h5")

    def test_a_mistake_is_said_once(self):
        result = self.run_one("out.h5", "--gpus", 2, "--position-span", 10**9)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr.count("--position-span"), 1, result.stderr)

    def test_descriptions_of_processes_that_are_none_are_refused(self):
        for changes, word in (({"WORLD_SIZE": "2", "RANK": "2"}, "RANK"),
                              ({"WORLD_SIZE": "9", "RANK": "0"}, "WORLD_SIZE"),
                              ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK")):
            result = self.run_one("out.h5", **changes)
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn(word, result.stderr)
        result = self.run_one("out.h5", "--gpus", 2, WORLD_SIZE="2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--gpus", result.stderr)


if __name__ == "__main__":
    unittest.main()
