#!/usr/bin/env python3
"""The forward pass and its statistics against transformers, on random checkpoints of every family.

Each model is written with both styles of config.json; tolerances: mean NLL 1e-5 relative, logits
1e-4 of max |logit|, every moment and sum of every layer and head 1e-5 relative (Frobenius). Then
deliberate mistakes are made on the reference side, and the same comparison must fail.
"""
import copy
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
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

PROGRAM = pathlib.Path(os.environ.get("OSCAR_BIN", "build-cpu/bin")) / "oscar-test-forward"
SEQUENCES, TOKENS = 3, 257
NLL_BOUND, LOGIT_BOUND, MOMENT_BOUND = 1e-5, 1e-4, 1e-5
NAMES = ("q", "k", "v", "o")

# Small, with a head_dim that is not hidden / heads where the family allows it.
SIZES = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, vocab_size=512, hidden_act="silu", rms_norm_eps=1e-6,
             initializer_range=0.02, attention_dropout=0.0, use_cache=True)


def family(model_type, rope=None, theta=10000.0, **keys):
    """A model: keys shared by both config styles, and its rope in neutral form."""
    architecture = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}
    return dict(model_type=model_type, rope=rope, theta=theta,
                keys={**SIZES, "model_type": model_type,
                      "architectures": [architecture[model_type] + "ForCausalLM"],
                      "bos_token_id": 1, "eos_token_id": 2, **keys})


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=128)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
CASES = {
    "qwen3": family("qwen3", theta=1e6, head_dim=32, max_position_embeddings=4096),
    "qwen3_bias_tied": family("qwen3", theta=1e6, head_dim=32, attention_bias=True,
                              tie_word_embeddings=True, max_position_embeddings=4096),
    "qwen2": family("qwen2", theta=1e6, max_position_embeddings=4096),
    "qwen2_windows": family("qwen2", use_sliding_window=True, sliding_window=64,
                            max_window_layers=2, max_position_embeddings=4096),
    "qwen2_yarn": family("qwen2", YARN, theta=1e6, max_position_embeddings=64),
    "llama": family("llama", theta=5e5, max_position_embeddings=4096),
    "llama3_biases": family("llama", LLAMA3, theta=5e5, attention_bias=True, mlp_bias=True,
                            max_position_embeddings=1024, eos_token_id=[2, 3]),
    "llama_linear": family("llama", dict(rope_type="linear", factor=2.0),
                           max_position_embeddings=2048),
    "llama_yarn_all_keys": family(
        "llama", dict(YARN, mscale=1.0, mscale_all_dim=0.5, beta_fast=16, beta_slow=2,
                      truncate=False), max_position_embeddings=256),
    "llama_yarn_attention_factor": family("llama", dict(YARN, attention_factor=1.3),
                                          max_position_embeddings=256),
    "mistral_window": family("mistral", sliding_window=64, head_dim=32, rms_norm_eps=1e-5,
                             max_position_embeddings=4096),
    "mistral_default_window": family("mistral", max_position_embeddings=8192),
    "mistral_full": family("mistral", sliding_window=None, max_position_embeddings=4096),
}


def config_json(case, style):
    """config.json as transformers 4 or 5 writes it."""
    config = copy.deepcopy(case["keys"])
    if style == 4:
        config.update(torch_dtype="float32", transformers_version="4.51.0",
                      rope_theta=case["theta"])
        config["rope_scaling"] = None
        if case["rope"]:
            scaling = dict(case["rope"])
            if scaling["rope_type"] == "yarn":  # older files say "type"
                scaling["type"] = scaling.pop("rope_type")
            config["rope_scaling"] = scaling
    else:
        config.update(dtype="float32", transformers_version="5.0.0")
        config["rope_parameters"] = {**(case["rope"] or {"rope_type": "default"}),
                                     "rope_theta": case["theta"]}
    return config


def make_weights(folder, seed):
    """Random weights with outliers in the norms of q and k and biases that matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.copy_(torch.exp(torch.randn_like(parameter) * 0.3))
                if "q_norm" in name or "k_norm" in name:
                    parameter[::7] *= 6.0
            else:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    state = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def write_checkpoint(folder, case, style, state, dtype=torch.float32, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(case, style), indent=2))
    if state is None:
        return
    state = {k: v.to(dtype) for k, v in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(state), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: state[n] for n in names[i::shards]}, folder / file)
        weight_map.update({n: file for n in names[i::shards]})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}))


class Recorder:
    """Takes q, k, v, o of every layer where transformers computes attention."""

    def __init__(self):
        self.layers, self.permute_kv = {}, False

    def __call__(self, module, q, k, v, mask, scaling, **kwargs):
        group = q.shape[1] // k.shape[1]
        keys, values = (x.flip(1) if self.permute_kv else x for x in (k, v))
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        allowed = causal if mask is None else (mask if mask.dtype == torch.bool else mask == 0)
        scores = (q @ keys.transpose(2, 3) * scaling).masked_fill(~allowed, float("-inf"))
        o = scores.softmax(-1) @ values
        self.layers[module.layer_idx] = (q, k, v, o)
        return o.transpose(1, 2).contiguous(), None


RECORDER = Recorder()
AttentionInterface.register("oscar_recorder", RECORDER)
try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    ALL_MASK_ATTENTION_FUNCTIONS.register("oscar_recorder",
                                          ALL_MASK_ATTENTION_FUNCTIONS["eager"])
except ImportError:
    pass


def sums(x, kv_heads):
    """fp64 moments and sums per KV head of x [batch, heads, tokens, d]."""
    rows = x.double().reshape(x.shape[0], kv_heads, -1, x.shape[-1]).transpose(0, 1)
    rows = rows.reshape(kv_heads, -1, x.shape[-1])
    return rows.transpose(1, 2) @ rows, rows.sum(1)


def reference(folder, ids, mistake=None):
    """transformers' logits and statistics; `mistake` changes the model or its inputs first."""
    config = AutoConfig.from_pretrained(folder)
    position_ids = torch.arange(ids.shape[1])[None].expand(ids.shape)
    if mistake and mistake.get("config"):
        mistake["config"](config)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="oscar_recorder").eval()
    if mistake and mistake.get("model"):
        mistake["model"](model)
    position_ids = position_ids + (mistake or {}).get("shift", 0)
    RECORDER.layers, RECORDER.permute_kv = {}, bool(mistake and mistake.get("permute"))
    with torch.inference_mode():
        logits = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
    layers = []
    for i in sorted(RECORDER.layers):
        record = RECORDER.layers[i]
        heads, d = record[1].shape[1], record[1].shape[3]
        w = model.model.layers[i].self_attn.o_proj.weight.double()
        slices = w.reshape(w.shape[0], heads, -1, d)
        metric = torch.einsum("nhjd,nhje->hde", slices, slices)
        layers.append(dict(sums={n: sums(x, heads) for n, x in zip(NAMES, record)}, metric=metric))
    return logits, layers


def ours(folder, ids, dtype="fp32", rope_scaling=None):
    with tempfile.TemporaryDirectory() as out:
        out = pathlib.Path(out)
        ids.numpy().astype(np.int64).tofile(out / "ids")
        command = [PROGRAM, "run", folder, out / "ids", str(ids.shape[1]), out, dtype]
        result = subprocess.run(command + ([rope_scaling] if rope_scaling else []),
                                capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
        config = json.loads((out / "config.json").read_text())
        logits = torch.from_numpy(np.fromfile(out / "logits.f32", np.float32)).reshape(
            *ids.shape, config["vocab_size"])
        heads, d = config["num_key_value_heads"], config["head_dim"]
        layers = []
        for i in range(config["num_hidden_layers"]):
            flat = torch.from_numpy(np.fromfile(out / f"layer{i}.f64", np.float64))
            matrices = flat[:5 * heads * d * d].reshape(5, heads, d, d)
            vectors = flat[5 * heads * d * d:].reshape(4, heads, d)
            layers.append(dict(sums={n: (matrices[j], vectors[j]) for j, n in enumerate(NAMES)},
                               metric=matrices[4]))
        return logits, layers


def mean_nll(logits, ids):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten()).item()


def relative(ours_, theirs):
    """Largest relative Frobenius error over heads."""
    difference = (ours_ - theirs).flatten(1).norm(dim=1)
    return (difference / theirs.flatten(1).norm(dim=1).clamp_min(1e-300)).max().item()


def compare(a, b, ids):
    """Violations of the bounds, as text; empty when everything agrees. Also the worst figures."""
    nll_a, nll_b = mean_nll(a[0], ids), mean_nll(b[0], ids)
    figures = {"nll": abs(nll_a - nll_b) / nll_b / NLL_BOUND,
               "logits": ((a[0] - b[0]).abs().max() / b[0].abs().max()).item() / LOGIT_BOUND}
    for i, (x, y) in enumerate(zip(a[1], b[1], strict=True)):
        for name in NAMES:
            for j, kind in enumerate(("moment", "sum")):
                figures[f"layer {i} {name} {kind}"] = relative(
                    x["sums"][name][j], y["sums"][name][j]) / MOMENT_BOUND
        figures[f"layer {i} M_O"] = relative(x["metric"], y["metric"]) / 1e-12
    bad = [f"{k}: {v:.3g} times the bound" for k, v in figures.items() if not v <= 1]
    return bad, figures


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
