"""Causal attention of rows that stand behind others, where no fused kernel takes them."""
import torch
import torch.nn.functional as F

QUERY_BLOCK = 256      # queries at once, and
MASK_ENTRIES = 1 << 24  #   entries of their mask: bounds of memory


def attend_behind(q, k, v, out, sm_scale, lse=None):
    """The last len(q) of len(k) tokens over themselves and all before them: q and out [new, Hq, d],
    k and v [tokens, Hkv, d]; query head h reads KV head h / (Hq / Hkv). Writes `out`, and on a CPU the logsumexp of
    each query's logits into `lse`, float32 [new, Hq], if it is given."""
    new, before = len(q), len(k) - len(q)
    for first in range(0, new, QUERY_BLOCK):
        end = min(first + QUERY_BLOCK, new)
        seen = torch.ones(end - first, before + end, dtype=torch.bool, device=q.device)
        rows = slice(first, end)
        out[rows] = _attend(q[rows], k[:before + end], v[:before + end], seen.tril(before + first), sm_scale,
                            None if lse is None else lse[rows])


def attend_as_steps(q, exact, int2, out, format, sm_scale):
    """The same where each query reads what the step of its token would read: rows that have left the
    window by then as INT2, the others exactly (docs/mathematics.md, 4.7).

    `exact`: k and v [tokens, Hkv, d]; `int2`: k and v [history_tokens(tokens), Hkv, d], what INT2 makes
    of those behind the sink. `format`: recipe.CacheFormat. The rows in `exact` become INT2 on the way."""
    new, tokens, group = len(q), len(exact[0]), q.shape[1] // exact[0].shape[1]
    before, sink, converted = tokens - new, format.sink_tokens, 0
    size = max(16, min(QUERY_BLOCK, MASK_ENTRIES // (tokens * group)))
    for first in range(0, new, size):
        end = min(first + size, new)
        # The first query of the block finds `held` rows INT2, the last one `left` more, which lie behind
        # all others in both forms: the mask picks.
        lengths = torch.arange(before + first + 1, before + end + 1, device=q.device)[:, None]
        held = format.history_tokens(before + first + 1)
        left = format.history_tokens(before + end) - held
        for rows, coded in zip(exact, int2):
            rows[sink + converted:sink + held] = coded[converted:held]
        converted = held
        place = torch.arange(before + end, device=q.device)
        aged = sink + format.history_tokens(lengths)
        seen = (place < lengths) & ((place < sink + held) | (place >= aged))
        seen = torch.cat((seen, place[sink + held:sink + held + left] < aged), 1)
        k, v = (torch.cat((rows[:before + end], coded[held:held + left]))
                for rows, coded in zip(exact, int2))
        out[first:end] = _attend(q[first:end], k, v, seen, sm_scale)


def weigh_by_sinks(out, lse, scores):
    """Makes attention without sinks, `out` [rows, Hq, d], that with them, in place: a sink is a further score in a query's
    softmax, and has no value (gpt-oss; docs/mathematics.md, 7.1). `lse`: float32 [rows, Hq], the logsumexp of each
    query's logits. `scores`: float32 [Hq] or [rows, Hq]."""
    return out.mul_(torch.sigmoid(lse - scores)[..., None])


def _attend(q, k, v, seen, sm_scale, lse=None):
    """q [new, Hq, d] over those of k and v [tokens, Hkv, d] that bool seen [new, tokens] says."""
    new, heads, d = q.shape
    kv_heads = k.shape[1]
    # The query heads of a group are further queries of its KV head: every kernel takes that.
    queries = q.view(new, kv_heads, -1, d).permute(1, 2, 0, 3)
    group = queries.shape[1]
    queries = queries.reshape(1, kv_heads, -1, d)
    rows = [x.transpose(0, 1)[None] for x in (k, v)]
    seen = seen.repeat(group, 1)
    if lse is None:
        o = F.scaled_dot_product_attention(queries, *rows, attn_mask=seen, scale=sm_scale)
    else:
        if q.device.type == "cpu":
            bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
            o, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, *rows, attn_mask=bias, scale=sm_scale)
        else:  # no operator of a GPU gives sums and takes every mask
            keys, values = (x.float() for x in rows)
            logits = (queries.float() @ keys.transpose(-1, -2) * sm_scale).masked_fill_(~seen, -torch.inf)
            sums = logits.logsumexp(-1)
            o = ((logits - sums[..., None]).exp_() @ values).to(q.dtype)
        lse.copy_(sums.view(kv_heads, group, new).permute(2, 0, 1).reshape(new, heads))
    return o.view(kv_heads, group, new, d).permute(2, 0, 1, 3).reshape(new, heads, d)
