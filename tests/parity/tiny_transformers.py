"""Tiny random models of many families as transformers builds them, each with the features that set it apart."""
import importlib
import json
import pathlib
import re
import tempfile
import unittest

import torch
from safetensors.torch import load_file, save_file

VOCAB = 97
SHAPE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=24)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
EIGHT = dict(EXPERTS, num_experts=8)
HALF_TURNS = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
# Gated DeltaNet in three of four layers.
DELTA = dict(layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
             linear_key_head_dim=8, linear_value_head_dim=8,
             rope_parameters=dict(HALF_TURNS, mrope_section=[2, 1, 1], mrope_interleaved=True))
BY_POSITION = dict(rope_parameters=dict(YARN, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0))
STEP = dict(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=24, n_routed_experts=8,
            num_local_experts=8, share_expert_dim=24, mlp_layer_types=["dense"] + ["sparse"] * 3,
            num_sliding_attention_heads=6, partial_rotary_factors=[0.5, 1.0] * 2, rope_theta=[5e5, 1e4] * 2,
            moe_router_scaling_factor=3.0, swiglu_limits=[0, 0, 0, 0.1], swiglu_limits_shared=[0, 0, 0, 0.2], **EXPERTS)
LONG = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, short_factor=[1.0] * 6,
            long_factor=[4.0] * 6, original_max_position_embeddings=128, factor=4.0)
LATENT = dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
              n_routed_experts=8, num_key_value_heads=4, **EXPERTS)
PATCHES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16,
               patch_size=4)
TOWER = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4,
             num_position_embeddings=16)

# Name: folder of transformers.models, beginning of the classes' names, keys of the text's config, those of a vision
# tower for whole models of images and text.
FAMILIES = {
    "llama": ("llama", "Llama", {}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "mistral": ("mistral", "Mistral", dict(sliding_window=24)),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", EIGHT),
    "glm4": ("glm4", "Glm4", dict(rope_parameters=HALF_TURNS)),
    "glm4_moe": ("glm4_moe", "Glm4Moe", dict(n_routed_experts=8, n_shared_experts=1, use_qk_norm=True,
                                             rope_parameters=HALF_TURNS, **EXPERTS)),
    "gemma": ("gemma", "Gemma", {}),
    "gemma2": ("gemma2", "Gemma2", dict(WINDOWS, attn_logit_softcapping=2.0)),
    "gemma3 whole": ("gemma3", "Gemma3", dict(WINDOWS, query_pre_attn_scalar=20), PATCHES),
    "gemma3": ("gemma3", "Gemma3", dict(WINDOWS, query_pre_attn_scalar=20)),
    "qwen3_5": ("qwen3_5", "Qwen3_5", DELTA),
    "qwen3_5 whole": ("qwen3_5", "Qwen3_5", DELTA, TOWER),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5Moe", dict(DELTA, shared_expert_intermediate_size=24, **EIGHT)),
    "qwen3_next": ("qwen3_next", "Qwen3Next", dict(DELTA, shared_expert_intermediate_size=24, **{
        **EIGHT, "rope_parameters": HALF_TURNS})),
    "qwen3_vl whole": ("qwen3_vl", "Qwen3VL", dict(rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])), dict(TOWER, deepstack_visual_indexes=[0])),
    "mistral3 whole": ("mistral3", "Mistral3", dict(BY_POSITION, model_type="ministral3"),
                       dict(PATCHES, model_type="pixtral", head_dim=16)),
    "ministral3": ("ministral3", "Ministral3", BY_POSITION),
    "gpt_oss": ("gpt_oss", "GptOss", dict(WINDOWS, num_local_experts=8, num_experts_per_tok=2,
                                          rope_parameters=dict(YARN, truncate=False))),
    "minimax_m2": ("minimax_m2", "MiniMaxM2", dict(num_local_experts=8, num_experts_per_tok=2,
                                                   partial_rotary_factor=0.5)),
    "hy_v3": ("hy_v3", "HYV3", dict(EIGHT, num_shared_experts=1)),
    "seed_oss": ("seed_oss", "SeedOss", {}),
    "smollm3": ("smollm3", "SmolLM3", dict(no_rope_layer_interval=2)),
    "step3p7 whole": ("step3p7", "Step3p7", STEP, PATCHES),
    "cohere": ("cohere", "Cohere", {}),
    "cohere2": ("cohere2", "Cohere2", WINDOWS),
    "exaone4": ("exaone4", "Exaone4", dict(sliding_window=24, sliding_window_pattern=2)),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": ("olmo3", "Olmo3", WINDOWS),
    "granite": ("granite", "Granite", dict(attention_multiplier=0.1, embedding_multiplier=12.0,
                                           residual_multiplier=0.22, logits_scaling=8.0)),
    "phi3 longrope": ("phi3", "Phi3", dict(original_max_position_embeddings=128, rope_parameters=LONG)),
    "llama4": ("llama4", "Llama4", dict(intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1,
                                        attention_chunk_size=24, no_rope_layer_interval=2, floor_scale=8)),
    "gpt2": ("gpt2", "GPT2", dict(n_embd=64, n_head=4, n_layer=4, n_positions=512, num_key_value_heads=4)),
    "gpt_neox": ("gpt_neox", "GPTNeoX", dict(rotary_pct=0.5, num_key_value_heads=4)),
}
# Named, and why they are refused.
REFUSED = {
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", dict(LATENT, head_dim=8, n_group=1, topk_group=1)),
    "bloom": ("bloom", "Bloom", dict(n_head=4, n_layer=4)),
    "gemma4": ("gemma4", "Gemma4", dict(
        WINDOWS, **EIGHT, global_head_dim=512, num_global_key_value_heads=1, attention_k_eq_v=True,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, enable_moe_block=True, top_k_experts=2)),
}


def tiny_model(name, cases=None, dtype=torch.float32, **more):
    """A random model of a family, in evaluation mode. Norms, biases and sinks matter. `more`: further config keys."""
    folder, stem, keys, *vision = (cases or FAMILIES)[name]
    configs, models = (importlib.import_module(f"transformers.models.{folder}.{part}_{folder}")
                       for part in ("configuration", "modeling"))
    keys = {**SHAPE, **keys, **more}
    if vision:
        config = getattr(configs, f"{stem}Config")(text_config=keys, vision_config=dict(vision[0]),
                                                   tie_word_embeddings=False)
    else:
        config = getattr(configs, f"{stem}TextConfig", getattr(configs, f"{stem}Config"))(**keys)
    kind = getattr(models, f"{stem}ForConditionalGeneration" if vision else
                   f"{stem}{'LMHeadModel' if stem == 'GPT2' else 'ForCausalLM'}")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) / weight.shape[-1]**0.5)
            elif parameter.endswith("A_log"):  # a state that is forgotten within a token leaves norms of rounding alone
                weight.copy_(-2.5 + 0.3 * torch.randn_like(weight))
            else:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.to(dtype)


def first_layers(model, count, folder):
    """A checkpoint in a new folder that runs the first layers of another."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    tensors = {name: x for path in model.glob("*.safetensors") for name, x in load_file(path).items()}
    layer_of = {name: re.search(r"\.layers\.(\d+)\.", name) for name in tensors}
    save_file({name: x for name, x in tensors.items() if not layer_of[name] or int(layer_of[name][1]) < count},
              folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_ids(rows, tokens, seed=0):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


class InAFolder(unittest.TestCase):
    """Tests of such models with a folder for all cases of a class."""

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(2)
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()
