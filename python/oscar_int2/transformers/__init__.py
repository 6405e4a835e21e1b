"""model.generate() of Hugging Face transformers, unchanged, over the 2-bit cache.

    model = AutoModelForCausalLM.from_pretrained("/models/my-qwen3", dtype=torch.bfloat16)
    oscar_int2.transformers.apply(model, "my-qwen3.h5")
    model.generate(**inputs, max_new_tokens=500)

Prompts are attended exactly, by SDPA over their own rows, which then go into the cache; every token
behind them reads the cache, and so does a second prompt over the same cache, or a prompt's second chunk:

    cache = oscar_int2.transformers.OscarCache(model, batch=1, max_tokens=8192)
    model.generate(**whole_chat_so_far, past_key_values=cache)  # turn by turn

A pass that was given no cache gives its rows back; whoever goes on from them does so over an OscarCache.

Rows are rounded to bf16 or 2 bits whatever the model's dtype is, and
attention's outputs come back in that dtype: float32 and float16 models run, at bf16's precision.
A forward pass without a cache (scoring, training) is plain SDPA: its logits are the BF16 baseline's.
With apply(..., prompts="int2") it reads rows as decode steps do, and so do prompts.

Greedy search and sampling, padded batches, streamers, logits processors and compiled steps work as
ever. What isn't served is refused by name (UnsupportedError): beams, assisted decoding, cropping,
other caches, attention weights, sliding windows, soft caps.
"""
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..bundle import Bundle, has_other_attention, load
from ..cache import check_served
from ..codec import is_served_scale
from ..errors import BundleMismatchError
from ..transformers_version import require_version
from ..weights import check_model as check_weights
from .applied import Applied, attention, mask
from .cache import NAME, OscarCache, refuse, unwrapped
from .prompts import check_mode, demote_block_of
from .verify import Verification

__all__ = ["OscarCache", "apply", "remove"]

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def apply(model, bundle, *, max_tokens=None, demote_block=None, prompts="exact", verify=False,
          weights="same"):
    """Makes generate() of this causal language model run over the 2-bit cache. Returns the model.

    `bundle`: a Bundle or a path. `max_tokens`: tokens a row, prompt and answer, that generate() makes
    room for at least; it keeps its cache for the next call, and makes a larger one when it must.
    `demote_block`: tokens that leave the exact window at once; None: 16, or the bundle's if more; with prompts="int2" the
    bundle's, as in oscar-eval.
    `prompts`: "exact", or "int2", where a prompt's tokens read as 2-bit rows what has left the exact
    windows, as if they came one by one: for evaluation, where model(ids) is then what is served.
    `verify`: quote a passage from some thousand tokens back over the cache, and compare its log
    probabilities with BF16's: True, with the tokenizer of the model's folder if there is one, or a
    tokenizer. Raises SelfCheckError, and leaves the model without all this, if they are far apart.
    `weights`: "same" refuses a bundle that was calibrated on other weights than the model has; "any"
    serves it and says so: for a fine-tune of the calibrated model, and a model in training.
    Applied again, it replaces what was applied. A model inside peft's is found there.
    Raises BundleError for an unsound bundle or one that was edited in memory, BundleMismatchError for one of another model,
    UnsupportedError for a model or a transformers that isn't served.
    """
    require_version()
    inner = _causal_model(model)
    for name, value in (("max_tokens", max_tokens), ("demote_block", demote_block)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} of apply() is {value!r}, expected a whole number from 1 on, or None")
    bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
    bundle.require_unedited()
    attentions = _attentions(inner, bundle)
    check_mode(prompts)
    demote_block = demote_block_of(prompts, bundle.quantizer, demote_block)
    compared = check_weights(bundle, inner, {module.layer_idx: module for module in attentions}, weights, "apply")
    remove(inner)
    verification = Verification(inner, bundle, demote_block, verify) if verify else None
    applied = Applied(inner, bundle, max_tokens, demote_block, prompts, compared)
    for module in (inner, *attentions):
        setattr(module, NAME, applied)
    _set_attention(inner, NAME)
    try:
        applied.require_options(inner)
        if verification is not None:
            applied.verified = verification.check(inner)
    except BaseException:
        remove(inner)
        raise
    return model


def remove(model):
    """Undoes apply(), if it was applied. Returns the model."""
    inner = unwrapped(model)
    applied = getattr(inner, NAME, None)
    if applied is not None:
        applied.undo()
        for module in inner.modules():
            if hasattr(module, NAME):
                delattr(module, NAME)
        _set_attention(inner, applied.implementation)
    return model


def _set_attention(model, name):
    """Of the model and of every module with a config of its own, as copied layers have."""
    model.set_attn_implementation(name)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name


def _causal_model(model):
    """The model of transformers in what was given."""
    if hasattr(model, "_orig_mod"):
        refuse("apply() behind torch.compile(); apply() first, and compile then")
    inner = unwrapped(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"apply() takes a causal language model of transformers, found a "
                        f"{type(inner).__name__}; AutoModelForCausalLM.from_pretrained(folder) loads one")
    return inner


def _attentions(model, bundle):
    """The attention modules of a model that can be served with this bundle."""
    config, kind = model.config.get_text_config(decoder=True), type(model).__name__
    if kind != bundle.model.architecture:
        raise BundleMismatchError(f"{bundle.path} is of a {bundle.model.architecture}, and the model is a "
                                  f"{kind}; give the model with its head, of the bundle's architecture")
    bundle.check_model(config)
    bundle.check_frequencies(model)
    check_served(bundle)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or getattr(model, "_tp_size", None):
        refuse("a model on several devices, or with a part that is offloaded; load it whole on one device")
    if devices == {torch.device("meta")}:
        refuse("a model whose weights are offloaded; load it whole on one device")
    if has_other_attention(config):
        refuse("layers with a sliding window, or other than full attention")
    for name in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, name, None):
            refuse(f"models with {name}")
    found = [module for module in model.modules()
             if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")]
    if sorted(module.layer_idx for module in found) != list(bundle.layers):
        refuse(f"attention as this transformers writes it in {kind}")
    for module in found:
        if not is_served_scale(module.scaling, bundle.layers[module.layer_idx].head_dim):
            refuse(f"logits times {module.scaling} in place of 1 / sqrt(head_dim)")
        if getattr(module, NAME, None) is not getattr(model, NAME, None):
            refuse("layers that another model behind apply() has too, or had; remove() that one first, or this one")
    return found
