#!/usr/bin/env python3
"""Writes a checkpoint of random weights in the shape of a known model.

For timing and memory at real sizes without downloading anything: `oscar-calibrate` and
`oscar-eval` run it like any other. What it says means nothing.
"""
import argparse
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

import fp8_layouts

SHAPES = {  # hidden, intermediate, query heads, KV heads, head_dim
    "qwen3-8b": (4096, 12288, 32, 8, 128),
    "qwen3-32b": (5120, 25600, 64, 8, 128),
    "qwen3-30b-a3b": (2048, 6144, 32, 4, 128),
    "glm-4.7": (5120, 12288, 96, 8, 128),
    "tiny": (128, 192, 4, 2, 64),  # for trials of a pipeline
    "tiny-qwen3-moe": (128, 192, 4, 2, 64),
    "tiny-glm4-moe": (128, 192, 4, 2, 64),
}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
             "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
             "tie_word_embeddings": False}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
            "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False}
EXPERTS = {  # keys of config.json beside those of a dense model
    "qwen3-30b-a3b": {**QWEN3_MOE, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768},
    "glm-4.7": {**GLM4_MOE, "n_routed_experts": 160, "num_experts_per_tok": 8,
                "moe_intermediate_size": 1536, "first_k_dense_replace": 3},
    "tiny-qwen3-moe": {**QWEN3_MOE, "num_experts": 8, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 48},
    "tiny-glm4-moe": {**GLM4_MOE, "n_routed_experts": 8, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 48, "first_k_dense_replace": 1},
}


def config_of(shape, layers, vocab):
    hidden, intermediate, heads, kv_heads, head_dim = SHAPES[shape]
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_act": "silu",
        "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": 0,
        **EXPERTS.get(shape, {}),
    }


class RandomTensors:
    """The tensors of one checkpoint, part by part: of one seed, device and version of torch."""

    def __init__(self, config, seed, device):
        self.config, self.device = config, device
        self.random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random, device=self.device)

    def matrix(self, rows, columns):
        return (self.normal(rows, columns) * columns ** -0.5).to(torch.bfloat16)

    def ones(self, count):
        return torch.ones(count, dtype=torch.bfloat16, device=self.device)

    def mlp(self, name, width):
        hidden = self.config["hidden_size"]
        return {f"{name}.gate_proj": self.matrix(width, hidden),
                f"{name}.up_proj": self.matrix(width, hidden),
                f"{name}.down_proj": self.matrix(hidden, width)}

    def experts(self, count):
        width = self.config["moe_intermediate_size"]
        parts = {"mlp.gate": self.matrix(count, self.config["hidden_size"])}
        for i in range(count):
            parts |= self.mlp(f"mlp.experts.{i}", width)
        if "n_shared_experts" in self.config:
            parts |= self.mlp("mlp.shared_experts", width * self.config["n_shared_experts"])
        return parts

    def ends(self):
        """What is in no layer."""
        config = self.config
        tensors = {"model.embed_tokens.weight":
                       self.matrix(config["vocab_size"], config["hidden_size"]),
                   "model.norm.weight": self.ones(config["hidden_size"])}
        if not config["tie_word_embeddings"]:
            tensors["lm_head.weight"] = self.matrix(config["vocab_size"], config["hidden_size"])
        return tensors

    def layer(self, i):
        config, hidden, d = self.config, self.config["hidden_size"], self.config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        num_experts = config.get("num_experts", config.get("n_routed_experts", 0))
        with_experts = num_experts and i >= config.get("first_k_dense_replace", 0)
        tensors = {f"model.layers.{i}.{name}.weight": value for name, value in {
            "input_layernorm": self.ones(hidden),
            "post_attention_layernorm": self.ones(hidden),
            "self_attn.q_proj": self.matrix(heads * d, hidden),
            "self_attn.k_proj": self.matrix(kv_heads * d, hidden),
            "self_attn.v_proj": self.matrix(kv_heads * d, hidden),
            "self_attn.o_proj": self.matrix(hidden, heads * d),
            "self_attn.q_norm": self.ones(d),
            "self_attn.k_norm": self.ones(d),
            **(self.experts(num_experts) if with_experts
               else self.mlp("mlp", config["intermediate_size"]))}.items()}
        if config["attention_bias"]:
            tensors |= {f"model.layers.{i}.self_attn.{name}_proj.bias": self.matrix(1, n * d)[0]
                        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
        if "n_routed_experts" in config and with_experts:
            bias = f"model.layers.{i}.mlp.gate.e_score_correction_bias"
            tensors[bias] = 0.1 * self.normal(num_experts)
        return tensors


def write_shards(out, config, random, fp8):
    """One file for the ends and one for each layer, and their index: few of them lie in memory."""
    layers = config["num_hidden_layers"]
    weight_map, total = {}, 0
    for i in range(layers + 1):
        tensors = random.ends() if i == 0 else random.layer(i - 1)
        if fp8:
            tensors = fp8_layouts.store(tensors, fp8)
        name = f"model-{i + 1:05}-of-{layers + 1:05}.safetensors"
        save_file({key: value.cpu() for key, value in tensors.items()}, out / name)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--vocab", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where the numbers are drawn (default: a GPU if there is one)")
    parser.add_argument("--ids", type=int, default=0, metavar="N",
                        help="also write N random token ids to OUT/ids.npy")
    parser.add_argument("--fp8", choices=("block", "channel", "tensor"),
                        help="store the layers' matrices in FP8, with a scale for every 128 x 128, "
                             "a channel or a tensor")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = config_of(arguments.shape, arguments.layers, arguments.vocab)
    if arguments.fp8:
        config["quantization_config"] = fp8_layouts.quantization_config(arguments.fp8)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_shards(arguments.out, config, RandomTensors(config, arguments.seed, arguments.device),
                 arguments.fp8)
    if arguments.ids:
        import numpy
        ids = numpy.random.default_rng(arguments.seed).integers(1, arguments.vocab, arguments.ids)
        numpy.save(arguments.out / "ids.npy", ids.astype(numpy.int32))
    return 0


if __name__ == "__main__":
    sys.exit(main())
