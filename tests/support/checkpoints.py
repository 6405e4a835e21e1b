"""Small random checkpoints and tokenizers for the tests of the programs."""
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

QWEN3_MINI = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 260, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "torch_dtype": "float32",
    "eos_token_id": 256, "bos_token_id": 256,
}


def qwen3_tensors(config, seed=0):
    """Random weights of a Qwen3 checkpoint, name -> float32 array."""
    rng = np.random.default_rng(seed)
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, d = (config["num_attention_heads"], config["num_key_value_heads"],
                          config["head_dim"])

    def linear(rows, cols):
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def norm(size):
        return np.exp(0.3 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden) * 4,
               "model.norm.weight": norm(hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= {
            p + "input_layernorm.weight": norm(hidden),
            p + "post_attention_layernorm.weight": norm(hidden),
            p + "self_attn.q_proj.weight": linear(heads * d, hidden),
            p + "self_attn.k_proj.weight": linear(kv_heads * d, hidden),
            p + "self_attn.v_proj.weight": linear(kv_heads * d, hidden),
            p + "self_attn.o_proj.weight": linear(hidden, heads * d),
            p + "self_attn.q_norm.weight": norm(d),
            p + "self_attn.k_norm.weight": norm(d),
            p + "mlp.gate_proj.weight": linear(inter, hidden),
            p + "mlp.up_proj.weight": linear(inter, hidden),
            p + "mlp.down_proj.weight": linear(hidden, inter),
        }
    return tensors


# Two local layers before each global one, with a window longer than the 256 recent tokens.
GEMMA3_MINI = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 260, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32, "sliding_window": 300, "sliding_window_pattern": 3,
    "attention_bias": False, "torch_dtype": "float32", "eos_token_id": 256, "bos_token_id": 256,
}


def gemma3_tensors(config, seed=0):
    """Random weights of a Gemma 3 checkpoint: Qwen3's, four norms a layer, each stored as w - 1."""
    tensors = qwen3_tensors(config, seed)
    rng = np.random.default_rng(seed + 1)
    for i in range(config["num_hidden_layers"]):
        for place in ("pre_feedforward", "post_feedforward"):
            scale = np.exp(0.3 * rng.standard_normal(config["hidden_size"]))
            tensors[f"model.layers.{i}.{place}_layernorm.weight"] = scale.astype(np.float32)
    tensors["model.embed_tokens.weight"] /= np.float32(np.sqrt(config["hidden_size"]))
    return {n: v - 1 if "norm" in n else v for n, v in tensors.items()}


# Two linear layers before each layer of full attention, whose outputs are gated.
QWEN3_5_MINI = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 260, "rms_norm_eps": 1e-6,
    "rope_theta": 1e7, "partial_rotary_factor": 0.25, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
    "attn_output_gate": True, "full_attention_interval": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "torch_dtype": "float32", "eos_token_id": 256,
    "bos_token_id": 256,
}


def qwen3_5_tensors(config, seed=0):
    """Random weights of a Qwen3.5 checkpoint: Qwen3's with gates, linear layers, norms as w - 1."""
    tensors = qwen3_tensors(config, seed)
    rng = np.random.default_rng(seed + 1)
    hidden, interval = config["hidden_size"], config["full_attention_interval"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, d = config["linear_num_value_heads"], config["linear_value_head_dim"]

    def normal(*shape, scale=None):
        return (rng.standard_normal(shape) * (scale or shape[-1]**-0.5)).astype(np.float32)

    for name in [n for n in tensors if "norm" in n]:
        tensors[name] -= 1
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        if (i + 1) % interval == 0:
            rows = 2 * config["num_attention_heads"] * config["head_dim"]
            tensors[p + "self_attn.q_proj.weight"] = normal(rows, hidden)
            continue
        for name in [n for n in tensors if n.startswith(p + "self_attn.")]:
            del tensors[name]
        p += "linear_attn."
        tensors |= {
            p + "in_proj_qkv.weight": normal(2 * keys + heads * d, hidden),
            p + "in_proj_z.weight": normal(heads * d, hidden),
            p + "in_proj_b.weight": normal(heads, hidden),
            p + "in_proj_a.weight": normal(heads, hidden),
            p + "conv1d.weight": normal(2 * keys + heads * d, 1, 4),
            p + "A_log": normal(heads, scale=1.0),
            p + "dt_bias": normal(heads, scale=1.0),
            p + "norm.weight": 1 + normal(d, scale=0.3),
            p + "out_proj.weight": normal(hidden, heads * d),
        }
    return tensors


def byte_tokenizer(path):
    """A tokenizer.json with the 256 byte tokens and <|endoftext|> as id 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def write_checkpoint(folder, config=None, tensors=None):
    """Writes config.json, model.safetensors and tokenizer.json; returns the folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = QWEN3_MINI | (config or {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(qwen3_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    byte_tokenizer(folder / "tokenizer.json")
    return folder


def sample_text(documents=40, seed=0):
    """Plain English-like documents, one string each."""
    rng = np.random.default_rng(seed)
    words = "the cache keeps keys and values of every token in two bits per number".split()
    return [" ".join(rng.choice(words, 60)) + ".\n" for _ in range(documents)]
