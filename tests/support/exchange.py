"""What independent readers make of the files of an export: torch, safetensors, numpy."""
import json

import numpy as np
import torch
from safetensors.numpy import load_file

from bundle.verify_bundle import datasets_of

# Names as a server is told them, and the orientation in which it multiplies rows.
FILES = {"sglang-v1": ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"),
         "sglang-v2": ("k_rotation_perhead.pt", "v_rotation_perhead.pt"),
         "vllm-pr46774": ("k_rotation.pt", "v_rotation.pt"),
         "mlx": ("k_rotation.safetensors", "v_rotation.safetensors")}


def turned(matrices):
    return matrices.transpose(0, 2, 1)


def load_torch(path, side):
    """{layer: (rotation, partner)} of a rotation file, [heads, d, d] each, by what the servers'
    loaders look up: outputs are o o_rotation^T there."""
    state = torch.load(path, weights_only=True)
    matrices = {}
    for layer_id, entry in state["layers"].items():
        assert entry["layer_id"] == layer_id
        rotation = entry["rotation"]
        assert rotation.dtype == torch.float32
        partner = entry.get("q_rotation" if side == "k" else "o_rotation", rotation)
        rotation, partner = (m.numpy().reshape(-1, *m.shape[-2:]) for m in (rotation, partner))
        matrices[int(layer_id)] = rotation, partner if side == "k" else turned(partner)
    return matrices


def load_mlx(path, side):
    """Rows are x M^T there, so M^T is this toolkit's matrix, and outputs o M."""
    matrices = {}
    for key, matrix in load_file(path).items():
        matrix = matrix.reshape(-1, *matrix.shape[-2:])
        rotation = turned(matrix)
        matrices[int(key.removeprefix("layer_"))] = rotation, rotation if side == "k" else matrix
    return matrices


def load_export(backend, folder):
    """{"k": {layer: (rotation, partner)}, "v": ...} in this toolkit's orientation."""
    load = load_mlx if backend == "mlx" else load_torch
    return {side: load(folder / name, side) for side, name in zip("kv", FILES[backend])}


def manifest(folder):
    return json.loads((folder / "oscar-export.json").read_text())


def stored(bundle, variant):
    """The same of an open bundle: its own, portable or portable-perhead."""
    matrices, numbers = {"k": {}, "v": {}}, datasets_of(bundle)
    for name, layer in bundle["layers"].items():
        group = f"/layers/{name}"
        if variant != "own":
            part = "shared" if variant == "portable" else "per_head"
            group = f"/portable/layers/{name}/{part}"
        for side, other in ("kq", "vo"):
            rotation = numbers[f"{group}/{side}_rotation"]
            implied = rotation if side == "k" else turned(rotation)
            partner = numbers.get(f"{group}/{other}_rotation", implied)
            matrices[side][int(layer.attrs["layer_id"])] = rotation, partner
    return matrices


def random_rotation(d, rng):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]
