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
    "qwen3.5-27b": (5120, 17408, 24, 4, 256),
    "qwen3.5-35b-a3b": (2048, 512, 16, 2, 256),
    "hy3": (4096, 13312, 64, 8, 128),
    "minimax-m2": (3072, 1536, 48, 8, 128),
    "tiny": (128, 192, 4, 2, 64),  # for trials of a pipeline
    "tiny-qwen3-moe": (128, 192, 4, 2, 64),
    "tiny-glm4-moe": (128, 192, 4, 2, 64),
    "tiny-qwen3.5": (128, 192, 4, 2, 64),
    "tiny-qwen3.5-moe": (128, 48, 4, 2, 64),
    "tiny-hy3": (128, 192, 4, 2, 64),
    "tiny-minimax-m2": (128, 48, 4, 2, 64),
}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
             "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
             "tie_word_embeddings": False}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
            "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False}
QWEN3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
           "attn_output_gate": True, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
           "rope_theta": 1e7, "max_position_embeddings": 262144, "linear_num_key_heads": 16,
           "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
           "mamba_ssm_dtype": "float32", "tie_word_embeddings": False}
QWEN3_5_MOE = {**QWEN3_5, "architectures": ["Qwen3_5MoeForCausalLM"],
               "model_type": "qwen3_5_moe_text"}
HY3 = {"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "rope_theta": 11158840.0,
       "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "qk_norm": True,
       "first_k_dense_replace": 1, "num_shared_experts": 1, "route_norm": True,
       "router_scaling_factor": 2.826, "moe_router_use_sigmoid": True,
       "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0,
       "tie_word_embeddings": False}
# transformers 5.17 does not read rotary_dim, and partial_rotary_factor says the same.
MINIMAX_M2 = {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
              "rope_theta": 5e6, "max_position_embeddings": 196608, "partial_rotary_factor": 0.5,
              "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
              "use_routing_bias": True, "shared_intermediate_size": 0, "bos_token_id": None,
              "tie_word_embeddings": False}
TINY_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
              "linear_value_head_dim": 32}
KEYS = {  # of config.json beside those of a dense model
    "qwen3-30b-a3b": {**QWEN3_MOE, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768},
    "glm-4.7": {**GLM4_MOE, "n_routed_experts": 160, "num_experts_per_tok": 8,
                "moe_intermediate_size": 1536, "first_k_dense_replace": 3},
    "tiny-qwen3-moe": {**QWEN3_MOE, "num_experts": 8, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 48},
    "tiny-glm4-moe": {**GLM4_MOE, "n_routed_experts": 8, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    "qwen3.5-27b": {**QWEN3_5, "linear_num_value_heads": 48},
    "qwen3.5-35b-a3b": {**QWEN3_5_MOE, "linear_num_value_heads": 32, "num_experts": 256,
                        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                        "shared_expert_intermediate_size": 512},
    "hy3": {**HY3, "num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    "minimax-m2": {**MINIMAX_M2, "num_local_experts": 256, "num_experts_per_tok": 8,
                   "rotary_dim": 64},
    "tiny-qwen3.5": {**QWEN3_5, **TINY_DELTA},
    "tiny-qwen3.5-moe": {**QWEN3_5_MOE, **TINY_DELTA, "num_experts": 8, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40},
    "tiny-hy3": {**HY3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "tiny-minimax-m2": {**MINIMAX_M2, "num_local_experts": 8, "num_experts_per_tok": 2,
                        "rotary_dim": 32},
}
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
WITH_CHOICE_BIAS = ("glm4_moe", "hy_v3", "minimax_m2")
PUBLISHED_NAMES = {  # parts of names that files of a family have otherwise, replaced in this order
    "qwen3_5_moe_text": {".shared_experts.": ".shared_expert."},
    "hy_v3": {".gate.e_score_correction_bias": ".expert_bias", ".mlp.gate.": ".mlp.router.gate.",
              ".shared_experts.": ".shared_mlp."},
    "minimax_m2": {".gate.e_score_correction_bias": ".e_score_correction_bias",
                   ".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.",
                   ".down_proj.": ".w2."},
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
        **KEYS.get(shape, {}),
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

    def norm(self, count):
        """The weights of a norm that changes no length: Qwen3.5 adds 1 to them."""
        ones = self.ones(count)
        return ones - 1 if self.config["model_type"].startswith("qwen3_5") else ones

    def mlp(self, name, width):
        hidden = self.config["hidden_size"]
        return {f"{name}.gate_proj": self.matrix(width, hidden),
                f"{name}.up_proj": self.matrix(width, hidden),
                f"{name}.down_proj": self.matrix(hidden, width)}

    def experts(self, count):
        config, hidden = self.config, self.config["hidden_size"]
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        parts = {"mlp.gate": self.matrix(count, hidden)}
        for i in range(count):
            parts |= self.mlp(f"mlp.experts.{i}", width)
        shared = config.get("n_shared_experts", config.get("num_shared_experts", 0)) * width
        shared = config.get("shared_expert_intermediate_size", shared)
        if shared:
            parts |= self.mlp("mlp.shared_experts", shared)
        if "shared_expert_intermediate_size" in config:
            parts["mlp.shared_expert_gate"] = self.matrix(1, hidden)
        return parts

    def attention(self):
        config, hidden, d = self.config, self.config["hidden_size"], self.config["head_dim"]
        queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
        gated, joint = config.get("attn_output_gate"), config.get("qk_norm_type") == "per_layer"
        return {"self_attn.q_proj": self.matrix(2 * queries if gated else queries, hidden),
                "self_attn.k_proj": self.matrix(keys, hidden),
                "self_attn.v_proj": self.matrix(keys, hidden),
                "self_attn.o_proj": self.matrix(hidden, queries),
                "self_attn.q_norm": self.norm(queries if joint else d),
                "self_attn.k_norm": self.norm(keys if joint else d)}

    def delta_net(self):
        """Linear attention, but for the vectors that have no `.weight` in their names."""
        config, hidden = self.config, self.config["hidden_size"]
        heads, taps = config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
        values = heads * config["linear_value_head_dim"]
        channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
        return {"linear_attn.in_proj_qkv": self.matrix(channels, hidden),
                "linear_attn.in_proj_z": self.matrix(values, hidden),
                "linear_attn.in_proj_b": self.matrix(heads, hidden),
                "linear_attn.in_proj_a": self.matrix(heads, hidden),
                "linear_attn.conv1d": self.matrix(channels, taps).view(channels, 1, taps),
                "linear_attn.norm": self.ones(config["linear_value_head_dim"]),
                "linear_attn.out_proj": self.matrix(hidden, values)}

    def decay(self):
        """A head forgets about a tenth of its state with each token."""
        heads = self.config["linear_num_value_heads"]
        return {"linear_attn.A_log": 0.5 * self.normal(heads) - 2,
                "linear_attn.dt_bias": 0.5 * self.normal(heads)}

    def ends(self):
        """What is in no layer."""
        config = self.config
        tensors = {"model.embed_tokens.weight":
                       self.matrix(config["vocab_size"], config["hidden_size"]),
                   "model.norm.weight": self.norm(config["hidden_size"])}
        if not config["tie_word_embeddings"]:
            tensors["lm_head.weight"] = self.matrix(config["vocab_size"], config["hidden_size"])
        return tensors

    def layer(self, i):
        config, hidden, d = self.config, self.config["hidden_size"], self.config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        num_experts = next((config[key] for key in NUM_EXPERTS if key in config), 0)
        with_experts = num_experts and i >= config.get("first_k_dense_replace", 0)
        linear = (i + 1) % config.get("full_attention_interval", 1) != 0
        tensors = {f"{name}.weight": value for name, value in {
            "input_layernorm": self.norm(hidden),
            "post_attention_layernorm": self.norm(hidden),
            **(self.delta_net() if linear else self.attention()),
            **(self.experts(num_experts) if with_experts
               else self.mlp("mlp", config["intermediate_size"]))}.items()}
        if linear:
            tensors |= self.decay()
        if config["attention_bias"]:
            tensors |= {f"self_attn.{name}_proj.bias": self.matrix(1, n * d)[0]
                        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
        if with_experts and config["model_type"] in WITH_CHOICE_BIAS:
            tensors["mlp.gate.e_score_correction_bias"] = 0.1 * self.normal(num_experts)
        return {f"model.layers.{i}.{name}": value for name, value in tensors.items()}


def published_name(name, model_type):
    for ours, theirs in PUBLISHED_NAMES.get(model_type, {}).items():
        name = name.replace(ours, theirs)
    return name


def write_shards(out, config, random, fp8):
    """One file for the ends and one for each layer, and their index: few of them lie in memory."""
    layers = config["num_hidden_layers"]
    weight_map, total = {}, 0
    for i in range(layers + 1):
        tensors = random.ends() if i == 0 else random.layer(i - 1)
        if fp8:
            tensors = fp8_layouts.store(tensors, fp8)
        tensors = {published_name(key, config["model_type"]): value.cpu()
                   for key, value in tensors.items()}
        name = f"model-{i + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, out / name)
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
    config = config_of(arguments.shape, arguments.layers, arguments.vocab)
    interval = config.get("full_attention_interval", 1)
    if arguments.layers < interval:
        parser.error(f"--layers {arguments.layers}: only one of {interval} layers of "
                     f"{arguments.shape} attends to all tokens, so it takes {interval} or more")
    arguments.out.mkdir(parents=True, exist_ok=True)
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
