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

SHAPES = {  # hidden, intermediate, query heads, KV heads, head_dim
    "qwen3-8b": (4096, 12288, 32, 8, 128),
    "qwen3-32b": (5120, 25600, 64, 8, 128),
    "tiny": (128, 192, 4, 2, 64),  # for trials of a pipeline
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
    }


def tensors_of(config, seed):
    random = torch.Generator().manual_seed(seed)
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config["head_dim"]

    def matrix(rows, columns):
        values = torch.randn(rows, columns, generator=random) * columns ** -0.5
        return values.to(torch.bfloat16)

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
            "mlp.gate_proj": matrix(inter, hidden),
            "mlp.up_proj": matrix(inter, hidden),
            "mlp.down_proj": matrix(hidden, inter)}.items()}
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
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    config = config_of(arguments.shape, arguments.layers, arguments.vocab)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors_of(config, arguments.seed), arguments.out / "model.safetensors")
    if arguments.ids:
        import numpy
        ids = numpy.random.default_rng(arguments.seed).integers(1, arguments.vocab, arguments.ids)
        numpy.save(arguments.out / "ids.npy", ids.astype(numpy.int32))
    return 0


if __name__ == "__main__":
    sys.exit(main())
