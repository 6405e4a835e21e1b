"""How a forward pass over many tokens at once reads its own rows: apply(..., prompts=...).

"exact": every row as the model made it. Logits of such a pass are the BF16 baseline's, to the bit.
"int2": each token reads what the step of its token would read, rows that have left the exact windows by
then as 2-bit ones. A pass without a cache, as for scoring, runs over one that lives as long as the pass.
"""
import logging

import torch

from .cache import OscarCache, PlainRows, refuse

MODES = ("exact", "int2")
LOGGER = logging.getLogger("oscar_int2")


def demote_block_of(prompts, format, asked):
    """As PagedCache.int2() takes it: `asked`, else what a server takes (None), or in measuring, as oscar-eval does, the
    bundle's own."""
    return format.demote_block if prompts == "int2" and asked is None else asked


def check_mode(prompts):
    if prompts not in MODES:
        raise ValueError(f"prompts={prompts!r}; expected one of {', '.join(map(repr, MODES))}")
    return prompts


class Scoring:
    """Forward passes without a cache, of one model that apply() prepared."""

    def __init__(self, prompts, format):
        self.prompts, self.format, self.warned = prompts, format, False
        self.exact_tokens = format.sink_tokens + format.recent_tokens

    def cache(self, applied, base, kwargs):
        """Where the rows of such a pass go, from which its caller may go on: an OscarCache if it reads
        through one, PlainRows, or None if he asks for none."""
        inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        batch, columns = inputs.shape[:2]
        if self.prompts == "exact":
            served = base.training or any(applied.calls)  # or of guidance in generate(), which goes on over INT2
            if columns > self.exact_tokens and not served and not self.warned:
                self.warned = True
                LOGGER.warning(
                    "oscar_int2: %d tokens without a cache are attended exactly: these logits are the BF16 "
                    "baseline's, not the 2-bit cache's. To measure the cache: apply(..., prompts='int2')",
                    columns)
            return PlainRows(applied, kwargs) if wants_cache(base, kwargs) else None
        if base.training or torch.is_grad_enabled():
            refuse("gradients with prompts='int2'; score under model.eval() and torch.no_grad(), and train "
                   "with prompts='exact'")
        cache = _PassCache.over(applied, applied.memory(batch, columns, inputs.device))
        cache.counted = True
        if not self.format.history_tokens(columns) and not any(applied.calls) and not self.warned:
            self.warned = True
            LOGGER.warning(
                "oscar_int2: a pass of %d tokens reads no row in 2 bits: the first one leaves the exact windows at %d "
                "tokens. These logits are the BF16 baseline's, so take longer texts to measure the cache", columns,
                self.exact_tokens + self.format.demote_block)
        return cache


def wants_cache(base, kwargs):
    """Whether a forward pass without a cache gives one back, as transformers decides it."""
    wanted = kwargs.get("use_cache")
    if wanted is None:
        wanted = getattr(base.config, "use_cache", False)
    return bool(wanted) and not (base.training and getattr(base, "gradient_checkpointing", False))


class _PassCache(OscarCache):
    """The cache of a forward pass that was given none, and of those behind it if its caller goes on."""

    def end(self):
        super().end()
        self.check_rows()
        self.owner.last = self.paged.held_tokens()
