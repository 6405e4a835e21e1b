#!/usr/bin/env python3
"""The forward pass and its statistics against transformers, on random checkpoints of every family.

Each model is written with both styles of config.json; tolerances: mean NLL 1e-5 relative, logits
1e-4 of max |logit|, every moment and sum of every layer and head 1e-5 relative (Frobenius). Then
deliberate mistakes are made on the reference side, and the same comparison must fail.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from forward_runs import PROGRAM, compare, ours, reference
from random_families import CASES, LLAMA3, YARN, make_weights, write_checkpoint

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

SEQUENCES, TOKENS = 3, 257


class Checkpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(2)
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.ids = torch.randint(0, 512, (SEQUENCES, TOKENS),
                                generator=torch.Generator().manual_seed(7))
        cls.worst = {}

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)
        if cls.worst:
            name, figure = max(cls.worst.items(), key=lambda kv: kv[1])
            print(f"worst figure: {name}, {figure:.2f} of its bound", file=sys.stderr)

    def checkpoint(self, name, style, **options):
        folder = self.folder / f"{name}_{style}_{len(list(self.folder.iterdir()))}"
        write_checkpoint(folder, CASES[name], style, None)
        write_checkpoint(folder, CASES[name], style, make_weights(folder, seed=11), **options)
        return folder


class Forward(Checkpoints):
    def agree(self, folder, label, **options):
        bad, figures = compare(ours(folder, self.ids, **options), reference(folder, self.ids),
                               self.ids)
        self.worst.update({f"{label} {k}": v for k, v in figures.items()})
        self.assertEqual(bad, [], label)

    def test_every_family_agrees_in_both_config_styles(self):
        for name in CASES:
            for style in (4, 5):
                with self.subTest(model=name, style=style):
                    self.agree(self.checkpoint(name, style), f"{name} v{style}")

    def test_16_bit_and_sharded_weights_agree(self):
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                self.agree(self.checkpoint("qwen3", 5, dtype=dtype), f"{dtype}")
        self.agree(self.checkpoint("llama", 5, shards=3), "3 shards")

    def test_rope_scaling_option_equals_the_same_scaling_in_the_file(self):
        plain, scaled = self.checkpoint("qwen2", 4), self.checkpoint("qwen2_yarn", 4)
        (scaled / "model.safetensors").unlink()
        shutil.copy(plain / "model.safetensors", scaled / "model.safetensors")
        a = ours(plain, self.ids, rope_scaling=json.dumps(YARN))
        bad, _ = compare(a, ours(scaled, self.ids), self.ids)
        self.assertEqual(bad, [])
        bad, _ = compare(a, ours(plain, self.ids), self.ids)
        self.assertNotEqual(bad, [], "the option changed nothing")


class Configs(unittest.TestCase):
    """config.json as we read it, beside the same file read by transformers."""

    def understood(self, config):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            result = subprocess.run([PROGRAM, "config", path], capture_output=True, text=True,
                                    check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            return json.loads(result.stdout), AutoConfig.from_pretrained(folder)

    def check(self, config):
        got, theirs = self.understood(config)
        for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size",
                    "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
                    "tie_word_embeddings", "bos_token_id"):
            self.assertEqual(got[key], getattr(theirs, key), key)
        head_dim = getattr(theirs, "head_dim", None)
        self.assertEqual(got["head_dim"],
                         head_dim or theirs.hidden_size // theirs.num_attention_heads)
        eos = theirs.eos_token_id
        self.assertEqual(got["eos_token_ids"],
                         [] if eos is None else eos if isinstance(eos, list) else [eos])
        model_type = theirs.model_type
        sliding = [kind == "sliding_attention" for kind in theirs.layer_types] \
            if model_type.startswith("qwen") \
            else [getattr(theirs, "sliding_window", None) is not None] * got["num_hidden_layers"]
        self.assertEqual(got["sliding_layers"], sliding)
        if any(sliding):
            self.assertEqual(got["sliding_window"], theirs.sliding_window)
        rotary = type(theirs).__name__.replace("Config", "RotaryEmbedding")
        module = sys.modules[f"transformers.models.{model_type}.modeling_{model_type}"]
        rope = getattr(module, rotary)(theirs)
        # transformers computes in float32; 2e-6 covers its powers and divisions.
        np.testing.assert_allclose(got["inv_freq"], rope.inv_freq.numpy(), rtol=2e-6)
        self.assertAlmostEqual(got["attention_factor"], rope.attention_scaling, places=12)

    def test_absent_keys_take_the_defaults_of_transformers(self):
        for name in ("Qwen3", "Qwen2", "Llama", "Mistral"):
            __import__(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
            with self.subTest(family=name):
                self.check({"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]})
                # Null differs from absent, but transformers' Mistral takes no null here.
                heads = {} if name == "Mistral" else {"num_key_value_heads": None}
                self.check({"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"],
                            "num_attention_heads": 16, "hidden_size": 2048, **heads})

    def test_rope_and_windows_of_shipped_configurations_are_understood(self):
        def released(name, **keys):
            return {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"], **keys}
        self.check(released("Llama", rope_theta=500000.0, max_position_embeddings=131072,
                            num_key_value_heads=8, rope_scaling=dict(
                                LLAMA3, original_max_position_embeddings=8192)))
        self.check(released("Qwen2", rope_theta=1e6, num_attention_heads=32, hidden_size=4096,
                            rope_scaling={"type": "yarn", "factor": 4.0,
                                          "original_max_position_embeddings": 32768}))
        self.check(released("Qwen3", rope_parameters=dict(YARN, rope_theta=1e6, factor=2.0,
                                                          original_max_position_embeddings=40960)))
        self.check(released("Qwen2", use_sliding_window=True, max_window_layers=5))
        self.check(released("Qwen2", use_sliding_window=False, sliding_window=131072,
                            max_window_layers=5))
        self.check(released("Mistral", sliding_window=None, rope_theta=1e6))


def zero_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.data.zero_()


def scale_eps(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 10


def rope_changed(**keys):
    def change(config):
        config.rope_parameters = {**config.rope_parameters, **keys}
    return change


def window_plus_one(config):
    config.sliding_window += 1


def last_layer_full(config):
    config.layer_types = config.layer_types[:-1] + ["full_attention"]


MISTAKES = {
    "rope off by one position": ("qwen3", dict(shift=1)),
    "query heads read the wrong KV head": ("qwen3", dict(permute=True)),
    "window one token too wide": ("mistral_window", dict(config=window_plus_one)),
    "window one token too wide in some layers": ("qwen2_windows", dict(config=window_plus_one)),
    "a sliding layer run as full": ("qwen2_windows", dict(config=last_layer_full)),
    "key bias lost": ("qwen2", dict(model=zero_biases)),
    "norm epsilon ten times too large": ("mistral_window", dict(model=scale_eps)),
    "llama3 factor ignored": ("llama3_biases", dict(config=rope_changed(factor=1.0))),
    "linear factor ignored": ("llama_linear", dict(config=rope_changed(factor=1.0))),
    "yarn attention factor ignored": ("qwen2_yarn",
                                      dict(config=rope_changed(attention_factor=1.0))),
    "yarn ramp not rounded outwards": ("qwen2_yarn", dict(config=rope_changed(truncate=False))),
    "rope theta left at its default": ("qwen3", dict(config=rope_changed(rope_theta=1e4))),
}


class DeliberateMistakes(Checkpoints):
    """Each mistake, made on the reference side, breaks the comparison that passes without it."""

    def test_each_mistake_is_caught(self):
        cache = {}
        for label, (name, mistake) in MISTAKES.items():
            with self.subTest(mistake=label):
                if name not in cache:
                    folder = self.checkpoint(name, 5)
                    cache[name] = folder, ours(folder, self.ids)
                folder, run = cache[name]
                bad, _ = compare(run, reference(folder, self.ids, mistake), self.ids)
                self.assertNotEqual(bad, [], f"not caught: {label}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
