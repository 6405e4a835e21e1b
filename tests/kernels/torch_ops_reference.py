"""The paged INT2 cache again, in plain torch: bytes, goldens, float64 attention, a small server.

Nothing of the library is used here: pages are taken apart by the byte diagram of kernels/README.md.
"""
from dataclasses import dataclass

import torch

PAGE = 64
BITS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


@dataclass(frozen=True)
class Format:
    head_dim: int = 128
    group: int = 128
    metadata: torch.dtype = torch.float16

    def numbers(self, sink=0):
        """As operators take it."""
        return [self.group, (torch.float16, torch.bfloat16, torch.float32).index(self.metadata), sink]

    def page_bytes(self):
        return 2 * PAGE * (self.head_dim // 4 + self.pairs() * self.metadata.itemsize)

    def pairs(self):
        return 2 * self.head_dim // self.group


# What the tests run: the format of every build, then others.
CORE = Format()
FORMATS = [CORE, Format(128, 64), Format(128, 128, torch.bfloat16), Format(64, 64),
           Format(64, 64, torch.float32), Format(256, 256), Format(256, 64)]


# Of keys, then of values, in the order of the operators' list.
PROPERTIES = ("forward", "partner", "mean", "key_centers", "clip_ratio", "scale_correction", "rounding",
              "feedback", "metric")


def recipe_of(device, **given):
    """The operators' list of a layer from tensors such as clip_ratio_k."""
    empty = torch.empty(0, device=device)
    recipe = [given.pop(f"{name}_{side}", empty) for side in "kv" for name in PROPERTIES]
    assert not given, given
    return recipe


def unpacked(packed):
    """Codes [..., d] of packed rows [..., d / 4]."""
    return ((packed[..., None] >> BITS) & 3).flatten(-2)


def split(pool, fmt):
    """Codes [pages, heads, side, token, d]; (scale, zero) [pages, heads, side, token, group, 2]."""
    pool = pool.cpu()
    pages, heads, d = *pool.shape[:2], fmt.head_dim
    codes, metadata = pool.split([PAGE * d // 2, fmt.page_bytes() - PAGE * d // 2], dim=2)
    codes = unpacked(codes.reshape(pages, heads, 2, PAGE, d // 4))
    pairs = metadata.contiguous().view(fmt.metadata)
    return codes, pairs.reshape(pages, heads, 2, PAGE, d // fmt.group, 2)


def dequantized(pool, fmt):
    """[pages, heads, side, token, d] float32; keys without their centers."""
    codes, pairs = split(pool, fmt)
    pairs = pairs.float().repeat_interleave(fmt.group, dim=4)
    return (codes.float() - pairs[..., 1]) * pairs[..., 0].abs()


def shaped_feedback(metric, damping=0.01):
    """U of metric + damping = U D U^T by elimination from the last row up, float64."""
    a = metric.double() + damping * metric.diagonal().double().mean() * torch.eye(len(metric))
    u = torch.eye(len(a), dtype=torch.float64)
    for j in reversed(range(len(a))):
        u[:j, j] = a[:j, j] / a[j, j]
        a[:j, :j] -= torch.outer(u[:j, j], u[:j, j]) * a[j, j]
    return u


def golden_matrices(d):
    j, i = torch.meshgrid(torch.arange(d), torch.arange(d), indexing="ij")
    feedback = ((7 * j + 13 * i) % 33 - 16).float() / 256
    metric = 2.0 * torch.eye(d) + ((5 * (i + j)) % 9 - 4).float() / 64
    return torch.where(j < i, feedback, torch.eye(d)), metric


@dataclass
class Golden:
    """One row of tests/golden and what the codec must make of it (tests/golden/make_goldens.py)."""

    name: str
    fmt: Format
    clip: float
    shaped: bool
    correction: str
    row: torch.Tensor    # bf16 [d]
    codes: torch.Tensor  # [d]
    pairs: torch.Tensor  # [groups, (scale, zero)]


def from_hex(text, dtype):
    """Numbers that are written with their highest byte first."""
    numbers = [bytes.fromhex(text[i:i + 2 * dtype.itemsize])[::-1]
               for i in range(0, len(text), 2 * dtype.itemsize)]
    return torch.frombuffer(bytearray(b"".join(numbers)), dtype=dtype)


def bits(tensor):
    """The bytes of a tensor, so that -0 is not 0."""
    return tensor.contiguous().view(torch.uint8)


def goldens(folder):
    """Every case of the folder as a Golden."""
    metadata = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    for d in (64, 128, 256):
        for case in (folder / f"codec_d{d}.txt").read_text().split("case ")[1:]:
            head, row, packed, pairs = case.strip().split("\n")
            _, _, group, clip, dtype, order, rounding, correction = head.split()
            if order != "consecutive":  # of other backends, which have pages of their own
                continue
            fmt = Format(d, int(group), metadata[dtype])
            codes = unpacked(from_hex(packed, torch.uint8))
            yield Golden(head, fmt, float(clip), rounding == "shaped", correction,
                         from_hex(row, torch.bfloat16), codes,
                         from_hex(pairs, fmt.metadata).reshape(-1, 2))


class Server:
    """Requests that share one layer's cache, and calls of the operators as a server makes them."""

    def __init__(self, ops, device, fmt, batch, *, heads=2, qo_heads=8, sink=16, recent=32,
                 most_new=4, pages=40, seed=0, first_position=None, ahead=False, **recipe):
        """`ahead`: pages are written once they are full, however exact their rows stay."""
        self.ops, self.device, self.fmt, self.batch = ops, device, fmt, batch
        self.sink, self.recent, self.qo_heads, self.ahead = sink, recent, qo_heads, ahead
        self.recipe, self.first_position = recipe, first_position
        self.key_centers = recipe.get("key_centers_k")
        self.random = torch.Generator().manual_seed(seed)
        ring = recent + 1 + most_new
        window = (batch + 2, heads, sink + ring, fmt.head_dim)  # two slots stay unused
        self.window_k = torch.full(window, torch.nan, dtype=torch.bfloat16, device=device)
        self.window_v = self.window_k.clone()
        self.window_slot = self.ints(torch.randperm(batch + 2, generator=self.random)[:batch])
        # 0xff: codes 3 with NaN metadata, so that whatever reads an unwritten row shows
        self.pool = torch.full((pages, heads, fmt.page_bytes()), 255, dtype=torch.uint8,
                               device=device)
        self.free = torch.randperm(pages, generator=self.random).tolist()
        self.pages = [[] for _ in range(batch)]
        self.rows = [torch.empty(0, 2, heads, fmt.head_dim, dtype=torch.bfloat16)
                     for _ in range(batch)]
        self.history = [0] * batch
        self.written = [0] * batch  # INT2 tokens that have a page
        self.status = self.ints([0] * window[0])
        self.block_table = self.ints([[]] * batch)

    def ints(self, values):
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random).to(torch.bfloat16)

    def lengths(self):
        return [len(rows) for rows in self.rows]

    def append(self, new, call=None):
        """Appends new[b] [count, side, heads, d] to request b; demotes what leaves the window."""
        old_len, old_written = self.lengths(), self.written
        self.rows = [torch.cat(pair) for pair in zip(self.rows, new)]
        for b, length in enumerate(self.lengths()):
            self.history[b] = max(self.history[b], length - self.sink - self.recent)
        self.written = [max(history, (length - self.sink) // PAGE * PAGE) if self.ahead else history
                        for history, length in zip(self.history, self.lengths())]
        for pages, written in zip(self.pages, self.written):
            while len(pages) * PAGE < written:
                pages.append(self.free.pop())
        self.set_table()
        counts = torch.tensor([0] + [len(rows) for rows in new]).cumsum(0)
        rows = torch.cat(new).to(self.device)
        arguments = {
            "k": rows[:, 0], "v": rows[:, 1],
            "query_start_loc": self.ints(counts), "old_len": self.ints(old_len),
            "old_history": self.ints(old_written), "new_history": self.ints(self.written),
            "status": self.status}
        if self.ahead:
            arguments["read_history"] = self.ints(self.history)
        (call or self.ops.quantize_append)(**self.cache(), **arguments)
        return arguments

    def cache(self):
        return {"recipe": recipe_of(self.device, **self.recipe), "format": self.fmt.numbers(self.sink),
                "pool": self.pool, "block_table": self.block_table, "window_k": self.window_k,
                "window_v": self.window_v, "window_slot": self.window_slot,
                "first_position": self.first_position}

    def set_table(self):
        """Rows of different lengths, padded with entries that no call may follow; not contiguous."""
        most = max(map(len, self.pages))
        padded = [[-7] + pages + [1 << 30] * (most - len(pages)) for pages in self.pages]
        self.block_table = self.ints(padded)[:, 1:]

    def attention_arguments(self, q):
        return {"q": q.to(self.device), **self.cache(),
                "history_len": self.ints(self.history), "seq_lens": self.ints(self.lengths()), "sm_scale": self.fmt.head_dim**-0.5}

    def history_arguments(self):
        """Of dequantize_history, without k and v."""
        cache = self.cache()
        return {name: cache[name] for name in ("recipe", "format", "pool", "block_table", "first_position")} | {
            "history_len": self.ints(self.history)}

    def queries(self, q_len=1):
        return self.normal(self.batch, q_len, self.qo_heads, self.fmt.head_dim)

    def history_rows(self, b):
        """What the pages hold of request b: [tokens, side, heads, d] float32."""
        pages = dequantized(self.pool, self.fmt)[self.pages[b]]  # [page, heads, side, token, d]
        rows = pages.permute(0, 3, 2, 1, 4).reshape(-1, 2, pages.shape[1], self.fmt.head_dim)
        return rows[:self.written[b]]

    def row_centers(self, b):
        """The centers of request b's keys in pages: [tokens, heads, d] float64."""
        pairs = split(self.pool, self.fmt)[1][self.pages[b]]
        second = pairs[:, :, 0, :, 0, 0].float().signbit()[..., None]  # [page, heads, token, 1]
        first = 0 if self.first_position is None else self.first_position[b].item()
        middle = first + self.sink + PAGE * torch.arange(len(self.pages[b])) + PAGE // 2
        table = self.key_centers.cpu().double()
        both = table[(middle // 1024).clamp(max=len(table) - 1)]  # [page, heads, 2, d]
        rows = torch.where(second, both[:, :, None, 1], both[:, :, None, 0])
        return rows.transpose(1, 2).flatten(0, 1)[:self.history[b]]

    def reference(self, q):
        """o and lse in float64, from the exact rows and the dequantized ones."""
        o, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3]).double()
        share = self.qo_heads // self.pool.shape[1]
        lse.fill_(-torch.inf)
        for b, length in enumerate(self.lengths()):
            if length == 0:
                continue
            rows = self.rows[b].double()
            rows[self.sink:self.sink + self.history[b]] = self.history_rows(b).double()
            if self.key_centers is not None:
                rows[self.sink:self.sink + self.history[b], 0] += self.row_centers(b)
            k, v = rows.repeat_interleave(share, dim=2).unbind(1)  # [tokens, qo heads, d]
            for i in range(q.shape[1]):
                seen = length - q.shape[1] + i + 1
                logits = torch.einsum("hd,thd->ht", q[b, i].double(), k[:seen])
                logits = logits * self.fmt.head_dim**-0.5
                lse[b, i] = logits.logsumexp(-1)
                o[b, i] = torch.einsum("ht,thd->hd", logits.softmax(-1), v[:seen])
        return o, lse


def relative_error(result, reference):
    return ((result.cpu().double() - reference).norm() / reference.norm()).item()


def step_numbers(windows, starts, seq_lens, slots, held, drafts, history, written):
    """What one step makes of its requests, by the words of lib/oscar/cache/steps.h: ({name: list}, history, written,
    query_start_loc of the rows that are written). `starts`: of each request's rows; `slots`: of each row, -1 nowhere;
    `held`: windows of the first requests."""
    sink, recent, block = windows
    history, written, found, begins = list(history), list(written), {}, [0]
    for b, (begin, end) in enumerate(zip(starts, starts[1:])):
        rows = end - begin if end > begin and slots[begin] >= 0 else 0
        begins.append(begins[-1] + rows)
        length = seq_lens[b] if rows else 0
        window = held[b] if b < len(held) else None
        old = (history[window], written[window]) if window is not None else (0, 0)
        certain = length - (drafts[b] if window is not None else 0)
        coded = max(certain - sink - recent, 0) // block * block
        new_history = max(coded, old[0])
        new_written = max(max(certain - sink, 0) // 64 * 64, new_history, old[1])
        if window is not None:
            history[window], written[window] = new_history, new_written
        for name, value in zip(("old_len", "seq_lens", "old_history", "new_history", "old_written", "new_written",
                                "window_slot"), (length - rows, length, old[0], new_history, old[1], new_written,
                                                 window or 0)):
            found.setdefault(name, []).append(value)
    return found, history, written, begins
