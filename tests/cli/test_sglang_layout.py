"""A bundle's portable part, without the model, as SGLang's rotation files of format_version 1.

The writer below is the least one that the layout asks for; what it writes is loaded back under the
loader's rules: key `rotation` of every global layer id, shape, cast to bf16, orthogonal after it.
"""
import unittest

import h5py
import numpy as np
import torch

from support.stacks import HEAD_DIM, StackCase

ORTHOGONALITY = 5e-3  # of the loader, largest entry after the cast
NAMES = {"k": ("k_rotation_qqt_r_h_pbr.pt", "qqt_r_h_pbr"),
         "v": ("v_rotation_sst_r_h_pbr.pt", "sst_r_h_pbr")}


def write_v1(bundle, folder):
    """The two files of one rotation a layer, from /portable of an open bundle."""
    folder.mkdir()
    for side, (name, objective) in NAMES.items():
        layers = {}
        for group in bundle["portable/layers"].values():
            shared = group["shared"]
            layer_id = int(bundle["layers"][group.name.split("/")[-1]].attrs["layer_id"])
            layers[layer_id] = {
                "layer_id": layer_id,
                "rotation": torch.from_numpy(shared[f"{side}_rotation"][0]),
                "eigenvalues": torch.from_numpy(shared[f"{side}_eigenvalues"][0]).float()}
        torch.save({"format_version": 1, "objective": objective, "source_grouping": "layer",
                    "layers": layers}, folder / name)


def load_v1(path, layer_ids, head_dim):
    """[layer, d, d] in bf16, or ValueError as the server's loader would raise."""
    state = torch.load(path, weights_only=True)
    matrices = []
    for layer_id in layer_ids:
        entry = state["layers"].get(layer_id, state["layers"].get(str(layer_id)))
        if entry is None:
            raise ValueError(f"layer {layer_id} is missing")
        rotation = entry["rotation"]
        if tuple(rotation.shape) != (head_dim, head_dim):
            raise ValueError(f"layer {layer_id} has shape {tuple(rotation.shape)}")
        rotation = rotation.to(torch.bfloat16)
        product = rotation.double().T @ rotation.double()
        if (product - torch.eye(head_dim)).abs().max() > ORTHOGONALITY:
            raise ValueError(f"layer {layer_id} is not orthogonal")
        matrices.append(rotation)
    return torch.stack(matrices)


class SglangLayout(StackCase):
    def test_a_default_bundle_exports_without_the_model(self):
        path = self.calibrate("--no-statistics")
        with h5py.File(path) as bundle:
            write_v1(bundle, self.folder / "sglang")
            layers = [group["shared"] for group in bundle["portable/layers"].values()]
            rng = np.random.default_rng(0)
            for side, (name, _) in NAMES.items():
                rotations = load_v1(self.folder / "sglang" / name, range(len(layers)), HEAD_DIM)
                for layer, served in zip(layers, rotations.double().numpy()):
                    stored = layer[f"{side}_rotation"][()].astype(np.float64)
                    self.assertTrue((stored == stored[0]).all())  # one for all heads
                    self.assertFalse(np.any(layer[f"{side}_mean"][()]))
                    rows = rng.standard_normal((100, HEAD_DIM))
                    expected = rows @ stored[0]
                    # K' = K R; bf16 keeps 8 bits of each entry: 2^-9 relative, sqrt(d) terms.
                    norm = np.linalg.norm(expected)
                    self.assertLess(np.linalg.norm(rows @ served - expected), 2 ** -8 * norm)
                    if np.abs(stored[0] - stored[0].T).max() > 1e-6:  # Hadamard is symmetric
                        # Found: 1.37 to 1.42. Of an unrelated rotation sqrt(2) is to be expected.
                        self.assertGreater(np.linalg.norm(rows @ served.T - expected), norm)
            kinds = {int(k) for layer in layers for k in layer["k_kind"][()]}
            clips = {(float(layer["k_clip_ratio"][0]), float(layer["v_clip_ratio"][0]))
                     for layer in layers}
        self.assertLessEqual(kinds, {1, 2})  # Hadamard or OSCAR's rotation
        stack = self.stack(path, "sglang-v1")
        self.assertEqual((stack["verdict"], stack["variant"]), ("portable", "portable"))
        if len(clips) == 1:  # one pair is all that the environment variables take
            np.testing.assert_allclose(stack["clip"], *clips, atol=1e-6)
        # Plain rounding without means costs more than the bundle's own choice. Found: 3.9 times.
        self.assertGreater(stack["relative_error"], 1)

    def test_a_fit_with_rotations_alone_is_not_symmetric_and_comes_back_unturned(self):
        path = self.calibrate("--search", "off")  # portable: OSCAR's rotation everywhere
        with h5py.File(path) as bundle:
            write_v1(bundle, self.folder / "sglang")
            matrix = bundle["portable/layers/001/shared/k_rotation"][0]
        served = load_v1(self.folder / "sglang" / NAMES["k"][0], [0, 1, 2], HEAD_DIM)[1].float()
        # Entries are about 1/8 (d 64), found: 0.64. A transpose would not pass unseen.
        self.assertGreater(np.abs(matrix - matrix.T).max(), 0.1)
        np.testing.assert_allclose(served.numpy(), matrix, atol=2 ** -9)
        self.assertEqual(self.stack(path, "sglang-v1")["clip"], [.96, .92])

    def test_the_loader_of_this_test_can_fail(self):
        path = self.calibrate("--search", "off")
        with h5py.File(path) as bundle:
            write_v1(bundle, self.folder / "sglang")
        name = self.folder / "sglang" / NAMES["v"][0]
        for layers, dim, word in (([3], HEAD_DIM, "missing"), ([0], 32, "shape")):
            with self.assertRaisesRegex(ValueError, word):
                load_v1(name, layers, dim)
        state = torch.load(name, weights_only=True)
        state["layers"][0]["rotation"][0] *= 1.1
        torch.save(state, name)
        with self.assertRaisesRegex(ValueError, "orthogonal"):
            load_v1(name, [0], HEAD_DIM)


if __name__ == "__main__":
    unittest.main()
