"""INT2 pages as an attention backend of vLLM's.

A block of vLLM's is one page, 64 tokens of every KV head. Of a request's blocks the first sink_tokens
/ 64 stand for the sink, which lies in the exact window, and their pages stay unused. The others are
written once they are full. Attention reads recent tokens from the ring all the same.

Prompts attend (prompts.py) and are then appended; generated tokens, and drafts behind them, are appended
and attend over pages and windows, in a CUDA graph where vLLM makes one.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override
from vllm.config import get_current_vllm_config
from vllm.distributed import (get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size,
                              get_tp_group)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl,
                                       AttentionMetadataBuilder)
from vllm.v1.attention.backends import fa_utils

from .._library import PAGE_TOKENS
from ..attention import weigh_by_sinks
from ..codec import LayerCodec, LayerPages, StepTables
from ..errors import UnsupportedError
from . import adapter as installed_adapter, settings
from .layers import check_layer
from .prompts import Prompts, causal_attention, sort_prompts
from .steps import (MOST_QUERIES, NOBODY, Batch, Decodes, RequestTables, ragged, takes_pinned,
                    to_device)
from .windows import WindowSlots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from .specs import Int2Spec

logger = init_logger("vllm.oscar_int2")  # below vllm's: its level and format
adapter = installed_adapter()
MIB = 1 << 20


class OscarBackend(adapter.CacheShape, AttentionBackend):
    """backend_of() makes one for each bundle: vLLM asks a class for the shape of its cache."""

    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    @override
    def get_name():
        return "CUSTOM"  # a name of AttentionBackendEnum, which has none for third parties

    @staticmethod
    @override
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list:
        return [PAGE_TOKENS]

    @classmethod
    @override
    def supports_sink(cls):
        return True

    @staticmethod
    @override
    def get_impl_cls():
        return OscarAttention

    @staticmethod
    @override
    def get_builder_cls():
        return OscarMetadataBuilder


_BACKENDS = {}  # by the hash of their bundle


def backend_of(config: VllmConfig):
    """The backend of the layers of an engine with this VllmConfig."""
    bundle = settings.bundle(config)
    if bundle.content_sha256 not in _BACKENDS:
        _BACKENDS[bundle.content_sha256] = type("OscarBackend", (OscarBackend,), {"bundle": bundle})
    return _BACKENDS[bundle.content_sha256]


@dataclass
class OscarMetadata:
    """One step: requests with a few rows first, then prompts."""

    decodes: Decodes | None
    num_tokens: int                 # tokens of the step, padding excluded
    appended: StepTables | None     # the prompts'; None besides in dummy runs, which compute none
    prompts: Prompts | None         # as above
    workspace: torch.Tensor

    @property
    def num_decodes(self):
        """Those that pad a CUDA graph among them."""
        return self.decodes.requests if self.decodes else 0


class OscarMetadataBuilder(AttentionMetadataBuilder):
    """Knows the windows of the requests, and makes the tables of a step."""

    kv_cache_spec: Int2Spec
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [layers[name].impl for name in layer_names]
        self.format = settings.cache_format(vllm_config)
        self.sink_blocks = self.format.sink_tokens // PAGE_TOKENS
        most = vllm_config.scheduler_config.max_num_seqs
        # So many rows of a request, a token and drafts, are no prompt; vLLM's runners sort by it.
        self.queries = self.reorder_batch_threshold = 1 + settings.drafts(vllm_config)
        self.tables = RequestTables(self.format, most, self.queries, device)
        self.slots, self.batch = WindowSlots(most), NOBODY
        self.chunk = settings.chunk_tokens(vllm_config)
        self.held = self.tokens = 0  # requests and tokens of the step
        # Of each window's request: INT2 tokens that it began with, in blocks of others.
        self.shared_history = np.zeros(most, np.int32)
        self.workspace = self.layers[0].codec.workspace()
        self._say_sizes(most)

    def _say_sizes(self, most):
        impl, spec = self.layers[0], self.kv_cache_spec
        layers = sum(isinstance(getattr(layer, "impl", None), OscarAttention) for layer in impl.layers.values())
        window = impl.window_bytes * layers
        # At a level that many servers show: the proof that this is not BF16.
        logger.warning_once(
            "OSCAR INT2 is on: %d layers hold 2-bit rows, %s",
            layers, " ".join(f"{k}={v}" for k, v in settings.facts(self.vllm_config).items()))
        if impl.loaded is None:
            logger.warning_once("OSCAR INT2: weights were not compared with the bundle's, since "
                                "--load-format %s loads them in a way of its own",
                                self.vllm_config.load_config.load_format)
        # Once: vLLM makes a builder to measure graphs, and another one to serve.
        logger.info_once("OSCAR INT2: blocks of %d tokens take %d bytes a layer, BF16 takes %d (%s)",
                         PAGE_TOKENS, spec.page_size_bytes,
                         4 * PAGE_TOKENS * spec.num_kv_heads * spec.head_size,
                         settings.bundle(self.vllm_config).path)
        logger.info_once("OSCAR INT2: exact windows take %.1f MiB beside them, %.2f for each of %d "
                         "requests", window / MIB, window / most / MIB, most)
        kept = settings.kept_sinks(self.vllm_config)
        if kept:
            logger.info_once("OSCAR INT2: sinks of up to %d shared prefixes are kept in up to %.1f MiB of host memory",
                             kept, kept * settings.sink_size(self.vllm_config) / MIB)
        if impl.scratch is not None:
            logger.info_once("OSCAR INT2: prompts in chunks of up to %d tokens take %.1f MiB, once",
                             self.vllm_config.scheduler_config.max_num_batched_tokens,
                             impl.scratch.nbytes / MIB)

    def keep_sinks(self, places):
        """Before a step. `places`: (slot, place) of each."""
        for slot, place in places:
            for layer in self.layers:
                layer.keep_sink(slot, place)

    def leave(self, slots):
        """Requests have left these windows."""
        if settings.poisons():
            for layer in self.layers:
                layer.poison(slots)
        self.shared_history[slots] = 0
        self.tables.clear(slots)

    def take_sinks(self, places):
        """For requests that begin with shared blocks. `places`: (slot, place, tokens in these blocks)."""
        for slot, place, tokens in places:
            self.shared_history[slot] = tokens - self.format.sink_tokens
            self.tables.begin(slot, tokens - self.format.sink_tokens)
            for layer in self.layers:
                layer.take_sink(place, slot)

    def go_on(self, places):
        """For requests whose input goes on. vLLM drops the last token of an answer, whose row a step that was under
        way has computed: if that has filled a page, it is written again. `places`: (slot, tokens that stay)."""
        for slot, tokens in places:
            history = max(self.format.history_tokens(tokens), int(self.shared_history[slot]))
            self.tables.begin(slot, history, max(self.format.page_tokens(tokens), history))

    def publish(self, slots, drafts):
        """Says who is in the batch of the next build(), in its order: their windows, and how many of their
        rows are drafts. What is built without that is a dummy run."""
        self.batch = Batch(np.asarray(slots, np.int32), np.asarray(drafts, np.int32))

    @override
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common, batch, self.batch = common_attn_metadata, self.batch, NOBODY
        starts = common.query_start_loc_cpu[:common.num_reqs + 1].numpy()
        new = np.diff(starts)
        # Both runners put requests with few rows first. A prompt as short may come anywhere, and is either.
        few = common.num_reqs if common.max_query_len <= self.queries else int((new > self.queries).argmax())
        self.held, self.tokens = len(batch.slots), int(starts[len(batch.slots)])
        queries, rows = int(new[:few].max(initial=0)), int(starts[few])
        alike = few * queries <= common.num_actual_tokens and not (new[:few] % max(queries, 1)).any()
        lists = [batch.slots, batch.drafts]
        if alike:
            rows = few * queries  # with those that pad a graph
        else:
            lists += ragged(starts[:few + 1], queries)
        prompts = self._prompts(common, batch.slots, few, starts) if len(batch.slots) > few else None
        packed = prompts.packed() if prompts else []
        sent = list(to_device([*lists, *(p.starts for p in packed)], self.tables.device))
        for p, indptr in zip(packed, sent[len(lists):]):
            p.indptr = indptr
        self.tables.fill(common, *sent[:2])
        block_table = common.block_table_tensor[:, self.sink_blocks:]
        decodes = appended = None
        if few:
            pick, place = (None, None) if alike else sent[2:4]
            decodes = self.tables.decodes(block_table, few, queries, rows, pick, place)
        if prompts:
            requests = slice(few, len(batch.slots))
            appended = self.tables.step_tables(
                block_table, requests, self.tables.starts[few:len(batch.slots) + 1] - rows,
                int(new[requests].max()), prompts.grown)
        return OscarMetadata(decodes=decodes, num_tokens=int(starts[-1]), appended=appended, prompts=prompts,
                             workspace=self.workspace)

    def _prompts(self, common: CommonAttentionMetadata, slots, few, starts):
        """Of requests behind the first few. vLLM knows their lengths on the host exactly."""
        requests, slots = slice(few, len(slots)), slots[few:]
        lengths = common.seq_lens_cpu_upper_bound[requests].tolist()
        if self.chunk:
            self._begin_chunks(slots, [length - new for length, new in zip(lengths, np.diff(starts[few:]).tolist())])
        prompts = sort_prompts(self.format, slots.tolist(), (starts[few:] - starts[few]).tolist(), lengths,
                               self.shared_history[slots].tolist())
        if prompts.chunks and self.layers[0].scratch is None:
            raise UnsupportedError("a prompt comes in chunks, and chunked prefill is off")
        return prompts

    def _begin_chunks(self, slots, computed):
        """What canonical chunks find before them is all in 2 bits. Lists by prompt: its window, and its tokens before
        this step."""
        for slot, tokens in zip(slots.tolist(), computed):
            if tokens and tokens % self.chunk == 0:
                self.shared_history[slot] = tokens - self.format.sink_tokens
                self.tables.begin(slot, tokens - self.format.sink_tokens)

    def refused(self, requests):
        """Status of the first requests of the step, on the device."""
        bits = self.tables.status.index_select(0, self.tables.row("window_slot", slice(requests)))
        if get_tensor_model_parallel_world_size() > 1:  # each rank knows of its own KV heads
            torch.distributed.all_reduce(bits, torch.distributed.ReduceOp.MAX, get_tp_group().device_group)
        return bits

    def spoil_refused(self, tensors):
        """Of a stage of pipeline parallelism that is not the last: fills rows of requests with a refused row
        with NaN, which the last stage sees. `tensors` [tokens, ...] go to the next one."""
        refused = self.refused(self.held).bool()
        rows = torch.repeat_interleave(refused, self.tables.starts[:self.held + 1].diff(), output_size=self.tokens)
        for tensor in tensors:
            tensor[:self.tokens].masked_fill_(rows[:, None], torch.nan)


def first_kv_head(total, ranks, rank):
    """Of a layer's KV heads, the first of those that a rank of tensor parallelism has. Where there are more
    ranks than heads, neighbours have copies of one."""
    return rank * total // ranks


class OscarAttention(AttentionImpl):
    """One layer: its codec and its exact windows."""

    supports_quant_query_input = False

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
                 sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                 attn_type="decoder", kv_sharing_target_layer_name=None, sinks=None, **others):
        config = get_current_vllm_config()
        settings.check(config)
        check_layer(
            scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap, attn_type=attn_type, others=others,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.bundle, self.format = settings.bundle(config), settings.cache_format(config)
        self.positions = config.model_config.max_model_len
        self.slots = config.scheduler_config.max_num_seqs
        self.layers = config.compilation_config.static_forward_context
        chunked = config.scheduler_config.enable_chunked_prefill
        prefixes = config.cache_config.enable_prefix_caching
        self.scratch_tokens = config.model_config.max_model_len if chunked or prefixes else 0
        self.fa_version, self.scratch = None, None
        self.sinks = sinks  # [Hq]: of each head a score without a value, a parameter of the model; None: there is none
        self.kept = {}  # by place: a sink in host memory, bf16 [2, Hkv, sink tokens, d]
        self.codec, self.loaded = None, None  # weights.Loaded, of all layers
        self.drafts = settings.drafts(config)
        if current_platform.is_cuda():
            self.fa_version = fa_utils.get_flash_attn_version(head_size=head_size)
            if sinks is not None and self.fa_version is None:
                raise UnsupportedError("the INT2 cache does not serve attention sinks where vLLM has no FlashAttention")

    @override
    def process_weights_after_loading(self, act_dtype):
        """Makes codec, windows and, once for all layers, the scratch of prompts in chunks: here, while vLLM
        counts what the weights take, so that its pool becomes smaller by them. Called again, when weights are
        loaded again: nothing here depends on them, and running requests and captured graphs go on with the
        same memory."""
        if self.codec is not None:
            if self.loaded is not None:
                self.loaded.again(self.codec.layer_id)
            return
        name = next(name for name, layer in self.layers.items()
                    if getattr(layer, "impl", None) is self)
        device, format = torch.device(current_platform.device_type), self.format
        layer_id = extract_layer_index(name)
        self.first_head = first_kv_head(self.bundle.layers[layer_id].num_kv_heads,
                                        get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank())
        self.codec = LayerCodec(self.bundle, layer_id, device, positions=self.positions, sm_scale=self.scale,
                                heads=slice(self.first_head, self.first_head + self.num_kv_heads))
        shape = (self.slots, self.num_kv_heads, format.sink_tokens + format.ring_tokens(1 + self.drafts),
                 self.head_size)
        self.window_k, self.window_v = (torch.zeros(shape, dtype=torch.bfloat16, device=device)
                                        for _ in "kv")
        self.window_bytes = 2 * self.window_k.numel() * self.window_k.element_size()
        if self.scratch_tokens:
            shape = (2, self.scratch_tokens, self.num_kv_heads, self.head_size)
            others = (getattr(layer.impl, "scratch", None) for layer in self.layers.values()
                      if hasattr(layer, "impl"))
            self.scratch = next((s for s in others if s is not None and s.shape == shape), None)
            if self.scratch is None:
                self.scratch = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if settings.poisons():
            self.poison(range(self.slots))

    def poison(self, slots):
        for window in (self.window_k, self.window_v):
            window[list(slots)] = torch.nan

    def keep_sink(self, slot, place):
        """Waits for nothing: copies to and from host memory have the order of the steps."""
        sink = slice(self.format.sink_tokens)
        rows = torch.stack((self.window_k[slot, :, sink], self.window_v[slot, :, sink]))
        if place not in self.kept:
            self.kept[place] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=takes_pinned(rows.device))
        self.kept[place].copy_(rows, non_blocking=True)

    def take_sink(self, place, slot):
        sink = slice(self.format.sink_tokens)
        rows = self.kept[place].to(self.window_k.device, non_blocking=True)
        self.window_k[slot, :, sink], self.window_v[slot, :, sink] = rows

    @override
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        """query [tokens, Hq, d], key and value [tokens, Hkv, d], output as query: all bf16."""
        if attn_metadata is None:  # vLLM measures the memory of a step: a prompt in chunks has copies
            held = *self.codec.transform_qkv(query, key, value), torch.empty_like(output)
            del held
            return output.zero_()
        pages = LayerPages(adapter.pool(kv_cache), self.window_k, self.window_v)
        n, end = 0, attn_metadata.num_tokens
        if attn_metadata.decodes is not None:
            n = attn_metadata.decodes.rows
            self._decode(pages, attn_metadata.decodes, query[:n], key[:n], value[:n], output[:n],
                         attn_metadata.workspace)
        if attn_metadata.prompts is not None:
            q, k, v, out = (x[n:end] for x in (query, key, value, output))
            self._read_prompts(pages, q, k, v, attn_metadata, out)
        elif end > n:
            output[n:end].zero_()
        return output

    def _decode(self, pages, step, query, key, value, out, workspace):
        """A few rows of each request into the cache, then their attention."""
        q, k, v = self.codec.transform_qkv(query, key, value)
        self.codec.append(pages, step.tables, k, v)
        if step.pick is not None:
            q = q.index_select(0, step.pick)
        q = q.view(step.requests, step.queries, *q.shape[1:])
        parts = q.split(MOST_QUERIES, 1) if len(step.ends) > 1 else [q]
        sums = [self._sums(*part.shape[:2]) for part in parts]
        o = [self.codec.attend(pages, tables, part.contiguous(), workspace=workspace, lse=lse)
             for tables, part, lse in zip(step.ends, parts, sums)]

        def as_rows(parts):
            rows = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).flatten(0, 1)
            return rows if step.place is None else rows.index_select(0, step.place)

        self.codec.transform_output(as_rows(o), out=out)
        if self.sinks is not None:
            self._add_sinks(out, as_rows(sums), query, True)

    def _read_prompts(self, pages, q, k, v, metadata, out):
        """Attention of prompts, then their rows into the cache."""
        tables, prompts = metadata.appended, metadata.prompts
        for begun in prompts.begun:
            raw_q, raw_k, raw_v, raw_out = (x[begun.rows] for x in (q, k, v, out))
            sums = self._attend(raw_q, raw_k, raw_v, raw_out, begun.packed, begun.packed)
            self._add_sinks(raw_out, sums, raw_q, False)
        raw_q = q
        if prompts.chunks:
            q, k, v = self.codec.transform_qkv(q, k, v)
        else:
            k, v = self.codec.transform_kv(k, v)
        for chunk in prompts.chunks:
            held = chunk.keys.starts[-1]
            if settings.poisons():
                self.scratch.fill_(torch.nan)
            all_k, all_v = self.scratch[:, :held]
            self.codec.read(pages, tables, chunk.request, chunk.slot, chunk.history,
                            all_k[:chunk.old_len], all_v[:chunk.old_len])
            all_k[chunk.old_len:] = k[chunk.rows]
            all_v[chunk.old_len:] = v[chunk.rows]
            o = torch.empty_like(q[chunk.rows])
            sums = self._attend(q[chunk.rows], all_k, all_v, o, chunk.queries, chunk.keys)
            self.codec.transform_output(o, out=out[chunk.rows])
            self._add_sinks(out[chunk.rows], sums, raw_q[chunk.rows], True)
        self.codec.append(pages, tables, k, v)

    def _attend(self, q, k, v, out, queries, keys):
        """Attention without sinks; returns the logsumexp of each query's logits where there are some."""
        sums = self._sums(len(q))
        causal_attention(q, k, v, out, queries, keys, self.scale, self.fa_version, sums)
        return sums

    def _sums(self, *rows):
        """Memory for the logsumexp of these queries; None where nobody asks for it."""
        if self.sinks is None:
            return None
        return torch.empty(*rows, self.num_heads, dtype=torch.float32, device=self.sinks.device)

    def _add_sinks(self, out, sums, query, centered):
        """Of queries [rows, Hq, d] as the model made them, their output, and the logsumexp of their logits over keys as
        the cache has them, `centered`, or as the model made them."""
        if self.sinks is not None:
            weigh_by_sinks(out, sums, self.sinks.float() - (self.codec.centered_logits(query) if centered else 0))
