"""Small random models of the families that are calibrated, bundles for them, and what they should give."""
import copy
import dataclasses
import functools
import pathlib
import sys

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "parity"))
import int2_reference
from oscar_int2.bundle import Bundle, Layer, Model
from oscar_int2.recipe import CacheFormat, SideRecipe

HEAD_DIM, LAYERS, VOCAB, THETA, POSITIONS = 32, 2, 300, 1e4, 4096
SINK, RECENT = 4, 12
FAMILIES = {  # what each has that others don't
    "Llama": {}, "Mistral": {"sliding_window": None}, "Qwen2": {"use_sliding_window": False},
    # All experts of a layer are chosen: a choice may turn on the rounding of a cached row.
    "Qwen3": {}, "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 48},
    "Glm4Moe": {"n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                "use_qk_norm": True}}
ROTARY_FACTOR = {"Glm4Moe": 0.5}  # RoPE turns a part of each head


@functools.cache
def random_model(family="Qwen3", dtype=torch.float32):
    """In evaluation mode; attention is sharp, so that a wrong row shows. Copy it to change it."""
    factor = {"partial_rotary_factor": ROTARY_FACTOR[family]} if family in ROTARY_FACTOR else {}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, **factor}}
    if transformers.__version__.startswith("4."):
        rope = {"rope_theta": THETA, **factor}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False, **rope, **FAMILIES[family])
    torch.manual_seed(4)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
            elif "norm" in name:
                weight.copy_(torch.exp(0.4 * torch.randn_like(weight)) * (1.6 if "_norm" in name else 1))
    return model.to(dtype)


def random_side(key, recipe, random):
    """Invertible transforms, means and clipping; "shaped": also feedback, metrics and key centers."""
    heads, d = 2, HEAD_DIM

    def normal(*size):
        return torch.randn(heads, *size, generator=random)

    rotation = torch.linalg.qr(normal(d, d).double())[0] * torch.exp(0.2 * normal(1, d).double())
    inverse = torch.linalg.inv(rotation)
    shaped = recipe == "shaped"
    metric = normal(d, 4 * d)
    return SideRecipe(
        kind=torch.full((heads,), 3, dtype=torch.uint8), forward=rotation.float().contiguous(),
        partner=(inverse.mT if key else inverse).float().contiguous(), mean=0.3 * normal(d),
        clip_ratio=torch.tensor([0.96, 0.0]),
        scale_correction=torch.full((heads,), 2 * shaped, dtype=torch.uint8),
        feedback=torch.eye(d) + normal(d, d).triu(1) / d if shaped else None,
        metric=metric @ metric.mT / (4 * d) if shaped else None,
        key_centers=normal(2, d) if shaped and key else None)


@functools.cache
def random_bundle(family="Qwen3", recipe="plain", demote_block=1):
    random = torch.Generator().manual_seed(5)
    layers = {i: Layer(i, "full", 0, True, 4, 2, HEAD_DIM, random_side(True, recipe, random),
                       random_side(False, recipe, random)) for i in range(LAYERS)}
    model = Model("random", f"{family}ForCausalLM", LAYERS, 4, 2, HEAD_DIM, 96,
                  {"rope_type": "default", "rope_theta": THETA, "max_positions": POSITIONS,
                   "partial_rotary_factor": ROTARY_FACTOR.get(family, 1.0)}, "")
    return Bundle("random.h5", "", "", model, CacheFormat(0, SINK, RECENT, demote_block), layers)


def prompts(*lengths, seed=6):
    """Random token ids, one list a length."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=random).tolist() for n in lengths]


def left_padded(rows):
    """input_ids and attention_mask of lists of ids."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def reference_layers(bundle):
    """The bundle's layers as the independent attention of tests/parity wants them."""
    def side(s):
        return int2_reference.Side(s.forward, s.partner, s.mean, s.clip_ratio.tolist(),
                         s.scale_correction.tolist(), s.feedback, s.metric, s.key_centers)
    return [(side(layer.key), side(layer.value)) for layer in bundle.layers.values()]


def reference_log_probabilities(model, bundle, ids, prompt):
    """[len(ids) - prompt, vocab] in float64: predictions of ids[prompt:] by the definition of the
    cache, where the first `prompt` ids are a prompt; and the same over exact rows."""
    other = copy.deepcopy(model).float()
    other.set_attn_implementation(int2_reference.NAME)
    quantizer = bundle.quantizer
    rule = int2_reference.Rule(quantizer.sink_tokens, quantizer.recent_tokens, quantizer.demote_block,
                     "prefill", prompt, layers=reference_layers(bundle))
    exact = dataclasses.replace(rule, layers=[None] * len(bundle.layers))
    return [int2_reference.scores(other, r, [ids], prompt)[1][0] for r in (rule, exact)]
