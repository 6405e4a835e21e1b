"""Models of transformers for this package: loaded by what config.json names, observed for as long as a run lasts."""
import contextlib

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ..errors import UnsupportedError
from ..transformers_version import require_version
from .interface import NAME


def load_model(model, device=None, dtype=None, trust_remote_code=False):
    """A causal language model in evaluation mode. Folders and names are loaded to memory; their layers move to the
    device one at a time. Raises UnsupportedError for code of a checkpoint's own that nobody allowed, for MLA, and for a
    transformers whose caches probe() does not find."""
    require_version()
    if isinstance(model, PreTrainedModel):
        check_config(model.config)
        return model.eval()
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if getattr(config, "auto_map", None) and not trust_remote_code:
        raise UnsupportedError(f"{model} comes with code of its own, which is run only with --trust-remote-code")
    check_config(config)
    if dtype is None:
        dtype = torch.float32 if torch.device(device or "cpu").type == "cpu" else "auto"
    named = getattr(transformers, (config.architectures or [""])[0], None)
    kind = transformers.AutoModelForCausalLM if trust_remote_code or named is None else named
    options = {"trust_remote_code": True} if trust_remote_code else {}
    return kind.from_pretrained(model, config=config, dtype=dtype, **options).eval()


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
    """Within it, all attention of the model goes through interface.attention."""
    configs = {id(module.config): module.config for module in model.modules()
               if hasattr(getattr(module, "config", None), "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = NAME
        yield model
    finally:
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
