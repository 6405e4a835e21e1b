#!/usr/bin/env python3
"""What rounding keys and rounding values to 2 bits each cost, by how much attention is on one token.

  focused_attention.py MODEL BUNDLE IDS.npy [--last 1024] [--rows 1]

The model, a Hugging Face folder, reads each row of token ids exactly. Behind it the attention of the last queries is computed
again, over rows behind the exact windows as the bundle has them, keys alone and values alone. A query of a head counts where
its heaviest 2-bit row has so much of its attention. Errors are mean squares behind the head's part of the output projection,
in shares of those of its output about the mean value of all rows: sums over queries, heads and layers.

IDS are rows whose ends look back, such as those of studies/recall.py (tune-tails.npy, tune-chats.npy), or text as it comes.
"""
import argparse
import pathlib
import sys

import numpy as np
import torch

BOUNDS = (0.0, 0.1, 0.3, 0.5, 1.0)  # of the heaviest row's weight
NAMES = tuple(f"{100 * low:.0f} to {100 * high:.0f}%" for low, high in zip(BOUNDS, BOUNDS[1:]))
QUERIES = 64  # that are computed at a time


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, metavar="MODEL", help="a Hugging Face folder")
    parser.add_argument("bundle", type=pathlib.Path, metavar="BUNDLE", help="of the model, all layers in 2 bits")
    parser.add_argument("ids", type=pathlib.Path, metavar="IDS.npy", help="token ids [rows, tokens]")
    parser.add_argument("--last", type=int, default=1024, metavar="N", help="queries at the end of each row (1024)")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="the first so many rows (1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (cuda if there is one)")
    return parser.parse_args(words)


class Sums:
    """Of each range of weights, one entry: queries, and energies of outputs and of errors."""

    def __init__(self):
        self.queries, self.output, self.keys, self.values = (torch.zeros(len(NAMES), dtype=torch.float64) for _ in range(4))

    def add(self, weight, output, keys, values):
        """All [queries, Hq]."""
        place = torch.bucketize(weight.flatten(), torch.tensor(BOUNDS[1:-1], device=weight.device)).cpu()
        for total, of in ((self.queries, torch.ones_like(weight)), (self.output, output), (self.keys, keys), (self.values, values)):
            total.index_add_(0, place, of.flatten().double().cpu())

    def table(self):
        """One line a range."""
        head = ("weight of one row", "queries", "output", "keys", "values")
        lines = [head, *((name, *(f"{100 * x:.2f}%" for x in (
            self.queries[i] / self.queries.sum(), self.output[i] / self.output.sum(), self.keys[i] / self.output[i],
            self.values[i] / self.output[i]))) for i, name in enumerate(NAMES) if self.queries[i])]
        return "\n".join("  ".join(cell.ljust(18) if i == 0 else cell.rjust(8) for i, cell in enumerate(line)) for line in lines)


def attend(call, q, k, seen):
    """Weights [queries, Hkv, group, rows] of q [queries, Hq, d] over k [rows, Hkv, d]; bool seen [queries, rows]."""
    from oscar_int2.calibration.interface import weights

    return weights(call, q.transpose(0, 1)[None], k.transpose(0, 1)[None], seen)[0].permute(2, 0, 1, 3)


def measure(call, codec, tables, pages, history, sink, first, sums):
    """One layer: adds the queries from `first` on. Rows [sink, sink + history) are in 2 bits."""
    q, k, v = (x[0].transpose(0, 1).bfloat16().contiguous() for x in (call.q, call.k, call.v))
    tokens, heads = k.shape[0], q.shape[1]
    q, exact_k, exact_v = codec.transform_qkv(q, k, v)
    codec.append(pages, tables, exact_k[:tables.seq_lens[0]].contiguous(), exact_v[:tables.seq_lens[0]].contiguous())
    coded = slice(sink, sink + history)
    int2_k, int2_v = exact_k.clone(), exact_v.clone()
    int2_k[coded], int2_v[coded] = codec.read_history(pages, tables, 0, history)
    projection = call.module.o_proj.weight.float().unflatten(1, (heads, -1))
    mean = codec.transform_output(exact_v.float().mean(0, keepdim=True).repeat_interleave(heads // k.shape[1], 1).bfloat16())
    for begin in range(first, tokens, QUERIES):
        queries = torch.arange(begin, min(begin + QUERIES, tokens), device=k.device)
        exact, rounded = (attend(call, q[queries], rows, call.visible(queries)) for rows in (exact_k, int2_k))

        def output(weights, rows):
            mixed = torch.einsum("qhgn,nhd->qhgd", weights, rows.float()).flatten(1, 2)
            return codec.transform_output(mixed.bfloat16()).float()

        def energy(rows):
            return torch.einsum("qhd,mhd->qhm", rows, projection).square().sum(-1)

        out = output(exact, exact_v)
        sums.add(exact[..., coded].amax(-1).flatten(1), energy(out - mean.float()), energy(output(rounded, exact_v) - out),
                 energy(output(exact, int2_v) - out))


def main(words=None):
    arguments = parse(words)
    import oscar_int2
    from oscar_int2.cache import PagedCache
    from oscar_int2.calibration.interface import NAME, observing
    from oscar_int2.transformers import apply, remove
    from transformers import AutoModelForCausalLM

    ids = np.load(arguments.ids)[:arguments.rows]
    if ids.ndim != 2 or not len(ids):
        sys.exit(f"focused_attention: {arguments.ids} must hold rows of token ids, [rows, tokens]")
    tokens, first = ids.shape[1], ids.shape[1] - arguments.last
    bundle, sums = oscar_int2.load(arguments.bundle), Sums()
    if first < bundle.quantizer.sink_tokens + bundle.quantizer.recent_tokens:
        sys.exit(f"focused_attention: --last {arguments.last} leaves no 2-bit row in rows of {tokens} tokens")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, attn_implementation=NAME)
    remove(apply(model.to(arguments.device).eval(), bundle))  # which refuses another model's bundle, windows and sinks
    cache = PagedCache.int2(bundle, 1, tokens, arguments.device)
    sink = bundle.quantizer.sink_tokens
    for row in ids:
        cache.reset()
        cache.admit(0, first)
        tables = cache.prompt_tables([0], [first])  # the queries' own rows stay exact
        history = cache.format.history_tokens(first)

        def observe(call):
            layer = call.module.layer_idx
            measure(call, cache.codecs[layer], tables, cache.layers[layer], history, sink, first, sums)

        with torch.inference_mode(), observing(observe):
            model.base_model(torch.tensor(row[None].astype(np.int64), device=arguments.device), use_cache=False)
    print(sums.table())
    print(f"{len(ids)} rows of {tokens} tokens, the last {arguments.last} queries of each, {history} rows in 2 bits")


if __name__ == "__main__":
    main()
