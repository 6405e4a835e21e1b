"""OscarCache: what transformers sees as a cache, over PagedCache."""
import weakref

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import CacheFullError, CacheRowError, UnsupportedError

NAME = "oscar_int2"  # of the attention implementation, of what was applied, and of attention's argument
UNKNOWN, EMBEDDED = -1, -2  # in place of an id: padding, and a column that came as an embedding
GROWTH = 256         # further tokens that a cache has room for at least which grows by itself
LEFT_OUT = ("an attention_mask that leaves out tokens that the cache holds; generate() makes one itself where ids "
            "hold the padding's id: give attention_mask")
CHECK_EVERY = 16     # steps of a loop of one's own between two looks for rows that could not be written


def unwrapped(model):
    """The model that transformers made, inside what peft or torch.compile put around it."""
    while hasattr(model, "get_base_model") or hasattr(model, "_orig_mod"):
        model = model.get_base_model() if hasattr(model, "get_base_model") else model._orig_mod
    return model


def refuse(what):
    raise UnsupportedError(f"the 2-bit cache in transformers does not serve {what}")


class Memory:
    """What one OscarCache after another lies in. All tensors stay where they are."""

    def __init__(self, paged):
        self.paged, self.max_tokens = paged, paged.max_tokens
        # Columns of input_ids that were seen, on the device: no step may wait for their number.
        self.columns = torch.zeros((), dtype=torch.int64, device=paged.device)
        self.ids = torch.full((paged.max_num_seqs, paged.max_tokens), UNKNOWN, dtype=torch.int32,
                              device=paged.device)
        self.holder = None  # of the cache that lies here, weakly
        for tensor in (self.columns, self.ids, *paged.tensors()):
            torch._dynamo.mark_static_address(tensor)  # or CUDA graphs of a step would copy it

    def serves(self, batch, tokens, device):
        return (self.paged.max_num_seqs == batch and self.max_tokens >= tokens
                and self.paged.device == device)

    def take(self, cache):
        """From now on it is this cache's: the last one's rows are gone."""
        last = self.holder and self.holder()
        if last is not None and last is not cache and last.memory is self:
            last.stale = True
        self.holder = weakref.ref(cache)

    def grown(self, max_tokens):
        """The same with room for more tokens."""
        more = Memory(self.paged.grown(max_tokens))
        more.columns.copy_(self.columns)
        more.ids[:, :self.max_tokens].copy_(self.ids)
        return more


class OscarCache(Cache):
    """The cache of `batch` rows of up to max_tokens tokens each, padding included.

    For a loop of one's own over model(...), or as past_key_values of generate(), which otherwise makes
    one itself. `model` is one that apply() prepared. Each row takes a prompt, then a token a step (a
    single column, which counts for every row whatever a mask says), then perhaps a further prompt,
    which reads what is held as the cache has it, 2-bit rows included; reset() makes the cache ready
    for other texts, and copy.deepcopy() makes another that goes on by itself. check_rows(), which
    generate() calls at its end, raises CacheRowError if a row could not be written, and CacheFullError
    if compiled steps, which nothing counts on the way, went beyond max_tokens.

    One that generate() made and gave back lies in memory that the next generate() takes: it is stale
    from then on, and refuses. It grows if it is given more tokens before.
    """

    def __init__(self, model, batch, max_tokens):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"OscarCache(model, batch, max_tokens) takes a model first, found {model!r}")
        owner = getattr(unwrapped(model), NAME, None)
        if owner is None:
            refuse("an OscarCache of a model that apply() did not prepare; apply(model, bundle) first")
        for name, value in (("batch", batch), ("max_tokens", max_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of an OscarCache is {value!r}, expected a whole number from 1 on")
        self._own(owner, owner.memory(batch, max_tokens, model.device))
        self.reset()

    @classmethod
    def over(cls, owner, memory):
        """One in memory that there is, which grows when it must."""
        cache = cls.__new__(cls)
        cache._own(owner, memory)
        cache.grows = True
        cache.reset()
        return cache

    def _own(self, owner, memory):
        self.owner, self.stale = owner, False
        self.as_steps = owner.scoring.prompts == "int2"  # how prompts read their own rows
        owner.caches.add(self)
        self.grows = False    # makes room for more tokens than it was made for
        self.counted = False  # every step has to be counted, for nobody has seen to the room
        super().__init__(layers=[_Layer(self) for _ in memory.paged.layers])
        self._lie_in(memory)

    def _lie_in(self, memory):
        memory.take(self)
        self.memory, self.paged, self.columns = memory, memory.paged, memory.columns
        self.max_tokens = memory.max_tokens

    def __deepcopy__(self, memo):
        self.check_usable()
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied._own(self.owner, self.owner.grown(self.memory, self.max_tokens))
        copied.grows, copied.counted = self.grows, self.counted
        copied.tokens = self.tokens
        copied._rest(self.filled)
        return copied

    def reset(self):
        """Forgets all rows and keeps their memory."""
        self.check_usable()
        self.paged.reset()
        self.columns.zero_()
        self.memory.ids.fill_(UNKNOWN)
        self.tokens = 0  # a row, without steps that ran compiled
        self._rest(False)

    def _rest(self, filled):
        """Between two forward passes, some prompt held or not."""
        self.filled, self.running = filled, False
        self.new_columns = 0  # of a forward pass
        self.tables = None    # of its prompts, or
        self.second = None    #   SecondPrompts, where they read what is held as it is
        self.places = None    # of each row's tokens among its columns; None: all
        self.attended = []    # ids of the layers that attended in it

    def memory_bytes(self):
        """Bytes of 2-bit pages, and of exact windows."""
        return self.paged.memory_bytes()

    def check_rows(self):
        """Raises CacheRowError if some row could not be written, CacheFullError if some had no room;
        waits for the device."""
        errors = self.paged.take_errors().values()
        self.owner.refused += sum(isinstance(error, CacheRowError) for error in errors)
        for error in errors:
            raise error

    def check_usable(self):
        """Raises UnsupportedError once a later generate() has taken the memory."""
        if self.stale:
            refuse("an OscarCache that generate() gave back, after a later generate() took its memory; "
                   "pass an OscarCache(model, batch, max_tokens) of your own as past_key_values to keep one")

    def check_continues(self, ids):
        """Raises UnsupportedError unless a chat so far, input_ids [rows, columns], begins with what is
        held, and goes on; waits for the device."""
        self.check_usable()
        held, batch = int(self.columns), self.paged.max_num_seqs
        if not self.filled or batch % len(ids):
            return
        wrong = ("give all of the chat so far, unchanged; reset() the cache for another chat or an edited "
                 "one, which is then read anew")
        if ids.shape[1] <= held:
            refuse(f"input_ids of {ids.shape[1]} columns over an OscarCache that holds {held}: {wrong}")
        ours = self.memory.ids[:, :held]
        given = ids[:, :held].to(ours.device).repeat_interleave(batch // len(ids), 0)
        apart = ((given != ours) & (ours != UNKNOWN)).nonzero()
        if len(apart):
            row, column = apart[apart[:, 1].argmin()].tolist()
            held_one = "an embedding" if ours[row, column] == EMBEDDED else ours[row, column].item()
            refuse(f"input_ids that differ from what the OscarCache holds: row {row}, column {column} of "
                   f"{held} is {given[row, column]}, and {held_one} is held; {wrong}")

    def make_room(self, tokens):
        """Sees to the room for so many tokens a row. Raises CacheFullError if there is too little."""
        self.check_usable()
        if tokens <= self.max_tokens:
            return
        if not self.grows:
            raise CacheFullError(f"{tokens} tokens a row, padding and answer included, in an OscarCache "
                                 f"made for {self.max_tokens}; make one with max_tokens={tokens} or more")
        self._lie_in(self.owner.grown(self.memory, max(tokens, 2 * self.max_tokens)))

    def begin(self, kwargs):
        """Before a forward pass of the model with these arguments, which it completes."""
        self.check_usable()
        ids = kwargs.get("input_ids")
        rows = kwargs["inputs_embeds"] if ids is None else ids
        batch, self.new_columns = rows.shape[:2]
        if self.running:
            refuse("a cache whose last forward pass failed, or still runs in another thread; reset() it, "
                   "or make one for each thread")
        if rows.device != self.paged.device:
            refuse(f"an OscarCache on {self.paged.device} with input on {rows.device}; make one behind "
                   "model.to(...)")
        if batch != self.paged.max_num_seqs:
            refuse(f"a batch of {batch} with an OscarCache of {self.paged.max_num_seqs} rows")
        self.running = True  # between this and the look at it no other thread comes
        try:
            if self.filled and self.new_columns == 1:
                self._begin_step(kwargs)
            else:
                self._begin_prompts(kwargs)
        except BaseException:
            self.running = False
            raise
        kwargs["attention_mask"] = None  # nothing behind this needs one

    def end(self):
        """After a forward pass. Raises UnsupportedError if attention of some layer went another way."""
        if sorted(self.attended) != list(self.owner.bundle.layers):
            wrong = [i for i in self.owner.bundle.layers if self.attended.count(i) != 1]
            refuse(f"a pass in which attention of layer {wrong[0]} came here {self.attended.count(wrong[0])} times "
                   f"({len(wrong)} such layers): layers or a forward() that were replaced, or attention that calls no "
                   "attention function of transformers; apply() again, or use transformers' own layers")
        self.advance()

    def advance(self):
        """The rows of a pass are held from now on."""
        self.columns.add_(self.new_columns)
        self._rest(True)

    def _begin_step(self, kwargs):
        if torch.compiler.is_compiling():  # generate() has seen to the room before
            if self.counted:
                refuse("compiled steps over a cache that a forward pass made; pass OscarCache(...)")
        else:
            if self.tokens % CHECK_EVERY == 0:
                self.check_rows()
            self._check_mask(kwargs.get("attention_mask"))
            self._check_positions(kwargs.get("position_ids"))
            self.make_room(self.tokens + 1)
            self.tokens += 1
        tables = self.paged.next_step()
        column = self.columns.clamp(max=self.max_tokens - 1)[None]
        self.memory.ids.index_copy_(1, column, self._ids(kwargs).int())
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = tables.old_len[:, None].long()

    def _check_mask(self, mask):
        """That a step's mask hides nothing. On a GPU, which would be waited for, at every CHECK_EVERYth step."""
        if isinstance(mask, dict):  # by kind of layer
            mask = mask["full_attention"]
        if mask is None:
            return
        if mask.dim() != 2:
            refuse(f"an attention_mask of shape {list(mask.shape)}; expected one of {self.paged.max_num_seqs} rows, with 1 "
                   "for tokens and 0 for padding")
        if mask.device.type != "cpu" and self.tokens % CHECK_EVERY:
            return
        if not torch.equal((mask != 0).sum(1), self.paged.step.seq_lens + 1):
            refuse(LEFT_OUT)

    def _check_positions(self, positions):
        """That a step's positions, if it is given any, count tokens; as often as its mask is looked at."""
        if positions is None or positions.device.type != "cpu" and self.tokens % CHECK_EVERY:
            return
        expected = self.paged.step.seq_lens[:, None]
        if (positions != expected).any():
            refuse("position_ids that do not count each row's tokens, on from those that the cache holds: "
                   f"{positions.flatten().tolist()}, expected {expected.flatten().tolist()}")

    def _begin_prompts(self, kwargs):
        """Prompts: the first of all rows, or the next, behind all that the cache holds."""
        batch, new, before = self.paged.max_num_seqs, self.new_columns, int(self.columns)
        self.make_room(before + new)
        held = self.paged.step.seq_lens.tolist()
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if positions is not None and positions.dim() == 3:  # of models of images and text: time, height, width
            if (positions != positions[:1]).any():
                refuse("images, whose tokens have positions of their own; text alone is served")
            positions = positions[0]
        if isinstance(mask, dict):  # by kind of layer
            mask = mask["full_attention"]
        seen = torch.ones(batch, new, dtype=torch.bool, device=self.columns.device)
        if mask is not None:
            if mask.shape != (batch, before + new):
                refuse(f"an attention_mask of shape {list(mask.shape)} for {[batch, before + new]} "
                       "columns; expected 1 for tokens and 0 for padding")
            mask = mask != 0
            if mask[:, :before].sum(1).tolist() != held:
                refuse(LEFT_OUT)
            seen = mask[:, before:]
        lengths, everybody = seen.sum(1).tolist(), list(range(batch))
        if not min(lengths):
            refuse("an attention_mask with a row that has no tokens")
        expected = self.paged.step.seq_lens[:, None] + seen.cumsum(1) - 1
        if positions is None:
            starts = seen[:, :1].sum(1) + (seen[:, 1:] & ~seen[:, :-1]).sum(1)
            if (starts > 1).any():  # the model alone would count what a hole hides
                refuse("an attention_mask with padding between tokens and no position_ids; give position_ids "
                       "that count each row's tokens")
            kwargs["position_ids"] = expected.clamp(min=0)
        elif (wrong := (positions.expand(batch, new) != expected) & seen).any():
            row, column = wrong.nonzero()[0].tolist()
            padded = not self.filled and not bool(seen[:, 0].all())
            refuse("position_ids that do not count each row's tokens, on from those that the cache holds: "
                   f"{int(positions.expand(batch, new)[row, column])} in row {row}, column {column}, expected "
                   f"{int(expected[row, column])}"
                   + "; a first pass over left padding needs such ones, or past_key_values=OscarCache(...)" * padded)
        if not self.filled:
            for slot in everybody:
                self.paged.admit(slot, self.max_tokens)
        if self.filled or self.as_steps:
            self.second = self.paged.second_prompts(everybody, lengths)
        else:
            self.tables = self.paged.prompt_tables(everybody, lengths)
        self.places = None if min(lengths) == new else [row.nonzero()[:, 0] for row in seen]
        self.tokens = before + new
        self.memory.ids[:, before:before + new] = torch.where(seen, self._ids(kwargs), UNKNOWN).int()

    @staticmethod
    def _ids(kwargs):
        """What is remembered of the columns of a forward pass [rows, columns]."""
        if kwargs.get("input_ids") is not None:
            return kwargs["input_ids"]
        return torch.full_like(kwargs["inputs_embeds"][..., 0], EMBEDDED, dtype=torch.int64)

    def attend(self, module, q, k, v, scaling):
        """Attention of one layer, whose new rows go into the cache. q [batch, Hq, new, d], k and v
        [batch, Hkv, new, d], behind RoPE. Returns [batch, new, Hq, d]."""
        self.attended.append(module.layer_idx)
        if self.second is not None:
            return self._attend_second(module, q, k, v)
        if self.filled:
            rows = (x[:, :, 0].bfloat16().contiguous() for x in (q, k, v))
            return self.paged.decode(module.layer_idx, *rows)[:, None].to(q.dtype)
        if self.places is None:
            o, _ = sdpa_attention_forward(module, q, k, v, None, scaling=scaling)
        else:
            o = self._attend_padded(module, q, k, v, scaling)
        self.write(module.layer_idx, k, v)
        return o

    def write(self, layer_id, k, v):
        """Rows of first prompts [batch, Hkv, new, d], behind RoPE, into the cache."""
        k, v = (x.transpose(1, 2) for x in (k, v))
        if self.places is None:
            k, v = (x.flatten(0, 1) for x in (k, v))
        else:
            k, v = (torch.cat([x[row, seen] for row, seen in enumerate(self.places)]) for x in (k, v))
        self.paged.write(layer_id, self.tables, k.bfloat16().contiguous(), v.bfloat16().contiguous())

    def _attend_padded(self, module, q, k, v, scaling):
        """Row by row without the padding: no mask of new x new entries, no softmax over nothing."""
        o = torch.zeros_like(q.transpose(1, 2))
        for row, places in enumerate(self.places):
            one = (x[row:row + 1, :, places] for x in (q, k, v))
            o[row, places] = sdpa_attention_forward(module, *one, None, scaling=scaling)[0][0]
        return o

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
        self.cache, self.is_initialized = weakref.ref(cache), True

    def lazy_initialization(self, *_):
        pass

    def update(self, key_states, value_states, *_, **__):
        if not self.cache().running:
            refuse("an OscarCache in a model that apply() did not prepare, or that it was not made for")
        return key_states, value_states

    def get_seq_length(self):
        cache = self.cache()
        return cache.columns if cache.filled else 0

    def get_mask_sizes(self, *_):
        return 0, 0  # no key lies behind a mask: by this the mask function knows the cache

    def get_max_length(self):
        return self.cache().max_tokens

    get_max_cache_shape = get_max_length  # transformers 4 and early 5
    max_cache_len = property(get_max_length)
    max_batch_size = property(lambda self: self.cache().paged.max_num_seqs)


class PlainRows(Cache):
    """What a forward pass gives back that was given no cache: its rows as they are, as transformers keeps
    them. Whoever goes on from them goes on over an OscarCache, which takes them in and grows."""

    def __init__(self, owner, kwargs):
        super().__init__(layers=[_PlainLayer() for _ in owner.bundle.layers])
        self.owner, self.cache = owner, None
        self.prompt = {name: kwargs.get(name) for name in
                       ("input_ids", "inputs_embeds", "attention_mask", "position_ids")}

    @torch.no_grad()
    def oscar_cache(self, owner):
        """The cache that goes on from these rows, always the same."""
        if self.cache is None:
            batch, _, tokens, _ = self.layers[0].keys.shape
            room = max(tokens + GROWTH, owner.max_tokens or 0)
            cache = OscarCache.over(owner, owner.memory(batch, room, self.layers[0].keys.device))
            cache.counted = True
            if self.prompt["position_ids"] is None:  # as the model counts then, padding included
                self.prompt["position_ids"] = torch.arange(tokens, device=cache.paged.device)[None]
            cache.begin(self.prompt)
            for layer_id, layer in enumerate(self.layers):
                cache.write(layer_id, layer.keys, layer.values)
            cache.advance()
            self.cache, self.prompt = cache, None
            for layer in self.layers:
                layer.keys = layer.values = None
        return self.cache

    def get_seq_length(self, layer_idx=0):
        rows = self if self.cache is None else self.cache
        return Cache.get_seq_length(rows, layer_idx)

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = OscarCache._refused
    activate_past_recording = offload = prefetch = OscarCache._refused


class _PlainLayer(DynamicLayer):
    """The rows of one forward pass, not copied."""

    def update(self, key_states, value_states, *_, **__):
        if self.is_initialized:
            refuse("rows of a forward pass of another model, or of one before apply() or remove()")
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states
