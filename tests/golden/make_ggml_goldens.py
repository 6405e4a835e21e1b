#!/usr/bin/env python3
"""Writes tests/golden/ggml_blocks.txt: blocks of every type of GGUF that we read, and their values.

The values are those of `gguf.quants.dequantize` of the gguf package (scripts/setup.sh --tests).
Usage: tests/golden/make_ggml_goldens.py [FILE]

One type after another: a line with its number and name, one with the bytes of three blocks in hex,
one with the values as fp32 patterns in hex.
"""
import pathlib
import sys

import gguf
import numpy as np

# Where a block holds fp16 numbers, which are kept finite: byte offsets by type.
HALVES = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
          "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
          "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": []}
NAMES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
         "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"]


def random_blocks(name, count, seed):
    """Random bytes of `count` blocks, [count, bytes] u8, with finite numbers where numbers are."""
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    if name in ("F32", "BF16"):
        values = (rng.standard_normal(count) * np.exp(rng.uniform(-40, 40, count)))
        bits = values.astype(np.float32).view(np.uint32)
        return (bits if name == "F32" else (bits >> 16).astype(np.uint16)).view(np.uint8).reshape(
            count, size).copy()
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for offset in HALVES[name]:
        # Any sign, exponent and mantissa but those of infinity and NaN: subnormal and zero too.
        halves = rng.integers(0, 0x7C00, count, np.uint16) | (
            rng.integers(0, 2, count, np.uint16) << 15)
        halves[rng.integers(0, count)] &= 0x83FF
        blocks[:, offset:offset + 2] = halves.view(np.uint8).reshape(count, 2)
    return blocks


def values_of(name, blocks):
    return gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[name]).ravel()


def main():
    default = pathlib.Path(__file__).with_name("ggml_blocks.txt")
    lines = []
    for seed, name in enumerate(NAMES):
        blocks = random_blocks(name, 3, seed)
        lines += [f"{int(gguf.GGMLQuantizationType[name])} {name}", blocks.tobytes().hex(),
                  " ".join(f"{bits:08x}" for bits in values_of(name, blocks).view(np.uint32))]
    pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else default).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
