"""Random checkpoints of every supported family, in both styles of config.json."""
import copy
import json
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

# Small, with a head_dim that is not hidden / heads where the family allows it.
SIZES = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, vocab_size=512, hidden_act="silu", rms_norm_eps=1e-6,
             initializer_range=0.02, attention_dropout=0.0, use_cache=True)


def family(model_type, rope=None, theta=10000.0, styles=(4, 5), **keys):
    """A model: keys shared by the config styles that it has, and its rope in neutral form."""
    architecture = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral",
                    "qwen3_moe": "Qwen3Moe", "glm4_moe": "Glm4Moe", "gemma3_text": "Gemma3",
                    "ministral3": "Ministral3", "phi3": "Phi3", "seed_oss": "SeedOss",
                    "hy_v3": "HYV3", "minimax_m2": "MiniMaxM2", "qwen3_next": "Qwen3Next",
                    "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}
    return dict(model_type=model_type, rope=rope, theta=theta, styles=styles,
                keys={**SIZES, "model_type": model_type,
                      "architectures": [architecture[model_type] + "ForCausalLM"],
                      "bos_token_id": 1, "eos_token_id": 2, **keys})


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=128)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
# Eight experts, of which three answer for a token.
QWEN_EXPERTS = dict(head_dim=32, max_position_embeddings=4096, num_experts=8,
                    num_experts_per_tok=3, moe_intermediate_size=48)
GLM = dict(head_dim=32, max_position_embeddings=4096, attention_bias=True,
           partial_rotary_factor=0.5, n_routed_experts=8, num_experts_per_tok=3,
           moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1,
           norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1,
           num_nextn_predict_layers=1, rms_norm_eps=1e-5)
HY3 = dict(QWEN_EXPERTS, num_shared_experts=2, router_scaling_factor=2.826, route_norm=True,
           moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True, qk_norm=True,
           expert_hidden_dim=48, num_nextn_predict_layers=1, rms_norm_eps=1e-5)
# transformers 5.17 does not read rotary_dim, which says the same.
MINIMAX = dict(head_dim=32, max_position_embeddings=4096, num_local_experts=8,
               num_experts_per_tok=3, partial_rotary_factor=0.5, rotary_dim=16, use_qk_norm=True,
               qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
               shared_intermediate_size=0, attn_type_list=[1, 1, 1, 1])
# Gated DeltaNet in all layers but the last of each three; value heads that share a key head.
DELTA = dict(head_dim=32, max_position_embeddings=4096, partial_rotary_factor=0.25,
             num_hidden_layers=6, full_attention_interval=3, linear_num_key_heads=2,
             linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
             linear_conv_kernel_dim=4)
SHARED = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48,
              shared_expert_intermediate_size=40)
# A local layer before each global one.
GEMMA = dict(hidden_act=None, hidden_activation="gelu_pytorch_tanh", head_dim=32,
             max_position_embeddings=4096, sliding_window=64, sliding_window_pattern=2,
             query_pre_attn_scalar=32, rope_local_base_freq=10000.0,
             tie_word_embeddings=True, attention_bias=False, attn_logit_softcapping=None,
             final_logit_softcapping=None, pad_token_id=0)
CASES = {
    "gemma3": family("gemma3_text", theta=1e6, **GEMMA),
    # Global layers first and in a row, their RoPE scaled, a softmax scale and a local base of its
    # own, the width of published heads, biases.
    "gemma3_scaled": family("gemma3_text", dict(rope_type="linear", factor=8.0), theta=5e5, **{
        **GEMMA, "head_dim": 256, "query_pre_attn_scalar": 168, "rope_local_base_freq": 5000.0,
        "sliding_window": 100, "attention_bias": True,
        "tie_word_embeddings": False, "sliding_window_pattern": None, "layer_types":
        ["full_attention", "full_attention", "sliding_attention", "full_attention"]}),
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
    "qwen3_moe": family("qwen3_moe", theta=1e6, norm_topk_prob=True, **QWEN_EXPERTS),
    "qwen3_moe_mixed": family("qwen3_moe", theta=1e6, norm_topk_prob=False, mlp_only_layers=[3],
                              decoder_sparse_step=2, num_hidden_layers=6, use_sliding_window=True,
                              sliding_window=64, attention_bias=True, **QWEN_EXPERTS),
    # Positions on both sides of the original length.
    "ministral3": family("ministral3", dict(YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0,
                                            beta_slow=1.0, llama_4_scaling_beta=0.1), theta=1e6,
                         styles=(5,), head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5),
    "phi3": family("phi3", theta=25e4, max_position_embeddings=4096, rms_norm_eps=1e-5,
                   sliding_window=None, original_max_position_embeddings=4096, pad_token_id=0),
    "phi3_window_part": family("phi3", sliding_window=64, partial_rotary_factor=0.75,
                               max_position_embeddings=4096, pad_token_id=0),
    "seed_oss": family("seed_oss", theta=1e7, head_dim=32, attention_bias=True,
                       attention_out_bias=False, max_position_embeddings=4096),
    "seed_oss_out_bias": family("seed_oss", theta=1e7, head_dim=32, attention_bias=False,
                                attention_out_bias=True, mlp_bias=True,
                                max_position_embeddings=4096, residual_dropout=0.1),
    "hy_v3": family("hy_v3", theta=11158840.0, first_k_dense_replace=1, **HY3),
    "hy_v3_types": family("hy_v3", mlp_layer_types=["sparse", "dense", "dense", "sparse"], **{
        **HY3, "num_shared_experts": 1, "num_nextn_predict_layers": 0, "attention_bias": True}),
    "minimax_m2": family("minimax_m2", theta=5e6, **MINIMAX),
    "qwen3_next": family("qwen3_next", theta=1e7, **DELTA, **SHARED),
    "qwen3_next_mixed": family("qwen3_next", theta=1e6, **{
        **DELTA, **SHARED, "mlp_only_layers": [2], "norm_topk_prob": False,
        "partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 3, "layer_types":
        ["full_attention", "linear_attention", "linear_attention"] * 2}),
    "qwen3_5": family("qwen3_5_text", theta=1e7, attn_output_gate=True, mamba_ssm_dtype="float32",
                      **{**DELTA, "linear_num_value_heads": 2}),
    "qwen3_5_moe": family("qwen3_5_moe_text", theta=1e7, **DELTA, **SHARED),
    "glm4_moe": family("glm4_moe", theta=1e6, use_qk_norm=True, **GLM),
    "glm4_moe_sets": family("glm4_moe", YARN, theta=1e6, **{
        **GLM, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False,
        "partial_rotary_factor": 0.25, "first_k_dense_replace": 2, "attention_bias": False,
        "max_position_embeddings": 256}),
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
        if "rope_local_base_freq" in config:
            config["rope_parameters"] = {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_type": "default",
                                      "rope_theta": config.pop("rope_local_base_freq")}}
        if "partial_rotary_factor" in config:
            config["rope_parameters"]["partial_rotary_factor"] = \
                config.pop("partial_rotary_factor")
        if "num_experts" in config and "linear_num_key_heads" not in config:
            config["num_local_experts"] = config.pop("num_experts")
    return config


def further_layer(state, index):
    """A layer that predicts further tokens: like the last one, and with tensors of its own."""
    last = f"model.layers.{index - 1}."
    layer = {name.replace(last, f"model.layers.{index}."): tensor.clone()
             for name, tensor in state.items() if name.startswith(last)}
    return layer | {f"model.layers.{index}.eh_proj.weight": torch.randn(8, 16)}


def has_offset_norms(model):
    """Whether norms multiply by 1 + their weights."""
    return any(kind in type(model).__name__ for kind in ("Gemma", "Qwen3_5", "Qwen3Next"))


def make_weights(folder, seed):
    """Random weights with outliers in the norms of q and k and biases that matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif name.endswith("A_log"):  # what is forgotten within a token leaves norms of rounding
                parameter.normal_(-2, 0.5)
            elif "norm" in name:
                scale = torch.exp(torch.randn_like(parameter) * 0.3)
                if "q_norm" in name or "k_norm" in name:
                    scale[::7] *= 6.0
                plain = "linear_attn" in name or not has_offset_norms(model)
                parameter.copy_(scale if plain else scale - 1)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    with tempfile.TemporaryDirectory() as saved:  # under the names of published files
        model.save_pretrained(saved)
        state = load_file(f"{saved}/model.safetensors")
    if getattr(model.config, "num_nextn_predict_layers", 0):
        state |= further_layer(state, model.config.num_hidden_layers)
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
