"""Small inputs cost little time and memory, and large ones no more than their bytes are worth
(SECURITY.md). Prints what each costs."""
import json
import os
import subprocess
import sys
import unittest
import zlib

import h5py

from support import checkpoints
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest

MEBIBYTE = 1 << 20


class Cost:
    """What a run of a program takes."""

    # From a small process: a program's peak is never below that of what started it.
    WATCH = """import json, resource, subprocess, sys, time
began = time.monotonic()
result = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE, check=False)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"code": result.returncode, "said": result.stderr.decode(),
                  "seconds": used.ru_utime + used.ru_stime, "wall": time.monotonic() - began,
                  "mebibytes": used.ru_maxrss / 1024}))"""

    def __init__(self, program, *arguments):
        watched = subprocess.run([sys.executable, "-S", "-c", self.WATCH, BIN / program,
                                  *map(os.fspath, arguments)], env=ENVIRONMENT, capture_output=True,
                                 text=True, check=True, timeout=300)
        vars(self).update(json.loads(watched.stdout))


class Bounds(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text()))

    def expect(self, name, cost, code, seconds, mebibytes, *words):
        """Bounds of time and memory several times what was measured on a slow machine."""
        print(f"{name}: {cost.seconds:.2f} s of processor, {cost.wall:.2f} s, "
              f"{cost.mebibytes:.0f} MiB")
        self.assertEqual(cost.code, code, cost.said)
        for word in words:
            self.assertIn(word, cost.said)
        self.assertLess(cost.seconds, seconds)
        self.assertLess(cost.mebibytes, mebibytes)

    def calibrate(self, corpus, *options):
        return Cost("oscar-calibrate", self.model, corpus, self.folder / "out.h5", "--device", "cpu",
                    "--dry-run", "--sequence-length", "256", *options)

    def plan(self):
        return Cost("oscar-bundle", "plan", self.model)

    def test_of_an_array_of_many_rows_without_columns(self):
        ids = self.folder / "ids.npy"
        header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({1 << 48}, 0), }}".ljust(117)
        ids.write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header.encode() + b"\n")
        whole = self.calibrate(self.text)
        cost = self.calibrate(ids)
        self.expect("npy of shape (2^48, 0)", cost, 1, whole.seconds + 5, whole.mebibytes + 50)

    def test_of_compressed_ids_of_which_few_are_asked_for(self):
        ids, rows = self.folder / "ids.h5", 1 << 17
        chunk = zlib.compress(bytes(8 * rows))
        with h5py.File(ids, "w") as file:
            tokens = file.create_dataset("tokens", (rows * 960,), "<i8", chunks=(rows,),
                                         compression="gzip")
            for number in range(960):  # 960 MiB
                tokens.id.write_direct_chunk((number * rows,), chunk)
        self.assertLess(ids.stat().st_size, 2 * MEBIBYTE)
        whole = self.calibrate(self.text, "--max-tokens", "1000")
        cost = self.calibrate(ids, "--max-tokens", "1000")
        self.expect("960 MiB of ids, deflated, with --max-tokens 1000", cost, 0, whole.seconds + 5,
                    whole.mebibytes + 100)

    def test_of_a_hundred_thousand_keys(self):
        config = json.loads((self.model / "config.json").read_text())
        config |= {f"key {number}": number for number in range(100_000)}
        (self.model / "config.json").write_text(json.dumps(config))
        self.expect("config.json of 100,000 keys", self.plan(), 1, 5, 300, "not known")

    def test_of_an_index_of_a_million_tensors(self):
        weights = (self.model / "model.safetensors").rename(self.model / "one.safetensors")
        header = weights.read_bytes()
        names = json.loads(header[8:8 + int.from_bytes(header[:8], "little")])
        index = self.model / "model.safetensors.index.json"
        weight_map = dict.fromkeys(names, weights.name)
        weight_map |= {f"model.layers.{number}.self_attn.q_proj.weight": weights.name
                       for number in range(3, 1_000_003)}
        index.write_text(json.dumps({"weight_map": weight_map}))
        size = index.stat().st_size / MEBIBYTE
        self.expect(f"index of 1,000,000 entries, {size:.0f} MiB", self.calibrate(self.text), 1, 40,
                    49 * size)

    def test_of_a_config_of_many_megabytes(self):
        with (self.model / "config.json").open("r+b") as file:
            file.write(b"[" * MEBIBYTE)
            file.truncate(100 * MEBIBYTE)
        self.expect("config.json of 100 MiB", self.plan(), 1, 5, 100, "larger than")

    def test_of_the_smallest_number_on_an_axis(self):
        data = json.loads((SOURCE / "rotation_zoo" / "tiny-gqa" / "evaluation.json").read_text())

        def shrink(value):
            if isinstance(value, float):
                return 5e-324
            if isinstance(value, list):
                return [shrink(entry) for entry in value]
            if isinstance(value, dict):
                return {key: shrink(entry) for key, entry in value.items()}
            return value

        report, page = self.folder / "report.json", self.folder / "page.html"
        data["methods"] = {name: {key: entry if key == "bpe" else shrink(entry)
                                  for key, entry in method.items()}
                           for name, method in data["methods"].items()}
        report.write_text(json.dumps(data))
        self.expect("page of figures of 5e-324", Cost("oscar-bundle", "report", report, "-o", page), 0,
                    5, 200)
        self.assertLess(page.stat().st_size, 4 * MEBIBYTE)

    def test_of_a_fifo_in_place_of_a_file(self):
        (self.model / "config.json").unlink()
        os.mkfifo(self.model / "config.json")
        cost = self.plan()
        self.expect("a FIFO as config.json", cost, 1, 5, 100, "a FIFO")
        self.assertLess(cost.wall, 10)

    def test_of_a_name_of_many_megabytes(self):
        header = json.dumps({"\x1b" * 5_000_000: {"dtype": "F32", "shape": [7],
                                                  "data_offsets": [0, 4]}}).encode()
        (self.model / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + bytes(4))
        cost = self.calibrate(self.text)
        self.expect(f"a tensor's name of {len(header) / MEBIBYTE:.0f} MiB", cost, 1, 20, 2000)
        self.assertLess(len(cost.said), 20000)


if __name__ == "__main__":
    unittest.main()
