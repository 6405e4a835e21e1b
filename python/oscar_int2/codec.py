"""One layer's cache as a server uses it: into the cache's basis, into pages, attention, and back.

Everything runs through torch.ops.oscar_int2 (kernels/README.md), on the CPU or a GPU. Nothing here
allocates in a decode step but the tensors that are returned, waits for the device, or reads a tensor
on the host, so that a step can be captured in a CUDA graph.
"""
from dataclasses import dataclass

import numpy as np
import torch

from ._library import PAGE_TOKENS, ops
from .rope import inverse_frequencies

# Rows that leave a window at once, unless somebody says otherwise: 15 of 16 steps then write no page.
DEMOTE_BLOCK = 16
SEGMENT_TOKENS = 1024  # positions that share a pair of key centres (docs/mathematics.md, 4.9)


@dataclass(frozen=True)
class LayerPages:
    """The memory of one layer's cache."""

    pool: torch.Tensor      # uint8 [pages, Hkv, chunk_bytes]
    window_k: torch.Tensor  # bf16 [slots, Hkv, sink + ring tokens, d]
    window_v: torch.Tensor  # the same


@dataclass(frozen=True)
class StepTables:
    """Who holds what before and after one append; int32 tensors on the device of the pages.

    Request b holds old_len[b] tokens, of which those behind the sink begin with old_history[b] INT2
    ones; rows rows_indptr[b] to rows_indptr[b + 1] of the call are new. Afterwards it holds
    seq_len[b] tokens and new_history[b] INT2 ones. A request with seq_len 0 is an empty place.
    """

    block_table: torch.Tensor   # [batch, max_pages]: page p of request b; rows of any stride
    rows_indptr: torch.Tensor   # [batch + 1]
    old_len: torch.Tensor       # [batch]
    seq_len: torch.Tensor       # [batch]
    old_history: torch.Tensor   # [batch]
    new_history: torch.Tensor   # [batch]
    status: torch.Tensor        # [slots]: of each window slot, not 0 once a row was refused
    max_new_rows: int           # most new rows of a request, and most rows that it turns INT2:
    max_new_history: int        #   bounds of the launch
    window_slot: torch.Tensor | None = None     # [batch]; None: the request's index
    first_position: torch.Tensor | None = None  # [batch] of the first token; None: 0


@dataclass(frozen=True)
class Windows:
    """What stays exact, in tokens: the first ones, the last ones, and what leaves them at once."""

    sink_tokens: int
    recent_tokens: int
    demote_block: int = 1

    @classmethod
    def of(cls, quantizer, demote_block=None):
        """Those that a bundle was made for. `demote_block`: None for DEMOTE_BLOCK, or the bundle's
        where that is more."""
        return cls(quantizer.sink_tokens, quantizer.recent_tokens,
                   demote_block or max(DEMOTE_BLOCK, quantizer.demote_block))

    def ring_tokens(self, step_tokens=1):
        """Rows behind the sink where a decode step appends up to step_tokens a request."""
        return self.recent_tokens + self.demote_block + step_tokens

    def history_tokens(self, length):
        """INT2 tokens of `length` (docs/mathematics.md, 4.7): int or tensor."""
        blocks = (length - self.sink_tokens - self.recent_tokens) // self.demote_block
        blocks = blocks.clamp(min=0) if isinstance(blocks, torch.Tensor) else max(blocks, 0)
        return blocks * self.demote_block

    def history_pages(self, length):
        """Pages that a request of `length` tokens can come to need."""
        return -(-max(length - self.sink_tokens - self.recent_tokens, 0) // PAGE_TOKENS)


class _Pages:
    """What every codec shares: shapes, and the operators that read and write pages."""

    def __init__(self, layer_id, num_kv_heads, head_dim, sink_tokens, group, metadata_dtype, device):
        self.layer_id, self.num_kv_heads, self.head_dim = layer_id, num_kv_heads, head_dim
        self.sink_tokens, self.sm_scale = sink_tokens, head_dim**-0.5
        self.device = torch.device(device)
        self.format = {"quant_group_size": group or head_dim, "metadata_dtype": metadata_dtype}
        self.chunk_bytes = ops.chunk_bytes(head_dim, **self.format)
        self.key_centres, self.writer = None, {}

    def pages(self, pages, slots, window_tokens):
        """New memory: that many pages, and windows of sink + ring tokens for that many requests."""
        window = (slots, self.num_kv_heads, window_tokens, self.head_dim)
        pool = torch.zeros(max(pages, 1), self.num_kv_heads, self.chunk_bytes, dtype=torch.uint8,
                           device=self.device)
        return LayerPages(pool, *(torch.zeros(window, dtype=torch.bfloat16, device=self.device)
                                  for _ in range(2)))

    def workspace(self):
        """Memory of attend(), once for all layers and steps of a stream; zeros between calls."""
        pool = torch.empty(1, self.num_kv_heads, self.chunk_bytes, dtype=torch.uint8,
                           device=self.device)
        size = ops.decode_attention_workspace_size(pool, self.head_dim)
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def append(self, pages, tables, k, v):
        """New rows [rows, Hkv, d] into windows and pages, and old ones from windows into pages."""
        ops.quantize_append(
            pages.pool, tables.block_table, pages.window_k, pages.window_v, k, v,
            tables.rows_indptr, tables.old_len, tables.old_history, tables.new_history,
            tables.status, **self._options(tables), **self.writer,
            max_new_rows=tables.max_new_rows, max_new_history=tables.max_new_history)

    def attend(self, pages, tables, q, sm_scale=None, workspace=None):
        """q [batch, q_len, Hq, d], the newest q_len <= 4 tokens of each request, over all its rows.

        Returns bf16 of the same shape, in the cache's basis. `workspace`: that of workspace()."""
        out = torch.empty_like(q)
        ops.decode_attention_out(
            q, pages.pool, tables.block_table, tables.new_history, pages.window_k, pages.window_v,
            tables.seq_len, out, sm_scale=self.sm_scale if sm_scale is None else sm_scale,
            workspace=workspace, **self._options(tables))
        return out

    def read(self, pages, tables, request, slot, history, k, v):
        """What a request holds before an append, as rows: its tokens in order into k and v, bf16
        [old_len, Hkv, d], in the cache's basis, exact or as INT2 has them.

        `request`: its index in the tables; `slot`: its window; `history`: its old_history. All three
        are read here, and not on the device."""
        sink, one = self.sink_tokens, slice(request, request + 1)
        if history:
            ops.dequantize_history(
                pages.pool, tables.block_table[one], tables.old_history[one],
                k[None, sink:sink + history], v[None, sink:sink + history], sink_tokens=sink,
                key_centres=self.key_centres, **self.format)
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
            ops.dequantize_history(
                pages.pool, tables.block_table[one], tables.new_history[one], *rows[:, None],
                sink_tokens=self.sink_tokens, key_centres=self.key_centres, **self.format)
        return rows

    def _options(self, tables):
        return {**self.format, "sink_tokens": self.sink_tokens, "window_slot": tables.window_slot,
                "key_centres": self.key_centres, "first_position": tables.first_position}


class LayerCodec(_Pages):
    """The transforms and the row recipe of one layer of a bundle, on one device.

    `heads`: the KV heads that this process serves, as a slice; the query heads are theirs. `positions`:
    that requests may reach, where these are more than the bundle's.
    """

    def __init__(self, bundle, layer_id, device, heads=slice(None), positions=0):
        layer, quantizer = bundle.layers[layer_id], bundle.quantizer
        super().__init__(layer_id, len(range(layer.num_kv_heads)[heads]), layer.head_dim,
                         quantizer.sink_tokens, quantizer.quant_group_size,
                         quantizer.metadata_dtype, device)

        def here(tensor):
            return None if tensor is None else tensor[heads].contiguous().to(device)

        key, value = layer.key, layer.value
        self.q_rotation, self.k_rotation = here(key.partner), here(key.rotation)
        self.v_rotation, self.o_rotation = here(value.rotation), here(value.partner)
        self.k_mean = here(key.mean) if key.mean.any() else None
        self.v_mean = here(value.mean) if value.mean.any() else None
        centres = key_centre_table(bundle, layer_id, positions)
        self.key_centres = None if centres is None else centres[:, heads].contiguous().to(device)
        for letter, side in (("k", key), ("v", value)):
            self.writer |= {f"clip_{letter}": here(side.clip_ratio),
                            f"feedback_{letter}": here(side.feedback)}
            if side.scale_correction[heads].any():
                metric = side.metric  # of heads that are corrected otherwise it is not read
                if metric is None:
                    metric = torch.eye(layer.head_dim).expand(layer.num_kv_heads, -1, -1)
                self.writer |= {f"correction_{letter}": here(side.scale_correction),
                                f"metric_{letter}": here(metric)}

    def transform_qkv(self, q, k, v):
        """Rows into the cache's basis: q bf16 [rows, Hq, d], k and v [rows, Hkv, d], behind RoPE."""
        return ops.transform_qkv(q, k, v, self.q_rotation, self.k_rotation, self.v_rotation,
                                 self.k_mean, self.v_mean)

    def transform_kv(self, k, v):
        """The same without queries."""
        return self.transform_qkv(k, k, v)[1:]

    def transform_output(self, o, out=None):
        """Attention's output bf16 [rows, Hq, d] back into the model's basis; into `out`, if given."""
        if out is None:
            return ops.transform_output(o, self.o_rotation, self.v_mean)
        ops.transform_output_out(o, self.o_rotation, self.v_mean, out)
        return out


class ExactCodec(_Pages):
    """Rows as they are: every token stays in an exact window, nothing is turned or rounded to INT2.
    The same loop over BF16, to compare with."""

    def __init__(self, layer_id, num_kv_heads, head_dim, sink_tokens, device):
        super().__init__(layer_id, num_kv_heads, head_dim, sink_tokens, head_dim, torch.float16,
                         device)

    def transform_qkv(self, q, k, v):
        return q.contiguous(), k.contiguous(), v.contiguous()

    def transform_kv(self, k, v):
        return k.contiguous(), v.contiguous()

    def transform_output(self, o):
        return o


def key_centre_table(bundle, layer_id, positions=0):
    """bf16 [segments, Hkv, 2, d] on the CPU, or None: each segment's two key centres, turned to its
    middle, centred and transformed (docs/mathematics.md, 7.2). Heads without centres have zeros. Segments
    are those of the bundle's positions, or of so many; rows behind them have the last one's."""
    layer = bundle.layers[layer_id]
    key = layer.key
    if key.centres is None:
        return None
    positions = max(int(bundle.model.rope["max_positions"]), positions)
    segments = max(1, -(-positions // SEGMENT_TOKENS))
    middles = SEGMENT_TOKENS * np.arange(segments) + (SEGMENT_TOKENS - 1) / 2
    angles = torch.from_numpy(middles[:, None] * inverse_frequencies(bundle.model.rope, layer.head_dim))
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]  # [segments, 1, 1, n / 2]
    half = angles.shape[1]
    x, y, still = key.centres.double().split((half, half, layer.head_dim - 2 * half), dim=-1)
    turned = torch.cat((x * cos - y * sin, y * cos + x * sin,
                        still.expand(segments, *still.shape)), -1)  # [segments, Hkv, 2, d]
    rows = (turned - key.mean.double()[:, None]) @ key.rotation.double()
    rows[:, (key.centres == 0).all(-1).all(-1)] = 0
    return rows.float().bfloat16()
