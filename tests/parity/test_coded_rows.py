"""Rows in the codec of each backend against numpy, written from the backends' own rules, to the bit.

Rows of small integers put many values half way between two codes.
"""
import subprocess
import unittest

import numpy as np

from support.programs import BIN, ProgramTest

F = np.float32
# clip over the row; zero: point in code units or minimum; halves; metadata and when it is rounded;
# packing. With groups of a whole head, as here, MLX's clipping by group is clipping by row.
RULES = {"sglang-v1": ("point", "up", F, "after", "quartered"),
         "sglang-v2": ("point", "up", F, "after", "quartered"),
         "sglang-0c88a": ("point", "up", F, "after", "quartered"),
         "vllm-pr46774": ("minimum", "up", np.float16, "before", "consecutive"),
         "onnxruntime": ("minimum", "even", F, "after", "consecutive"),
         "mlx": ("point", "up", np.float16, "after", "consecutive"),
         "oscar_int2": ("point", "up", np.float16, "before", "consecutive")}


def code(row, ratio, zero_form, ties, dtype, when, packing):
    """(bytes, scale, zero) of one row."""
    d = len(row)
    threshold = np.sort(np.abs(row))[min(int(F(ratio) * F(d)), d - 1)] if ratio > 0 else np.inf
    low, high = F(max(row.min(), -threshold)), F(min(row.max(), threshold))
    scale = F((high - low) / F(3))
    if zero_form == "point" and when == "before":
        scale = F(dtype(scale))
    zero = F(-low / scale) if zero_form == "point" else low
    stored = F(dtype(scale)), F(dtype(zero))
    used_scale, used_zero = stored if when == "before" else (scale, zero)
    if zero_form == "point":
        level = row / used_scale + used_zero
    else:
        level = (row - used_zero) / used_scale
    codes = np.floor(level + F(.5)) if ties == "up" else np.rint(level)
    codes = codes.clip(0, 3).astype(np.uint8)
    four = codes.reshape(4, d // 4) if packing == "quartered" else codes.reshape(d // 4, 4).T
    return four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6, *stored


class CodedRows(ProgramTest):
    def test_every_backend_gets_its_own_bytes(self):
        rng = np.random.default_rng(0)
        for d in (64, 128):
            normal = rng.standard_normal((30, d)).astype(F)
            tied = rng.integers(-6, 7, (30, d)).astype(F)
            tied[:, :2] = -6, 6  # scale 4: every odd number but those next to the ends is a tie
            for ratio in (0, .96, .92):
                rows = np.concatenate([normal, tied])
                source, out = self.folder / "rows.npz", self.folder / "coded.npz"
                np.savez(source, rows=rows)
                for backend, rules in RULES.items():
                    with self.subTest(backend=backend, d=d, ratio=ratio):
                        subprocess.run([BIN / "oscar-test-code-rows", backend, str(ratio), source,
                                        out], check=True)
                        found = np.load(out)
                        for i, row in enumerate(rows):
                            codes, scale, zero = code(row, ratio, *rules)
                            np.testing.assert_array_equal(found["codes"][i], codes)
                            self.assertEqual((found["scale"][i], found["zero"][i]),
                                             (scale, zero + F(0)))

    def test_the_rules_differ_on_these_rows(self):
        row = np.array([0, 6, 1, 3, 5, 2, 4, 0], F)
        coded = {rules: bytes(code(row, 0, *rules)[0]) for rules in RULES.values()}
        self.assertEqual(len(set(coded.values())), 3)  # up, even, quartered


if __name__ == "__main__":
    unittest.main()
