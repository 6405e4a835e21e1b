#!/usr/bin/env python3
"""Tokens per second of transformers' own forward pass (sdpa, bf16, no hooks, no cache).

The peer of `oscar-bench calibrate`: same checkpoint, same token ids, same batches. The output
projection is left out on both sides, since calibration does not need it.

    benchmarks/bench_transformers.py MODEL IDS.npy [--batch-tokens N] [--repeats N] [--compile]
"""
import argparse
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def batches(ids, batch_tokens):
    """Consecutive rows of a 2-D id array, at most batch_tokens tokens together."""
    rows = max(1, batch_tokens // ids.shape[1])
    return [ids[i:i + rows] for i in range(0, ids.shape[0], rows)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("ids", help=".npy of token ids, one sequence a row")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    arguments = parser.parse_args()

    ids = torch.from_numpy(np.load(arguments.ids).astype(np.int64)).cuda()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    forward = torch.compile(model.model) if arguments.compile else model.model
    work = batches(ids, arguments.batch_tokens)
    seconds = []
    with torch.inference_mode():
        for repeat in range(-1, arguments.repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for batch in work:
                forward(input_ids=batch, use_cache=False)
            torch.cuda.synchronize()
            if repeat >= 0:  # the first round warms up
                seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    how = "sdpa, bf16, compiled" if arguments.compile else "sdpa, bf16"
    print(f"transformers forward ({how}): {ids.numel() / median:,.0f} tokens/s, "
          f"median of {len(seconds)} rounds, {median:.3f} s for {ids.numel():,} tokens")


if __name__ == "__main__":
    main()
