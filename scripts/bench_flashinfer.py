#!/usr/bin/env python3
"""Paged decode attention of FlashInfer, BF16 and FP8 KV, as a peer of `oscar-bench attention`.

Same shapes and method: graph replays over enough distinct pools that L2 is cold, shuffled pages of
64 tokens, random data, one page table for all pools. The faster of its two kernels is reported.

    scripts/bench_flashinfer.py [--points 1x32K,8x100K] [--csv OUT.csv]
"""
import argparse
import csv
import statistics
import sys

import torch

PAGE = 64


def parse_point(text):
    batch, context = text.split("x")
    return int(batch), int(context.removesuffix("K")) * (1024 if context.endswith("K") else 1)


def time_graph(calls, replays):
    """Median microseconds a call; `calls` are captured once, in order, and replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for replay in range(-2, replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 0:
            times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def time_decode(flashinfer, arguments, batch, context, kv_dtype):
    """Microseconds of the faster kernel, or None where neither takes the shape."""
    pages = (context + PAGE - 1) // PAGE
    heads, d = arguments.kv_heads, arguments.head_dim
    pool_bytes = batch * pages * PAGE * heads * d * 2 * kv_dtype.itemsize
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    count = -(-4 * l2_bytes // pool_bytes)
    pools = [torch.randn(batch * pages, 2, heads, PAGE, d, device="cuda",
                         dtype=torch.bfloat16).to(kv_dtype) for _ in range(count)]
    queries = [torch.randn(batch, arguments.qo_heads, d, device="cuda", dtype=torch.bfloat16)
               for _ in range(count)]
    indptr = torch.arange(0, batch + 1, dtype=torch.int32) * pages
    indices = torch.randperm(batch * pages, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), context - (pages - 1) * PAGE, dtype=torch.int32)
    best = None
    for tensor_cores in (True, False):
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=tensor_cores)
        try:
            wrapper.plan(indptr, indices, last, arguments.qo_heads, heads, d, PAGE,
                         q_data_type=torch.bfloat16, kv_data_type=kv_dtype)
            calls = [lambda i=i: wrapper.run(queries[i], pools[i]) for i in range(count)]
            us = time_graph(calls * max(1, 8 // count), arguments.replays)
        except Exception as error:  # this kernel does not take the shape or the dtype
            print(f"tensor cores {tensor_cores}, {kv_dtype}: {error}", file=sys.stderr)
            continue
        best = us if best is None else min(best, us)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", default="1x32K,1x128K,8x32K,8x100K,32x32K,64x8K")
    parser.add_argument("--qo-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--csv", help="write every number here")
    arguments = parser.parse_args()
    try:
        import flashinfer
    except ImportError:
        sys.exit("bench_flashinfer: FlashInfer is not installed (pip install flashinfer-python)")
    rows = []
    for text in arguments.points.split(","):
        batch, context = parse_point(text)
        row = {"batch": batch, "context": context, "flashinfer": flashinfer.__version__}
        for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
            us = time_decode(flashinfer, arguments, batch, context, dtype)
            row[f"flashinfer_{name}_us"] = "" if us is None else round(us, 2)
            torch.cuda.empty_cache()
        print(row)
        rows.append(row)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as out:
            out.write(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
            writer = csv.DictWriter(out, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
