"""Causal attention of rows that stand behind others, where no fused kernel takes them."""
import torch
import torch.nn.functional as F

QUERY_BLOCK = 256  # queries at once: bounds the mask


def attend_behind(q, k, v, out, sm_scale):
    """The last len(q) of len(k) tokens over themselves and all before them: q and out [new, Hq, d],
    k and v [tokens, Hkv, d]; query head h reads KV head h / (Hq / Hkv). Writes `out`."""
    new, heads, d = q.shape
    before, kv_heads = len(k) - new, k.shape[1]
    for first in range(0, new, QUERY_BLOCK):
        end = min(first + QUERY_BLOCK, new)
        seen = torch.ones(end - first, before + end, dtype=torch.bool, device=q.device)
        # The query heads of a group are further queries of its KV head: every kernel takes that.
        queries = q[first:end].view(end - first, kv_heads, -1, d).permute(1, 2, 0, 3)
        group = queries.shape[1]
        mask = seen.tril(before + first).repeat(group, 1)
        rows = (x[:before + end].transpose(0, 1)[None] for x in (k, v))
        o = F.scaled_dot_product_attention(queries.reshape(1, kv_heads, -1, d), *rows,
                                           attn_mask=mask, scale=sm_scale)
        o = o.view(kv_heads, group, end - first, d).permute(2, 0, 1, 3)
        out[first:end] = o.reshape(end - first, heads, d)
