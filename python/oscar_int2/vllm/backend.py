"""INT2 pages as an attention backend of vLLM's.

A block of vLLM's is one page, 64 tokens of every KV head. Of a request's blocks the first sink_tokens
/ 64 stand for the sink, which lies in the exact window, and their pages stay unused; the next ones
hold the history; the last ones stand for the ring of recent tokens.

Prompts attend (prompts.py) and are then appended; single tokens are appended and attend over pages and
windows, in a CUDA graph where vLLM makes one.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl,
                                       AttentionMetadataBuilder)
from vllm.v1.attention.backends import fa_utils

from .._library import PAGE_TOKENS
from ..codec import LayerCodec, LayerPages, StepTables
from ..errors import UnsupportedError
from . import adapter as installed_adapter, settings
from .prompts import Chunk, Packed, Prompts, causal_attention
from .refusals import NO_LOGITS
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
    """One step: single tokens first, then prompts."""

    num_decodes: int                # those that pad a CUDA graph among them
    decodes: StepTables | None
    num_tokens: int                 # tokens of the step, padding excluded
    appended: StepTables | None     # the prompts'; None besides in dummy runs, which compute none
    prompts: Prompts | None         # as above
    workspace: torch.Tensor


class OscarMetadataBuilder(AttentionMetadataBuilder):
    """Keeps the windows' slots, and the tables of a step in tensors that never move."""

    kv_cache_spec: Int2Spec
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    # Of `host` and `tables`: five with a number a request, then of single tokens, of all prompts, of
    # those that begin, and of each chunk the two of Chunk.queries and the two of Chunk.keys.
    ROWS: tuple[str, ...] = (
        "old_len", "seq_lens", "old_history", "new_history", "window_slot", "single_indptr",
        "query_start_loc", "begun_indptr", "chunk_indptr")

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = 1
        settings.check(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [layers[name].impl for name in layer_names]
        self.format = settings.cache_format(vllm_config)
        self.sink_blocks = self.format.sink_tokens // PAGE_TOKENS
        most = vllm_config.scheduler_config.max_num_seqs
        self.slots, self.batch = WindowSlots(most), None
        # Of each window's request: INT2 tokens that it began with, in blocks of others.
        self.shared_history = np.zeros(most, np.int32)
        # On the CPU one tensor is both; vLLM waits for the copies of a step before the next one.
        self.host = torch.zeros(len(self.ROWS), 4 * most + 1, dtype=torch.int32,
                                pin_memory=is_pin_memory_available())
        self.tables = self.host if device.type == "cpu" else self.host.to(device)
        self.status = torch.zeros(most, dtype=torch.int32, device=device)  # of each window
        self.notes = None
        self.workspace = self.layers[0].codec.workspace()
        self._say_sizes(most)

    def _say_sizes(self, most):
        impl, spec = self.layers[0], self.kv_cache_spec
        window = impl.window_bytes * len(self.layers)
        # At a level that many servers show: the proof that this is not BF16.
        logger.warning_once(
            "OSCAR INT2 is on: %d layers hold 2-bit rows, %s",
            len(self.layers), " ".join(f"{k}={v}" for k, v in settings.facts(self.vllm_config).items()))
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
        if impl.kept_k is not None:
            kept = 2 * impl.kept_k.nbytes * len(self.layers)
            logger.info_once("OSCAR INT2: sinks of %d shared prefixes take %.1f MiB",
                             len(impl.kept_k), kept / MIB)
        if impl.scratch is not None:
            logger.info_once("OSCAR INT2: prompts in chunks of up to %d tokens take %.1f MiB, once",
                             self.vllm_config.scheduler_config.max_num_batched_tokens,
                             impl.scratch.nbytes / MIB)

    def follow(self, finished, preempted, resumed, request_ids, moves):
        """Who is in the next batch, in its order, and what happens to sinks (prefixes.SinkMoves)
        before; None: nothing. Called once a step, before build()."""
        for request, place in moves.kept if moves else ():
            for layer in self.layers:
                layer.keep_sink(self.slots.of[request], place)
        freed = [slot for ids in (finished, preempted, resumed) for slot in self.slots.release(ids)]
        if settings.poisons():
            for layer in self.layers:
                layer.poison(freed)
        self.shared_history[freed] = 0
        for slot in freed:
            self.status[slot] = 0
        self.batch = self.slots.hold(request_ids) if request_ids else None
        for request, place, tokens in moves.taken if moves else ():
            slot = self.slots.of[request]
            self.shared_history[slot] = tokens - self.format.sink_tokens
            for layer in self.layers:
                layer.take_sink(place, slot)

    @override
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common, slots = common_attn_metadata, self.batch
        self.batch = None  # what comes without a follow() is a dummy run
        starts = common.query_start_loc_cpu[:common.num_reqs + 1].numpy()
        new = np.diff(starts)
        # Single tokens come first; prompts of one token may come anywhere, and are either.
        decodes = common.num_reqs if common.max_query_len == 1 else int((new > 1).argmax())
        length = np.zeros(common.num_reqs, np.int32)
        if slots is not None:
            length[:len(slots)] = common.seq_lens_cpu_upper_bound[:len(slots)].numpy()
        rows = self._fill(decodes, new, length, slots)
        # Requests that pad a graph have no row, and those of dummy runs neither: what is computed for
        # them must not reach a window, which somebody may hold.
        rows["single_indptr"][:decodes + 1] = 0 if slots is None else starts[:decodes + 1]
        appended = prompts = None
        if slots is not None and decodes < common.num_reqs:
            grown = (rows["new_history"] - rows["old_history"])[decodes:common.num_reqs]
            appended = self._tables(
                common, slice(decodes, common.num_reqs), int(new[decodes:].max()), int(grown.max()),
                self._on_device("query_start_loc", 0, common.num_reqs - decodes + 1))
            prompts = self._prompts(rows, slice(decodes, common.num_reqs), new[decodes:])
        single = self._tables(common, slice(decodes), 1, self.format.demote_block,
                              self._on_device("single_indptr", 0, decodes + 1)) if decodes else None
        if self.tables is not self.host:
            self.tables.copy_(self.host, non_blocking=True)
        return OscarMetadata(num_decodes=decodes, decodes=single, num_tokens=int(starts[-1]),
                             appended=appended, prompts=prompts, workspace=self.workspace)

    def _fill(self, decodes, new, length, slots):
        """The numbers of each request, and where the prompts' rows are. Returns the rows of `host`."""
        rows, n = dict(zip(self.ROWS, self.host.numpy())), len(length)
        rows["seq_lens"][:n] = length
        rows["old_len"][:n] = np.maximum(length - new, 0)
        rows["window_slot"][:n], shared = 0, 0
        if slots is not None:
            rows["window_slot"][:len(slots)] = slots
            shared = np.zeros(n, np.int32)
            shared[:len(slots)] = self.shared_history[slots]
        for history, tokens in (("old_history", "old_len"), ("new_history", "seq_lens")):
            rows[history][:n] = np.maximum(self.format.history_tokens(rows[tokens][:n]), shared)
        rows["query_start_loc"][0] = 0
        rows["query_start_loc"][1:n - decodes + 1] = np.cumsum(new[decodes:])
        return rows

    def _prompts(self, rows, requests, new):
        """Of the prompts of a step, which have `new` rows each: chunks first, as vLLM sorts them."""
        old_len, count = rows["old_len"][requests], len(new)
        later = int((old_len > 0).sum())
        if (old_len[later:] > 0).any():
            raise UnsupportedError("a prompt begins before one that goes on: not served")
        if later and self.layers[0].scratch is None:
            raise UnsupportedError("a prompt comes in chunks, and chunked prefill is off")
        starts = rows["query_start_loc"][:count + 1].tolist()
        chunks = []
        for i in range(later):
            request = requests.start + i
            ends = int(new[i]), int(rows["seq_lens"][request])
            rows["chunk_indptr"][4 * i:4 * i + 4] = 0, ends[0], 0, ends[1]
            queries, keys = (Packed([0, end], self._on_device("chunk_indptr", 4 * i + 2 * j, 2))
                             for j, end in enumerate(ends))
            chunks.append(Chunk(request=i, rows=slice(starts[i], starts[i + 1]),
                                slot=int(rows["window_slot"][request]), old_len=int(old_len[i]),
                                history=int(rows["old_history"][request]), queries=queries, keys=keys))
        begun = None
        if later < count:
            begin = [start - starts[later] for start in starts[later:]]
            rows["begun_indptr"][:len(begin)] = begin
            begun = Packed(begin, self._on_device("begun_indptr", 0, len(begin)))
        return Prompts(chunks=chunks, begin=slice(starts[later], starts[-1]), begun=begun)

    def _on_device(self, row, first, count):
        return self.tables[self.ROWS.index(row), first:first + count]

    def _tables(self, common: CommonAttentionMetadata, requests, max_new_rows, max_new_history, query_start_loc):
        """Of a slice of the requests."""
        rows = {name: row[requests] for name, row in zip(self.ROWS[:5], self.tables)}
        return StepTables(block_table=common.block_table_tensor[requests, self.sink_blocks:],
                          query_start_loc=query_start_loc, status=self.status, max_new_rows=max_new_rows,
                          max_new_history=max_new_history, **rows)

    def note_refused(self, request_ids, logits):
        """Reads which requests of the step have a refused row (refusals.py), behind all that the step has
        computed; waits for nothing."""
        bits = self.status.index_select(0, self._on_device("window_slot", 0, len(request_ids)))
        if logits is not None:  # one number a request shows whether any is NaN
            bits = torch.where(logits[:len(bits)].amax(-1).isnan(), bits | NO_LOGITS, bits)
        self.notes = request_ids, bits.to("cpu", non_blocking=True)

    def take_notes(self):
        """Of the last step, for refusals.send(); None: there are none."""
        notes, self.notes = self.notes, None
        return notes


class OscarAttention(AttentionImpl):
    """One layer: its codec and its exact windows."""

    supports_quant_query_input = False

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
                 sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                 attn_type="decoder", kv_sharing_target_layer_name=None, **others):
        config = get_current_vllm_config()
        settings.check(config)
        settings.check_layer(
            head_size, scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap, attn_type=attn_type, others=others,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name)
        adapter.follow_worker()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.bundle, self.format = settings.bundle(config), settings.cache_format(config)
        self.positions = config.model_config.max_model_len
        self.slots = config.scheduler_config.max_num_seqs
        self.layers = config.compilation_config.static_forward_context
        chunked = config.scheduler_config.enable_chunked_prefill
        self.prefixes = settings.prefixes(config)
        self.scratch_tokens = config.model_config.max_model_len if chunked or self.prefixes else 0
        self.fa_version, self.scratch, self.kept_k, self.kept_v = None, None, None, None
        self.codec, self.loaded = None, None  # weights.Loaded, of all layers
        if current_platform.is_cuda():
            self.fa_version = fa_utils.get_flash_attn_version(head_size=head_size)

    @override
    def process_weights_after_loading(self, act_dtype):
        """Makes codec, windows, room for sinks of shared prefixes and, once for all layers, the scratch
        of prompts in chunks: here, while vLLM counts what the weights take, so that its pool becomes
        smaller by them. Called again, when weights are loaded again: nothing here depends on them, and
        running requests and captured graphs go on with the same memory."""
        if self.codec is not None:
            if self.loaded is not None:
                self.loaded.again(self.codec.layer_id)
            return
        name = next(name for name, layer in self.layers.items()
                    if getattr(layer, "impl", None) is self)
        device, format = torch.device(current_platform.device_type), self.format
        self.codec = LayerCodec(self.bundle, extract_layer_index(name), device,
                                positions=self.positions)
        shape = (self.slots, self.num_kv_heads, format.sink_tokens + format.ring_tokens(),
                 self.head_size)
        self.window_k, self.window_v = (torch.zeros(shape, dtype=torch.bfloat16, device=device)
                                        for _ in "kv")
        if self.prefixes:
            shape = (self.prefixes, self.num_kv_heads, format.sink_tokens, self.head_size)
            self.kept_k, self.kept_v = (torch.zeros(shape, dtype=torch.bfloat16, device=device)
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
        for kept, window in ((self.kept_k, self.window_k), (self.kept_v, self.window_v)):
            kept[place] = window[slot, :, :kept.shape[2]]

    def take_sink(self, place, slot):
        for kept, window in ((self.kept_k, self.window_k), (self.kept_v, self.window_v)):
            window[slot, :, :kept.shape[2]] = kept[place]

    @override
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        """query [tokens, Hq, d], key and value [tokens, Hkv, d], output as query: all bf16."""
        if attn_metadata is None:  # vLLM measures the memory of a step: a prompt in chunks has copies
            held = *self.codec.transform_qkv(query, key, value), torch.empty_like(output)
            del held
            return output.zero_()
        pages = LayerPages(adapter.pool(kv_cache), self.window_k, self.window_v)
        n, end = attn_metadata.num_decodes, attn_metadata.num_tokens
        if n:
            q, k, v = self.codec.transform_qkv(query[:n], key[:n], value[:n])
            self.codec.append(pages, attn_metadata.decodes, k, v)
            o = self.codec.attend(pages, attn_metadata.decodes, q[:, None],
                                  workspace=attn_metadata.workspace)
            self.codec.transform_output(o[:, 0], out=output[:n])
        if attn_metadata.prompts is not None:
            q, k, v, out = (x[n:end] for x in (query, key, value, output))
            self._read_prompts(pages, q, k, v, attn_metadata, out)
        elif end > n:
            output[n:end].zero_()
        return output

    def _read_prompts(self, pages, q, k, v, metadata, out):
        """Attention of prompts, then their rows into the cache."""
        tables, prompts = metadata.appended, metadata.prompts
        if prompts.begun is not None:
            raw_q, raw_k, raw_v, raw_out = (x[prompts.begin] for x in (q, k, v, out))
            self._attend(raw_q, raw_k, raw_v, raw_out, prompts.begun, prompts.begun)
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
            self._attend(q[chunk.rows], all_k, all_v, o, chunk.queries, chunk.keys)
            self.codec.transform_output(o, out=out[chunk.rows])
        self.codec.append(pages, tables, k, v)

    def _attend(self, q, k, v, out, queries, keys):
        causal_attention(q, k, v, out, queries, keys, self.scale, self.fa_version)
