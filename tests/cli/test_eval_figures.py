#!/usr/bin/env python3
"""What a report says by position and by head, against the means that it says besides, its key row against
transformers and the bundle, and its pictures."""
import json
import unittest

import h5py
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bundle.verify_bundle import datasets_of
from support.backends import BackendCase


class EvalFigures(BackendCase):
    def test_parts_of_a_mean_add_up_to_it(self):
        bundle, report, page = self.calibrate("--search", "off"), self.folder / "r.json", self.folder / "r.html"
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.corpus, "--sequence-length", 512,
                    "--max-tokens", 2048, "--separators", "off", "--compare", "hadamard,bundle,bundle@k",
                    "--json", report, "--html", page)
        found = json.loads(report.read_text())
        edges = np.array(found["positions"])
        self.assertEqual((edges[0], edges[-1]), (found["first_position"], found["longest_sequence"]))
        self.assertEqual(len(edges), 1 + found["tokens"] // 256)
        widths = np.diff(edges)  # sequences are of one length: tokens of a stretch are in proportion
        self.assertEqual(found["tokens"], found["sequences"] * widths.sum())
        for name in ("hadamard", "bundle", "bundle@k"):
            method = found["methods"][name]
            parts = np.array(method["kl"]["by_position"])
            self.assertEqual(len(set(parts)), len(widths))
            self.assertAlmostEqual(parts @ widths / widths.sum() / method["kl"]["mean"], 1, delta=1e-9)
            heads = np.array(method["output_nmse_heads"])
            self.assertEqual(heads.shape, (3, 2))
            for layer, mean in zip(heads, method["output_nmse"]):
                self.assertLess(layer.min(), mean)
                self.assertGreater(layer.max(), mean)
        self.assertNotIn("output_nmse_heads", found["methods"]["bf16"])
        for title in ("What each bit buys", "Whether it grows along a sequence",
                      "Error of the attention output, head by head", "A key row as the model has it",
                      "The same row after the transform"):
            self.assertIn(title, page.read_text())

    def keys(self, ids):
        """Of all layers after RoPE, as transformers has them: [layers, heads, tokens, head_dim]."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        with torch.no_grad():
            cache = model(torch.from_numpy(ids).long(), use_cache=True).past_key_values
        return np.stack([layer.keys[0].numpy() for layer in cache.layers])

    def test_the_key_row_is_the_models_and_its_transform_the_bundles(self):
        bundle, report, text = self.calibrate("--search", "off"), self.folder / "r.json", self.folder / "ids.npy"
        ids = np.random.default_rng(0).integers(0, 256, (1, 512)).astype(np.int32)
        np.save(text, ids)
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", text, "--sequence-length", 512,
                    "--separators", "off", "--compare", "exact,identity,hadamard,bundle,bundle@v", "--device", "cpu",
                    "--json", report)
        found = json.loads(report.read_text())
        row = found["key_row"]
        keys = self.keys(ids)
        rows = keys[:, :, 8:264]  # in 2 bits after 280 tokens: 8 of the sink, 256, 16 recent ones
        channels = np.sqrt((rows ** 2).mean(axis=2))
        peaks = channels.max(axis=2) / np.median(channels, axis=2)
        layer, head = np.unravel_index(peaks.argmax(), peaks.shape)
        self.assertEqual((row["layer"], row["head"], row["position"]), (layer, head, 8 + 128))
        self.assertAlmostEqual(row["peak"] / peaks.max(), 1, delta=2e-3)
        key = keys[layer, head, 8 + 128]
        scale = np.abs(key).max()
        np.testing.assert_allclose(row["written"], key, rtol=1e-3, atol=1e-4 * scale)

        made = {name: method["key_row"] for name, method in found["methods"].items() if "key_row" in method}
        self.assertEqual(list(made), ["identity", "hadamard", "bundle"])
        self.assertEqual(made["identity"]["transformed"], row["written"])
        # Two bits: four levels in each group of the row, here the whole of it.
        self.assertEqual(len(set(made["identity"]["read_back"])), 4)
        norms = [np.linalg.norm(made[name]["transformed"]) for name in ("identity", "hadamard")]
        self.assertAlmostEqual(norms[0] / norms[1], 1, delta=1e-3)
        with h5py.File(bundle) as file:
            content = datasets_of(file)
        transform = {name: content[f"/layers/{layer:03}/k_{name}"][head].astype(float)
                     for name in ("mean", "rotation")}
        expected = (key - transform["mean"]) @ transform["rotation"]
        np.testing.assert_allclose(made["bundle"]["transformed"], expected, rtol=1e-3,
                                   atol=1e-3 * np.abs(expected).max())
        for name, method in made.items():
            before, after = np.array(method["transformed"]), np.array(method["read_back"])
            self.assertTrue(0 < ((after - before) ** 2).sum() < (before ** 2).sum(), name)


if __name__ == "__main__":
    unittest.main()
