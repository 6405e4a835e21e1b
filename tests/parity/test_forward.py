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


def setUpModule():
    torch.set_num_threads(2)
    Checkpoints.folder = pathlib.Path(tempfile.mkdtemp())


def tearDownModule():
    shutil.rmtree(Checkpoints.folder)


class Checkpoints(unittest.TestCase):
    """One folder for all classes. What is run without changes is run once."""

    folder, made = pathlib.Path(), {}

    @classmethod
    def setUpClass(cls):
        cls.ids = torch.randint(0, 512, (SEQUENCES, TOKENS),
                                generator=torch.Generator().manual_seed(7))
        cls.worst = {}

    @classmethod
    def tearDownClass(cls):
        if cls.worst:
            name, figure = max(cls.worst.items(), key=lambda kv: kv[1])
            print(f"worst figure: {name}, {figure:.2f} of its bound", file=sys.stderr)

    def checkpoint(self, name, style, **options):
        folder = self.folder / f"{name}_{style}_{len(list(self.folder.iterdir()))}"
        write_checkpoint(folder, CASES[name], style, None)
        write_checkpoint(folder, CASES[name], style, make_weights(folder, seed=11), **options)
        return folder

    def plain(self, name, style):
        """The folder of a family's checkpoint, and our run of it."""
        if (name, style) not in self.made:
            folder = self.checkpoint(name, style)
            self.made[name, style] = folder, ours(folder, self.ids)
        return self.made[name, style]


class Forward(Checkpoints):
    def agree(self, folder, run, label):
        bad, figures = compare(run, reference(folder, self.ids), self.ids)
        self.worst.update({f"{label} {k}": v for k, v in figures.items()})
        self.assertEqual(bad, [], label)

    def test_every_family_agrees_in_both_config_styles(self):
        for name in CASES:
            for style in CASES[name]["styles"]:
                with self.subTest(model=name, style=style):
                    self.agree(*self.plain(name, style), f"{name} v{style}")

    def test_16_bit_and_sharded_weights_agree(self):
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                folder = self.checkpoint("qwen3", 5, dtype=dtype)
                self.agree(folder, ours(folder, self.ids), f"{dtype}")
        folder = self.checkpoint("llama", 5, shards=3)
        self.agree(folder, ours(folder, self.ids), "3 shards")

    def test_rope_scaling_option_equals_the_same_scaling_in_the_file(self):
        plain, scaled = self.plain("qwen2", 4)[0], self.checkpoint("qwen2_yarn", 4)
        (scaled / "model.safetensors").unlink()
        shutil.copy(plain / "model.safetensors", scaled / "model.safetensors")
        a = ours(plain, self.ids, rope_scaling=json.dumps(YARN))
        bad, _ = compare(a, ours(scaled, self.ids), self.ids)
        self.assertEqual(bad, [])
        bad, _ = compare(a, self.plain("qwen2", 4)[1], self.ids)
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

    @staticmethod
    def has_experts(config, layer):
        """Of transformers' config, as its decoder layers decide."""
        if config.model_type == "glm4_moe":
            return layer >= config.first_k_dense_replace
        if config.model_type == "hy_v3":
            return config.mlp_layer_types[layer] == "sparse"
        if config.model_type == "minimax_m2":
            return True
        return (config.model_type == "qwen3_moe" and layer not in config.mlp_only_layers
                and (layer + 1) % config.decoder_sparse_step == 0)

    def check(self, config):
        got, theirs = self.understood(config)
        for key in ("num_hidden_layers", "hidden_size", "vocab_size",
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
        gemma = model_type == "gemma3_text"
        sliding = [kind == "sliding_attention" for kind in theirs.layer_types] \
            if model_type in ("qwen2", "qwen3", "gemma3_text") \
            else [getattr(theirs, "sliding_window", None) is not None] * got["num_hidden_layers"]
        self.assertEqual([layer["sliding_window"] for layer in got["layers"]],
                         [theirs.sliding_window if slides else 0 for slides in sliding])
        for i, layer in enumerate(got["layers"]):
            width = theirs.intermediate_size
            if self.has_experts(theirs, i):
                own = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
                shared = getattr(theirs, "n_shared_experts", getattr(theirs, "num_shared_experts", 0))
                width = shared * own
                self.assertEqual(layer["moe_intermediate_size"], own)
                self.assertEqual(layer["num_experts_per_tok"], theirs.num_experts_per_tok)
                self.assertEqual(layer["num_experts"], theirs.num_local_experts)
            self.assertEqual(("num_experts" in layer, layer["intermediate_size"]),
                             (self.has_experts(theirs, i), width))
        self.assertEqual([layer["local"] for layer in got["layers"]],
                         [gemma and slides for slides in sliding])
        scalar = theirs.query_pre_attn_scalar if gemma else got["head_dim"]
        self.assertAlmostEqual(got["sm_scale"], scalar ** -0.5, places=15)
        rotary = type(theirs).__name__.replace("Config", "RotaryEmbedding").replace("Text", "")
        package = model_type.removesuffix("_text")
        module = sys.modules[f"transformers.models.{package}.modeling_{package}"]
        rope = getattr(module, rotary)(theirs)
        # transformers computes in float32; 2e-6 covers its powers and divisions.
        if gemma:
            for key, kind in (("inv_freq", "full"), ("local_inv_freq", "sliding")):
                np.testing.assert_allclose(got[key], getattr(rope, f"{kind}_attention_inv_freq"),
                                           rtol=2e-6)
            return
        self.assertIsNone(got["local_inv_freq"])
        np.testing.assert_allclose(got["inv_freq"], rope.inv_freq.numpy(), rtol=2e-6)
        self.assertAlmostEqual(got["attention_factor"], rope.attention_scaling, places=12)

    def test_absent_keys_take_the_defaults_of_transformers(self):
        for name, kind in (("Qwen3", "qwen3"), ("Qwen2", "qwen2"), ("Llama", "llama"),
                           ("Mistral", "mistral"), ("Qwen3Moe", "qwen3_moe"),
                           ("Glm4Moe", "glm4_moe"), ("Gemma3", "gemma3_text"), ("Phi3", "phi3"),
                           ("SeedOss", "seed_oss"), ("HYV3", "hy_v3"),
                           ("MiniMaxM2", "minimax_m2")):
            package = kind.removesuffix("_text")
            __import__(f"transformers.models.{package}.modeling_{package}")
            with self.subTest(family=name):
                # transformers' GLM needs a head_dim where the width has no share for each head.
                size = {"head_dim": 128} if name == "Glm4Moe" else {}
                self.check({"model_type": kind, "architectures": [f"{name}ForCausalLM"], **size})
                # Null differs from absent, but transformers' Mistral takes no null here.
                heads = {"num_key_value_heads": None} if name in ("Qwen3", "Qwen2", "Llama") else {}
                self.check({"model_type": kind, "architectures": [f"{name}ForCausalLM"],
                            "num_attention_heads": 16, "hidden_size": 2048, **heads})

    def test_rope_and_windows_of_shipped_configurations_are_understood(self):
        def released(name, **keys):
            kind = {"Qwen3Moe": "qwen3_moe", "Glm4Moe": "glm4_moe",
                    "Gemma3": "gemma3_text"}.get(name, name.lower())
            return {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **keys}
        # As published, which leaves the kinds of layers to the pattern.
        self.check(released("Gemma3", num_hidden_layers=26, hidden_size=1152, head_dim=256,
                            num_attention_heads=4, num_key_value_heads=1, intermediate_size=6912,
                            attn_logit_softcapping=None, cache_implementation="hybrid",
                            eos_token_id=[1, 106], query_pre_attn_scalar=256, rope_scaling=None,
                            rope_local_base_freq=10000, rope_theta=1000000, sliding_window=512,
                            sliding_window_pattern=6, max_position_embeddings=32768))
        self.check(released("Qwen3Moe", num_experts=128, num_experts_per_tok=8, head_dim=128,
                            norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
                            moe_intermediate_size=768, max_window_layers=48, sliding_window=None,
                            num_hidden_layers=48, rope_theta=1e6, output_router_logits=False,
                            router_aux_loss_coef=0.001))
        self.check(released("Glm4Moe", attention_bias=True, head_dim=128, hidden_size=5120,
                            first_k_dense_replace=3, n_routed_experts=160, num_hidden_layers=92,
                            num_nextn_predict_layers=1, partial_rotary_factor=0.5,
                            rope_theta=1e6, routed_scaling_factor=2.5, use_qk_norm=True))
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


def norms_without_one(model):
    """All norms times their weights as the file has them, in place of 1 + those."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def embeddings_unscaled(model):
    model.model.embed_tokens.embed_scale.fill_(1.0)


def embeddings_scaled_in_bf16(model):
    scale = model.model.embed_tokens.embed_scale
    scale.copy_(scale.bfloat16())


def norms_lost(name):
    def change(model):
        for layer in model.model.layers:
            getattr(layer, name).forward = lambda x: x
    return change


def rope_of_layers(kind, **keys):
    def change(config):
        config.rope_parameters[f"{kind}_attention"].update(keys)
    return change


def gelu_exact(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


def first_layer_full(config):
    config.layer_types = ["full_attention"] + config.layer_types[1:]


def scale_of_head_dim(config):
    config.query_pre_attn_scalar = config.head_dim


def window_minus_one(config):
    config.sliding_window -= 1


def without_shared_expert(model):
    for layer in model.model.layers:
        if hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts.down_proj.weight.data.zero_()


def rerouted(change):
    """Changes what the router of the last layer returns: the weights and the experts chosen."""
    def install(model):
        router = model.model.layers[-1].mlp.gate

        def hook(_, inputs, output):
            return (output[0], *change(router, inputs[0].reshape(-1, router.hidden_dim), *output[1:]))
        router.register_forward_hook(hook)
    return install


def bias_in_the_weights(router, x, weights, experts):
    scores = (x @ router.weight.T).sigmoid() + router.e_score_correction_bias
    chosen = scores.gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * router.routed_scaling_factor, experts


def bias_not_in_the_choice(model):
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()


def one_token_astray(_, x, weights, experts):
    """One choice of one token: the expert after the one that was chosen and not chosen itself."""
    chosen = experts[100].tolist()
    experts = experts.clone()
    experts[100, 0] = next(e for e in range(8) if e not in chosen)
    return weights, experts


def unnormalized(router, x, weights, experts):
    scores = (x @ router.weight.T).softmax(-1)
    return scores.gather(1, experts), experts


def routers(name, value):
    def change(model):
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                assert hasattr(layer.mlp.gate, name)
                setattr(layer.mlp.gate, name, value)
    return change


def queries_unscaled(config):
    config.rope_parameters["llama_4_scaling_beta"] = 0.0


def norm_of_each_head(model):
    """A norm over each head of q in place of one over all of them."""
    for layer in model.model.layers:
        norm, heads = layer.self_attn.q_norm, model.config.num_attention_heads

        def forward(x, norm=norm, heads=heads):
            rows = x.unflatten(-1, (heads, -1))
            rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return rows.flatten(-2) * norm.weight
        norm.forward = forward


def halves_swapped(name):
    """Of a tensor that holds two matrices."""
    def change(model):
        for layer in model.model.layers:
            weight = layer.get_submodule(name).weight.data
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))
    return change


def keys_and_values_swapped(model):
    for layer in model.model.layers:
        attention = layer.self_attn
        weight, heads = attention.qkv_proj.weight.data, model.config.num_key_value_heads
        rows = heads * attention.head_dim
        q, k, v = weight[:-2 * rows], weight[-2 * rows:-rows], weight[-rows:]
        weight.copy_(torch.cat((q, v, k)))


def output_biases_lost(model):
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()


MISTAKES = {
    "queries not scaled by position": ("ministral3", dict(config=queries_unscaled)),
    "a norm of each head in place of all": ("minimax_m2", dict(model=norm_of_each_head)),
    "the whole head turned, of a part": ("minimax_m2",
                                         dict(config=rope_changed(partial_rotary_factor=1.0))),
    "bias of the choice lost, without sets": ("minimax_m2", dict(model=bias_not_in_the_choice)),
    "gate and up swapped": ("phi3", dict(model=halves_swapped("mlp.gate_up_proj"))),
    "keys and values swapped": ("phi3", dict(model=keys_and_values_swapped)),
    "a bias of the output projection lost": ("seed_oss_out_bias", dict(model=output_biases_lost)),
    "scaling of experts lost": ("hy_v3", dict(model=routers("router_scaling_factor", 1.0))),
    "the shared expert of a wide model lost": ("hy_v3", dict(model=without_shared_expert)),
    "norm weights without the 1 that is added": ("gemma3", dict(model=norms_without_one)),
    "embedding scale lost": ("gemma3", dict(model=embeddings_unscaled)),
    "embedding scale rounded to another dtype": ("gemma3", dict(model=embeddings_scaled_in_bf16)),
    "norm behind attention lost": ("gemma3", dict(model=norms_lost("post_attention_layernorm"))),
    "norm before the MLP lost": ("gemma3", dict(model=norms_lost("pre_feedforward_layernorm"))),
    "norm behind the MLP lost": ("gemma3", dict(model=norms_lost("post_feedforward_layernorm"))),
    "local window one token too wide": ("gemma3", dict(config=window_plus_one)),
    "local window one token too narrow": ("gemma3_scaled", dict(config=window_minus_one)),
    "local RoPE base used for global layers":
        ("gemma3", dict(config=rope_of_layers("full", rope_theta=1e4))),
    "global RoPE base used for local layers":
        ("gemma3", dict(config=rope_of_layers("sliding", rope_theta=1e6))),
    "scaling of global layers lost":
        ("gemma3_scaled", dict(config=rope_of_layers("full", factor=1.0))),
    "local layers scaled like global ones":
        ("gemma3_scaled", dict(config=rope_of_layers("sliding", rope_type="linear", factor=8.0))),
    "a local layer run as global": ("gemma3", dict(config=first_layer_full)),
    "softmax scale of head_dim": ("gemma3_scaled", dict(config=scale_of_head_dim)),
    "gelu without its tanh": ("gemma3", dict(model=gelu_exact)),
    "bias of the choice in the weights": ("glm4_moe",
                                          dict(model=rerouted(bias_in_the_weights))),
    "bias of the choice lost": ("glm4_moe", dict(model=bias_not_in_the_choice)),
    "routed scaling lost": ("glm4_moe", dict(model=routers("routed_scaling_factor", 1.0))),
    "norm of the top k lost": ("glm4_moe", dict(model=routers("norm_topk_prob", False))),
    "norm of the top k lost after a softmax": ("qwen3_moe", dict(model=rerouted(unnormalized))),
    "norm of the top k made without being asked for":
        ("glm4_moe_sets", dict(model=routers("norm_topk_prob", True))),
    "shared expert lost": ("glm4_moe", dict(model=without_shared_expert)),
    "sets of experts ignored": ("glm4_moe_sets", dict(model=routers("topk_group", 4))),
    "one token of one layer sent to another expert": ("qwen3_moe",
                                                      dict(model=rerouted(one_token_astray))),
    "the whole head turned": ("glm4_moe", dict(config=rope_changed(partial_rotary_factor=1.0))),
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
        for label, (name, mistake) in MISTAKES.items():
            with self.subTest(mistake=label):
                folder, run = self.plain(name, 5)
                bad, _ = compare(run, reference(folder, self.ids, mistake), self.ids)
                self.assertNotEqual(bad, [], f"not caught: {label}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
