"""Logits and statistics of one forward pass, by transformers and by ours, and their comparison."""
import json
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import torch
from transformers import (AttentionInterface, AutoConfig, AutoModelForCausalLM,
                          AutoModelForImageTextToText)

PROGRAM = pathlib.Path(os.environ.get("OSCAR_BIN", "build-cpu/bin")) / "oscar-test-forward"
NLL_BOUND, LOGIT_BOUND, MOMENT_BOUND = 1e-5, 1e-4, 1e-5
NAMES = ("q", "k", "v", "o")


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


def observe_gates(text):
    """What layers multiply outputs by, [batch, tokens, heads, d] by layer, once the model has run."""
    gates = {}
    for i, layer in enumerate(text.layers):
        attention = getattr(layer, "self_attn", None)
        projection = getattr(attention, "q_proj", None)
        if projection is None or projection.out_features == attention.o_proj.in_features:
            continue

        def hook(_, inputs, output, i=i, d=attention.head_dim):
            gates[i] = output.unflatten(-1, (-1, 2, d))[..., 1, :].sigmoid()
        projection.register_forward_hook(hook)
    return gates


def reference(folder, ids, mistake=None):
    """transformers' logits and statistics; `mistake` changes the model or its inputs first."""
    config = AutoConfig.from_pretrained(folder)
    position_ids = torch.arange(ids.shape[1])[None].expand(ids.shape)
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"
    if mistake and mistake.get("config"):
        mistake["config"](config)
    whole = hasattr(config, "vision_config")
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="oscar_recorder").eval()
    if mistake and mistake.get("model"):
        mistake["model"](model)
    position_ids = position_ids + (mistake or {}).get("shift", 0)
    RECORDER.layers, RECORDER.permute_kv = {}, bool(mistake and mistake.get("permute"))
    text = model.model.language_model if whole else model.model
    gates = observe_gates(text)
    with torch.inference_mode():
        logits = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
    layers = []
    for i in sorted(RECORDER.layers):
        record = RECORDER.layers[i]
        heads, d = record[1].shape[1], record[1].shape[3]
        w = text.layers[i].self_attn.o_proj.weight.double()
        slices = w.reshape(w.shape[0], heads, -1, d)
        squares = torch.einsum("nhjd,nhje->hjde", slices, slices)
        if i in gates:  # the mean over tokens (math 1.2)
            s = gates[i].double().flatten(0, 1)
            squares *= (torch.einsum("njd,nje->jde", s, s) / len(s)).view(squares.shape)
        layers.append(dict(sums={n: sums(x, heads) for n, x in zip(NAMES, record)},
                           metric=squares.sum(1), gated=i in gates))
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
        for i, layer in enumerate(config["layers"]):
            if layer["linear"]:
                continue
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


def compare(a, b, ids, logits=LOGIT_BOUND, moments=MOMENT_BOUND, sums=None):
    """Violations of the bounds, as text; empty when everything agrees. Also the worst figures. `sums`: the bound of sums of
    rows, in which signs cancel; None: that of moments."""
    nll_a, nll_b = mean_nll(a[0], ids), mean_nll(b[0], ids)
    figures = {"nll": abs(nll_a - nll_b) / nll_b / NLL_BOUND,
               "logits": ((a[0] - b[0]).abs().max() / b[0].abs().max()).item() / logits}
    for i, (x, y) in enumerate(zip(a[1], b[1], strict=True)):
        for name in NAMES:
            for j, kind in enumerate(("moment", "sum")):
                figures[f"layer {i} {name} {kind}"] = relative(
                    x["sums"][name][j], y["sums"][name][j]) / (moments if j == 0 else sums or moments)
        # Both are float64 products of the same weights; with gates also of the text.
        figures[f"layer {i} M_O"] = relative(x["metric"], y["metric"]) / (
            moments if y.get("gated") else 1e-12)
    bad = [f"{k}: {v:.3g} times the bound" for k, v in figures.items() if not v <= 1]
    return bad, figures
