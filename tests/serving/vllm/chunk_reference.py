"""What attention of a prompt in chunks has to give: recorded from an engine, and worked out in float64."""
import contextlib
from unittest import mock

import torch

# Of an output row, in shares of what its values weigh: the weights and the row are rounded to bf16,
# 2^-9 each.
ROUNDINGS = 2 / 2**9


class Recorder:
    """Records what one layer of an engine gets and gives, while it runs one request alone. `codec`: what its
    rows have to be coded by; None: what it codes by."""

    def __init__(self, engine, layer, codec=None):
        self.windows, self.layer = engine.builder.format, layer
        self.impl, self.steps = engine.builder.layers[layer], []
        self.codec = codec or self.impl.codec

    def __enter__(self):
        from oscar_int2.vllm import adapter

        forward = self.impl.forward

        def record(_, q, k, v, kv_cache, metadata, output, *others, **options):
            result = forward(_, q, k, v, kv_cache, metadata, output, *others, **options)
            end = metadata.num_tokens
            self.steps.append([x[:end].clone() for x in (q, k, v, output)])
            tables = metadata.decodes.tables if metadata.decodes else metadata.appended
            self.pool = adapter().pool(kv_cache)
            self.block_table = tables.block_table[:1].clone()
            return result

        self.impl.forward = record
        return self

    def __exit__(self, *_):
        del self.impl.forward

    def check(self):
        """Returns (steps that read INT2 rows, the largest error of an output row, in shares of what
        the values of its keys weigh), and raises AssertionError unless the engine's pages hold the
        bytes of one append of all rows."""
        q, k, v, out = (torch.cat(rows) for rows in zip(*self.steps))
        codec = self.codec
        turned = codec.transform_qkv(q, k, v)
        int2 = self._int2_rows(codec, *turned[1:])
        begin = reading = 0
        worst = 0.0
        for rows in (len(step[0]) for step in self.steps):
            end = begin + rows
            # A single token enters the cache before it attends, a chunk behind it.
            history = self.windows.history_tokens(end if rows == 1 else begin)
            raw = begin == 0 and rows > 1
            keys, values = ([x.double() for x in ((k, v) if raw else turned[1:])])
            keys, values = keys[:end].clone(), values[:end].clone()
            past = slice(codec.format.sink_tokens, codec.format.sink_tokens + history)
            keys[past], values[past] = (rows[:history].double() for rows in int2)
            sinks = self.impl.sinks
            if sinks is not None:
                sinks = sinks.double() - (0 if raw else self._centered(codec, q[begin:end]))
            o, weighed, share = attention((q if raw else turned[0])[begin:end].double(), keys, values,
                                          codec.sm_scale, sinks)
            if not raw:
                shared = o.shape[1] // values.shape[1]
                named = tensors_of_side(codec, 1)
                back = named["partner"].double().repeat_interleave(shared, 0)
                o = torch.einsum("nhd,hde->nhe", o, back)
                weighed = weighed * torch.linalg.matrix_norm(back, 2)
                if named["mean"].numel():
                    mean = named["mean"].double()
                    o += share[..., None] * mean.repeat_interleave(shared, 0)
                    weighed = weighed + mean.norm(dim=-1).repeat_interleave(shared)
            error = (out[begin:end].double() - o).norm(dim=-1) / weighed
            worst, reading = max(worst, error.max().item()), reading + (history > 0)
            begin = end
        return reading, worst

    @staticmethod
    def _centered(codec, q):
        """What logits of queries lose where the mean of keys is subtracted: float64 [rows, heads]."""
        mean = tensors_of_side(codec, 0)["mean"].double()
        if not mean.numel():
            return 0
        mean = mean.repeat_interleave(q.shape[1] // len(mean), 0)
        return (q.double() * mean).sum(-1) * codec.sm_scale

    def _int2_rows(self, codec, k, v):
        """INT2 rows bf16 [history, Hkv, d] of keys and values, from one append of all of them."""
        from oscar_int2 import ops
        from oscar_int2.cache import PagedCache

        length = len(k)
        cache = PagedCache({0: codec}, self.windows, 1, length)
        cache.admit(0, length)
        tables = cache.prompt_tables([0], [length])
        codec.append(cache.layers[0], tables, k, v)
        cache.check_rows()
        history = self.windows.history_tokens(length)
        full = history // 64
        ours = cache.layers[0].pool[cache.block_table[0, :full].long()]
        assert torch.equal(ours, self.pool[self.block_table[0, :full].long()]), "bytes of pages differ"
        found = []
        for pool, table in ((cache.layers[0].pool, cache.block_table), (self.pool, self.block_table)):
            rows = torch.zeros(2, 1, history, *k.shape[1:], dtype=torch.bfloat16, device=k.device)
            ops.dequantize_history(codec.recipe, codec.numbers, pool, table, tables.new_history, *rows)
            found.append(rows[:, 0])
        assert torch.equal(*found), "INT2 rows of the last page differ"
        return found[0]


def tensors_of_side(codec, side):
    """Those of a codec's recipe by name, of keys (0) or values (1)."""
    from oscar_int2 import ops

    names = ops.recipe_names().split()
    return dict(zip(names, codec.recipe[side * len(names):]))


@contextlib.contextmanager
def flash_attention(engine, look):
    """As on a GPU: an engine asks vLLM's FlashAttention for prompts, in whose place torch answers.
    `look(q, k, v, queries, keys, **options)` sees each call, with Packed of chunk and keys."""
    from oscar_int2.vllm import prompts

    def flash(q, k, v, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, return_softmax_lse, **options):
        queries, keys = (prompts.Packed(x.tolist(), x) for x in (cu_seqlens_q, cu_seqlens_k))
        look(q, k, v, queries, keys, longest=(max_seqlen_q, max_seqlen_k), sums=return_softmax_lse, **options)
        sums = torch.empty(q.shape[:2]) if return_softmax_lse else None
        prompts.causal_attention(q, k, v, out, queries, keys, softmax_scale, None, sums)
        return (out, sums.T.contiguous()) if return_softmax_lse else out  # [heads, queries]

    with contextlib.ExitStack() as stack:
        for owner, name, value in ((prompts.fa_utils, "flash_attn_varlen_func", flash),
                                   *((layer, "fa_version", 3) for layer in engine.builder.layers)):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def attention(q, k, v, scale, sinks=None):
    """Of the last len(q) tokens of [tokens, heads, d], causal, in float64: the output, sum_j p_j |v_j| and sum_j p_j of
    each row. `sinks` [heads] or [rows, heads]: a further score, without a value."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    before = len(k) - len(q)
    later = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(before + 1)
    logits.masked_fill_(later, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.expand(len(q), -1).T[..., None]), -1)
    weights = logits.softmax(-1)[..., :len(k)]
    return (torch.einsum("hqk,khd->qhd", weights, v), torch.einsum("hqk,kh->qh", weights, v.norm(dim=-1)),
            weights.sum(-1).T)
