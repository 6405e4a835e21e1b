"""Decode attention over BF16 rows as a split-KV kernel in Triton, the usual baseline of other papers.

One program for each (request, KV head, split): the query heads of a group share the rows that they
read; a second kernel joins the splits.
"""
import torch
import triton
import triton.language as tl

TILE = 64  # tokens a program reads at once


@triton.jit
def _split(q, k, v, parts, sums, stride_b, stride_h, length, scale, splits,
           GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    begin, end = split * share, tl.minimum((split + 1) * share, length)
    rows, dims, tile = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    query = (request * heads + head) * GROUP + rows
    used = rows < GROUP
    queries = tl.load(q + query[:, None] * D + dims[None, :], mask=used[:, None], other=0.0)
    base = request.to(tl.int64) * stride_b + head * stride_h
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tile
        here = token < end
        keys = tl.load(k + base + token[None, :] * D + dims[:, None], mask=here[None, :], other=0.0)
        logits = tl.where(here[None, :], tl.dot(queries, keys) * scale, -1e30)
        new = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp(logits - new[:, None])
        kept = tl.exp(top - new)
        values = tl.load(v + base + token[:, None] * D + dims[None, :], mask=here[:, None], other=0.0)
        out = out * kept[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * kept + tl.sum(weights, 1)
        top = new
    place = query * splits + split
    tl.store(parts + place[:, None] * D + dims[None, :], out / tl.maximum(total, 1e-30)[:, None],
             mask=used[:, None])
    tl.store(sums + place, tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-30)), -1e30), mask=used)


@triton.jit
def _join(parts, sums, out, splits, SPLITS: tl.constexpr, D: tl.constexpr):
    query = tl.program_id(0)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, D)
    here = split < splits
    logs = tl.load(sums + query * splits + split, mask=here, other=-1e30)
    weights = tl.exp(logs - tl.max(logs, 0))
    rows = tl.load(parts + (query * splits + split)[:, None] * D + dims[None, :], mask=here[:, None],
                   other=0.0)
    o = tl.sum(rows * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query * D + dims, o.to(out.dtype.element_ty))


def decode_attention(q, keys, values):
    """q bf16 [batch, Hq, d], keys and values [batch, Hkv, tokens, d]; bf16 [batch, Hq, d]."""
    batch, heads, d = q.shape
    kv_heads, length = keys.shape[1:3]
    group, q = heads // kv_heads, q.contiguous()
    blocks = 4 * torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = max(1, min(64, -(-blocks // (batch * kv_heads)), length // (2 * TILE)))
    parts = torch.empty(batch * heads * splits, d, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * heads * splits, dtype=torch.float32, device=q.device)
    _split[(batch, kv_heads, splits)](q, keys, values, parts, sums, keys.stride(0), keys.stride(1),
                                      length, d**-0.5, splits, GROUP=group, ROWS=max(16, group), D=d,
                                      TILE=TILE, num_warps=4, num_stages=3)
    out = torch.empty_like(q)
    _join[(batch * heads,)](parts, sums, out, splits, SPLITS=triton.next_power_of_2(splits), D=d)
    return out
