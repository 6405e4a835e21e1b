#!/usr/bin/env python3
"""Writes tests/golden/codec_d*.txt: rows and the bytes that the INT2 codec must make of them.

Independent of the C++ code: numpy scalars of type float32, one rounding per operation.
Usage: tests/golden/make_goldens.py [FOLDER]     (default tests/golden)

Format, one case after another, blank line between:
  case NAME d GROUP CLIP METADATA ORDER ROUNDING CORRECTION
  x        bf16 patterns, hex
  codes    packed bytes, hex
  metadata (scale, zero) patterns, hex
The feedback matrix and the metric of shaped and corrected cases are formulas (see matrices()).
"""
import pathlib
import sys

import numpy as np

F = np.float32


def to_bf16(x):
    bits = np.asarray(x, F).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(F)


def round_metadata(value, dtype):
    if dtype == "fp16":
        return F(np.float16(value))
    if dtype == "bf16":
        return from_bf16(to_bf16(np.array([value], F)))[0]
    return F(value)


def metadata_hex(value, dtype):
    if dtype == "fp16":
        return f"{int(np.float16(value).view(np.uint16)):04x}"
    if dtype == "bf16":
        return f"{int(to_bf16(np.array([value], F))[0]):04x}"
    return f"{int(np.array([value], F).view(np.uint32)[0]):08x}"


def matrices(d):
    """U and M by formula, exact in fp32."""
    j, i = np.meshgrid(np.arange(d), np.arange(d), indexing="ij")
    u = np.where(j < i, ((7 * j + 13 * i) % 33 - 16) / 256.0, np.where(j == i, 1.0, 0.0))
    m = np.where(i == j, 2.0, 0.0) + ((5 * (i + j)) % 9 - 4) / 64.0
    return u.astype(F), m.astype(F)


def code_of(x, scale, zero):
    t = F(F(F(x / scale) + zero) + F(0.5))
    return int(min(max(np.floor(t), 0), 3))


def dequantize(code, scale, zero):
    return F(F(F(code) - zero) * scale)


def encode(x, group, clip, dtype, shaped, correction):
    d = len(x)
    clipped = x
    if clip > 0:
        rank = min(int(np.floor(F(F(clip) * F(d)))), d - 1)
        threshold = np.sort(np.abs(x))[rank]
        clipped = np.clip(x, -threshold, threshold)
    scales, zeros = [], []
    for g in range(d // group):
        part = clipped[g * group:(g + 1) * group]
        lo, hi = part.min(), part.max()
        scale = max(F(F(hi - lo) / F(3)), F(F(1e-8) / F(3)))
        if dtype == "fp16":
            scale = max(scale, F(abs(lo) * F(2.0**-10)), F(2.0**-14))
        scale = round_metadata(scale, dtype)
        zero = round_metadata(F(F(-lo) / scale), dtype)
        scales.append(scale)
        zeros.append(zero if zero != 0 else F(0))
    u, m = matrices(d)
    codes, y, errors = [], [], []
    for i in range(d):
        s, z = scales[i // group], zeros[i // group]
        target = x[i]
        if shaped:
            pushed = F(0)
            for j in range(i):
                pushed = F(pushed + F(errors[j] * u[j, i]))
            target = F(x[i] - pushed)
        codes.append(code_of(target, s, z))
        y.append(dequantize(codes[-1], s, z))
        errors.append(F(y[-1] - x[i]))
    if correction != "none":
        num, den = F(0), F(0)
        for i in range(d):
            weight = x[i]
            if correction == "metric":
                weight = F(0)
                for j in range(d):
                    weight = F(weight + F(x[j] * m[j, i]))
            num = F(num + F(weight * x[i]))
            den = F(den + F(weight * y[i]))
        f = F(1)
        if num > 0 and den > 0 and den > F(F(1e-6) * num):
            f = min(max(F(num / den), F(0.5)), F(2))
        scales = [round_metadata(F(s * f), dtype) for s in scales]
    return codes, scales, zeros


def pack(codes, order):
    d = len(codes)
    out = []
    for b in range(d // 4):
        dims = [4 * b + k for k in range(4)] if order == "consecutive" else [
            b + k * d // 4 for k in range(4)]
        out.append(sum(codes[i] << (2 * k) for k, i in enumerate(dims)))
    return out


def rows(d, rng):
    normal = rng.standard_normal(d)
    outlier = normal.copy()
    outlier[d // 3] = 250.0
    ties = np.tile([1.0, -1.0, 2.0, 2.0, -2.0, 0.5, 0.5, 0.0], d // 8)
    halves = np.tile([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 1.0], d // 8)  # on the rounding edge
    return {
        "normal": normal,
        "heavy_tails": rng.standard_t(2.0, d),
        "zero": np.zeros(d),
        "negative_zero": np.full(d, -0.0),
        "constant": np.full(d, 3.140625),
        "negative_constant": np.full(d, -3.140625),
        "tiny_range_on_a_large_mean": 100.0 + 0.5 * (np.arange(d) % 2),
        "ties": ties,
        "rounding_edges": halves,
        "one_outlier": outlier,
        "subnormal_scale": normal * 1e-6,
        "large": normal * 3000.0,
        "all_positive": np.abs(normal) + 0.25,
    }


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden")
    folder.mkdir(parents=True, exist_ok=True)
    for d in (64, 128, 256):
        rng = np.random.default_rng(d)
        lines = []
        for name, values in rows(d, rng).items():
            bits = to_bf16(values.astype(F))
            x = from_bf16(bits)
            settings = [(d, 0.96, "fp16", "consecutive", "plain", "none"),
                        (d, 0.92, "fp16", "quartered", "plain", "unbiased"),
                        (d, 0.0, "bf16", "consecutive", "plain", "none"),
                        (64, 0.96, "fp32", "consecutive", "plain", "none"),
                        (d, 0.95, "fp16", "consecutive", "shaped", "metric")]
            for group, clip, dtype, order, rounding, correction in settings:
                codes, scales, zeros = encode(x, group, clip, dtype, rounding == "shaped",
                                              correction)
                lines += [f"case {name} {d} {group} {clip} {dtype} {order} {rounding} {correction}",
                          "".join(f"{int(b):04x}" for b in bits),
                          "".join(f"{b:02x}" for b in pack(codes, order)),
                          "".join(metadata_hex(s, dtype) + metadata_hex(z, dtype)
                                  for s, z in zip(scales, zeros)), ""]
        (folder / f"codec_d{d}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    with np.errstate(all="raise", under="ignore"):
        main()
