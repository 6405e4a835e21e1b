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
    one itself. `model` is one that apply() prepared. Each row takes a prompt, then a token a step;
    reset() makes the cache ready for the next prompts. check_rows(), which generate() calls at its end,
    raises CacheRowError if a row could not be written.
    """

    def __init__(self, model, batch, max_tokens):
        self.owner = getattr(model, NAME, None)
        if self.owner is None:
            refuse("an OscarCache of a model that apply() did not prepare")
        self.paged, self.max_tokens = self.owner.paged_cache(batch, max_tokens), max_tokens
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
        self.tables = self.spans = None     # of this prompt; spans: (begin, end) of padded rows

    def memory_bytes(self):
        """Bytes of 2-bit pages, and of exact windows."""
        return self.paged.memory_bytes()

    def check_rows(self):
        """Raises CacheRowError if some row could not be written; waits for the device."""
        self.paged.check_rows()

    def begin(self, kwargs):
        """Before a forward pass of the model with these arguments, which it completes."""
        ids = kwargs.get("input_ids")
        batch, self.new_columns = (kwargs["inputs_embeds"] if ids is None else ids).shape[:2]
        if self.running:
            refuse("a cache whose last forward pass failed; reset() it")
        if batch != self.paged.places:
            refuse(f"a batch of {batch} with an OscarCache of {self.paged.places} rows")
        if self.filled and self.new_columns > 1:
            refuse("a second prompt, or several tokens at once, over a filled OscarCache")
        (self._begin_step if self.filled else self._begin_prompt)(kwargs)
        kwargs["attention_mask"] = None  # nothing behind this needs one
        self.running = True

    def end(self):
        """After a forward pass."""
        self.columns.add_(self.new_columns)
        self.filled, self.running = True, False
        self.tables = self.spans = None

    def _begin_step(self, kwargs):
        if not torch.compiler.is_compiling():  # generate() has seen to the room before
            self.tokens += 1
            self._check_room(self.tokens)
        tables = self.paged.next_step()
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = tables.old_len[:, None].long()

    def _begin_prompt(self, kwargs):
        places, new = self.paged.places, self.new_columns
        self._check_room(new)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if isinstance(mask, dict):  # by kind of layer
            mask = mask["full_attention"]
        spans = [(0, new)] * places
        if mask is not None:
            if mask.shape != (places, new):
                refuse(f"an attention_mask of shape {list(mask.shape)} for prompts {[places, new]}; "
                       "expected 1 for tokens and 0 for padding")
            spans = [_span(row) for row in (mask != 0).tolist()]
        padded = spans != [(0, new)] * places
        if positions is None and padded:
            kwargs["position_ids"] = positions = ((mask != 0).cumsum(1) - 1).clamp(min=0)
        if positions is not None:
            for row, (begin, _) in zip(positions.expand(places, new).tolist(), spans):
                if row[begin] != 0:
                    refuse("position_ids that do not begin at 0 with the first token of each row")
        for place in range(places):
            self.paged.admit(place, self.max_tokens)
        self.tables = self.paged.prompt_tables(list(range(places)), [e - b for b, e in spans])
        self.spans, self.tokens = spans if padded else None, new

    def _check_room(self, tokens):
        if tokens > self.max_tokens:
            raise CacheFullError(f"{tokens} tokens a row, padding included, in an OscarCache made for "
                                 f"{self.max_tokens}")

    def attend(self, module, q, k, v, scaling):
        """Attention of one layer, whose new rows go into the cache. q [batch, Hq, new, d], k and v
        [batch, Hkv, new, d], behind RoPE. Returns [batch, new, Hq, d]."""
        if self.filled:
            rows = (x[:, :, 0].bfloat16().contiguous() for x in (q, k, v))
            return self.paged.decode(module.layer_idx, *rows)[:, None].to(q.dtype)
        if self.spans is None:
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
        for row, (begin, end) in enumerate(self.spans):
            q1, k1, v1 = (x[row:row + 1, :, begin:end] for x in (q, k, v))
            o[row, begin:end] = sdpa_attention_forward(module, q1, k1, v1, None, scaling=scaling)[0][0]
            packed.append([x[0].transpose(0, 1) for x in (k1, v1)])
        return o, *(torch.cat(side) for side in zip(*packed))

    def _refused(self, *_, **__):
        refuse("beams, cropping, offloading or assisted decoding over an OscarCache")

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refused
    activate_past_recording = offload = prefetch = _refused


def _span(row):
    """Begin and end of the tokens in a row of a mask."""
    begin, length = row.index(True) if True in row else 0, sum(row)
    if not length or not all(row[begin:begin + length]):
        refuse("an attention_mask with a row whose tokens are not in one piece, or that has none")
    return begin, begin + length


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
