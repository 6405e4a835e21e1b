"""OscarCache: what transformers sees as a cache, over PagedCache."""
import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import CacheFullError, UnsupportedError

NAME = "oscar_int2"  # of the attention implementation, and of the attribute that holds what was applied


def refuse(what):
    raise UnsupportedError(f"the 2-bit cache in transformers does not serve {what}")


class OscarCache(Cache):
    """The cache of `batch` rows of up to max_tokens tokens each, padding included.

    For a loop of one's own over model(...), or as past_key_values of generate(), which otherwise makes
    one itself. `model` is one that apply() prepared. Each row takes a prompt, then a token a step (a
    single column, which counts for every row whatever a mask says), then perhaps a further prompt,
    which reads what is held as the cache has it, 2-bit rows included; reset() makes the cache ready
    for other texts. check_rows(), which generate() calls at its end, raises CacheRowError if a row
    could not be written, and CacheFullError if compiled steps, which nothing counts on the way, went
    beyond max_tokens.
    """

    def __init__(self, model, batch, max_tokens):
        self.owner = getattr(model, NAME, None)
        if self.owner is None:
            refuse("an OscarCache of a model that apply() did not prepare")
        self.paged, self.max_tokens = self.owner.paged_cache(batch, max_tokens), max_tokens
        self.as_steps = self.owner.scoring.prompts == "int2"  # how prompts read their own rows
        # Columns of input_ids that were seen, on the device: no step may wait for their number.
        self.columns = torch.zeros((), dtype=torch.int64, device=self.paged.device)
        super().__init__(layers=[_Layer(self) for _ in self.paged.layers])
        for tensor in (self.columns, *self.paged.tensors()):
            torch._dynamo.mark_static_address(tensor)  # or CUDA graphs of a step would copy it
        self.reset()

    def reset(self):
        """Forgets all rows and keeps their memory."""
        self.paged.reset()
        self.columns.zero_()
        self.filled = self.running = False  # some prompt is held; a forward pass is under way
        self.new_columns = 0                # of this forward pass
        self.tokens = 0                     # a row, without steps that ran compiled
        self.tables = None                  # of this forward pass's prompts, or
        self.second = None                  #   SecondPrompts, where they read what is held as it is
        self.places = None                  # of each row's tokens among its columns; None: all

    def memory_bytes(self):
        """Bytes of 2-bit pages, and of exact windows."""
        return self.paged.memory_bytes()

    def check_rows(self):
        """Raises CacheRowError if some row could not be written, CacheFullError if some had no room;
        waits for the device."""
        self.paged.check_rows()

    def begin(self, kwargs):
        """Before a forward pass of the model with these arguments, which it completes."""
        ids = kwargs.get("input_ids")
        batch, self.new_columns = (kwargs["inputs_embeds"] if ids is None else ids).shape[:2]
        if self.running:
            refuse("a cache whose last forward pass failed; reset() it")
        if batch != self.paged.places:
            refuse(f"a batch of {batch} with an OscarCache of {self.paged.places} rows")
        if self.filled and self.new_columns == 1:
            self._begin_step(kwargs)
        else:
            self._begin_prompts(kwargs)
        kwargs["attention_mask"] = None  # nothing behind this needs one
        self.running = True

    def end(self):
        """After a forward pass."""
        self.columns.add_(self.new_columns)
        self.filled, self.running = True, False
        self.tables = self.second = self.places = None

    def _begin_step(self, kwargs):
        if not torch.compiler.is_compiling():  # generate() has seen to the room before
            self.tokens += 1
            self._check_room(self.tokens)
        tables = self.paged.next_step()
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = tables.old_len[:, None].long()

    def _begin_prompts(self, kwargs):
        """Prompts: the first of all rows, or the next, behind all that the cache holds."""
        batch, new, before = self.paged.places, self.new_columns, int(self.columns)
        self._check_room(before + new)
        held = self.paged.step.seq_len.tolist()
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if isinstance(mask, dict):  # by kind of layer
            mask = mask["full_attention"]
        seen = torch.ones(batch, new, dtype=torch.bool, device=self.columns.device)
        if mask is not None:
            if mask.shape != (batch, before + new):
                refuse(f"an attention_mask of shape {list(mask.shape)} for {[batch, before + new]} "
                       "columns; expected 1 for tokens and 0 for padding")
            mask = mask != 0
            if mask[:, :before].sum(1).tolist() != held:
                refuse("an attention_mask that leaves out tokens that the cache holds")
            seen = mask[:, before:]
        lengths, everybody = seen.sum(1).tolist(), list(range(batch))
        if not min(lengths):
            refuse("an attention_mask with a row that has no tokens")
        expected = self.paged.step.seq_len[:, None] + seen.cumsum(1) - 1
        if positions is None:
            kwargs["position_ids"] = expected.clamp(min=0)
        elif not torch.equal(positions.expand(batch, new)[seen], expected[seen]):
            refuse("position_ids that do not count each row's tokens, on from those that the cache holds")
        if not self.filled:
            for place in everybody:
                self.paged.admit(place, self.max_tokens)
        if self.filled or self.as_steps:
            self.second = self.paged.second_prompts(everybody, lengths)
        else:
            self.tables = self.paged.prompt_tables(everybody, lengths)
        self.places = None if min(lengths) == new else [row.nonzero()[:, 0] for row in seen]
        self.tokens = before + new

    def _check_room(self, tokens):
        if tokens > self.max_tokens:
            raise CacheFullError(f"{tokens} tokens a row, padding included, in an OscarCache made for "
                                 f"{self.max_tokens}")

    def attend(self, module, q, k, v, scaling):
        """Attention of one layer, whose new rows go into the cache. q [batch, Hq, new, d], k and v
        [batch, Hkv, new, d], behind RoPE. Returns [batch, new, Hq, d]."""
        if self.second is not None:
            return self._attend_second(module, q, k, v)
        if self.filled:
            rows = (x[:, :, 0].bfloat16().contiguous() for x in (q, k, v))
            return self.paged.decode(module.layer_idx, *rows)[:, None].to(q.dtype)
        if self.places is None:
            o, _ = sdpa_attention_forward(module, q, k, v, None, scaling=scaling)
            k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        else:
            o, k, v = self._attend_padded(module, q, k, v, scaling)
        self.paged.write(module.layer_idx, self.tables, k.bfloat16().contiguous(),
                         v.bfloat16().contiguous())
        return o

    def _attend_padded(self, module, q, k, v, scaling):
        """Row by row without the padding: no mask of new x new entries, no softmax over nothing.
        Also returns k and v packed, [tokens, Hkv, d]."""
        o, packed = torch.zeros_like(q.transpose(1, 2)), []
        for row, places in enumerate(self.places):
            q1, k1, v1 = (x[row:row + 1, :, places] for x in (q, k, v))
            o[row, places] = sdpa_attention_forward(module, q1, k1, v1, None, scaling=scaling)[0][0]
            packed.append([x[0].transpose(0, 1) for x in (k1, v1)])
        return o, *(torch.cat(side) for side in zip(*packed))

    def _attend_second(self, module, q, k, v):
        """Of prompts behind what is held: new rows are packed, padding is left out."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        places = self.places or [slice(None)] * len(q)
        packed = (torch.cat([x[row, seen] for row, seen in enumerate(places)]).bfloat16().contiguous()
                  for x in (q, k, v))
        rows = self.paged.extend(module.layer_idx, self.second, *packed, self.as_steps).to(q.dtype)
        o = torch.zeros_like(q)
        for row, (seen, of_row) in enumerate(zip(places, rows.split(self.second.lengths))):
            o[row, seen] = of_row
        return o

    def _refused(self, *_, **__):
        refuse("beams, cropping, offloading or assisted decoding over an OscarCache")

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refused
    activate_past_recording = offload = prefetch = _refused


class _Layer(CacheLayerMixin):
    """A layer as transformers sees it. Its rows go on to attention, which takes them in."""

    is_compileable, is_sliding = True, False

    def __init__(self, cache):
        super().__init__()
        self.cache, self.is_initialized = cache, True

    def lazy_initialization(self, *_):
        pass

    def update(self, key_states, value_states, *_, **__):
        if not self.cache.running:
            refuse("an OscarCache in a model that apply() did not prepare, or that it was not made for")
        return key_states, value_states

    def get_seq_length(self):
        return self.cache.columns if self.cache.filled else 0

    def get_mask_sizes(self, *_):
        return 0, 0  # no key lies behind a mask: by this the mask function knows the cache

    def get_max_length(self):
        return self.cache.max_tokens

    get_max_cache_shape = get_max_length  # transformers 4 and early 5
    max_cache_len = property(get_max_length)
    max_batch_size = property(lambda self: self.cache.paged.places)
