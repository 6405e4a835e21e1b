"""The cache of a whole model for a fixed number of requests: pages, exact windows, lengths, tables.

Shared by the decode loop of this package and by transformers; vLLM owns its pages itself.
"""
from dataclasses import dataclass

import torch

from ._library import PAGE_TOKENS
from .attention import attend_as_steps, attend_behind
from .codec import ExactCodec, LayerCodec, StepTables
from .errors import CacheFullError, CacheRowError, UnsupportedError
from .recipe import CacheFormat

SLOT_FULL = 1 << 8  # a bit of status that no kernel sets (RowStatus has 8)


@dataclass(frozen=True)
class SecondPrompts:
    """Prompts behind what their slots hold: their append, and its numbers on the host."""

    tables: StepTables
    slots: list
    lengths: list      # new rows of each
    old: list          # tokens that each slot holds before
    old_history: list  # of them INT2


class PagedCache:
    """`max_num_seqs` requests of up to max_tokens tokens each over one pool of pages a layer.

    A request is admitted to a slot, its prompt appended, then every decode step appends one token
    to each slot in use; further prompts may follow. Slots that are not in use take part and cost
    nothing. A step beyond the tokens that a slot was admitted for writes over the last of them, and
    check_rows() says so. All tensors that a step reads or writes stay where they are, so that a
    captured CUDA graph can be replayed.

    `codecs`: {layer id: LayerCodec or ExactCodec}. `pages`: pages of each layer's pool, fewer than
    all requests could come to need; None: enough for all. int2() and bf16() make the usual ones.
    """

    def __init__(self, codecs, format, max_num_seqs, max_tokens, *, pages=None):
        self.codecs, self.format, self.max_num_seqs, self.max_tokens = codecs, format, max_num_seqs, max_tokens
        some = next(iter(codecs.values()))
        self.device, self.workspace = some.device, some.workspace()
        self.max_pages = format.history_pages(max_tokens)
        self.num_pages = max_num_seqs * self.max_pages if pages is None else pages
        window_tokens = format.sink_tokens + format.ring_tokens()
        self.layers = {i: codec.pages(self.num_pages, max_num_seqs, window_tokens)
                       for i, codec in codecs.items()}
        self.free_pages = list(range(self.num_pages))
        self.pages_of_slot = [[] for _ in range(max_num_seqs)]

        def ints(*shape):
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        self.block_table = ints(max_num_seqs, max(self.max_pages, 1))
        self.active, self.status = ints(max_num_seqs), ints(max_num_seqs)  # active: 1 for a slot in use
        self.room = ints(max_num_seqs)                               # tokens that a slot was admitted for
        self.step = StepTables(
            block_table=self.block_table, old_len=ints(max_num_seqs), seq_lens=ints(max_num_seqs),
            query_start_loc=torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self.device),
            old_history=ints(max_num_seqs), new_history=ints(max_num_seqs), status=self.status,
            max_new_rows=1, max_new_history=format.demote_block)

    @classmethod
    def int2(cls, bundle, max_num_seqs, max_tokens, device, *, pages=None, demote_block=None, codecs=None):
        """2-bit rows by a bundle. `demote_block`: tokens that leave the exact window at once
        (CacheFormat.served). `codecs`: those of another cache of this bundle on this device, to share them.
        Raises UnsupportedError for a bundle with layers that can't be served."""
        check_served(bundle)
        codecs = codecs or {i: LayerCodec(bundle, i, device, positions=max_tokens) for i in bundle.layers}
        return cls(codecs, bundle.quantizer.served(demote_block), max_num_seqs, max_tokens, pages=pages)

    @classmethod
    def bf16(cls, model, max_num_seqs, max_tokens, device):
        """Exact rows, through the same operators. `model`: the shape, as Bundle.model."""
        format = CacheFormat(quant_group_size=0, recent_tokens=max_tokens)
        codecs = {i: ExactCodec(i, model.num_kv_heads, model.head_dim, format, device)
                  for i in range(model.num_layers)}
        return cls(codecs, format, max_num_seqs, max_tokens)

    def grown(self, max_tokens):
        """A copy with room for so many tokens a request, which holds the same."""
        more = PagedCache(self.codecs, self.format, self.max_num_seqs, max_tokens)
        old, new = [], []
        for slot, active in enumerate(self.active.tolist()):
            if active:
                more.admit(slot, max_tokens)
                old += self.pages_of_slot[slot]
                new += more.pages_of_slot[slot][:len(self.pages_of_slot[slot])]
        for layer_id, pages in self.layers.items():
            copy = more.layers[layer_id]
            copy.pool[new] = pages.pool[old]
            copy.window_k.copy_(pages.window_k)
            copy.window_v.copy_(pages.window_v)
        for name in ("old_len", "seq_lens", "old_history", "new_history", "status"):
            getattr(more.step, name).copy_(getattr(self.step, name))
        more.active.copy_(self.active)
        return more

    def memory_bytes(self):
        """Bytes of pages, and of windows, over all layers."""
        pools = sum(p.pool.numel() for p in self.layers.values())
        windows = sum(4 * p.window_k.numel() for p in self.layers.values())
        return pools, windows

    def held_tokens(self):
        """Tokens that are held in 2 bits, and exactly, over all slots; waits for the device."""
        int2 = self.step.new_history.sum().item()
        return int2, self.step.seq_lens.sum().item() - int2

    def tensors(self):
        """All that a decode step reads or writes besides its rows; their addresses never change."""
        for holder in (self, self.step, *self.layers.values(), *self.codecs.values()):
            for value in vars(holder).values():
                yield from (t for t in (value if isinstance(value, list) else (value,))
                            if isinstance(t, torch.Tensor))

    def fits(self, tokens):
        """Whether the pool has the pages for another request of that many tokens."""
        return self.format.history_pages(tokens) <= len(self.free_pages)

    def admit(self, slot, tokens):
        """Reserves the pages of a request that will hold up to `tokens` tokens.

        Raises CacheFullError when there are too few, or the slot is taken."""
        if tokens > self.max_tokens:
            raise CacheFullError(f"{tokens} tokens in a cache made for {self.max_tokens} a request")
        if self.pages_of_slot[slot]:
            raise CacheFullError(f"slot {slot} is taken")
        if not self.fits(tokens):
            raise CacheFullError(f"{self.format.history_pages(tokens)} pages of {PAGE_TOKENS} tokens are needed, "
                                 f"{len(self.free_pages)} are free")
        pages = [self.free_pages.pop() for _ in range(self.format.history_pages(tokens))]
        self.pages_of_slot[slot] = pages
        if pages:
            row = torch.tensor(pages, dtype=torch.int32)
            self.block_table[slot, :len(pages)].copy_(row)
        self.room[slot] = tokens
        self.status[slot] = 0
        self._set(slot, 0, 0)

    def release(self, slot):
        """The request has ended: its pages are free."""
        self.free_pages += self.pages_of_slot[slot]
        self.pages_of_slot[slot] = []
        self._set(slot, 0, 0)

    def reset(self):
        for slot in range(self.max_num_seqs):
            self.release(slot)
        self.status.zero_()

    def _set(self, slot, tokens, history):
        self.step.seq_lens[slot], self.step.new_history[slot] = tokens, history
        self.active[slot] = int(tokens > 0)

    def prompt_tables(self, slots, lengths):
        """Tables of one append of whole prompts, packed one behind another, into admitted slots,
        which hold them from then on. `lengths`: a list of tokens a prompt."""
        zeros = [0] * len(slots)
        return self._append_tables(slots, lengths, zeros, zeros)

    def second_prompts(self, slots, lengths):
        """The same for prompts behind what the slots hold; waits for the device. For extend()."""
        tokens, history = self.step.seq_lens.tolist(), self.step.new_history.tolist()
        old, old_history = ([values[slot] for slot in slots] for values in (tokens, history))
        return SecondPrompts(self._append_tables(slots, lengths, old, old_history), slots, lengths,
                             old, old_history)

    def _append_tables(self, slots, lengths, old, old_history):
        total = [before + n for before, n in zip(old, lengths)]
        history = [self.format.history_tokens(n) for n in total]
        indptr = [0]
        for n in lengths:
            indptr.append(indptr[-1] + n)

        def ints(values):
            return torch.tensor(values, dtype=torch.int32).to(self.device)

        window_slot = ints(slots)
        tables = StepTables(
            block_table=self.block_table[window_slot.long()], query_start_loc=ints(indptr), old_len=ints(old),
            seq_lens=ints(total), old_history=ints(old_history), new_history=ints(history),
            status=self.status, max_new_rows=max(lengths), window_slot=window_slot,
            max_new_history=max(new - before for new, before in zip(history, old_history)))
        self.step.seq_lens[window_slot.long()] = tables.seq_lens
        self.step.new_history[window_slot.long()] = tables.new_history
        self.active[window_slot.long()] = 1
        return tables

    def next_step(self):
        """Moves every slot in use on by one token, on the device alone. Returns the tables."""
        step = self.step
        full = self.active * (step.seq_lens >= self.room)
        self.status.bitwise_or_(full * SLOT_FULL)
        step.old_len.copy_(step.seq_lens - full)
        step.old_history.copy_(step.new_history)
        step.seq_lens.copy_(step.old_len + self.active)
        step.new_history.copy_(self.format.history_tokens(step.seq_lens))
        return step

    def write(self, layer_id, tables, k, v):
        """Rows in the model's basis, bf16 [rows, Hkv, d], behind RoPE, into the cache."""
        codec = self.codecs[layer_id]
        codec.append(self.layers[layer_id], tables, *codec.transform_kv(k, v))

    def extend(self, layer_id, prompts, q, k, v, as_steps=False):
        """One layer of `prompts`, which second_prompts() made: rows attend over what their slot holds,
        as the cache has it, and over their own, and then go into the cache. q bf16 [rows, Hq, d], k and
        v [rows, Hkv, d], behind RoPE. `as_steps`: each row reads as INT2 what the step of its token
        would read so, where otherwise new rows are read exactly. Returns bf16 [rows, Hq, d] in the
        model's basis."""
        codec, pages = self.codecs[layer_id], self.layers[layer_id]
        q, k, v = codec.transform_qkv(q, k, v)
        o, whole, end = torch.empty_like(q), [], 0
        for request, (slot, length, old, history) in enumerate(
                zip(prompts.slots, prompts.lengths, prompts.old, prompts.old_history)):
            new, end = slice(end, end + length), end + length
            rows = k.new_empty(2, old + length, *k.shape[1:])
            codec.read(pages, prompts.tables, request, slot, history, *rows[:, :old])
            rows[0, old:], rows[1, old:] = k[new], v[new]
            if as_steps:
                whole.append((request, new, rows))
            else:
                attend_behind(q[new], *rows, o[new], codec.sm_scale)
        codec.append(pages, prompts.tables, k, v)
        for request, new, rows in whole:
            history = self.format.history_tokens(rows.shape[1])
            coded = codec.read_history(pages, prompts.tables, request, history)
            attend_as_steps(q[new], rows, coded, o[new], self.format, codec.sm_scale)
        return codec.transform_output(o)

    def decode(self, layer_id, q, k, v):
        """One step of one layer, after next_step(): each slot's new row into the cache, and its
        query over all its rows. q bf16 [max_num_seqs, Hq, d], k and v [max_num_seqs, Hkv, d], behind RoPE.
        Returns bf16 [max_num_seqs, Hq, d] in the model's basis; zeros for slots that are not in use."""
        codec, pages = self.codecs[layer_id], self.layers[layer_id]
        q, k, v = codec.transform_qkv(q, k, v)
        codec.append(pages, self.step, k, v)
        o = codec.attend(pages, self.step, q[:, None], workspace=self.workspace)
        return codec.transform_output(o[:, 0])

    def take_errors(self):
        """{slot: CacheRowError of a row that could not be written, or CacheFullError of one that had no
        room}, since the last call; waits for the device. Other slots are as they should be."""
        status = self.status.tolist()
        if any(status):
            self.status.zero_()
        return {slot: _error(slot, bits) for slot, bits in enumerate(status) if bits}

    def check_rows(self):
        """Raises the first of take_errors(), if there is one."""
        for error in self.take_errors().values():
            raise error


def _error(slot, status):
    if status & SLOT_FULL:
        return CacheFullError(f"request {slot}: a decode step went beyond the tokens that its slot was "
                              "made for")
    return CacheRowError(f"request {slot}: {row_problem(status)}")


def row_problem(status):
    """What the bits of `status` (lib/oscar/cache/codec.h, RowStatus) mean."""
    if status & 2:  # first: what is worked out from such a row is not finite
        return ("the range of a key or value row does not fit the pages' metadata; calibrate with "
                "metadata_dtype=\"fp32\" (--metadata-dtype fp32)")
    return "a key or value row was not finite"


def check_served(bundle):
    """Raises UnsupportedError for a bundle with layers that this package can't serve yet."""
    for layer in bundle.layers.values():
        if layer.attention != "full" or layer.sliding_window or not layer.quantized:
            raise UnsupportedError(
                f"layer {layer.layer_id} of {bundle.model.name!r} has {layer.attention} attention"
                f"{f' over {layer.sliding_window} tokens' if layer.sliding_window else ''}"
                f"{'' if layer.quantized else ' and is not quantized'}; only models whose layers all "
                "have full attention and 2-bit rows are served")
