"""Files of oscar-bundle's tests, made with h5py, and the program that reads them."""
import json
import os
import subprocess

import h5py
import numpy as np

from bundle.verify_bundle import content_sha256
from support.programs import BIN, ProgramTest

LAYERS, HEADS, DIM = 2, 2, 8
KINDS = {"k": "q", "v": "o"}
STATISTICS = ("q_moment", "k_moment", "v_moment", "attn_out_moment", "o_proj_metric")
SUMS = ("q_sum", "k_sum", "v_sum", "attn_out_sum")


def run(*arguments, **options):
    return subprocess.run([BIN / "oscar-bundle", *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, **options)


def rotation(rng):
    """Orthogonal, far from symmetric, and exact in bf16: Hadamard blocks with signs, rolled."""
    block = np.array([[1, 1], [1, -1]])
    block = np.kron(block, block) / 2
    signs = rng.choice([-1, 1], (DIM, 1))
    return np.roll(signs * np.kron(np.eye(DIM // 4), block), 3, axis=1)


def attributes(group, **values):
    for name, value in values.items():
        group.attrs[name] = np.bytes_(value) if isinstance(value, str) else np.int64(value)


def dataset(group, name, value, dtype):
    return group.create_dataset(name, data=np.asarray(value, dtype), chunks=np.shape(value),
                                fletcher32=True)


def add_statistics(layer, rng):
    group = layer.create_group("statistics")
    for name in STATISTICS:
        rows = rng.standard_normal((HEADS, 50, DIM))
        dataset(group, name, rows.transpose(0, 2, 1) @ rows, "<f8")
    for name in SUMS:
        dataset(group, name, rng.standard_normal((HEADS, DIM)), "<f8")
    group["count_q"], group["count_kv"] = np.int64(200), np.int64(100)


def add_transforms(layer, rng):
    for side in KINDS:
        dataset(layer, f"{side}_kind", [2] * HEADS, "u1")
        dataset(layer, f"{side}_rotation", [rotation(rng) for _ in range(HEADS)], "<f4")
        dataset(layer, f"{side}_mean", np.zeros((HEADS, DIM)), "<f4")
        dataset(layer, f"{side}_eigenvalues", np.sort(rng.random((HEADS, DIM))), "<f8")
        dataset(layer, f"{side}_clip_ratio", [0.96] * HEADS, "<f4")
        dataset(layer, f"{side}_scale_correction", [0] * HEADS, "u1")
    dataset(layer, "predicted_output_nmse", [0.01] * HEADS, "<f8")


def seal(file):
    file.attrs["content_sha256"] = np.bytes_(content_sha256(file))


def make_file(path, statistics_only=False, seed=0, with_seal=True):
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        attributes(file, format="oscar-statistics" if statistics_only else "oscar-rotation-bundle",
                   format_version=1, required_features="[]", tool_version="0", tool_commit="0",
                   created_utc="2026-01-01T00:00:00Z", preset="paper", method="oscar",
                   objective_k="qtq", objective_v="sv", composition="r_h_pbr",
                   granularity="per-head", position_span=0, fit_seed=0)
        attributes(file.create_group("model"), name="m", architecture="Qwen3ForCausalLM",
                   num_layers=LAYERS, num_qo_heads=4, num_kv_heads=HEADS, head_dim_k=DIM,
                   head_dim_v=DIM, hidden_size=32, config_sha256="c", tokenizer_sha256="t",
                   chat_template_sha256="", weights_fingerprint="w",
                   rope='{"rope_type": "default", "rope_theta": 1e4, "max_positions": 64}')
        source = {"name": f"corpus {seed}", "sha256": f"{seed:064x}", "weight": 1}
        attributes(file.create_group("corpus"), sources=json.dumps([source]), sequences_read=2,
                   sequences_used=2, tokens=100, chunk_len=64, order_seed=0,
                   tokens_sha256=f"{seed + 1000:064x}", bos_eos_policy="none", template="none")
        attributes(file.create_group("quantizer"), bits=2, quant_group_size=DIM, sink_tokens=64,
                   recent_tokens=256, demote_block=1, metadata_dtype="fp16",
                   clip_span="head_row", zero="code_units")
        for number in range(LAYERS):
            layer = file.create_group(f"layers/{number:03}")
            attributes(layer, layer_id=number, attention="full", num_kv_heads=HEADS,
                       head_dim_k=DIM, head_dim_v=DIM, quantized=1)
            add_statistics(layer, rng)
            if not statistics_only:
                add_transforms(layer, rng)
        if with_seal:
            seal(file)
    return path


class BundleCase(ProgramTest):
    def expect_refused(self, path, *words):
        """verify, inspect and strip all fail with the words, and nothing is written."""
        before = sorted(os.listdir(self.folder))
        out = self.folder / "never.h5"
        for command in (("verify", path), ("inspect", path), ("strip", path, out)):
            result = run(*command)
            text = result.stdout + result.stderr
            self.assertEqual(result.returncode, 1, text)
            for word in words:
                self.assertIn(word, text, command[0])
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def changed(self, change, reseal=True):
        path = make_file(self.folder / "changed.h5")
        with h5py.File(path, "r+") as file:
            change(file)
            if reseal:
                seal(file)
        return path
