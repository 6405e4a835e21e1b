"""A decode loop of this package's own: one captured CUDA graph a step, tokens fed back on the device.

Requests join and leave between steps. On the CPU the same steps run without a graph.
"""
import math
import operator
import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from .bundle import Bundle, load
from .cache import PagedCache
from .decoder import Decoder, model_config
from .errors import CacheFullError, CacheRowError, LogitsError
from .weights import check_model as check_weights

CHECK_EVERY = 16  # steps between two looks at what was generated


@dataclass(eq=False)
class Request:
    """One prompt and what became of it. `tokens` grows while the generator runs."""

    prompt: list
    max_new_tokens: int
    stop: frozenset = frozenset()  # token ids that end the answer; the last token of it
    temperature: float = 0.0       # 0: the likeliest token
    tokens: list = field(default_factory=list)
    done: bool = False
    failed: bool = False           # it was given up: what it had generated is in `tokens`
    error: Exception | None = None  # why, where a row of it could not be written, or its logits are NaN
    slot: int | None = None

    def take(self, tokens):
        """Adds tokens until one of `stop` or the most that were asked for."""
        for token in tokens:
            if self.done:
                return
            self.tokens.append(token)
            self.done = token in self.stop or len(self.tokens) == self.max_new_tokens


class Generator:
    """Generates over a 2-bit cache (`bundle`: a Bundle or a path), or over BF16 (None).

    `model`: a causal language model of transformers in bf16, of a family of decoder.FAMILIES; its
    weights are used where they lie. `max_num_seqs`: requests at once; `max_tokens`: of a request, prompt
    and answer; `pages`: of the pool, None: enough for all; `demote_block`: see CacheFormat.served; `compile`
    and `graph`: fuse and capture steps, None: on a GPU. Attention of prompts is exact, as in
    transformers; their rows become INT2 behind it. `weights`: "same", or "any" to serve a bundle that was
    calibrated on other weights than the model has, as in apply() of oscar_int2.transformers.
    Weights that are loaded into the model's parameters in place are used from the next step on; a model
    whose parameters lie elsewhere since is refused. One thread runs at a time: others wait.
    Raises BundleMismatchError for a bundle of another model, UnsupportedError for what isn't served.
    """

    def __init__(self, model, bundle, max_num_seqs=1, max_tokens=4096, *, pages=None, demote_block=None,
                 compile=None, graph=None, weights="same"):
        for name, value in (("max_num_seqs", max_num_seqs), ("max_tokens", max_tokens)):
            _check_count(name, value)
        if bundle is not None:
            bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
            bundle.require_unedited()
            bundle.check_model(model_config(model))
            bundle.check_frequencies(model)
        self.decoder, self.device = Decoder(model, compile), model.device
        if bundle is not None:
            self.weights = check_weights(bundle, model, {i: block.self_attn for i, block in enumerate(model.model.layers)},
                                         weights, "Generator")
        self.vocab_size = len(self.decoder.embedding)
        room = max_tokens + CHECK_EVERY  # steps run on until the next look
        if bundle is None:
            self.cache = PagedCache.bf16(shape_of(self.decoder), max_num_seqs, room, self.device)
        else:
            self.cache = PagedCache.int2(bundle, max_num_seqs, room, self.device, pages=pages,
                                         demote_block=demote_block)
        self.bundle, self.prompts, self.max_tokens, self.demote_block = bundle, "exact", max_tokens, demote_block
        self.refused = 0  # requests of which a row could not be written
        self.last = 0, 0  # tokens of the last run in 2 bits, and exactly, each request at its end
        self.unclear = torch.zeros(max_num_seqs, dtype=torch.bool, device=self.device)  # logits were NaN
        self.busy = threading.RLock()  # held by the thread that runs
        self.waiting, self.running = deque(), {}
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self.emitted = torch.zeros(max_num_seqs, CHECK_EVERY, dtype=torch.int64, device=self.device)
        self.temperature = torch.zeros(max_num_seqs, 1, device=self.device)
        self.use_graph = self.device.type == "cuda" if graph is None else graph
        self.graphs = {}  # of steps, by whether some request is sampled

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, *, stop=(), temperature=0.0):
        """Answers, a list of token ids for each prompt (a list of ids, at least one). Once the others have
        ended, raises CacheRowError if a row of one of them could not be written, and LogitsError if its
        logits were NaN."""
        if not isinstance(prompts, (list, tuple)) or any(isinstance(prompt, int) for prompt in prompts):
            raise TypeError('prompts are a list of lists of token ids, for one text '
                            f'[tokenizer(text)["input_ids"]]; found {_described(prompts)}')
        with self.busy:
            requests = []
            try:
                for prompt in prompts:
                    requests.append(self.submit(prompt, max_new_tokens, stop=stop, temperature=temperature))
                self.run()
            except BaseException:
                for request in requests:
                    self._give_up(request)
                raise
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.tokens for request in requests]

    def submit(self, prompt, max_new_tokens, *, stop=(), temperature=0.0):
        """Queues a request, which joins at the next look. Raises CacheFullError if it never can."""
        prompt, stop = _checked_ids("prompt", prompt, self.vocab_size), _checked_ids("stop", stop)
        _check_count("max_new_tokens", max_new_tokens)
        if not prompt:
            raise ValueError("a prompt has at least one token")
        if not (isinstance(temperature, (int, float)) and 0 <= temperature < math.inf):
            raise ValueError(f"temperature is {temperature!r}, expected a number from 0 on")
        tokens = len(prompt) + max_new_tokens
        if tokens > self.max_tokens:
            raise CacheFullError(f"{len(prompt)} + {max_new_tokens} tokens in a generator made for "
                                 f"{self.max_tokens} (max_tokens)")
        if self.cache.format.history_pages(tokens + CHECK_EVERY) > self.cache.num_pages:
            raise CacheFullError(f"{tokens} tokens need more pages than the pool has (pages)")
        request = Request(prompt, max_new_tokens, frozenset(stop), temperature)
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def run(self, looks=None):
        """Generates until all requests have ended, or for so many looks of CHECK_EVERY steps.
        A request of which a row could not be written, or whose logits are NaN, is given up
        (Request.error), and the others go on.
        One whose prompt raises is given up too."""
        with self.busy:
            self.decoder.check_weights()
            if not self.running:
                self.last = 0, 0
            while (self.waiting or self.running) and looks != 0:
                self.join()
                for _ in range(CHECK_EVERY):
                    self.step()
                self.look()
                looks = None if looks is None else looks - 1

    def join(self):
        """Waiting requests that fit take free slots, in the order in which they came."""
        if self.use_graph and not self.graphs:
            with torch.cuda.device(self.device):  # streams and graphs are made on the present one
                self.graphs = {sampled: self._captured(sampled) for sampled in (False, True)}
        free = [slot for slot in range(self.cache.max_num_seqs) if slot not in self.running]
        while self.waiting and free:
            request = self.waiting[0]
            tokens = len(request.prompt) + request.max_new_tokens + CHECK_EVERY
            if not self.cache.fits(tokens):
                return
            self.waiting.popleft()
            request.slot = free.pop(0)
            self.cache.admit(request.slot, tokens)
            self.running[request.slot] = request
            try:
                self._prompt(request)
            except BaseException:  # its slot holds rows that were never written
                self._give_up(request)
                raise

    def _prompt(self, request):
        slot, tokens = request.slot, torch.tensor(request.prompt, device=self.device)
        tables = self.cache.prompt_tables([slot], [len(request.prompt)])
        logits = self.decoder.prompt(tokens, lambda layer, k, v: self.cache.write(layer, tables, k, v))
        self.temperature[slot] = request.temperature
        token, unclear = chosen(logits[None], self.temperature[slot:slot + 1])
        self.tokens[slot], self.unclear[slot] = token[0], unclear[0]
        if unclear:
            return  # look() gives it up
        request.take(token.tolist())
        if request.done:
            self._leave(slot)

    def _leave(self, slot):
        request = self.running.pop(slot)
        if request.tokens:  # the last of them is no row
            rows = len(request.prompt) + len(request.tokens) - 1
            int2 = self.cache.format.history_tokens(rows)
            self.last = self.last[0] + int2, self.last[1] + rows - int2
        self.cache.release(slot)
        self.temperature[slot] = 0

    def _give_up(self, request):
        if request in self.waiting:
            self.waiting.remove(request)
        elif self.running.get(request.slot) is request:
            self._leave(request.slot)
        request.failed = not request.done

    def look(self):
        """Gives every request its tokens of the last CHECK_EVERY steps; ended ones leave. So do those
        that have failed, without these tokens: they may come from behind the row."""
        errors, emitted = self.cache.take_errors(), self.emitted.tolist()
        for slot in self.unclear.nonzero().flatten().tolist():
            errors.setdefault(slot, LogitsError(
                f"the logits of request {slot} are NaN, so that no token is the likeliest: see the weights"))
        self.unclear.zero_()
        for slot, request in list(self.running.items()):
            if slot in errors:
                request.error = errors[slot]
                self.refused += isinstance(request.error, CacheRowError)
                self._give_up(request)
                continue
            request.take(emitted[slot])
            if request.done:
                self._leave(slot)

    def paged_caches(self):
        """As status() wants them."""
        return [self.cache]

    def step(self):
        """One token for every slot in use."""
        sampled = any(request.temperature > 0 for request in self.running.values())
        if self.use_graph:
            with torch.cuda.device(self.device):
                self.graphs[sampled].replay()
        else:
            self._step(sampled)

    def _step(self, sampled):
        tables = self.cache.next_step()
        logits = self.decoder.step(self.tokens, tables.old_len, self.cache.decode)
        token, unclear = chosen(logits, self.temperature if sampled else None)
        self.tokens.copy_(token)
        self.unclear.logical_or_(unclear)
        self.emitted.copy_(torch.cat((self.emitted[:, 1:], token[:, None]), 1))

    def _captured(self, sampled):
        """The step as a graph; before the first request, since its steps write into empty slots."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(sampled)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(sampled)
        return graph


def chosen(logits, temperature):
    """Token ids [rows] of logits [rows, vocab], and whether the logits hold NaN [rows]; temperature
    [rows, 1], None or 0: the likeliest."""
    if temperature is None:
        most, token = logits.max(-1)  # NaN counts as the most
        return token, most.isnan()
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32).clamp_min(1e-20)))
    noisy = logits.float() / temperature.clamp_min(1e-6) + noise  # Gumbel: a draw from softmax
    most, token = torch.where(temperature > 0, noisy, logits.float()).max(-1)
    return token, most.isnan()


def _checked_ids(name, ids, vocab_size=None):
    """A list of token ids, whatever they came as. Raises TypeError or ValueError for others."""
    try:
        if isinstance(ids, (str, bytes, dict, torch.Tensor)):
            raise TypeError
        ids = [operator.index(token) for token in ids]
    except TypeError:
        hint = ".tolist()" if isinstance(ids, torch.Tensor) else 'tokenizer(text)["input_ids"]'
        raise TypeError(f"{name} is a list of token ids, as {hint} gives one; found "
                        f"{_described(ids)}") from None
    wrong = next((token for token in ids if token < 0 or token >= (vocab_size or math.inf)), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} at place {ids.index(wrong)} of {name}, expected 0 to "
                         f"{vocab_size - 1 if vocab_size else 'the vocabulary'}; is the tokenizer this model's?")
    return ids


def _check_count(name, value):
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, expected a whole number, at least one")


def _described(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, (list, tuple)) and value:
        return f"a {type(value).__name__} of {type(value[0]).__name__}"
    return f"an object of type {type(value).__name__}"


@dataclass(frozen=True)
class _Shape:
    num_layers: int
    num_kv_heads: int
    head_dim: int


def shape_of(decoder):
    return _Shape(len(decoder.layers), decoder.kv_heads, decoder.head_dim)
