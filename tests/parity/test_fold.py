#!/usr/bin/env python3
"""oscar-bundle fold against transformers: a folded checkpoint is an ordinary one; its logits stay.

Checkpoints are float32, with random weights of families that set their biases differently, and
tiny-gqa widened to float32; bundles hold balanced, centered values. v_proj and o_proj are rounded
once more, so that logits move as they do between two orders of float32 sums: 1e-6 to 5e-6 of the
largest one. A wrong matrix in one layer moves them by about 1.
"""
import json
import os
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import h5py
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from bundle.verify_bundle import datasets_of
from support.checkpoints import byte_tokenizer, sample_text
from support.programs import SOURCE, ProgramTest
from tiny_transformers import random_ids, tiny_model

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

LOGIT_BOUND = 3e-5
# Relative. A row that float32 rounding moves over a threshold between two codes takes its own
# error; on four drawings of 2,048 tokens (--seed 0 to 3): 7e-4, 6e-4, 3e-5, 2e-4, and 1.4e-3 where
# a processor with other vector units adds in another order. Four times their root mean square.
KL_BOUND = 3e-3
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=260, rms_norm_eps=1e-6, hidden_act="silu",
             max_position_embeddings=512, rope_theta=1e4, torch_dtype="float32",
             bos_token_id=256, eos_token_id=256)
FAMILIES = {
    "qwen3": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=32),
    "qwen3_biases": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=32,
                         attention_bias=True),
    "qwen2": dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
    "llama_biases": dict(model_type="llama", architectures=["LlamaForCausalLM"],
                         attention_bias=True),
}


def make_model(folder, keys, shards=2):
    """A random float32 checkpoint in `shards` files, every tensor of it off its default."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | keys))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder),
                                             dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1 if "norm" in name else 0, 0.1 if tensor.dim() == 1 else 0.2)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file,
                  metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    byte_tokenizer(folder / "tokenizer.json")
    return folder


def widened_tiny_gqa(folder):
    """The embedded default with its weights in float32."""
    source = SOURCE / "datasets/tiny-gqa"
    folder.mkdir()
    for file in source.glob("*.json"):
        text = file.read_text()
        if file.name == "config.json":
            text = json.dumps(json.loads(text) | {"torch_dtype": "float32", "dtype": "float32"})
        (folder / file.name).write_text(text)
    for file in source.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            save_file({name: tensors.get_tensor(name).float() for name in tensors.keys()},
                      folder / file.name, metadata={"format": "pt"})
    return folder


def logits(folder, ids):
    whole = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def tensors_of(folder):
    result = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            result |= {name: (file.name, tensors.get_tensor(name)) for name in tensors.keys()}
    return result


class Fold(ProgramTest):
    def calibrate(self, model, corpus, *options):
        out = self.folder / f"{model.name}.h5"
        self.run_ok("oscar-calibrate", model, corpus, out, "--quiet", "--search", "off",
                    "--position-span", 0, *options)
        return out

    def fold(self, bundle, model, *options):
        out = self.folder / (model.name + "-folded")
        said = self.run_ok("oscar-bundle", "fold", bundle, model, out, *options).stdout
        return out, said

    def kl(self, model, bundle):
        report = self.folder / "report.json"
        self.run_ok("oscar-eval", model, "--bundle", bundle, "--compare", "bundle", "--corpus",
                    SOURCE / "datasets/tiny-gqa/heldout.jsonl", "--max-tokens",
                    2048, "--sequence-length", 1024, "--separators", "off", "--device", "cpu", "--json",
                    report, "--force", "--quiet")
        return json.loads(report.read_text())["methods"]["bundle"]["kl"]["mean"]

    def check_logits(self, model, folded, ids):
        expected, found = logits(model, ids), logits(folded, ids)
        change = (found - expected).abs().max() / expected.abs().max()
        self.assertLess(change, LOGIT_BOUND)
        self.assertGreater(change, 0)  # something was folded

    def corpus(self):
        path = self.folder / "corpus.txt"
        path.write_text("".join(sample_text(documents=60)))
        return path

    def test_logits_stay_in_every_family(self):
        ids = torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(1))
        corpus = self.corpus()
        for name, keys in FAMILIES.items():
            with self.subTest(name):
                model = make_model(self.folder / name, keys)
                bundle = self.calibrate(model, corpus, "--sequence-length", 256)
                folded, said = self.fold(bundle, model)
                self.check_logits(model, folded, ids)
                self.check_files(model, folded, with_biases=name.endswith("biases"))
                self.check_bundle(bundle, folded, with_biases=name.endswith("biases"))
                self.assertIn("folded into biases" if name.endswith("biases") else
                              "kept in the bundle", said)

    def saved(self, name, cases=None):
        """A tiny model as transformers saves it, and its bundle."""
        folder, ids = self.folder / name, self.folder / "ids.npy"
        tiny_model(name, cases).save_pretrained(folder)
        np.save(ids, random_ids(4, 120, 3).numpy().astype(np.int32))
        return folder, self.calibrate(folder, ids, "--sequence-length", 120, "--sink", 4,
                                      "--recent", 12)

    def test_a_whole_model_of_images_and_text_is_folded_in_place(self):
        model, bundle = self.saved("qwen3_vl whole")
        folded, _ = self.fold(bundle, model)
        self.check_logits(model, folded, random_ids(2, 60, 1))
        before, after = tensors_of(model), tensors_of(folded)
        self.assertEqual(set(before), set(after))
        changed = {name for name in before if not torch.equal(before[name][1], after[name][1])}
        self.assertEqual(changed, {name for name in before if "language_model" in name and
                                   name.endswith(("v_proj.weight", "o_proj.weight"))})

    def test_a_tensor_of_several_matrices_is_not_folded(self):
        model, bundle = self.saved("phi3", {"phi3": ("phi3", "Phi3", {})})
        self.refuse("oscar-bundle", ["fold", bundle, model, self.folder / "out"],
                    "several matrices", "qkv_proj")

    def check_files(self, model, folded, with_biases):
        """Names, shards, dtypes and shapes stay; only tensors of v_proj and o_proj change."""
        before, after = tensors_of(model), tensors_of(folded)
        self.assertEqual({n: (f, t.dtype, t.shape) for n, (f, t) in before.items()},
                         {n: (f, t.dtype, t.shape) for n, (f, t) in after.items()})
        changed = {n.split("self_attn.")[-1] for n in before
                   if not torch.equal(before[n][1], after[n][1])}
        weights = {"v_proj.weight", "o_proj.weight"}
        biases = {n.split("self_attn.")[-1] for n in before
                  if n.endswith(("v_proj.bias", "o_proj.bias"))}
        self.assertEqual(changed, weights | biases)
        for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            self.assertEqual((model / name).read_bytes(), (folded / name).read_bytes())
        self.assertTrue((folded / "oscar_fold.json").exists())
        if with_biases:
            self.assertIn("o_proj.bias", changed)

    def check_bundle(self, bundle, folded, with_biases):
        """Values have no transform of their own, keys are as they were, and rows come out alike."""
        rng = np.random.default_rng(0)
        with h5py.File(bundle) as old, h5py.File(folded / "oscar.h5") as new:
            self.assertNotIn("portable", new)
            before, after = datasets_of(old), datasets_of(new)
            for name in old["layers"]:
                a, b = old["layers"][name], new["layers"][name]
                for side in ("k_rotation", "q_rotation", "k_mean", "v_metric", "v_feedback"):
                    path = f"/layers/{name}/{side}"
                    np.testing.assert_array_equal(before[path], after[path])
                self.assertEqual(list(b["v_kind"]), [0, 0])
                self.assertNotIn(f"/layers/{name}/o_rotation", after)
                for head in range(2):
                    forward = a["v_rotation"][head].astype(np.float64)
                    np.testing.assert_array_equal(b["v_rotation"][head], np.eye(len(forward)))
                    v = rng.standard_normal((5, len(forward)))
                    mean = a["v_mean"][head].astype(np.float64)
                    self.assertGreater(np.abs(mean).max(), 0)
                    stored = (v - mean) @ forward  # what is quantized
                    served = v @ forward - (mean @ forward if with_biases else 0)
                    np.testing.assert_allclose(served - b["v_mean"][head], stored, rtol=1e-5,
                                               atol=1e-5 * np.abs(stored).max())
        self.assertIn("is sound",
                      self.run_ok("oscar-bundle", "verify", folded / "oscar.h5").stdout)

    def test_logits_of_tiny_gqa_stay(self):
        model = widened_tiny_gqa(self.folder / "tiny")
        corpus = SOURCE / "datasets/tiny-gqa/calibration.jsonl"
        bundle = self.calibrate(model, corpus, "--max-tokens", 4096, "--sequence-length", 1024)
        folded, _ = self.fold(bundle, model)
        ids = torch.randint(0, 8192, (1, 256), generator=torch.Generator().manual_seed(2))
        self.check_logits(model, folded, ids)
        # The INT2 cache holds the same rows, but for float32 rounding that moves a few codes.
        self.assertLess(abs(self.kl(folded, folded / "oscar.h5") / self.kl(model, bundle) - 1),
                        KL_BOUND)

    def test_what_cannot_be_done_is_refused(self):
        corpus = self.corpus()
        model = make_model(self.folder / "plain", FAMILIES["qwen3"])
        bundle = self.calibrate(model, corpus, "--sequence-length", 256)
        other = make_model(self.folder / "other", FAMILIES["llama_biases"])
        arguments = ["fold", bundle, model, self.folder / "out"]
        self.refuse("oscar-bundle", [*arguments, "--value-mean", "fold"],
                    "cannot be folded into this model", "o_proj")
        self.refuse("oscar-bundle", ["fold", bundle, other, self.folder / "out"],
                    "the bundle is of another model")
        self.refuse("oscar-bundle", ["fold", bundle, model, model], "exists already")
        folded, _ = self.fold(bundle, model, "--value-mean", "drop")
        with h5py.File(folded / "oscar.h5") as file:
            self.assertFalse(np.any(file["layers/000/v_mean"][()]))
        words = "values are not centered: fold --value-mean drop left their mean out"
        for command in (["inspect", folded / "oscar.h5"], ["card", folded / "oscar.h5", "-o", "-"]):
            said = " ".join(self.run_ok("oscar-bundle", *command).stdout.split()).replace("\\", "")
            self.assertEqual(said.count(words), 1, said)
        self.refuse("oscar-bundle", ["fold", bundle, folded, self.folder / "out"],
                    "the bundle is of another model")
        self.refuse("oscar-bundle", ["fold", folded / "oscar.h5", folded, self.folder / "out"],
                    "nothing to fold")


if __name__ == "__main__":
    unittest.main()
