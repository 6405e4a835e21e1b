#!/usr/bin/env python3
"""benchmarks/make_random_checkpoint.py: transformers and the programs read the model that it writes."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.scripts import run_main

BIN = pathlib.Path(os.environ["OSCAR_BIN"])
SCRIPT = pathlib.Path(os.environ["OSCAR_SOURCE"]) / "benchmarks" / "make_random_checkpoint.py"
sys.path.insert(0, str(SCRIPT.parent))
TOKENS, SEQUENCE = 512, 128
# Layers of each; of Qwen3.5's only the last attends to all tokens.
FAMILIES = {"tiny-qwen3-moe": 2, "tiny-glm4-moe": 2, "tiny-qwen3.5": 4, "tiny-qwen3.5-moe": 4,
            "tiny-hy3": 2, "tiny-minimax-m2": 2}


class RandomCheckpoint(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.model = cls.write("model")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def write(cls, name, *options, shape="tiny"):
        out = cls.folder / name
        result = run_main(SCRIPT, out, "--shape", shape, "--layers", 2, "--vocab", 256, "--device", "cpu", "--ids", TOKENS,
                          *options)
        assert result.returncode == 0, result.stderr
        return out

    def run_program(self, name, *arguments):
        result = subprocess.run([BIN / name, *map(str, arguments)], capture_output=True, text=True,
                                timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def loss(self, folder, ids):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = torch.from_numpy(np.load(ids).astype(np.int64)).view(-1, SEQUENCE)
        with torch.no_grad():
            return model(rows, labels=rows).loss.item()

    def test_transformers_finds_every_weight_and_no_other(self):
        model, info = AutoModelForCausalLM.from_pretrained(self.model, output_loading_info=True)
        self.assertEqual({name: list(info[name]) for name in
                          ("missing_keys", "unexpected_keys", "mismatched_keys")},
                         {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []})
        self.assertEqual(model.config.num_hidden_layers, 2)
        self.assertEqual(tuple(model.model.layers[1].self_attn.k_proj.weight.shape), (2 * 64, 128))

    def test_the_programs_predict_what_transformers_predicts(self):
        ids = np.load(self.model / "ids.npy")
        self.assertEqual((ids.shape, ids.dtype), ((TOKENS,), np.int32))
        self.assertTrue(1 <= ids.min() and ids.max() < 256)
        report = self.folder / "report.json"
        self.run_program("oscar-eval", self.model, "--corpus", self.model / "ids.npy", "--compare",
                         "bf16", "--sequence-length", SEQUENCE, "--first-position", 1, "--device", "cpu",
                         "--dtype", "fp32", "--quiet", "--json", report)
        measured = json.loads(report.read_text())
        self.assertEqual(measured["tokens"], TOKENS - TOKENS // SEQUENCE)
        # The bound of the forward pass in fp32 (parity/test_forward.py).
        self.assertAlmostEqual(measured["methods"]["bf16"]["nll"]["mean"]
                               / self.loss(self.model, self.model / "ids.npy"), 1, delta=1e-5)

    def test_it_can_be_calibrated(self):
        out = self.folder / "statistics.h5"
        self.run_program("oscar-calibrate", self.model, self.model / "ids.npy", out, "--sequence-length",
                         SEQUENCE, "--statistics-only", "--device", "cpu", "--quiet")
        import h5py
        with h5py.File(out) as file:
            self.assertEqual(file["layers/001/statistics/count_kv"][()], TOKENS)

    def test_every_family_is_calibrated_verified_and_evaluated(self):
        for shape, layers in FAMILIES.items():
            with self.subTest(shape):
                model = self.write(shape, "--layers", layers, shape=shape)
                _, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
                self.assertFalse(any(map(list, (info["missing_keys"], info["unexpected_keys"]))), info)
                ids, bundle, report = model / "ids.npy", model / "b.h5", model / "report.json"
                self.run_program("oscar-calibrate", model, ids, bundle, "--sequence-length", SEQUENCE,
                                 "--recent", 32, "--sink", 4, "--search", "off", "--device", "cpu",
                                 "--dtype", "fp32", "--quiet")
                self.assertIn(f"{shape}/b.h5", self.run_program("oscar-bundle", "verify", bundle))
                self.run_program("oscar-eval", model, "--bundle", bundle, "--corpus", ids,
                                 "--compare", "bf16,bundle", "--sequence-length", SEQUENCE, "--first-position", 1,
                                 "--device", "cpu", "--dtype", "fp32", "--quiet", "--separators", "off",
                                 "--json", report)
                methods = json.loads(report.read_text())["methods"]
                self.assertTrue(0 < methods["bundle"]["kl"]["mean"] < 1, methods)
                # Nothing that transformers would compute otherwise.
                self.assertAlmostEqual(methods["bf16"]["nll"]["mean"] / self.loss(model, ids), 1, delta=1e-5)

    def test_stored_in_fp8_they_are_calibrated_too(self):
        for shape, layout in (("tiny-glm4-moe", "block"), ("tiny-qwen3.5", "block"), ("tiny-qwen3.5", "channel"),
                              ("tiny-qwen3.5-moe", "tensor"), ("tiny-hy3", "block"), ("tiny-minimax-m2", "block")):
            with self.subTest(shape, layout=layout):
                layers = FAMILIES[shape]
                model = self.write(f"{shape}-{layout}", "--layers", layers, "--fp8", layout, shape=shape)
                tensors = {}
                for i in (1, layers):
                    tensors |= load_file(model / f"model-{i + 1:05}-of-{layers + 1:05}.safetensors")
                plain = {name.removesuffix(".weight").split(".")[-1] for name, value in tensors.items()
                         if value.dtype == torch.bfloat16 and value.ndim > 1}
                small = {"in_proj_a", "in_proj_b", "conv1d"} if "qwen3.5" in shape else set()
                routers = {"gate"} if shape != "tiny-qwen3.5" else set()
                shared = {"shared_expert_gate"} if shape == "tiny-qwen3.5-moe" else set()
                self.assertEqual(plain, small | routers | shared)
                self.run_program("oscar-calibrate", model, model / "ids.npy", model / "s.h5", "--sequence-length",
                                 SEQUENCE, "--statistics-only", "--device", "cpu", "--quiet")

    def test_layers_that_all_forget_are_refused(self):
        result = subprocess.run([sys.executable, SCRIPT, self.folder / "none", "--shape", "tiny-qwen3.5",
                                 "--layers", "3", "--device", "cpu"], capture_output=True, text=True, timeout=300)
        self.assertEqual(result.returncode, 2)
        self.assertIn("only one of 4 layers of tiny-qwen3.5 attends to all tokens", result.stderr)

    def test_the_seed_decides_every_byte(self):
        again, other = self.write("again"), self.write("other", "--seed", 1)
        names = [path.name for path in self.model.glob("*.safetensors")] + ["ids.npy"]
        self.assertEqual(len(names), 4)  # the ends, two layers
        for name in names:
            self.assertEqual((again / name).read_bytes(), (self.model / name).read_bytes())
            self.assertNotEqual((other / name).read_bytes(), (self.model / name).read_bytes())

    def test_the_index_names_every_tensor(self):
        index = json.loads((self.model / "model.safetensors.index.json").read_text())
        held = {}
        for path in self.model.glob("*.safetensors"):
            held |= {name: path.name for name in load_file(path)}
        self.assertEqual(index["weight_map"], held)


if __name__ == "__main__":
    unittest.main()
