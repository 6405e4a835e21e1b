"""GGUF files of small models, written with the gguf package as llama.cpp's converter would."""
import gguf
import numpy as np

Type = gguf.GGMLQuantizationType
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
# Types that the package cannot write: where a block has its fp16 scales, and what they are relative
# to the first, so that random codes give values about 0.
K_SCALES = {Type.Q2_K: {80: 1, 82: 1.5}, Type.Q3_K: {108: 1}, Type.Q4_K: {0: 1, 2: 7.5},
            Type.Q5_K: {0: 1, 2: 15.5}, Type.Q6_K: {208: 1}, Type.IQ4_NL: {0: 1}}


def gguf_name(name):
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{kind}"


def pair_rows(values, heads):
    """Rows of q and k in the order of ggml's RoPE: dimension i beside i + head_dim / 2."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def unpair_rows(values, heads):
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def encode(values, kind, rng):
    """Bytes of `values` [rows, columns] as `kind`; random ones of about that size for types that
    the gguf package only reads."""
    if kind not in K_SCALES:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)

    def scaled_by(scale):
        for offset, factor in K_SCALES[kind].items():
            data[..., offset:offset + 2] = np.array([scale * factor], np.float16).view(np.uint8)
        return data.reshape(*values.shape[:-1], -1)
    spread = gguf.quants.dequantize(scaled_by(0.01), kind).std() / 0.01
    return scaled_by(values.std() / spread)


def decode(data, kind):
    return gguf.quants.dequantize(data, kind).astype(np.float32)


def write_model(path, config, tensors, kinds, rng, paired=None, metadata=None, factors=None):
    """Writes a GGUF model of `config` (config.json's keys) and `tensors` (its names, fp32 arrays).

    kinds(name) gives the type of a matrix; vectors are F32. Returns what the file holds, dequantized
    and under the names of config.json. `paired`: whether rows of q and k are reordered (default: as
    the architecture has it). metadata(writer) adds further keys.
    """
    arch = config["model_type"]
    paired = arch == "llama" if paired is None else paired
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if metadata:
        metadata(writer)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    held = {}
    for name, values in tensors.items():
        heads = 0
        if paired and ".q_proj." in name:
            heads = config["num_attention_heads"]
        elif paired and ".k_proj." in name:
            heads = config["num_key_value_heads"]
        values = np.ascontiguousarray(values, np.float32)
        stored = pair_rows(values, heads) if heads else values
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
            held[name] = values
            continue
        kind = kinds(name)
        data = encode(stored, kind, rng)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        restored = decode(data, kind)
        held[name] = unpair_rows(restored, heads) if heads else restored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
