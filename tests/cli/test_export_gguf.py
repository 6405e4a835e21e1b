"""oscar-bundle export --for gguf-rot, read by the gguf package, and import of such tensors."""
import shutil
import unittest

import gguf
import h5py
import numpy as np

from support.checkpoints import QWEN3_MINI, qwen3_tensors, write_checkpoint
from support.exchange import manifest
from support.gguf_files import Type, write_model
from support.backends import BackendCase

D = 128  # llama.cpp's branch codes 128 values at a time


class Gguf(BackendCase):
    def setUp(self):
        super().setUp()
        config = {"head_dim": D}
        self.model = write_checkpoint(self.folder / "wide", config,
                                      qwen3_tensors(QWEN3_MINI | config))

    def test_the_tensors_hold_transposes_and_become_a_bundle_again(self):
        bundle = self.calibrate("--no-statistics", "--search", "off")
        out = self.folder / "rot"
        self.refuse("oscar-bundle", ["export", bundle, "--for", "gguf-rot", "-o", out],
                    "own transforms", "error unknown")
        self.run_ok("oscar-bundle", "export", bundle, "--for", "gguf-rot", "--reduce", "-o", out)
        self.run_ok("oscar-bundle", "verify", out, "--for", "gguf-rot")
        self.assertIn("LLAMA_KV_CLIP_RATIO=0.96", (out / "README.md").read_text())
        self.assertIsNone(manifest(out)["row"])  # levels of its own
        tensors = {t.name: t.data for t in gguf.GGUFReader(out / "rotations.gguf").tensors}
        self.assertEqual(len(tensors), 6)
        back = self.folder / "back.h5"
        self.run_ok("oscar-bundle", "import", out / "rotations.gguf", "--model", self.model, "-o",
                    back, "--sink", 8, "--recent", 16)
        with h5py.File(bundle) as file, h5py.File(back) as imported:
            for i in range(3):
                for side in "kv":
                    stored = file[f"portable/layers/{i:03}/shared/{side}_rotation"][0]
                    found = tensors[f"blk.{i}.attn_{side}_rot.weight"]
                    np.testing.assert_array_equal(found, stored.T)
                    self.assertGreater(np.abs(stored - stored.T).max(), .1)
                    for head in imported[f"layers/{i:03}/{side}_rotation"][()]:
                        np.testing.assert_array_equal(head, stored)

    def test_the_tensors_go_into_a_copy_of_the_model_of_any_quantization(self):
        bundle, base = self.calibrate("--no-statistics", "--search", "off"), self.folder / "m.gguf"
        config = QWEN3_MINI | {"head_dim": D}
        write_model(base, config, qwen3_tensors(config), lambda _: Type.Q8_0, np.random.default_rng(0),
                    metadata=lambda writer: writer.add_name("kept"))
        out, export = self.folder / "in", ["export", bundle, "--for", "gguf-rot", "--reduce", "-o"]
        self.run_ok("oscar-bundle", *export, out, "--base", base)
        self.run_ok("oscar-bundle", "verify", out, "--for", "gguf-rot")
        self.run_ok("oscar-bundle", *export, self.folder / "alone")
        model, copy, alone = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (
            base, out / "rotations.gguf", self.folder / "alone" / "rotations.gguf"))
        self.assertEqual(list(copy), [*model, *alone])
        for name, tensor in (model | alone).items():
            self.assertEqual(copy[name].tensor_type, tensor.tensor_type)
            self.assertEqual(copy[name].data.tobytes(), tensor.data.tobytes(), name)
        self.assertEqual(gguf.GGUFReader(out / "rotations.gguf").fields["general.name"].contents(), "kept")
        self.assertIn("-m rotations.gguf", (out / "README.md").read_text())
        never = self.folder / "never"
        self.refuse("oscar-bundle", [*export, never, "--base", out / "rotations.gguf"], "one of this name")
        self.refuse("oscar-bundle", [*export, never, "--base", self.corpus], "not a GGUF file")
        self.refuse("oscar-bundle", ["export", bundle, "--for", "mlx", "--reduce", "-o", never, "--base", base],
                    "only gguf-rot")
        tensors, keys = qwen3_tensors(config), [f"model.layers.{i}.self_attn.{k}_proj.weight" for i in range(3) for k in "qkvo"]
        rng = np.random.default_rng(1)
        moved = tensors | {k: tensors[k] * (1 + .2 * rng.standard_normal(tensors[k].shape)).astype(np.float32) for k in keys}
        for kind, weights, words in ((Type.Q8_0, qwen3_tensors(config, seed=1), ["holds other weights", "sampled entries", "oscar-calibrate takes"]),
                                     (Type.F16, moved, ["holds other weights"]), (Type.F16, tensors, None), (Type.Q4_0, tensors, None),
                                     (Type.Q8_0, moved, [])):
            with self.subTest(kind.name):
                write_model(base, config, weights, lambda _, kind=kind: kind, np.random.default_rng(0))
                if words:
                    self.refuse("oscar-bundle", [*export, never, "--base", base], *words)
                    continue
                said = self.run_ok("oscar-bundle", *export, self.folder / f"of{kind.name}", "--base", base).stderr
                shutil.rmtree(self.folder / f"of{kind.name}")
                self.assertEqual("A fine-tune needs a calibration of its own" in " ".join(said.split()), words == [], said)
        smaller = config | {"num_hidden_layers": 2}
        write_model(base, smaller, qwen3_tensors(smaller), lambda _: Type.F16, np.random.default_rng(0))
        self.refuse("oscar-bundle", [*export, never, "--base", base], "another shape", "block_count")
        write_model(base, config | {"model_type": "llama"}, qwen3_tensors(config), lambda _: Type.F16,
                    np.random.default_rng(0))
        self.refuse("oscar-bundle", [*export, never, "--base", base], "another architecture")

    def test_another_head_dim_is_refused(self):
        self.model = self.folder / "model"  # 64
        bundle = self.calibrate("--no-statistics", "--search", "off")
        self.refuse("oscar-bundle", ["export", bundle, "--for", "gguf-rot", "--reduce", "-o",
                                     self.folder / "never"], "does not take head_dim 64")


if __name__ == "__main__":
    unittest.main()
