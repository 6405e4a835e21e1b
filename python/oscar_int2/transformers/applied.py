"""What apply() puts into a model: hooks around its forward pass, and around generate()."""
import functools
import threading

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache import PagedCache
from ..codec import Windows
from ..errors import CacheFullError
from .cache import NAME, OscarCache, refuse
from .prompts import Scoring

SERVED_MODES = ("greedy_search", "sample")
# Settings of generate() and arguments of attention that change what is computed, if they are set.
REFUSED_SETTINGS = ("cache_implementation", "output_attentions")
REFUSED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias")


class Applied:
    """The bundle in one model, and the caches that its forward passes use."""

    def __init__(self, model, bundle, max_tokens, demote_block, prompts):
        self.bundle, self.max_tokens, self.demote_block = bundle, max_tokens, demote_block
        self.scoring = Scoring(prompts, Windows.of(bundle.quantizer, demote_block))
        self.device, self.implementation = model.device, model.config._attn_implementation
        self.codecs = None   # on the device, shared by all caches
        self.kept = None     # the cache that generate() made last
        self.running = None  # the cache of this forward pass
        self.used = None     # the cache of this generate()
        self.busy = threading.RLock()  # held by generate(): callers in other threads wait
        base = model.base_model
        self.hooks = [base.register_forward_pre_hook(self.begin, with_kwargs=True),
                      base.register_forward_hook(self.end)]
        self.overridden = []
        for name in ("generate", "_prepare_cache_for_generation", "generate_batch",
                     "init_continuous_batching"):
            if hasattr(model, name):
                self._override(model, name)

    def _override(self, model, name):
        original, ours = getattr(model, name), getattr(self, name, _refuse_batching)
        setattr(model, name, functools.wraps(original)(functools.partial(ours, model, original)))
        self.overridden.append(name)

    def undo(self, model):
        for hook in self.hooks:
            hook.remove()
        for name in self.overridden:
            delattr(model, name)

    def paged_cache(self, batch, max_tokens):
        paged = PagedCache.int2(self.bundle, batch, max_tokens, self.device, codecs=self.codecs,
                                demote_block=self.demote_block)
        self.codecs = paged.codecs
        return paged

    def begin(self, base, args, kwargs):
        """Before a forward pass: which cache it uses. Returns its arguments."""
        if len(args) > 1:
            refuse("positional arguments of the model behind input_ids; name them")
        if kwargs.get("output_attentions") or base.config.output_attentions:
            refuse("output_attentions")
        cache, self.running = kwargs.get("past_key_values"), None
        if cache is None:
            if kwargs.get("use_cache"):
                refuse("use_cache=True without a cache; pass past_key_values=OscarCache(...)")
            kwargs = kwargs | {"use_cache": False}
            cache = self.scoring.cache(base, args, kwargs)
            if cache is None:
                return args, kwargs
            kwargs["past_key_values"] = cache
        if not isinstance(cache, OscarCache) or cache.owner is not self:
            refuse(f"a {type(cache).__name__} that was not made for what apply() put into this model")
        if base.training or torch.is_grad_enabled():
            refuse("training over the cache; use model.eval() and torch.no_grad()")
        kwargs = kwargs | {"input_ids": args[0]} if args else dict(kwargs)
        cache.begin(kwargs)
        self.running = cache
        return (), kwargs

    def end(self, base, args, output):
        if self.running is not None:
            self.running.end()
            self.running = None

    def generate(self, model, original, *args, **kwargs):
        with self.busy:
            if self.used is not None:
                refuse("generate() within generate()")
            self.running = None
            try:
                result = original(*args, **kwargs)
                if self.used is not None:
                    self.used.check_rows()
                return result
            finally:
                self.used = self.running = None

    def _prepare_cache_for_generation(self, model, original, config, model_kwargs, mode, batch,
                                      max_cache_length, *rest):
        """generate() calls it when its settings and the prompts are known."""
        if mode not in SERVED_MODES:
            refuse(f"generate() by {getattr(mode, 'value', mode)}, only {' and '.join(SERVED_MODES)}")
        for name in REFUSED_SETTINGS:
            if getattr(config, name, None):
                refuse(f"{name}={getattr(config, name)!r} of generate()")
        tokens, cache = max_cache_length + 1, model_kwargs.get("past_key_values")
        if cache is None and config.use_cache is not False:
            cache = self._kept(model, batch * (config.num_return_sequences or 1), tokens)
            model_kwargs["past_key_values"] = cache
        elif cache is not None and not isinstance(cache, OscarCache):
            refuse(f"a {type(cache).__name__} in place of an OscarCache")
        elif cache is not None and cache.max_tokens < tokens:
            raise CacheFullError(f"generate() may come to {tokens} tokens a row, padding included, "
                                 f"in an OscarCache made for {cache.max_tokens}")
        self.used = cache
        return original(config, model_kwargs, mode, batch, max_cache_length, *rest)

    def _kept(self, model, batch, tokens):
        """The cache of the last call if it has the room: compiled steps and graphs stay valid."""
        kept = self.kept
        if kept is None or kept.paged.places != batch or kept.max_tokens < tokens:
            self.kept = kept = None  # its memory goes before the next one comes
            self.kept = OscarCache(model, batch, max(tokens, self.max_tokens or 0))
        else:
            kept.reset()
        return self.kept


def _refuse_batching(*_, **__):
    refuse("continuous batching of transformers")


def attention(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **options):
    """The attention function that transformers calls by name."""
    applied = getattr(module, NAME, None)
    if applied is None:
        refuse(f"attention {NAME!r} in a model that apply() did not prepare")
    for name in REFUSED_ARGUMENTS:
        if options.get(name) is not None:
            refuse(f"{name} in attention")
    if applied.running is not None:
        return applied.running.attend(module, query, key, value, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout,
                                  scaling=scaling, **options)


def mask(*arguments, kv_length, attention_mask=None, **options):
    """Over an OscarCache the 2-D mask as it is, by which a prompt's padding is known: with no function
    of this name transformers would drop it. Without a cache the mask of SDPA."""
    if kv_length == 0:
        return attention_mask
    return sdpa_mask(*arguments, kv_length=kv_length, attention_mask=attention_mask, **options)
