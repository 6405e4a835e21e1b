"""How a forward pass over many tokens at once reads its own rows: apply(..., prompts=...).

"exact": every row as the model made it. Logits of such a pass are the BF16 baseline's, to the bit.
"int2": each token reads what the step of its token would read, rows that have left the exact windows by
then as 2-bit ones. A pass without a cache, as for scoring, runs over one that lives as long as the pass.
"""
import logging

import torch

from .cache import NAME, OscarCache, refuse

MODES = ("exact", "int2")
LOGGER = logging.getLogger("oscar_int2")


def check_mode(prompts):
    if prompts not in MODES:
        raise ValueError(f"prompts={prompts!r}; expected one of {', '.join(map(repr, MODES))}")
    return prompts


class Scoring:
    """Forward passes without a cache, of one model that apply() prepared."""

    def __init__(self, prompts, windows):
        self.prompts, self.warned = prompts, False
        self.exact_tokens = windows.sink_tokens + windows.recent_tokens

    def cache(self, base, args, kwargs):
        """The OscarCache of such a pass over these arguments, or None: it is exact."""
        inputs = kwargs.get("inputs_embeds") if kwargs.get("inputs_embeds") is not None else \
            args[0] if args else kwargs["input_ids"]
        batch, columns = inputs.shape[:2]
        if self.prompts == "exact":
            if columns > self.exact_tokens and not base.training and not self.warned:
                self.warned = True
                LOGGER.warning(
                    "oscar_int2: %d tokens without a cache are attended exactly: these logits are the BF16 "
                    "baseline's, not the 2-bit cache's. To measure the cache: apply(..., prompts='int2')",
                    columns)
            return None
        if base.training or torch.is_grad_enabled():
            refuse("gradients with prompts='int2'; score under model.eval() and torch.no_grad(), and train "
                   "with prompts='exact'")
        model = next(module for module in base.modules() if hasattr(module, NAME))
        return _PassCache(model, batch, columns)


class _PassCache(OscarCache):
    """The cache of one forward pass."""

    def end(self):
        super().end()
        self.layers = []  # which hold it: its memory goes with the pass
        self.check_rows()
