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


def tensors_of(config, seed):
    random = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config["head_dim"]
    num_experts = config.get("num_experts", config.get("n_routed_experts", 0))

    def matrix(rows, columns):
        values = torch.randn(rows, columns, generator=random) * columns ** -0.5
        return values.to(torch.bfloat16)

    def mlp(name, width):
        return {f"{name}.gate_proj": matrix(width, hidden), f"{name}.up_proj": matrix(width, hidden),
                f"{name}.down_proj": matrix(hidden, width)}

    def experts(count):
        width = config["moe_intermediate_size"]
        parts = {"mlp.gate": matrix(count, hidden)}
        for i in range(count):
            parts |= mlp(f"mlp.experts.{i}", width)
        if "n_shared_experts" in config:
            parts |= mlp("mlp.shared_experts", width * config["n_shared_experts"])
        return parts

    ones = torch.ones
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
               "model.norm.weight": ones(hidden, dtype=torch.bfloat16)}
    for i in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in {
            "input_layernorm": ones(hidden, dtype=torch.bfloat16),
            "post_attention_layernorm": ones(hidden, dtype=torch.bfloat16),
            "self_attn.q_proj": matrix(heads * d, hidden),
            "self_attn.k_proj": matrix(kv_heads * d, hidden),
            "self_attn.v_proj": matrix(kv_heads * d, hidden),
            "self_attn.o_proj": matrix(hidden, heads * d),
            "self_attn.q_norm": ones(d, dtype=torch.bfloat16),
            "self_attn.k_norm": ones(d, dtype=torch.bfloat16),
            **(experts(num_experts) if num_experts and i >= config.get("first_k_dense_replace", 0)
               else mlp("mlp", config["intermediate_size"]))}.items()}
        if config["attention_bias"]:
            tensors |= {f"model.layers.{i}.self_attn.{name}_proj.bias": matrix(1, n * d)[0]
                        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
        bias = f"model.layers.{i}.mlp.gate.e_score_correction_bias"
        if "n_routed_experts" in config and i >= config["first_k_dense_replace"]:
            tensors[bias] = 0.1 * torch.randn(num_experts, generator=random)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--vocab", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--ids", type=int, default=0, metavar="N",
                        help="also write N random token ids to OUT/ids.npy")
    parser.add_argument("--fp8", choices=("block", "channel", "tensor"),
                        help="store the layers' matrices in FP8, with a scale for every 128 x 128, "
                             "a channel or a tensor")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = config_of(arguments.shape, arguments.layers, arguments.vocab)
    tensors = tensors_of(config, arguments.seed)
    if arguments.fp8:
        config["quantization_config"] = fp8_layouts.quantization_config(arguments.fp8)
        tensors = fp8_layouts.store(tensors, arguments.fp8)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, arguments.out / "model.safetensors")
    if arguments.ids:
        import numpy
        ids = numpy.random.default_rng(arguments.seed).integers(1, arguments.vocab, arguments.ids)
        numpy.save(arguments.out / "ids.npy", ids.astype(numpy.int32))
    return 0


if __name__ == "__main__":
    sys.exit(main())
