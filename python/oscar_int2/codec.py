"""One layer's cache as a server uses it: into the cache's basis, into pages, attention, and back.

Everything runs through torch.ops.oscar_int2 (kernels/README.md), on the CPU or a GPU. Nothing here
allocates in a decode step but the tensors that are returned, waits for the device, or reads a tensor
on the host, so that a step can be captured in a CUDA graph.
"""
from dataclasses import dataclass

import numpy as np
import torch

from ._library import ops
from .rope import turned

SEGMENT_TOKENS = 1024  # positions that share a pair of key centers (docs/mathematics.md, 4.9)


def is_served_scale(scale, head_dim):
    """Whether logits are q k^T / sqrt(head_dim), which the kernels compute."""
    return abs(scale * head_dim**0.5 - 1) <= 1e-6


@dataclass(frozen=True)
class LayerPages:
    """The memory of one layer's cache."""

    pool: torch.Tensor      # uint8 [pages, Hkv, page_bytes]
    window_k: torch.Tensor  # bf16 [slots, Hkv, sink + ring tokens, d]
    window_v: torch.Tensor  # the same


@dataclass(frozen=True)
class StepTables:
    """Who holds what before and after one append; int32 tensors on the device of the pages.

    Request b holds old_len[b] tokens, of which those behind the sink begin with old_history[b] INT2
    ones; rows query_start_loc[b] to query_start_loc[b + 1] of the call are new. Afterwards it holds
    seq_lens[b] tokens and new_history[b] INT2 ones. A request with seq_len 0 is an empty slot.

    Where pages are written once they are full, rows get theirs before they leave the window: those
    from old_written[b] to new_written[b] behind the sink, in place of old_history[b] to new_history[b].
    """

    block_table: torch.Tensor   # [batch, max_pages]: page p of request b; rows of any stride
    query_start_loc: torch.Tensor   # [batch + 1]
    old_len: torch.Tensor       # [batch]
    seq_lens: torch.Tensor       # [batch]
    old_history: torch.Tensor   # [batch]
    new_history: torch.Tensor   # [batch]
    status: torch.Tensor        # [slots]: of each window slot, not 0 once a row was refused
    max_new_rows: int           # most new rows of a request, and most rows that get their page:
    max_new_history: int        #   bounds of the launch
    window_slot: torch.Tensor | None = None     # [batch]; None: the request's index
    first_position: torch.Tensor | None = None  # [batch] of the first token; None: 0
    old_written: torch.Tensor | None = None     # [batch] INT2 tokens that have a page; None: old_history
    new_written: torch.Tensor | None = None     # [batch] the same afterwards; None: new_history


class _Pages:
    """What every codec shares: shapes, and the operators that read and write pages."""

    def __init__(self, layer_id, num_kv_heads, head_dim, format, device, sm_scale=None):
        self.layer_id, self.num_kv_heads, self.head_dim = layer_id, num_kv_heads, head_dim
        self.format, self.sm_scale = format, head_dim**-0.5 if sm_scale is None else sm_scale
        self.device = torch.device(device)
        self.numbers, self.recipe = format.numbers(), []  # as operators take them
        self.page_bytes = ops.page_bytes(head_dim, self.numbers)

    def pages(self, pages, slots, window_tokens):
        """New memory: that many pages, and windows of sink + ring tokens for that many requests."""
        window = (slots, self.num_kv_heads, window_tokens, self.head_dim)
        pool = torch.zeros(max(pages, 1), self.num_kv_heads, self.page_bytes, dtype=torch.uint8,
                           device=self.device)
        return LayerPages(pool, *(torch.zeros(window, dtype=torch.bfloat16, device=self.device)
                                  for _ in range(2)))

    def workspace(self):
        """Memory of attend(), once for all layers and steps of a stream; zeros between calls."""
        pool = torch.empty(1, self.num_kv_heads, self.page_bytes, dtype=torch.uint8,
                           device=self.device)
        size = ops.decode_attention_workspace_size(pool, self.head_dim)
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def append(self, pages, tables, k, v):
        """New rows [rows, Hkv, d] into windows and pages, and old ones from windows into pages."""
        written, read = (tables.old_history, tables.new_history), None
        if tables.old_written is not None:
            written, read = (tables.old_written, tables.new_written), tables.new_history
        ops.quantize_append(
            self.recipe, self.numbers, pages.pool, tables.block_table, pages.window_k, pages.window_v, k, v,
            tables.query_start_loc, tables.old_len, *written, tables.status, window_slot=tables.window_slot,
            first_position=tables.first_position, max_new_rows=tables.max_new_rows,
            max_new_history=tables.max_new_history, read_history=read)

    def attend(self, pages, tables, q, sm_scale=None, workspace=None, lse=None):
        """q [batch, q_len, Hq, d], the newest q_len <= 4 tokens of each request, over all its rows.

        Returns bf16 of the same shape, in the cache's basis. `workspace`: that of workspace(). `lse`: float32
        [batch, q_len, Hq], takes the logsumexp of each query's logits there."""
        out = torch.empty_like(q)
        ops.decode_attention_out(
            q, self.recipe, self.numbers, pages.pool, tables.block_table, tables.new_history, pages.window_k,
            pages.window_v, tables.seq_lens, out, lse, sm_scale=self.sm_scale if sm_scale is None else sm_scale,
            window_slot=tables.window_slot, workspace=workspace,
            first_position=tables.first_position)
        return out

    def read(self, pages, tables, request, slot, history, k, v):
        """What a request holds before an append, as rows: its tokens in order into k and v, bf16
        [old_len, Hkv, d], in the cache's basis, exact or as INT2 has them.

        `request`: its index in the tables; `slot`: its window; `history`: its old_history. All three
        are read here, and not on the device."""
        sink, one = self.format.sink_tokens, slice(request, request + 1)
        if history:
            ops.dequantize_history(
                self.recipe, self.numbers, pages.pool, tables.block_table[one], tables.old_history[one],
                k[None, sink:sink + history], v[None, sink:sink + history])
        ring = pages.window_k.shape[2] - sink
        pieces = [(0, min(sink, len(k)), 0)]  # first token, tokens, row of the window
        token = sink + history
        while token < len(k):
            row = (token - sink) % ring
            pieces.append((token, min(len(k) - token, ring - row), sink + row))
            token += pieces[-1][1]
        for token, count, row in pieces:
            for rows, window in ((k, pages.window_k), (v, pages.window_v)):
                rows[token:token + count] = window[slot, :, row:row + count].transpose(0, 1)

    def read_history(self, pages, tables, request, history):
        """The INT2 rows that a request holds behind an append, `history` of them, its new_history: k and
        v in one bf16 [2, history, Hkv, d], in the cache's basis."""
        rows = torch.empty(2, history, self.num_kv_heads, self.head_dim, dtype=torch.bfloat16,
                           device=self.device)
        one = slice(request, request + 1)
        if history:
            ops.dequantize_history(self.recipe, self.numbers, pages.pool, tables.block_table[one],
                                   tables.new_history[one], *rows[:, None])
        return rows


class LayerCodec(_Pages):
    """The transforms and the row recipe of one layer of a bundle, on one device.

    `heads`: the KV heads that this process serves, as a slice; the query heads are theirs. `positions`:
    that requests may reach, where these are more than the bundle's. `sm_scale`: of the model's logits;
    None: 1 / sqrt(head_dim).
    """

    def __init__(self, bundle, layer_id, device, heads=slice(None), positions=0, sm_scale=None):
        layer = bundle.layers[layer_id]
        super().__init__(layer_id, len(range(layer.num_kv_heads)[heads]), layer.head_dim, bundle.quantizer,
                         device, sm_scale)
        self.key_centers = key_center_table(bundle, layer_id, positions)
        if self.key_centers is not None:
            self.key_centers = self.key_centers[:, heads].contiguous().to(device)
        self.recipe = [*self._tensors(layer.key, heads), *self._tensors(layer.value, heads)]

    def _tensors(self, side, heads):
        corrected = side.scale_correction[heads].any()
        absent = set() if side.mean.any() else {"mean"}
        absent |= set() if corrected else {"scale_correction", "metric"}

        def place(name, tensor):
            if name == "key_centers":  # of the segments, not of the bundle
                tensor = self.key_centers if tensor is not None else None
            elif name in absent:
                tensor = None
            elif name == "metric" and tensor is None:  # not read where no head is corrected by it
                tensor = torch.eye(self.head_dim).expand(self.num_kv_heads, -1, -1).contiguous()
            elif tensor is not None:
                tensor = tensor[heads].contiguous()
            return torch.empty(0, device=self.device) if tensor is None else tensor.to(self.device)

        return side.tensors(place)

    def transform_qkv(self, q, k, v):
        """Rows into the cache's basis: q bf16 [rows, Hq, d], k and v [rows, Hkv, d], behind RoPE."""
        return ops.transform_qkv(q, k, v, self.recipe)

    def transform_kv(self, k, v):
        """The same without queries."""
        return self.transform_qkv(k, k, v)[1:]

    def centered_logits(self, q):
        """By how much the logits of queries bf16 [rows, Hq, d], in the model's basis, are larger than in the cache's, where
        keys are centered: float32 [rows, Hq], or 0. Alike for all keys, which softmax ignores, but not a sink."""
        mean = self.recipe[ops.recipe_names().split().index("mean")]  # the keys' tensors come first
        if not mean.numel():
            return 0
        q = q.float().view(len(q), self.num_kv_heads, -1, self.head_dim)
        return torch.einsum("nhgd,hd->nhg", q, mean.float()).flatten(1) * self.sm_scale

    def transform_output(self, o, out=None):
        """Attention's output bf16 [rows, Hq, d] back into the model's basis; into `out`, if given."""
        if out is None:
            return ops.transform_output(o, self.recipe)
        ops.transform_output_out(o, self.recipe, out)
        return out


class ExactCodec(_Pages):
    """Rows as they are: every token stays in an exact window, nothing is turned or rounded to INT2.
    The same loop over BF16, to compare with."""

    def transform_qkv(self, q, k, v):
        return q.contiguous(), k.contiguous(), v.contiguous()

    def transform_kv(self, k, v):
        return k.contiguous(), v.contiguous()

    def transform_output(self, o):
        return o


def key_center_table(bundle, layer_id, positions=0):
    """bf16 [segments, Hkv, 2, d] on the CPU, or None: each segment's two key centers, turned to its
    middle, centered and transformed (docs/mathematics.md, 7.2). Heads without centers have zeros. Segments
    are those of the bundle's positions, or of so many; rows behind them have the last one's."""
    layer = bundle.layers[layer_id]
    key = layer.key
    if key.key_centers is None:
        return None
    positions = max(int(bundle.model.rope["max_positions"]), positions)
    segments = max(1, -(-positions // SEGMENT_TOKENS))
    middles = SEGMENT_TOKENS * np.arange(segments) + (SEGMENT_TOKENS - 1) / 2
    rows = key.key_centers.double().unsqueeze(-2).expand(-1, -1, segments, -1)  # [Hkv, 2, segments, d]
    if layer.turned:
        rows = turned(rows, bundle.model.rope, middles)
    rows = (rows.permute(2, 0, 1, 3) - key.mean.double()[:, None]) @ key.forward.double()
    rows[:, (key.key_centers == 0).all(-1).all(-1)] = 0
    return rows.float().bfloat16()
