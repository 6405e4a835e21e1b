"""What apply() puts into a model: hooks around its forward pass, and around generate().

Nothing of it refers to the model, so that `del model` frees all at once. A forward pass hands its cache
on to attention as an argument, so that passes in several threads know nothing of each other.
"""
import copy
import functools
import threading
import weakref

import torch
from transformers import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache import PagedCache
from ..codec import is_served_scale
from ..transformers_version import CACHE, renamed
from .cache import NAME, Memory, OscarCache, PlainRows, refuse
from .prompts import LOGGER, Scoring, wants_cache

SERVED_MODES = ("greedy_search", "sample")
# Settings of generate() and arguments of attention that change what is computed, if they are set.
REFUSED_SETTINGS = ("cache_implementation", "output_attentions")
REFUSED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias")
OTHER_CACHE = ("a {} in place of an OscarCache(model, batch, max_tokens); prefix tuning brings one of its own, "
               "and can't be served")


class Asked(Exception):
    """Ends the pass of Applied.require_options() at the first layer's attention: whether a pass's options came there."""


class Applied:
    """The bundle in one model, and the memory that its generate() uses."""

    def __init__(self, model, bundle, max_tokens, demote_block, prompts, weights):
        self.bundle, self.max_tokens, self.demote_block = bundle, max_tokens, demote_block
        self.weights = weights  # "same", or what else weights.check() says
        self.scoring = Scoring(prompts, bundle.quantizer.served(demote_block))
        self.implementation = model.config._attn_implementation
        self.codecs = None    # on the device, shared by all caches
        self.verified = None  # Result of a self-check, where there was one
        self.warned = False   # of positions beyond the bundle's
        self.asked = False    # require_options() runs
        self._forget()
        base = model.base_model
        self.hooks = [base.register_forward_pre_hook(self.begin, with_kwargs=True),
                      base.register_forward_hook(self.end, with_kwargs=True)]

    def require_options(self, model):
        """Raises UnsupportedError for a model whose layers keep a pass's options, the cache among them, from attention. It is
        seen in a pass of one token, up to the first of them."""
        self.asked, came = True, True
        try:
            with torch.no_grad():
                model.base_model.forward(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False,
                                         **{NAME: None})
        except Asked as answer:
            came, = answer.args
        except Exception:  # of a model that takes other arguments: its own passes will tell
            pass
        finally:
            self.asked = False
        if not came:
            refuse(f"layers that keep a pass's options from attention, as those of {type(model).__name__} in this transformers")

    def _forget(self):
        self.kept = None  # the Memory that generate() used last
        self.calls = []   # the caches of the generate() that runs, and of those within it
        self.busy = threading.RLock()  # held by generate(): callers in other threads wait
        self.caches = weakref.WeakSet()  # that are in use, for status()
        self.refused = 0                 # rows of a batch that could not be held
        self.last = 0, 0                 # tokens of the last run in 2 bits, and exactly, for status()

    def __deepcopy__(self, memo):
        """Of a model that is copied: the copy has hooks and memory of its own."""
        copied = memo[id(self)] = object.__new__(Applied)
        vars(copied).update(vars(self))
        copied._forget()
        copied.hooks = copy.deepcopy(self.hooks, memo)
        return copied

    def __reduce__(self):
        refuse("pickling of a model behind apply(), or of its cache; of a model save the state_dict(), or "
               "remove(model) first; of a cache save the token ids")

    prompts = property(lambda self: self.scoring.prompts)

    def paged_caches(self):
        """Those that hold tokens now."""
        found = [cache.paged for cache in self.caches if not cache.stale]
        found += [self.kept.paged] if self.kept is not None else []
        return {id(paged): paged for paged in found}.values()

    def undo(self):
        for hook in self.hooks:
            hook.remove()

    def memory(self, batch, max_tokens, device):
        """New Memory for so many rows and tokens a row."""
        if device.type == "meta":
            refuse("a model whose weights were offloaded behind apply(); load it whole on one device")
        if self.codecs and next(iter(self.codecs.values())).device != device:
            self.codecs = None  # the model has moved
        self._warn_of_positions(max_tokens)
        with torch.inference_mode(False):  # or no other call could write into it
            paged = PagedCache.int2(self.bundle, batch, max_tokens, device, codecs=self.codecs,
                                    demote_block=self.demote_block)
            self.codecs = paged.codecs
            return Memory(paged)

    def grown(self, memory, max_tokens):
        """Memory with room for so many tokens a row, which holds the same."""
        self._warn_of_positions(max_tokens)
        with torch.inference_mode(False):
            return memory.grown(max_tokens)

    def _warn_of_positions(self, tokens):
        warning = self.bundle.beyond_positions(tokens)
        if warning and not self.warned:
            self.warned = True
            LOGGER.warning("oscar_int2: %s", warning)

    def begin(self, base, args, kwargs):
        """Before a forward pass: which cache it uses. Returns its arguments."""
        if base.config._attn_implementation != NAME:
            refuse(f"attention {base.config._attn_implementation!r}, set behind apply(); apply() again")
        if len(args) > 1:
            refuse("positional arguments of the model behind input_ids; name them")
        if kwargs.get("output_attentions") or base.config.output_attentions:
            refuse("output_attentions")
        kwargs = renamed(kwargs | {"input_ids": args[0]} if args else dict(kwargs))
        cache = kwargs.get(CACHE)
        if cache is None:
            cache = self.scoring.cache(self, base, kwargs)  # into which of them it goes
            kwargs |= {CACHE: cache, "use_cache": wants_cache(base, kwargs)}
            if not isinstance(cache, OscarCache):
                return (), kwargs | {NAME: None}
        else:
            kwargs["use_cache"] = True
            if not isinstance(cache, (OscarCache, PlainRows)):
                refuse(OTHER_CACHE.format(type(cache).__name__))
            if cache.owner is not self:
                refuse("a cache that was made for another model, or before the last apply(), or a copy of one that "
                       "a pass gave back; make an OscarCache(model, batch, max_tokens)")
            if base.training or torch.is_grad_enabled():
                refuse("training over the cache; use model.eval() and torch.no_grad()")
            if isinstance(cache, PlainRows):
                cache = cache.oscar_cache(self)
        cache.begin(kwargs)
        return (), kwargs | {CACHE: cache, NAME: cache}

    def end(self, base, args, kwargs, output):
        if kwargs.get(NAME) is not None:
            kwargs[NAME].end()

    def generate(self, model, original, *args, **kwargs):
        """generate(), for one caller at a time."""
        kwargs = renamed(kwargs)
        given = kwargs.get("generation_config")
        if given is model.generation_config:  # where trainers leave False
            given = None
        if kwargs.get("use_cache", getattr(given, "use_cache", None)) is False:
            refuse("use_cache=False of generate(); remove(model) first")
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask[:, -1].all():
            refuse("padding behind a prompt in generate(), whose answer would begin behind it; set "
                   'padding_side="left" of the tokenizer')
        self._check_chat(kwargs.get("input_ids", args[0] if args else kwargs.get("inputs")), kwargs)
        with self.busy:
            self.calls.append(None)
            try:
                result = original(*args, **kwargs)
                if self.calls[-1] is not None:
                    self.calls[-1].check_rows()
                    self.last = self.calls[-1].paged.held_tokens()
                return result
            finally:
                self.calls.pop()

    def _check_chat(self, ids, kwargs):
        """That a whole chat so far is what its cache was filled with."""
        cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
        if isinstance(cache, PlainRows) and cache.owner is self:
            cache = kwargs[CACHE] = cache.oscar_cache(self)
        if isinstance(cache, OscarCache) and cache.filled and kwargs.get("inputs_embeds") is not None:
            refuse("inputs_embeds over an OscarCache that holds tokens, for they can't be compared; give "
                   "input_ids, or reset() it first")
        if isinstance(cache, OscarCache) and isinstance(ids, torch.Tensor):
            if mask is None or mask.shape[1] == ids.shape[1]:  # or ids are the new ones alone
                cache.check_continues(ids)

    def prepare_cache(self, model, original, config, model_kwargs, mode, batch, max_cache_length, *rest):
        """generate() calls it when its settings and the prompts are known."""
        if mode not in SERVED_MODES:
            refuse(f"generate() by {getattr(mode, 'value', mode)}, only {' and '.join(SERVED_MODES)}; "
                   "remove(model) first for others")
        for name in REFUSED_SETTINGS:
            if getattr(config, name, None):
                refuse(f"{name}={getattr(config, name)!r} of generate()")
        config.use_cache = True  # trainers leave False in config.json
        tokens, cache = max_cache_length + 1, model_kwargs.get(CACHE)
        if cache is None:
            cache = self._cache(model, batch * (config.num_return_sequences or 1), tokens)
        elif not isinstance(cache, OscarCache):
            refuse(OTHER_CACHE.format(type(cache).__name__))
        cache.make_room(tokens)
        model_kwargs[CACHE] = cache
        if self.calls:
            self.calls[-1] = cache
        return original(config, model_kwargs, mode, batch, max_cache_length, *rest)

    def _cache(self, model, batch, tokens):
        """In the memory of the last call if it has the room: compiled steps and graphs stay valid."""
        if any(self.calls):  # within a generate() that uses it
            return OscarCache(model, batch, tokens)
        kept = self.kept
        if kept is None or not kept.serves(batch, tokens, model.device):
            self.kept = kept = None  # it goes before the next one comes
            self.kept = self.memory(batch, max(tokens, self.max_tokens or 0), model.device)
        return OscarCache.over(self, self.kept)

    def refuse_batching(self, *_, **__):
        refuse("continuous batching of transformers")


def _divert(name, ours):
    """Has this method of every model go through `ours`, a method of Applied, where apply() was called.
    On the class, once: a model's own attribute would refer to it, and others would call past it."""
    original = getattr(GenerationMixin, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def method(model, *args, **kwargs):
        applied = vars(model).get(NAME)
        if applied is None:
            return original(model, *args, **kwargs)
        return ours(applied, model, functools.partial(original, model), *args, **kwargs)

    setattr(GenerationMixin, name, method)


_divert("generate", Applied.generate)
_divert("_prepare_cache_for_generation", Applied.prepare_cache)
_divert("generate_batch", Applied.refuse_batching)
_divert("init_continuous_batching", Applied.refuse_batching)


def attention(module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, **options):
    """The attention function that transformers calls by name."""
    if not hasattr(module, NAME):
        refuse(f"attention {NAME!r} in a model that apply() did not prepare")
    for name in REFUSED_ARGUMENTS:
        if options.get(name) is not None:
            refuse(f"{name} in attention")
    if getattr(module, NAME).asked:
        raise Asked(NAME in options)
    if NAME not in options:
        refuse("a forward pass past the hooks of apply(); call the model, and not its forward() or its layers, "
               "and compile it behind apply()")
    cache = options.pop(NAME)
    if scaling is not None and not is_served_scale(scaling, query.shape[-1]):
        refuse(f"attention with logits times {scaling:g} in place of 1 / sqrt(head_dim), set behind apply(), "
               "in a model")
    if cache is not None:
        return cache.attend(module, query, key, value, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout,
                                  scaling=scaling, **options)


def mask(*arguments, kv_length, attention_mask=None, **options):
    """Over an OscarCache the 2-D mask as it is, by which a prompt's padding is known: with no function
    of this name transformers would drop it. Without a cache the mask of SDPA."""
    if kv_length == 0:
        return attention_mask
    return sdpa_mask(*arguments, kv_length=kv_length, attention_mask=attention_mask, **options)
