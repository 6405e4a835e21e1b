"""How rows become INT2: what all rows of a cache share, and what those of a side's KV heads do.

Operators take both as lists, whose order kernels/torch/recipe.h states.
"""
from dataclasses import dataclass, replace

import torch

from ._library import PAGE_TOKENS, ops

METADATA_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}  # in their order
# Rows that leave a window at once, unless somebody says otherwise: 15 of 16 steps then write no page.
DEMOTE_BLOCK = 16


@dataclass(frozen=True)
class CacheFormat:
    """The row format, and which tokens stay exact."""

    quant_group_size: int = 128  # 0: head_dim
    sink_tokens: int = 64        # the first tokens stay exact, and
    recent_tokens: int = 256     # the last ones,
    demote_block: int = 1        # which leave the recent window so many at a time
    metadata_dtype: torch.dtype = torch.float16

    def served(self, demote_block=None):
        """This format as a server runs it. `demote_block`: None for DEMOTE_BLOCK, or the format's where
        that is more."""
        return replace(self, demote_block=demote_block or max(DEMOTE_BLOCK, self.demote_block))

    def numbers(self):
        """This format as operators take it."""
        values = vars(self) | {"metadata_dtype": list(METADATA_DTYPES.values()).index(self.metadata_dtype)}
        return [values[name] for name in ops.format_names().split()]

    def ring_tokens(self, step_tokens=1):
        """Rows behind the sink where a decode step appends up to step_tokens a request."""
        return self.recent_tokens + self.demote_block + step_tokens

    def history_tokens(self, length):
        """INT2 tokens of `length` (docs/mathematics.md, 4.7): int, tensor or array."""
        blocks = (length - self.sink_tokens - self.recent_tokens) // self.demote_block
        blocks = max(blocks, 0) if isinstance(blocks, int) else blocks.clip(min=0)
        return blocks * self.demote_block

    def page_tokens(self, length):
        """Tokens behind the sink, of `length`, that fill whole pages: int, tensor or array."""
        pages = (length - self.sink_tokens) // PAGE_TOKENS
        return (max(pages, 0) if isinstance(pages, int) else pages.clip(min=0)) * PAGE_TOKENS

    def history_pages(self, length):
        """Pages that a request of `length` tokens can come to need."""
        return -(-max(length - self.sink_tokens - self.recent_tokens, 0) // PAGE_TOKENS)


KINDS = ("identity", "hadamard", "oscar", "balanced")  # of transforms, by SideRecipe.kind


@dataclass(frozen=True, repr=False)
class SideRecipe:
    """Of keys or values of one layer; float32 tensors on the CPU, Hkv KV heads of d dimensions."""

    kind: torch.Tensor              # uint8 [Hkv]: 0 identity, 1 Hadamard, 2 OSCAR, 3 balanced
    forward: torch.Tensor           # T [Hkv, d, d]: a stored row is (x - mean) T
    partner: torch.Tensor           # [Hkv, d, d]: queries times T^-T; outputs times T^-1
    mean: torch.Tensor              # [Hkv, d]
    clip_ratio: torch.Tensor        # [Hkv], 0: off
    scale_correction: torch.Tensor  # uint8 [Hkv]: 0 none, 1 unbiased, 2 metric
    feedback: torch.Tensor | None = None     # U [Hkv, d, d] of shaped rounding; None: plain rounding
    metric: torch.Tensor | None = None       # M [Hkv, d, d], where some correction is 2
    key_centers: torch.Tensor | None = None  # of keys, before RoPE [Hkv, 2, d]; None: one mean
    rounding: torch.Tensor | None = None     # uint8 [Hkv]; None: shaped where there is feedback

    def __repr__(self):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in vars(self).items() if tensor is not None)
        return f"<SideRecipe {'/'.join(sorted({KINDS[kind] for kind in self.kind.tolist()}))}: {shapes}>"

    def tensors(self, place):
        """This side's part of the list that operators take. `place`: what makes of a tensor, or of None,
        the one to pass."""
        return [place(name, getattr(self, name)) for name in ops.recipe_names().split()]
