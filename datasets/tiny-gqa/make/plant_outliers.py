#!/usr/bin/env python3
"""Plants channel outliers in the keys and values of a Qwen3-style checkpoint without changing its function.

Large models have channels far larger than the rest; a small one has few, so that methods for 2-bit caches look alike on
it. For each RoPE pair (channels i and i + head_dim / 2, which must share a factor to commute with the rotation) the
weight of k_norm is multiplied by s and that of q_norm by 1 / s; for each value channel the row of W_V is multiplied by s
and the matching columns of W_O, in every query head of that KV head, by 1 / s. s is log-normal with the given sigma,
rounded to a power of two, so that bf16 weights and every product with them keep their bits: the logits do not change,
and --undo gives back the very bytes. Needs numpy only.

  plant_outliers.py datasets/tiny-gqa OUT --sigma 1.0     the same model with harder outliers
  plant_outliers.py datasets/tiny-gqa OUT --undo          the model without
"""

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np

RECORD = "outliers.json"


class Shard:
    """One safetensors file in memory: header and bytes; bf16 tensors are edited in place."""

    def __init__(self, path: Path):
        self.path = path
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        self.head, self.body = data[:8 + size], bytearray(data[8 + size:])
        self.entries = {k: v for k, v in json.loads(data[8:8 + size]).items() if k != "__metadata__"}

    def tensor(self, name: str) -> np.ndarray:
        """A writable view of the raw bf16 bits, uint16, in the tensor's shape."""
        entry = self.entries[name]
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{self.path}: {name} is {entry['dtype']}, expected BF16; save the checkpoint in bf16 first")
        begin, end = entry["data_offsets"]
        return np.frombuffer(self.body, np.uint16)[begin // 2:end // 2].reshape(entry["shape"])

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(self.head + self.body)
        os.replace(temporary, path)


def exponents(config: dict, sigma: float, seed: int) -> list:
    """Per layer (log2 s of the RoPE pairs [head_dim / 2], log2 s of the value channels [num_kv_heads, head_dim])."""
    random = np.random.RandomState(seed)  # its stream is frozen across numpy versions
    head_dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    draws = [(random.standard_normal(head_dim // 2), random.standard_normal((kv_heads, head_dim)))
             for _ in range(config["num_hidden_layers"])]
    return [tuple(np.rint(sigma * z / math.log(2)).astype(np.int64) for z in pair) for pair in draws]


def scale_by_power(bits: np.ndarray, exponent: np.ndarray, name: str) -> None:
    """Multiplies bf16 numbers (raw bits, changed in place) by 2^exponent (broadcast); an inexact result is an error."""
    field = (bits >> 7 & 0xFF).astype(np.int64)
    moved = np.where(bits & 0x7FFF, field + exponent, 0)  # zero stays zero
    inexact = (bits & 0x7FFF != 0) & ((field == 0) | (field == 255) | (moved < 1) | (moved > 254)) & (exponent != 0)
    if inexact.any():
        raise SystemExit(f"{name}: {int(inexact.sum())} numbers are too small, too large or not finite to scale exactly")
    bits[...] = np.where(exponent == 0, bits, (bits & 0x807F) | (moved.astype(np.uint16) << 7))


def plant(shards: list, config: dict, sigma: float, seed: int, sign: int) -> None:
    """Plants (sign 1) or takes out (sign -1) the factors of `exponents` in all layers."""
    owner = {name: shard for shard in shards for name in shard.entries}
    heads_per_kv = config["num_attention_heads"] // config["num_key_value_heads"]
    for layer, (pairs, values) in enumerate(exponents(config, sigma, seed)):
        key_channels = sign * np.concatenate([pairs, pairs])
        value_rows = sign * values.reshape(-1, 1)
        value_columns = -sign * np.repeat(values, heads_per_kv, axis=0).reshape(1, -1)
        for part, exponent in (("k_norm", key_channels), ("q_norm", -key_channels),
                               ("v_proj", value_rows), ("o_proj", value_columns)):
            name = f"model.layers.{layer}.self_attn.{part}.weight"
            if name not in owner:
                raise SystemExit(f"{name} is missing: expected a Qwen3-style checkpoint")
            scale_by_power(owner[name].tensor(name), exponent, name)


def transform(source: Path, target: Path, sigma: float, seed: int) -> None:
    """Copies the folder `source` to `target` with outliers of `sigma`; outliers already planted are taken out first."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise SystemExit(f"{source}: no safetensors file")
    shards = [Shard(path) for path in paths]
    record = source / RECORD
    if record.exists():
        old = json.loads(record.read_text(encoding="utf-8"))
        plant(shards, config, old["sigma"], old["seed"], -1)
        print(f"took out the outliers of sigma {old['sigma']}, seed {old['seed']}")
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != RECORD and target.resolve() != source.resolve():
            shutil.copyfile(path, target / path.name)
    (target / RECORD).unlink(missing_ok=True)
    if sigma > 0:
        plant(shards, config, sigma, seed, 1)
        values = {"sigma": sigma, "seed": seed, "made_by": "datasets/tiny-gqa/make/plant_outliers.py"}
        (target / RECORD).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        print(f"planted outliers of sigma {sigma}, seed {seed}")
    for shard in shards:
        shard.save(target / shard.path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="checkpoint folder (bf16 safetensors)")
    parser.add_argument("target", type=Path, help="folder to write; may be the same")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the natural logarithm of the factors (0.6)")
    parser.add_argument("--seed", type=int, default=7, help="of the factors (7)")
    parser.add_argument("--undo", action="store_true", help="only take out what was planted")
    arguments = parser.parse_args()
    if arguments.undo and not (arguments.source / RECORD).exists():
        sys.exit(f"{arguments.source}: no {RECORD}, so nothing was planted there")
    transform(arguments.source, arguments.target, 0.0 if arguments.undo else arguments.sigma, arguments.seed)


if __name__ == "__main__":
    main()
