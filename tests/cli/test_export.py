"""oscar-bundle export: each backend's files, read by torch, safetensors and numpy.

Queries, keys and outputs through the matrices that a server would load are those of the bundle.
"""
import hashlib
import json
import unittest

import h5py
import numpy as np
import torch
from safetensors.numpy import load_file

from bundle.verify_bundle import datasets_of
from support.exchange import FILES, load_export, manifest, stored
from support.programs import run
from support.backends import HEAD_DIM, BackendCase

ORTHOGONALITY = 5e-3  # of the servers' loaders, largest entry after the cast to bf16


class Export(BackendCase):
    def export(self, bundle, backend, *options):
        out = self.folder / backend
        self.run_ok("oscar-bundle", "export", bundle, "--for", backend, "-o", out, *options)
        return out

    def check_products(self, exported, expected, per_head):
        """q k^T and o through the exported matrices, in float32."""
        rng = np.random.default_rng(0)
        for side in "kv":
            self.assertEqual(sorted(exported[side]), sorted(expected[side]))
            for layer, (matrices, partners) in exported[side].items():
                own, own_partners = expected[side][layer]
                self.assertEqual(matrices.shape[0], len(own) if per_head else 1)
                for head, (served, partner) in enumerate(zip(matrices, partners)):
                    q, x = rng.standard_normal((2, 20, HEAD_DIM)).astype(np.float32)
                    row, wanted_row = x @ served, x @ own[head]
                    self.assert_close(row, wanted_row)
                    if side == "k":
                        self.assert_close((q @ partner) @ row.T,
                                          (q @ own_partners[head]) @ wanted_row.T)
                        result, plain = (q @ partner) @ row.T, q @ x.T
                    else:
                        self.assert_close(row @ partner, wanted_row @ own_partners[head])
                        result, plain = row @ partner, x
                    # Rotated and back is unrotated, up to float32 and a condition number.
                    self.assertLess(np.abs(result - plain).max(), 1e-4 * np.abs(plain).max())
                    if np.abs(own[head] - own[head].T).max() > 1e-6:  # Hadamard is symmetric
                        # Of an unrelated rotation sqrt(2) is to be expected.
                        norm = np.linalg.norm(wanted_row)
                        self.assertGreater(np.linalg.norm(x @ served.T - wanted_row), .5 * norm)

    def assert_close(self, found, wanted):
        self.assertLess(np.abs(found - wanted).max(), 1e-6 * np.abs(wanted).max())

    def test_a_default_bundle_is_refused_with_the_reason_and_reduced_on_request(self):
        bundle = self.calibrate("--no-statistics")
        for backend in FILES:
            with self.subTest(backend):
                self.refuse("oscar-bundle", ["export", bundle, "--for", backend, "-o",
                                             self.folder / "never"],
                            "own transforms", "--reduce", "predicted error")
                out = self.export(bundle, backend, "--reduce")
                said = manifest(out)
                planned = self.backend(bundle, backend)
                self.assertEqual(said["variant"], planned["variant"])
                self.assertEqual(said["clip"], planned["clip"])
                self.assertGreater(said["relative_error"], 1)
                with h5py.File(bundle) as file:
                    expected = stored(file, said["variant"])
                exported = load_export(backend, out)
                per_head = backend == "sglang-v2" or said["variant"] == "portable-perhead"
                self.check_products(exported, expected, per_head)
                for rotation, _ in (m for side in exported.values() for m in side.values()):
                    served = torch.from_numpy(rotation.copy()).to(torch.bfloat16).double()
                    product = served.transpose(1, 2) @ served
                    self.assertLess((product - torch.eye(HEAD_DIM)).abs().max(), ORTHOGONALITY)
                readme = (out / "README.md").read_text()
                self.assertIn(f"{said['clip'][0]:g}", readme)
                self.run_ok("oscar-bundle", "verify", out, "--for", backend)

    def test_what_was_fitted_for_a_backend_is_exported_as_it_is(self):
        for backend, options in (("sglang-v1", []), ("sglang-v2", ["--clip", ".9,.95"]),
                               ("vllm-pr46774", []), ("mlx", ["--quant-group-size", 32])):
            with self.subTest(backend):
                bundle = self.calibrate("--for", backend, "--search", "off", *options)
                out = self.export(bundle, backend)
                self.assertEqual(manifest(out)["variant"], "own")
                with h5py.File(bundle) as file:
                    expected = stored(file, "own")
                per_head = backend in ("sglang-v2", "mlx")
                self.check_products(load_export(backend, out), expected, per_head)
                if backend == "sglang-v1":
                    state = torch.load(out / FILES[backend][0], weights_only=True)
                    self.assertEqual((state["format_version"], state["source_grouping"]),
                                     (1, "layer"))
                    eigenvalues = state["layers"][1]["eigenvalues"]
                    self.assertTrue((eigenvalues.diff() >= 0).all())
                if backend == "mlx":
                    data = json.loads((out / "metadata.json").read_text())
                    self.assertEqual(data["schema"], "mlx-lm-oscar-rotations-v1")
                    self.assertEqual(data["layer_indices"], [0, 1, 2])

    def test_arrays_hold_all_of_a_bundle(self):
        bundle = self.calibrate("--no-statistics")
        arrays = {"npz": np.load(self.export(bundle, "npz") / "transforms.npz"),
                  "safetensors": load_file(self.export(bundle, "safetensors") /
                                           "transforms.safetensors")}
        with h5py.File(bundle) as file:
            numbers, layers = datasets_of(file), [f"/layers/{name}" for name in file["layers"]]
            for name in ("k_rotation", "v_rotation", "q_rotation", "o_rotation", "k_mean", "v_mean",
                         "k_clip_ratio", "k_feedback", "v_metric", "k_scale_correction",
                         "k_centres"):
                having = [i for i, layer in enumerate(layers) if f"{layer}/{name}" in numbers]
                self.assertTrue(having, name)
                for found in arrays.values():
                    for i in having:
                        np.testing.assert_array_equal(found[name][i],
                                                      numbers[f"{layers[i]}/{name}"])

    def test_bad_requests_leave_nothing_behind(self):
        bundle = self.calibrate("--search", "off")
        out = self.folder / "out"
        for arguments, words in (
                (["export", bundle, "--for", "onnxruntime", "-o", out],
                 ["onnxruntime", "1.31.1", "MixedPrecisionGroupQueryAttention"]),
                (["export", self.corpus, "--for", "npz", "-o", out], ["corpus.txt"]),
                (["export", bundle, "--for", "npz", "-o", self.model], ["exists already"]),
                (["export", bundle, "--for", "npz", "-o", out / "deep"], [f"make the folder first: {out}"])):
            with self.subTest(arguments):
                self.refuse("oscar-bundle", arguments, *words)
        self.refuse("oscar-bundle", ["export", bundle, "-o", out], "--for", code=2)
        self.refuse("oscar-bundle", ["export", bundle, "--for", "tgi", "-o", out], "tgi", "sglang-v1",
                    "npz, safetensors, statistics\n", code=2)
        self.refuse("oscar-bundle", ["verify", out, "--for", "tgi"], "tgi", "sglang-v1",
                    "npz, safetensors\n", code=2)

    def test_verify_says_what_is_wrong_with_an_export(self):
        bundle = self.calibrate("--for", "sglang-v1", "--method", "oscar", "--search", "off")
        out = self.export(bundle, "sglang-v1")
        path = out / FILES["sglang-v1"][0]
        state = torch.load(path, weights_only=True)
        for layer in state["layers"].values():
            layer["rotation"] = layer["rotation"].T.contiguous()
        torch.save(state, path)
        findings = json.loads(self.failed("verify", out, "--for", "sglang-v1", "--json", "-"))
        wrong = {finding["check"] for finding in findings["findings"] if not finding["ok"]}
        self.assertEqual(wrong, {"checksums", "direction", "row in bytes"})
        said = manifest(out)
        said["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        (out / "oscar-export.json").write_text(json.dumps(said))
        text = self.failed("verify", out, "--for", "sglang-v1")
        self.assertIn("FAILED  direction", text)
        self.assertIn("layer 0, keys", text)
        # A folder of others has no list of what the matrices should be.
        (out / "oscar-export.json").unlink()
        said = self.run_ok("oscar-bundle", "verify", out, "--for", "sglang-v1").stdout
        self.assertIn("no oscar-export.json", said)
        state["layers"][2]["rotation"][0] *= 1.1
        torch.save(state, path)
        self.assertIn("not orthogonal", self.failed("verify", out, "--for", "sglang-v1"))

    def test_verify_tells_how_a_folder_of_an_export_is_verified(self):
        out = self.export(self.calibrate("--for", "sglang-v1", "--search", "off"), "sglang-v1")
        text = self.failed("verify", out)
        self.assertIn("found:    a folder", text)
        self.assertIn("hint:     a folder of an export is verified with --for NAME", text)
        named = "hint:     oscar-export.json says that this is an export to "
        text = self.failed("verify", out, "--for", "sglang-v2")
        self.assertIn("k_rotation_perhead.pt", text)
        self.assertIn(f"{named}sglang-v1: verify it with --for sglang-v1", text)
        said = manifest(out)
        for recorded, hint in (("statistics", f"{named}statistics\n"), ("sglang-v2", None), (3, None)):
            (out / "oscar-export.json").write_text(json.dumps({**said, "format": recorded}))
            text = self.failed("verify", out, "--for", "sglang-v2")
            with self.subTest(recorded):
                self.assertIn(hint or "No such file", text)
                self.assertEqual("hint:" in text, hint is not None)
        (out / "oscar-export.json").write_text("[")
        self.assertNotIn("hint:", self.failed("verify", out, "--for", "sglang-v2"))

    def test_an_export_under_the_name_of_before_is_still_verified(self):
        out = self.export(self.calibrate("--for", "vllm-pr46774", "--search", "off"), "vllm-pr46774")
        said = manifest(out)
        (out / "oscar-export.json").write_text(json.dumps({**said, "format": "vllm"}))
        self.run_ok("oscar-bundle", "verify", out, "--for", "vllm-pr46774")
        self.assertIn("an export to vllm: verify it with --for vllm-pr46774",
                      self.failed("verify", out, "--for", "mlx"))

    def failed(self, *arguments):
        result = run("oscar-bundle", *arguments)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        return result.stdout

    def test_statistics_are_the_stored_sums_as_numpy_arrays(self):
        bundle = self.calibrate("--search", "off")
        out = self.export(bundle, "statistics")
        self.refuse("oscar-bundle", ["verify", out, "--for", "statistics"], "nothing is to be verified", code=2)
        arrays = np.load(out / "statistics.npz")
        with h5py.File(bundle) as file:
            content = datasets_of(file)
        names = {name.rpartition("/")[2] for name in content if "/statistics/" in name}
        self.assertEqual(set(arrays.files), names | {"layer_id"})
        self.assertIn("k_attended_moment", names)
        for name in names:
            stored = np.stack([content[f"/layers/{i:03}/statistics/{name}"] for i in range(3)])
            self.assertEqual(arrays[name].dtype, stored.dtype)
            np.testing.assert_array_equal(arrays[name], stored)
        self.assertEqual(arrays["layer_id"].tolist(), [0, 1, 2])
        # The normalisation that SCHEMA.md states: means of squares are traces over counts.
        mean = np.trace(arrays["k_moment"], axis1=2, axis2=3) / arrays["count_kv"][:, None]
        inspection = json.loads(run("oscar-bundle", "inspect", bundle, "--json", "-").stdout)["statistics"]
        np.testing.assert_allclose(mean.mean(1) / HEAD_DIM, [s["k_mean_square"] for s in inspection])
        said = manifest(out)
        self.assertEqual(said["arrays"]["q_moment"], [3, 2, HEAD_DIM, HEAD_DIM])
        digest = hashlib.sha256((out / "statistics.npz").read_bytes()).hexdigest()
        self.assertEqual(said["files"], {"statistics.npz": digest})
        bare = self.calibrate("--search", "off", "--no-statistics")
        self.refuse("oscar-bundle", ["export", bare, "--for", "statistics", "-o", self.folder / "never"],
                    "no statistics")


if __name__ == "__main__":
    unittest.main()
