#!/usr/bin/env python3
"""Paged decode attention of FlashInfer, BF16 and FP8 KV, as a peer of `oscar-bench attention`.

Same shapes and method: graph replays over enough distinct pools that L2 is cold, as many calls a
graph, shuffled pages of 64 tokens, random data, one page table for all pools, queries and outputs
for each. Every kernel that FlashInfer has for paged decode is tried, and the fastest one reported:
  cuda      BatchDecodeWithPagedKVCacheWrapper
  tensor    the same on tensor cores (its FA2 prefill kernel, split over KV)
  fa3       the same through FA3; FP8 takes FP8 queries
  xqa       xqa_batch_decode_with_kv_cache; on Hopper, FP8 KV computes in FP8
Outputs are compared with float32 attention; `error` is relative, over the first request.

    benchmarks/bench_flashinfer.py [--points 1x32K,8x100K] [--csv OUT.csv] [--oscar OSCAR_BENCH.csv]
"""
import argparse
import csv
import json
import re
import statistics
import subprocess
import sys

import torch

PAGE = 64
KERNELS = ("cuda", "tensor", "fa3", "xqa")
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
WORKSPACE_BYTES = 256 << 20
MAX_ERROR = 0.1  # FP8 queries and weights are 3 to 5% off; a wrong page or scale is far more


def parse_points(text):
    """(batch, context) of every BATCHxCONTEXT in "1x32K,8x100000"."""
    points = []
    for point in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(K?)", point)
        if not match:
            raise argparse.ArgumentTypeError(
                f"a point is BATCHxCONTEXT, for example 8x32K, not '{point}'")
        points.append((int(match[1]), int(match[2]) * (1024 if match[3] else 1)))
    return points


def time_graph(calls, count, replays):
    """Median, p10 and p90 microseconds a call; at least `count` calls are captured, in order."""
    calls = calls * -(-count // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # outside the graph: modules are loaded
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
    times.sort()
    p10, p90 = (times[round(p * (replays - 1))] for p in (0.1, 0.9))
    return statistics.median(times), p10, p90


class Caches:
    """Distinct pools [pages, K or V, kv head, token, head_dim], queries and outputs [batch, heads,
    head_dim] beside them, one page table."""

    def __init__(self, arguments, batch, context, kv_dtype):
        self.batch, self.context, self.kv_dtype = batch, context, kv_dtype
        self.qo_heads, self.heads, self.d = (arguments.qo_heads, arguments.kv_heads,
                                             arguments.head_dim)
        self.pages = -(-context // PAGE)
        shape = (batch * self.pages, 2, self.heads, PAGE, self.d)
        self.bytes = 2 * batch * context * self.heads * self.d * kv_dtype.itemsize
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        count = -(-4 * l2_bytes // self.bytes)
        self.pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kv_dtype)
                      for _ in range(count)]
        self.queries = [torch.randn(batch, self.qo_heads, self.d, device="cuda",
                                    dtype=torch.bfloat16) for _ in range(count)]
        self.outputs = [torch.full_like(q, torch.nan) for q in self.queries]
        self.indptr = torch.arange(0, batch + 1, dtype=torch.int32) * self.pages
        self.indices = torch.randperm(batch * self.pages, device="cuda").int()
        self.last = torch.full((batch,), context - (self.pages - 1) * PAGE, dtype=torch.int32)

    def reference(self):
        """float32 attention of the first request of the first pool, [qo head, head_dim]."""
        kv = self.pools[0][self.indices[:self.pages].long()].float().permute(1, 2, 0, 3, 4)
        k, v = kv.reshape(2, self.heads, -1, self.d)[:, :, :self.context]
        q = self.queries[0][0].float().view(self.heads, -1, self.d)
        weights = torch.softmax(q @ k.transpose(1, 2) * self.d ** -0.5, dim=-1)
        return (weights @ v).view(self.qo_heads, self.d)


def decode_calls(flashinfer, kernel, caches):
    """One function for each pool, which runs the kernel on it."""
    c = caches
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    if kernel == "xqa":
        tables = c.indices.view(c.batch, c.pages)
        lens = torch.tensor([c.context] * c.batch, dtype=torch.uint32).cuda()
        run = flashinfer.decode.xqa_batch_decode_with_kv_cache
        return [lambda q=q, pool=pool, out=out: run(
            q, pool, workspace, tables, lens, c.context, bmm1_scale=c.d ** -0.5, bmm2_scale=1.0,
            kv_layout="HND", out=out) for q, pool, out in zip(c.queries, c.pools, c.outputs)]
    queries, scales = c.queries, []
    if kernel == "fa3" and c.kv_dtype != torch.bfloat16:
        queries = [q.to(c.kv_dtype) for q in queries]
        scales = [torch.ones(n, device="cuda") for n in (c.qo_heads, c.heads, c.heads)]
    backend = {} if kernel == "cuda" else {"backend": "fa3" if kernel == "fa3" else "fa2"}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=kernel != "cuda", **backend)
    wrapper.plan(c.indptr, c.indices, c.last, c.qo_heads, c.heads, c.d, PAGE,
                 q_data_type=queries[0].dtype, kv_data_type=c.kv_dtype,
                 o_data_type=torch.bfloat16)
    return [lambda q=q, pool=pool, out=out: wrapper.run(q, pool, *scales, out=out)
            for q, pool, out in zip(queries, c.pools, c.outputs)]


def time_kernel(flashinfer, kernel, caches, replays):
    """Median, p10, p90 in microseconds and the error, or None where it does not take the shape."""
    try:
        calls = decode_calls(flashinfer, kernel, caches)
        # As many calls a replay as oscar-bench: about a millisecond of work.
        count = min(max(int(5e9 / caches.bytes), 4), 64)
        times = time_graph(calls, count, replays)
    except Exception as error:  # not built, or the kernel does not take shape, dtype or device
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        print(f"{kernel}, {caches.kv_dtype}: {reason}", file=sys.stderr)
        return None
    expected = caches.reference()
    error = ((caches.outputs[0][0].float() - expected).norm() / expected.norm()).item()
    if not all(output.isfinite().all() for output in caches.outputs):
        error = float("nan")  # rows were not written
    if not error <= MAX_ERROR:
        print(f"{kernel}, {caches.kv_dtype}: left out, its error is {error:.3g}", file=sys.stderr)
        return None
    return *times, error


def time_dtype(flashinfer, arguments, batch, context, name):
    """Columns of one point and KV type; empty where no kernel takes it."""
    caches = Caches(arguments, batch, context, DTYPES[name])
    row, best = {}, None
    for kernel in arguments.kernels.split(","):
        timing = time_kernel(flashinfer, kernel, caches, arguments.replays)
        columns = [f"flashinfer_{name}_{kernel}_{what}" for what in ("us", "p10_us", "p90_us")]
        columns.append(f"flashinfer_{name}_{kernel}_error")
        row |= dict(zip(columns, [f"{x:.6g}" for x in timing] if timing else [""] * 4))
        for output in caches.outputs:
            output.fill_(torch.nan)
        if timing and (best is None or timing[0] < best[0]):
            best = timing[0], kernel
    summary = {f"flashinfer_{name}_us": "", f"flashinfer_{name}_kernel": "",
               f"flashinfer_{name}_gbps": ""}
    if best:
        summary = dict(zip(summary, (f"{best[0]:.6g}", best[1],
                                     f"{caches.bytes / best[0] * 1e-3:.6g}")))
    return summary | row


def read_oscar(path):
    """First line and rows (by batch, context) of what `oscar-bench attention --csv` wrote."""
    with open(path, newline="") as lines:
        record = json.loads(lines.readline().lstrip("# "))
        rows = csv.DictReader(lines)
        return record, {(int(r["batch"]), int(r["context"])): r for r in rows}


def compare(row, oscar):
    """Adds the INT2 times of the same point, and how many times faster they are."""
    for variant in ("int2", "int2_windows"):
        row[f"{variant}_us"] = ours = oscar.get(f"{variant}_us", "")
        for name in DTYPES:
            theirs = row[f"flashinfer_{name}_us"]
            row[f"{name}_over_{variant}"] = (f"{float(theirs) / float(ours):.4g}"
                                             if theirs and ours else "")


def machine_record(flashinfer):
    device = torch.cuda.get_device_properties(0)
    query = "driver_version,clocks.max.sm,clocks.max.mem"
    try:
        driver, clock, memory = subprocess.run(
            ["nvidia-smi", "-i", "0", "--query-gpu=" + query, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError):
        driver, clock, memory = "unknown", 0, 0
    return {"device": device.name, "multiprocessors": device.multi_processor_count,
            "l2_bytes": device.L2_cache_size, "driver": driver, "clock_khz": 1000 * int(clock),
            "memory_clock_khz": 1000 * int(memory), "cuda": torch.version.cuda,
            "torch": torch.__version__, "flashinfer": flashinfer.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=parse_points,
                        default="1x32K,1x128K,8x32K,8x100K,32x32K,64x8K")
    parser.add_argument("--qo-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--kernels", default=",".join(KERNELS), help="those to try (%(default)s)")
    parser.add_argument("--csv", help="write every number here")
    parser.add_argument("--oscar", metavar="CSV", help="of `oscar-bench attention --csv` on "
                        "this machine: adds its INT2 times and the ratios")
    arguments = parser.parse_args()
    unknown = set(arguments.kernels.split(",")) - set(KERNELS)
    if unknown:
        parser.error(f"--kernels takes {', '.join(KERNELS)}, not {', '.join(sorted(unknown))}")
    try:
        import flashinfer
    except ImportError as error:
        sys.exit(f"bench_flashinfer: FlashInfer cannot be loaded: {error} "
                 "(pip install flashinfer-python)")
    if not torch.cuda.is_available():
        sys.exit("bench_flashinfer: there is no CUDA device to time kernels on")
    record = machine_record(flashinfer)
    ours = {}
    if arguments.oscar:
        record["oscar"], ours = read_oscar(arguments.oscar)
    rows = []
    for batch, context in arguments.points:
        row = {"qo_heads": arguments.qo_heads, "kv_heads": arguments.kv_heads,
               "head_dim": arguments.head_dim, "batch": batch, "context": context}
        for name in DTYPES:
            row |= time_dtype(flashinfer, arguments, batch, context, name)
            torch.cuda.empty_cache()
        if arguments.oscar:
            compare(row, ours.get((batch, context), {}))
        print(json.dumps(row), flush=True)
        rows.append(row)
        if arguments.csv:  # after each point: a kernel that crashes leaves the points before it
            with open(arguments.csv, "w", newline="") as out:
                out.write(f"# {json.dumps(record)}\n")
                writer = csv.DictWriter(out, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
