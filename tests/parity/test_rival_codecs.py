#!/usr/bin/env python3
"""Other projects' codecs against numpy, written again from their definitions, one row after another.

gguf has q8_0 and q4_0 of its own, and torch the cast to e4m3: those are compared with. vLLM's fixed
numbers (signs of the rotation, levels of Lloyd-Max) stand here as vLLM 0.26 gives them.
"""
import subprocess
import unittest

import gguf
import numpy as np
import torch

from support.programs import BIN, ProgramTest

F = np.float32
SINK, TOKENS, HEADS = 5, 300, 2
# Of a row's largest value. Where float32 carries a value over the threshold between two codes, its row is a
# step off, and of a rotated row every value: few rows may be.
CLOSE, MOST_ROWS_OFF = 2e-5, 0.02
# KVarN's rounds end at equal tiles, of which rounding picks one: its fp16 scales may be the next ones.
CLOSE_KVARN = 2**-10


def hadamard(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def turn(row, n):
    return (row.astype(np.float64).reshape(-1, n) @ hadamard(n)).reshape(-1)


def half(x):
    return np.asarray(x, np.float16).astype(np.float64)


def bf16(x):
    return torch.tensor(np.asarray(x, F)).to(torch.bfloat16).float().numpy().astype(np.float64)


E4M3 = np.array([m / 8 * 2.0**-6 for m in range(8)]
                + [(1 + m / 8) * 2.0**(e - 7) for e in range(1, 16) for m in range(8)][:-1])


def nearest(x, levels):
    """By magnitude, with ties to the level of even index: the one whose last mantissa bit is 0."""
    out = np.empty(np.shape(x))
    for i, value in np.ndenumerate(np.abs(x)):
        distance = np.abs(levels - value)
        best = np.flatnonzero(distance == distance.min())
        out[i] = levels[best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1]]
    return np.sign(x) * out


def fp8(row, scale=1.0):
    return nearest(np.asarray(row, F) / F(scale), E4M3) * scale


def half_away(x):
    return np.sign(x) * np.floor(np.abs(x) + .5)


def uniform(row, top, halves=np.rint):
    """Codes of min to max in fp16, scale and minimum rounded first."""
    low = half(row.min())
    scale = max(half((row.max() - low) / top), 2.0**-24)
    return halves(np.clip((row - low) / scale, 0, top)) * scale + low


def int4(row, d):
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = (2 * torch.bernoulli(torch.full((d,), .5), generator=generator) - 1).numpy()
    y = bf16(turn(row * signs, d) * np.sqrt(d)).astype(F)
    scale = max(F((y.max() - y.min()) / F(15)), F(1e-6))
    zero = np.clip(half_away(F(-y.min() / scale)), 0, 15)
    codes = np.clip(np.floor(y * F(1 / scale) + F(zero) + F(.5)), 0, 15)
    bits = np.array(scale).view(np.int32) & -16
    return turn((codes - zero) * bits.view(F) / np.sqrt(d), d) * signs


def nvfp4(row, scale=1.0):
    out = []
    for block in row.reshape(-1, 16):
        of_block = fp8([np.abs(block).max() / 6 / scale])[0] * scale
        levels = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
        unit = block.astype(F) * F(1 / of_block) if of_block else 0 * block  # as kernels do
        out.append(nearest(unit, levels) * of_block)
    return np.concatenate(out)


def turboquant_key(row, d, levels):
    norm = np.sqrt((row.astype(np.float64)**2).sum())
    y = turn(row / (norm + 1e-8), d) * np.sqrt(d)
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, y, side="right")
    unit = levels[codes] / np.sqrt((levels[codes]**2).sum())
    return turn(unit * half(norm), d)


def turboquant_value(row, bits):
    top = 2**bits - 1
    scale = max((row.max() - row.min()) / top, 1e-8)
    codes = np.clip(np.floor((row - row.min()) / scale + .5), 0, top)
    return codes * half(scale) + half(row.min())


def llama_cpp(row, key, kind):
    n = row.size & -row.size if key else 64
    quant = gguf.GGMLQuantizationType[kind]
    coded = gguf.quants.quantize(turn(row, n).astype(F)[None], quant)
    return turn(gguf.quants.dequantize(coded, quant)[0], n)


def kvarn(tile, bits):
    """Rows of a tile are coded; scales of columns and of rows even their deviations out before."""
    tile = tile.astype(np.float64)
    s_row, s_column = np.zeros((len(tile), 1)), np.zeros((1, tile.shape[1]))
    spread = lambda x: sum(d.max() / max(d.min(), 1e-8) for d in (x.std(0, ddof=1), x.std(1, ddof=1)))
    best = spread(tile), np.exp(s_row), np.exp(s_column)
    now = tile
    for _ in range(16):
        s_column = np.clip(s_column + np.log(np.clip(now.std(0, ddof=1), 1e-3, 1e3)), -.3, 10)
        now = tile / np.exp(s_column) / np.exp(s_row)
        s_row = np.clip(s_row + np.log(np.clip(now.std(1, ddof=1), 1e-3, 1e3))[:, None], -.3, 10)
        now = tile / np.exp(s_column) / np.exp(s_row)
        if spread(now) <= best[0]:
            best = spread(now), np.exp(s_row), np.exp(s_column)
    _, rows, columns = best
    even = tile / rows / columns
    low, top = even.min(1, keepdims=True), 2**bits - 1
    scale = np.maximum((even.max(1, keepdims=True) - low) / top, 1e-10)
    codes = np.clip(np.rint((even - low) / scale), 0, top)
    return (codes * half(rows * scale) + half(rows * low)) * half(columns)


def by_tile(x, size, code):
    out = x.astype(np.float64).copy()
    for begin in range(SINK, len(x) - size + 1, size):
        out[begin:begin + size] = code(x[begin:begin + size])
    return out


def by_row(code):
    return lambda x: np.stack([code(row) for row in x])


def expected(name, key, x, levels):
    """One head's rows [tokens, d], of all heads' x [heads, tokens, d]."""
    d, largest = x.shape[2], float(np.abs(x).max())
    ranges = {"fp8-scaled": 200 if key else 100, "nvfp4-scaled": 448}
    scale = float(F(largest) / F(ranges.get(name, 1)))
    table = {
        "fp8": by_row(fp8),
        "fp8-scaled": by_row(lambda row: fp8(row, scale)),
        "fp8-per-token-head": by_row(lambda row: fp8(row, max(np.abs(row).max() / 448, 1e-6))),
        "int4-per-token-head": by_row(lambda row: int4(row, d)),
        "nvfp4": by_row(nvfp4),
        "nvfp4-scaled": by_row(lambda row: nvfp4(row, scale)),
        "q8_0": by_row(lambda row: llama_cpp(row, key, "Q8_0")),
        "q4_0": by_row(lambda row: llama_cpp(row, key, "Q4_0"))}
    if name in table:
        code = table[name]
    elif name == "kivi-2" and key:
        code = lambda rows: by_tile(rows, 32, lambda t: np.stack([uniform(c, 3) for c in t.T], 1))
    elif name == "kivi-2":
        code = by_row(lambda row: np.concatenate([uniform(g, 3) for g in row.reshape(-1, 32)]))
    elif name.startswith("kvarn"):
        bits = 4 if key and "k4" in name else 2
        turned = lambda rows: np.stack([turn(row, d) for row in rows])
        tile = lambda t: kvarn(t.T, bits).T if key else kvarn(t, bits)
        code = lambda rows: turned(by_tile(turned(rows), 128, tile))
    elif key and name == "turboquant-k8v4":
        code = by_row(fp8)
    elif key:
        code = by_row(lambda row: turboquant_key(row, d, levels[int(name[-1])]))
    else:
        code = by_row(lambda row: turboquant_value(row, int(name[-1])))
    return np.stack([code(rows) for rows in x])


NAMES = ("fp8", "fp8-scaled", "fp8-per-token-head", "int4-per-token-head", "nvfp4", "nvfp4-scaled", "q8_0",
         "q4_0", "kivi-2", "kvarn-k4v2", "kvarn-k2v2", "turboquant-4", "turboquant-3", "turboquant-k8v4")
# vLLM 0.26, get_centroids(128, bits) * sqrt(128), the positive half.
VLLM_LEVELS = {2: [.452572, 1.509559], 3: [.244984, .755646, 1.343180, 2.150350],
               4: [.128428, .388138, .656880, .942448, 1.256258, 1.617882, 2.068447, 2.730922]}


class RivalCodecs(ProgramTest):
    def rows(self, d, odd_rows=True):
        """Channels of hundreds, as biased keys have them; `odd_rows`: also a zero row, a tiny and a constant one."""
        rng = np.random.default_rng(d)
        x = rng.standard_normal((HEADS, TOKENS, d)) * np.exp(rng.standard_normal(d))
        x[0, :, 3] += 300
        x[1, :, 9] -= 40
        if odd_rows:
            x[1, 200] = 0
            x[1, 201] *= 1e-4
            x[1, 202] = .75
        return bf16(x).astype(F)

    def read_back(self, name, keys, values):
        source, out = self.folder / "rows.npz", self.folder / "read.npz"
        np.savez(source, keys=keys, values=values)
        subprocess.run([BIN / "oscar-test-rival-rows", name, str(SINK), source, out], check=True)
        with np.load(out) as read:
            levels = read["levels"].astype(np.float64)
            return read["keys"], read["values"], {2: levels[:4], 3: levels[4:12], 4: levels[12:]}

    def test_every_codec_equals_its_definition(self):
        for d in (64, 128):
            for name in NAMES:
                # Of a row without deviation KVarN's rounds never end.
                keys = self.rows(d, odd_rows=not name.startswith("kvarn"))
                values = keys[::-1].copy()
                read_keys, read_values, levels = self.read_back(name, keys, values)
                for side, x, read in (("keys", keys, read_keys), ("values", values, read_values)):
                    with self.subTest(codec=name, d=d, side=side):
                        want = expected(name, side == "keys", x, levels)
                        size = np.abs(want).max(-1, keepdims=True) + 1e-6
                        differs = np.abs(read - want) > (CLOSE_KVARN if "kvarn" in name else CLOSE) * size
                        self.assertLessEqual(differs.any(-1).mean(), MOST_ROWS_OFF)
                        self.assertGreater(np.abs(read - x).max(), 0)

    def test_levels_are_those_of_vllm(self):
        _, _, levels = self.read_back("fp8", self.rows(64), self.rows(64))
        for bits, positive in VLLM_LEVELS.items():
            np.testing.assert_allclose(levels[bits], np.r_[-np.array(positive)[::-1], positive], atol=1e-6)

    def test_fp8_is_the_cast_of_torch(self):
        rows = self.rows(64)
        read, _, _ = self.read_back("fp8", rows, rows)
        cast = torch.tensor(rows).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
        np.testing.assert_array_equal(read, cast)

    def test_what_was_read_back_once_is_read_back_unchanged(self):
        """Of codecs without rotation and without a scale that moves."""
        for name in ("fp8", "fp8-per-token-head", "nvfp4", "turboquant-k8v4"):
            keys, values, _ = self.read_back(name, self.rows(64), self.rows(64))
            again, _, _ = self.read_back(name, keys, values)
            with self.subTest(codec=name):
                np.testing.assert_allclose(again, keys, rtol=1e-6, atol=0)

    def test_tokens_before_the_first_tile_and_behind_the_last_stay_exact(self):
        rows = self.rows(64)
        for name, size in (("kivi-2", 32), ("kvarn-k4v2", 128)):
            read, _, _ = self.read_back(name, rows, rows)
            end = SINK + (TOKENS - SINK) // size * size
            differs = (np.abs(read - rows) > CLOSE * np.abs(rows).max(-1, keepdims=True)).any((0, 2))
            with self.subTest(codec=name):
                self.assertFalse(differs[:SINK].any() or differs[end:].any())
                self.assertTrue(differs[SINK:end].all())

    def test_a_head_dim_that_a_codec_cannot_code_is_refused(self):
        rows = np.ones((1, 40, 24), F)
        for name in ("q4_0", "nvfp4", "kivi-2", "int4-per-token-head", "turboquant-4", "kvarn-k2v2"):
            source = self.folder / "rows.npz"
            np.savez(source, keys=rows, values=rows)
            result = subprocess.run([BIN / "oscar-test-rival-rows", name, "0", source, source],
                                    capture_output=True, text=True)
            self.assertEqual(result.returncode, 1)
            self.assertIn(name, result.stderr)


if __name__ == "__main__":
    unittest.main()
