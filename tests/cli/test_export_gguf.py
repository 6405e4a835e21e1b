"""oscar-bundle export --to gguf-rot, read by the gguf package, and import of such tensors."""
import unittest

import gguf
import h5py
import numpy as np

from support.checkpoints import QWEN3_MINI, qwen3_tensors, write_checkpoint
from support.exchange import manifest
from support.stacks import StackCase

D = 128  # llama.cpp's branch codes 128 values at a time


class Gguf(StackCase):
    def setUp(self):
        super().setUp()
        config = {"head_dim": D}
        self.model = write_checkpoint(self.folder / "wide", config,
                                      qwen3_tensors(QWEN3_MINI | config))

    def test_the_tensors_hold_transposes_and_become_a_bundle_again(self):
        bundle = self.calibrate("--no-statistics", "--search", "off")
        out = self.folder / "rot"
        self.refuse("oscar-bundle", ["export", bundle, "--to", "gguf-rot", "-o", out],
                    "own transforms", "error unknown")
        self.run_ok("oscar-bundle", "export", bundle, "--to", "gguf-rot", "--reduce", "-o", out)
        self.run_ok("oscar-bundle", "verify", out, "--stack", "gguf-rot")
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

    def test_another_head_dim_is_refused(self):
        self.model = self.folder / "model"  # 64
        bundle = self.calibrate("--no-statistics", "--search", "off")
        self.refuse("oscar-bundle", ["export", bundle, "--to", "gguf-rot", "--reduce", "-o",
                                     self.folder / "never"], "does not take head_dim 64")


if __name__ == "__main__":
    unittest.main()
