#!/usr/bin/env python3
"""KL and perplexity of what oscar_int2 serves, to hold against `oscar-eval` on the same ids.

Every row of IDS.npy is decoded token by token over the 2-bit cache, each step given the row's own
next token; the model's plain forward pass in the same dtype is what it is compared with. Counts from
--first on, by default from the first token that reads a 2-bit row.

    benchmarks/eval_served.py MODEL BUNDLE IDS.npy [--rows N] [--first N] [--json OUT.json]
"""
import argparse
import json
import math
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import oscar_int2
from bench_serving import graph_of


def per_token(reference, logits, ids):
    """KL, both losses and top-1 agreement, [rows], of [rows, vocab] logits before ids [rows]."""
    p, q = (x.float().log_softmax(-1) for x in (reference, logits))
    taken = ids[:, None]
    return torch.stack(((p.exp() * (p - q)).sum(-1), -p.gather(1, taken)[:, 0],
                        -q.gather(1, taken)[:, 0],
                        (p.argmax(-1) == q.argmax(-1)).float()))


class Step:
    """A step of given tokens; on a GPU a graph, captured while the cache is empty."""

    def __init__(self, generator):
        cache, decoder = generator.cache, generator.decoder
        self.tokens = torch.zeros(cache.max_num_seqs, dtype=torch.int64, device=generator.device)
        self.logits = None

        def step():
            self.logits = decoder.step(self.tokens, cache.next_step().old_len, cache.decode)

        self.run = graph_of(step, generator.device)

    def __call__(self, tokens):
        """Logits [max_num_seqs, vocab], until the next call."""
        self.tokens.copy_(tokens)
        self.run()
        return self.logits


@torch.inference_mode()
def measure(model, generator, step, ids, first):
    """[4, tokens] of per_token over all rows of ids [rows, tokens], from position `first` on."""
    cache, decoder = generator.cache, generator.decoder
    rows, tokens = ids.shape
    prompt = min(first, tokens - 1)
    for slot in range(rows):
        cache.admit(slot, tokens)
    tables = cache.prompt_tables(list(range(rows)), [prompt] * rows)
    # Prompts one after another: their rows go into the cache together.
    parts = {}
    for slot in range(rows):
        decoder.prompt(ids[slot, :prompt], lambda layer, k, v: parts.setdefault(layer, []).append((k, v)))
    for layer, pairs in parts.items():
        cache.write(layer, tables, *(torch.cat(side) for side in zip(*pairs)))
    references = torch.stack([model(row[None]).logits[0, prompt - 1:-1] for row in ids])
    figures = []
    for position in range(prompt + 1, tokens):  # before it the prompt's own logits, which are exact
        figures.append(per_token(references[:, position - prompt], step(ids[:, position - 1]),
                                 ids[:, position]))
    cache.check_rows()
    for slot in range(rows):
        cache.release(slot)
    return torch.cat(figures, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("bundle")
    parser.add_argument("ids", help=".npy of token ids, one sequence a row")
    parser.add_argument("--rows", type=int, default=16, help="rows decoded together, default 16")
    parser.add_argument("--first", type=int, help="first position that counts, default sink + recent")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    arguments = parser.parse_args()

    ids = torch.from_numpy(np.load(arguments.ids).astype(np.int64)).to(arguments.device)
    bundle = oscar_int2.load(arguments.bundle)
    first = bundle.quantizer.sink_tokens + bundle.quantizer.recent_tokens
    first = arguments.first or first
    if ids.shape[1] < first + 2:
        sys.exit(f"{arguments.ids}: sequences of {ids.shape[1]} tokens have none behind the first that "
                 f"counts, at position {first + 1}; use longer ones, or --first")
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa").to(arguments.device).eval()
    rows = min(arguments.rows, len(ids))
    if left_out := len(ids) % rows:
        print(f"the last {left_out} of {len(ids)} sequences are left out: --rows {rows} decodes so many "
              "together", file=sys.stderr)
    generator = oscar_int2.Generator(model, bundle, max_num_seqs=rows, max_tokens=ids.shape[1],
                                     demote_block=bundle.quantizer.demote_block)
    with torch.inference_mode():
        step = Step(generator)
    figures = torch.cat([measure(model, generator, step, sequence, first)
                         for sequence in ids.split(rows) if len(sequence) == rows], 1)
    count = figures.shape[1]
    kl, exact, served, top1 = figures.double().mean(1).tolist()
    error = (figures[0].double().std() / math.sqrt(count)).item()
    print(f"{count} tokens from position {first + 1}: KL {kl:.5f} +- {error:.5f} nats (tokens taken as "
          f"independent), perplexity {math.exp(served):.3f} (BF16 {math.exp(exact):.3f}), "
          f"top-1 {100 * top1:.1f}%")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"tokens": count, "kl": kl, "kl_standard_error": error, "top1": top1,
                       "perplexity": math.exp(served), "perplexity_bf16": math.exp(exact)}, file)


if __name__ == "__main__":
    sys.exit(main())
