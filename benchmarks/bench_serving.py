#!/usr/bin/env python3
"""Decode steps of whole models over a 2-bit cache beside the best that BF16 and FP8 can do.

Random weights in the shapes of Qwen3, caches filled with random rows, one captured CUDA graph a step;
nothing differs between the rows of a table but the cache:
  int2          oscar_int2.Generator's step: default recipe (shaped rounding, metric scales, key
                centers), rows leave the windows 16 at a time
  bf16          the same loop, BF16 rows, attention by cuDNN at the length of the point
  bf16-ours     the same loop, BF16 rows, our own kernel over exact windows
  bf16-triton   the same loop, BF16 rows, a split-KV decode kernel in Triton
  fp8           the same loop, FP8 rows in FlashInfer's pages, its fastest kernel (if installed)
  transformers  a step of transformers as shipped: DynamicCache, SDPA, no graph
Times are medians over groups of 64 steps, in ms. `largest` stands for as many requests as fit, for
each cache, into what --memory leaves beside the weights.

    benchmarks/bench_serving.py [--shape qwen3-8b] [--points 1x32K,8x100K,largestx100K]
                             [--caches int2,bf16] [--parts] [--csv OUT.csv]
"""
import argparse
import csv
import gc
import re
import statistics
import sys
import time

import torch

import oscar_int2
from oscar_int2.bundle import Bundle, Layer, Model
from oscar_int2.recipe import CacheFormat, SideRecipe
from oscar_int2.cache import PagedCache
from oscar_int2.decoder import Decoder
from oscar_int2.generator import shape_of

SHAPES = {  # hidden, intermediate, layers, query heads, KV heads, tied embeddings
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
    "tiny": (256, 512, 2, 8, 2, True),  # to try the script without a GPU
}
HEAD_DIM, VOCAB, MAX_POSITIONS = 128, 151936, 131072
CACHES = ("int2", "bf16", "bf16-ours", "bf16-triton", "fp8", "transformers")
GROUP = 64  # steps that are timed together


def parse_points(text):
    points = []
    for point in text.split(","):
        match = re.fullmatch(r"([1-9]\d*|largest)x([1-9]\d*)(K?)", point)
        if not match:
            raise argparse.ArgumentTypeError(f"a point is BATCHxCONTEXT, for example 8x32K, not '{point}'")
        scale = 1024 if match[3] and match[2] != "100" else 1000 if match[3] else 1
        batch = match[1] if match[1] == "largest" else int(match[1])
        points.append((batch, int(match[2]) * scale, point))
    return points


def random_model(shape, device):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM,
        vocab_size=VOCAB if shape != "tiny" else 512, max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def random_bundle(config):
    """What the default recipe writes, with random numbers of the right kind."""
    random = torch.Generator().manual_seed(1)
    heads, d = config.num_key_value_heads, HEAD_DIM

    def normal(*size):
        return torch.randn(*size, generator=random)

    def side(centers):
        rotation = torch.linalg.qr(normal(heads, d, d))[0].contiguous()
        factor = torch.eye(d) + normal(heads, d, d).triu(1) / d
        metric = normal(heads, d, 4 * d)
        metric = metric @ metric.mT / (4 * d)
        return SideRecipe(
            kind=torch.full((heads,), 3, dtype=torch.uint8), forward=rotation,
            partner=rotation if centers else rotation.mT.contiguous(), mean=normal(heads, d),
            clip_ratio=torch.full((heads,), 0.96),
            scale_correction=torch.full((heads,), 2, dtype=torch.uint8), feedback=factor, metric=metric,
            key_centers=normal(heads, 2, d) if centers else None)

    key, value = side(True), side(False)  # one fit for all layers: its numbers change no time
    layers = {i: Layer(i, "full", 0, True, config.num_attention_heads, heads, d, key, value)
              for i in range(config.num_hidden_layers)}
    model = Model("random", (config.architectures or ["Qwen3ForCausalLM"])[0], config.num_hidden_layers, config.num_attention_heads,
                  heads, d, config.hidden_size,
                  {"rope_type": "default", "rope_theta": 1e4, "max_positions": MAX_POSITIONS}, "")
    return Bundle("random", "", "", model, CacheFormat(d, 64, 256, 16), layers)


class OwnCache:
    """int2 and bf16-ours: the package's own cache."""

    def __init__(self, cache, batch, context):
        self.cache = cache
        rows = torch.randn(context, cache.codecs[0].num_kv_heads, HEAD_DIM, device=cache.device)
        rows = rows.bfloat16()
        first = cache.layers[0]
        for slot in range(batch):
            cache.admit(slot, cache.max_tokens)
            tables = cache.prompt_tables([slot], [context])
            cache.write(0, tables, rows, rows.flip(0))
        for layer, pages in cache.layers.items():
            if layer:
                pages.pool.copy_(first.pool)
                pages.window_k.copy_(first.window_k)
                pages.window_v.copy_(first.window_v)

    def begin(self):
        return self.cache.next_step().old_len

    def decode(self, layer, q, k, v):
        return self.cache.decode(layer, q, k, v)


class DenseCache:
    """bf16: rows side by side, cuDNN's attention over a length that stays what it is."""

    def __init__(self, decoder, batch, context, attend):
        size = (batch, decoder.kv_heads, context, HEAD_DIM)
        some = torch.randn(size[1:], device=decoder.device).bfloat16()
        self.rows = [[some.expand(size).clone(memory_format=torch.contiguous_format) for _ in range(2)]
                     for _ in decoder.layers]
        self.attend = attend
        self.positions = torch.full((batch,), context - 1, dtype=torch.int32, device=decoder.device)

    def begin(self):
        return self.positions

    def decode(self, layer, q, k, v):
        keys, values = self.rows[layer]
        keys[:, :, -1], values[:, :, -1] = k, v
        return self.attend(q, keys, values)


def cudnn_attention(q, keys, values):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values,
                                                             enable_gqa=True)
    return o[:, :, 0]


def triton_attention():
    from triton_decode import decode_attention
    return decode_attention


class FlashInferCache:
    """fp8: FlashInfer's pages of 64 tokens, the plan made once."""

    def __init__(self, decoder, batch, context):
        import flashinfer
        self.flashinfer, self.batch, self.context = flashinfer, batch, context
        pages = -(-context // 64)
        shape = (batch * pages, 2, decoder.kv_heads, 64, HEAD_DIM)
        some = torch.randn(shape[1:], device=decoder.device).to(torch.float8_e4m3fn)
        self.pools = [some.view(torch.uint8).repeat(shape[0], 1, 1, 1, 1).view(torch.float8_e4m3fn)
                      for _ in decoder.layers]
        self.positions = torch.full((batch,), context - 1, dtype=torch.int32, device=decoder.device)
        self.tables = torch.arange(batch * pages, dtype=torch.int32, device=decoder.device)
        self.tables = self.tables.view(batch, pages)
        self.last = self.tables[:, -1].long()
        self.slot = (context - 1) % 64
        self.lens = torch.full((batch,), context, dtype=torch.uint32, device=decoder.device)
        self.workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=decoder.device)

    def begin(self):
        return self.positions

    def decode(self, layer, q, k, v):
        pool = self.pools[layer]
        bytes_ = pool.view(torch.uint8)
        bytes_[self.last, 0, :, self.slot] = k.to(torch.float8_e4m3fn).view(torch.uint8)
        bytes_[self.last, 1, :, self.slot] = v.to(torch.float8_e4m3fn).view(torch.uint8)
        return self.flashinfer.decode.xqa_batch_decode_with_kv_cache(
            q.contiguous(), pool, self.workspace, self.tables, self.lens, self.context,
            bmm1_scale=HEAD_DIM**-0.5, bmm2_scale=1.0, kv_layout="HND")


def graph_of(function, device):
    """A function that runs `function`, on a GPU as a captured graph."""
    if device.type != "cuda":
        return function
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    return graph.replay


def timed(run, device, groups=5, steps=GROUP):
    """Median, least and most ms a call, over groups of calls."""
    run()
    times = []
    for _ in range(groups):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(steps):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / steps)
        else:
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), max(times)


def profile(run, rows=25):
    """Kernels of one call: how often, and microseconds in all, the dearest ones first."""
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = sorted(recorded.key_averages(), key=lambda k: -k.device_time_total)
    total = sum(k.device_time_total for k in kernels)
    print(f"  {sum(k.count for k in kernels)} kernels, {total:.0f} us in all")
    for kernel in kernels[:rows]:
        print(f"  {kernel.count:5} {kernel.device_time_total:9.1f} us  {kernel.key[:100]}")


def step_of(decoder, cache, batch):
    tokens = torch.zeros(batch, dtype=torch.int64, device=decoder.device)

    def step():
        tokens.copy_(decoder.step(tokens, cache.begin(), cache.decode).argmax(-1))

    return step


def parts_of(decoder, cache, batch):
    """{part: ms} of a step, each part for all layers alone in a graph."""
    device, heads, own = decoder.device, decoder.heads, cache.cache
    hidden = torch.randn(batch, decoder.embedding.shape[1], device=device).bfloat16()
    q, k, v = (torch.randn(batch, n, HEAD_DIM, device=device).bfloat16()
               for n in (heads, decoder.kv_heads, decoder.kv_heads))

    def matrices():
        linear = torch.nn.functional.linear
        for w in decoder.layers:
            rows = linear(hidden, w.qkv)
            linear(rows[:, :heads * HEAD_DIM], w.o)
            linear(linear(hidden, w.gate_up)[:, :w.down.shape[1]], w.down)
        linear(hidden, decoder.head)

    def rotation():
        for codec in own.codecs.values():
            codec.transform_output(codec.transform_qkv(q, k, v)[0])

    def append():
        own.next_step()
        for layer, codec in own.codecs.items():
            codec.append(own.layers[layer], own.step, k, v)

    def attention():
        for layer, codec in own.codecs.items():
            codec.attend(own.layers[layer], own.step, q[:, None], workspace=own.workspace)

    return {part.__name__: timed(graph_of(part, device), device)[0]
            for part in (matrices, rotation, append, attention)}


def transformers_step(model, batch, context):
    """ms of a step of transformers as shipped, median of five."""
    from transformers import DynamicCache
    config, device = model.config, model.device
    cache = DynamicCache(config=config)
    size = (batch, config.num_key_value_heads, context - 8, HEAD_DIM)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2)), layer)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    return timed(lambda: model(input_ids=tokens, past_key_values=cache, use_cache=True), device,
                 groups=5, steps=1)


def bytes_of_request(name, config, context):
    """Bytes of cache of one request of `context` tokens."""
    per_row = 2 * config.num_hidden_layers * config.num_key_value_heads
    if name == "int2":
        row = HEAD_DIM // 4 + 4
        return per_row * (row * 64 * -(-(context + 2 * GROUP - 320) // 64) + 2 * HEAD_DIM * (320 + 17))
    return per_row * context * HEAD_DIM * (1 if name == "fp8" else 2)


def measure(name, decoder, model, bundle, batch, context, parts, show_kernels):
    """(median, least, most) ms, bytes of cache, {part: ms}."""
    device, config = decoder.device, model.config
    if name == "transformers":
        return transformers_step(model, batch, context), batch * bytes_of_request(name, config, context), {}
    if name in ("int2", "bf16-ours"):
        # Every step of every measurement adds a token; groups of parts count too.
        room = context + (14 if parts else 7) * GROUP
        cache = (PagedCache.int2(bundle, batch, room, device) if name == "int2" else
                 PagedCache.bf16(shape_of(decoder), batch, room, device))
        cache = OwnCache(cache, batch, context)
        size = sum(cache.cache.memory_bytes())
    elif name == "fp8":
        cache, size = FlashInferCache(decoder, batch, context), batch * bytes_of_request(name, config, context)
    else:
        attend = cudnn_attention if name == "bf16" else triton_attention()
        cache, size = DenseCache(decoder, batch, context, attend), batch * bytes_of_request(name, config, context)
    run = graph_of(step_of(decoder, cache, batch), device)
    times = timed(run, device)
    if show_kernels:
        profile(run)
    if name in ("int2", "bf16-ours"):
        cache.cache.check_rows()
    return times, size, parts_of(decoder, cache, batch) if parts and name == "int2" else {}


def largest(name, config, context, memory, weights):
    return int((memory - weights) // bytes_of_request(name, config, context))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--points", type=parse_points, default=parse_points("1x32K,1x128K,8x32K,8x100K"))
    parser.add_argument("--caches", default="int2,bf16", help=",".join(CACHES))
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU for weights and cache")
    parser.add_argument("--parts", action="store_true", help="also the parts of an int2 step, alone")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=argparse.FileType("w"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    names = arguments.caches.split(",")
    if set(names) - set(CACHES):
        parser.error(f"--caches: {', '.join(sorted(set(names) - set(CACHES)))}; known are {', '.join(CACHES)}")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{arguments.shape} on {gpu}, torch {torch.__version__}, oscar_int2 {oscar_int2.__version__}")
    with torch.inference_mode():
        model = random_model(arguments.shape, device)
        bundle, decoder = random_bundle(model.config), Decoder(model)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        total = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else 16 << 30
        writer = csv.writer(arguments.csv) if arguments.csv else None
        if writer:
            writer.writerow(["shape", "point", "cache", "requests", "context", "ms", "ms_least", "ms_most",
                             "tokens_per_s", "cache_gb", "matrices_ms", "rotation_ms", "append_ms",
                             "attention_ms", "gpu"])
        for batch, context, point in arguments.points:
            for name in names:
                count = batch
                if batch == "largest":
                    count = largest(name, model.config, context, arguments.memory * total, weights)
                try:
                    times, size, parts = measure(name, decoder, model, bundle, count, context,
                                                 arguments.parts, arguments.profile)
                except (torch.OutOfMemoryError, ImportError) as error:
                    print(f"{point:>12} {name:12} {type(error).__name__}: {str(error).splitlines()[0][:60]}")
                    times = None
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if times is None:
                    continue
                rate = 1e3 * count / times[0]
                rest = times[0] - sum(parts.values())
                shown = "".join(f"  {part} {ms:.3f}" for part, ms in parts.items())
                shown += f"  rest {rest:.3f}" if parts else ""
                print(f"{point:>12} {name:12} {count:4} requests {times[0]:8.3f} ms ({times[1]:.3f} to "
                      f"{times[2]:.3f}) {rate:9.1f} tokens/s{shown}", flush=True)
                if writer:
                    writer.writerow([arguments.shape, point, name, count, context,
                                     *(f"{t:.4f}" for t in times), f"{rate:.1f}", f"{size / 1e9:.3f}",
                                     *(f"{parts[p]:.4f}" if p in parts else "" for p in
                                       ("matrices", "rotation", "append", "attention")), gpu])
                    arguments.csv.flush()


if __name__ == "__main__":
    sys.exit(main())
