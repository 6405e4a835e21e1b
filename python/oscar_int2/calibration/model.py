"""Models of transformers for this package: loaded by what config.json names, observed for as long as a run lasts."""
import contextlib

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ..bundle import rope_of, stated_by
from ..errors import UnsupportedError
from ..rope import decoder_frequencies
from ..transformers_version import require_version
from .interface import NAME
from .layers import text_config
from .record import served_positions

LONGEST_DEFAULT = 4096  # tokens of a sequence: kLongestDefaultSequence of lib/oscar/calibrate/calibrate.cpp


def config_of(model, trust_remote_code=False):
    """The config of a model, loaded or not. Raises UnsupportedError for code of a checkpoint's own that nobody allowed,
    for MLA, for a model behind apply(), and for a transformers whose caches probe() does not find; TypeError for a model
    inside another."""
    require_version()
    if isinstance(model, PreTrainedModel):
        if hasattr(model, "oscar_int2"):
            raise UnsupportedError("the model is behind apply() of oscar_int2.transformers; remove(model) first")
        config = model.config
    elif isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a folder, a name or a model of transformers, found a {type(model).__name__}; give the model "
                        "inside: get_base_model() of peft's, _orig_mod of torch.compile's")
    else:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        if getattr(config, "auto_map", None) and not trust_remote_code:
            raise UnsupportedError(f"{model} comes with code of its own, which is run only with trust_remote_code=True")
    check_config(config)
    return config


def sequence_tokens(config, asked):
    """Tokens of a sequence: `asked`, or the model's context, 4096 at most (None). Raises ValueError for more than it serves."""
    served = served_positions(config.get_text_config(decoder=True))
    if asked is None:
        return min(LONGEST_DEFAULT, served or LONGEST_DEFAULT)
    if asked < 2:
        raise ValueError(f"sequence_length is {asked}, expected 2 or more")
    if served and asked > served:
        raise ValueError(f"sequences would be longer than the model's context: sequence_length is {asked}, expected at most "
                         f"{served}")
    return asked


def require_one_rope(config, lengths):
    """Raises ValueError for sequences of so many tokens that LongRoPE turns by two kinds of frequencies: those of more than
    original_max_position_embeddings tokens by others."""
    config = config.get_text_config(decoder=True)
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type", rope.get("type")) != "longrope" or not original or not min(lengths) <= original < max(lengths):
        return
    raise ValueError(f"LongRoPE turns sequences of more than {original} tokens (original_max_position_embeddings) by other "
                     f"frequencies than shorter ones, and a bundle has one kind: expected sequences of one kind, found "
                     f"{min(lengths)} to {max(lengths)} tokens; cut them with sequence_length={original}, or end the text "
                     "before the short ones with max_tokens")


def require_stated_rope(model):
    """Raises UnsupportedError for a model in memory that turns another part of each head than its config says: a version of
    transformers may not read what says it, and its activations are then not those of the model."""
    config = text_config(model)
    stated, dim = rope_of(config)["partial_rotary_factor"], stated_by(config, "head_dim")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # towers have RoPE of their own
    for found in (decoder_frequencies(decoder) if stated and dim and decoder is not None else ()):
        if 2 * len(found) != int(dim * stated):
            raise UnsupportedError(
                f"transformers {transformers.__version__} runs this model with other RoPE than its config says: "
                f"partial_rotary_factor is {2 * len(found) / dim} here and {stated} in the config. Its activations are not the "
                "model's; use a version of transformers that reads the config whole, or oscar-calibrate for the families that "
                "it runs (docs/models.md)")


def check_group(format, config):
    """Raises ValueError for a CacheFormat whose group does not divide the heads of a model of this config."""
    if not format.quant_group_size:
        return
    config = config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dim % format.quant_group_size:
        raise ValueError(f"the quantization group does not divide the head: quant_group_size is {format.quant_group_size}, "
                         f"expected a divisor of {dim}, or 0 for {dim}")


def load_model(model, device=None, dtype=None, trust_remote_code=False):
    """A causal language model. Folders and names are loaded to memory; their layers move to the device one at a time.
    Raises what config_of() raises, and ValueError for a dtype that a loaded model does not have."""
    config = config_of(model, trust_remote_code)
    if isinstance(model, PreTrainedModel):
        if dtype is not None and str(dtype).removeprefix("torch.") != str(model.dtype).removeprefix("torch."):
            raise ValueError(f"dtype is {dtype}, and the model was loaded in {model.dtype}; leave dtype out, or give the folder")
        return model
    if dtype is None:
        dtype = torch.float32 if torch.device(device or "cpu").type == "cpu" else "auto"
    named = getattr(transformers, (config.architectures or [""])[0], None)
    kind = transformers.AutoModelForCausalLM if trust_remote_code or named is None else named
    options = {"trust_remote_code": True} if trust_remote_code else {}
    return kind.from_pretrained(model, config=config, dtype=dtype, **options)


def run_device(model, device):
    """Where layers run: `device`, or where a loaded model is (None), or a GPU if there is one."""
    if device is not None or isinstance(model, PreTrainedModel):
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_config(config):
    """Refuses what a config tells by itself: transformers 4 caches MLA as heads, which is not what servers hold."""
    if getattr(config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedError("MLA (kv_lora_rank) caches no keys and values of heads; it is not calibrated")


def tokenizer_of(model):
    """The tokenizer of a model, loaded or not: that of its folder."""
    return AutoTokenizer.from_pretrained(model.name_or_path if isinstance(model, PreTrainedModel) else model)


@contextlib.contextmanager
def observed(model):
    """Within it, the model is in evaluation mode, and all its attention goes through interface.attention."""
    training = [module for module in model.modules() if module.training]
    configs = {id(module.config): module.config for module in model.modules()
               if hasattr(getattr(module, "config", None), "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        model.eval()
        for config in configs.values():
            config._attn_implementation = NAME
        yield model
    finally:
        for module in training:
            module.training = True
        for key, config in configs.items():
            config._attn_implementation = before[key]


def batched(sequences, batch_tokens):
    """Tensors [batch, T] of sequences in order: neighbours of one length together, of so many tokens at most. The first
    sequence stands alone: layers are probed with it."""
    batches = []
    for ids in sequences:
        if len(batches) > 1 and len(batches[-1][0]) == len(ids) and (len(batches[-1]) + 1) * len(ids) <= batch_tokens:
            batches[-1].append(ids)
        else:
            batches.append([ids])
    return [torch.stack([torch.as_tensor(ids) for ids in rows]) for rows in batches]
