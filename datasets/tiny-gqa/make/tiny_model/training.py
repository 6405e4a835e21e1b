"""Training: sequences of text and needle tasks, two phases (short, then long context) under one schedule."""

import math
import queue
import threading
import time

import numpy as np
import torch

from .needles import TaskBook, training_piece
from .network import LanguageModel, rope_tables
from .settings import END_OF_TEXT, Settings


class SequenceSource:
    """Draws training sequences; owns its random generator, so that a seed gives one order."""

    def __init__(self, ids: np.ndarray, tokenizer, seed: int):
        self.ids, self.tokenizer = ids, tokenizer
        self.book = TaskBook()
        self.rng = np.random.default_rng(seed)
        self.kinds = list(self.book.shares)
        self.bounds = np.cumsum([self.book.shares[k] for k in self.kinds])

    def _text(self, length: int) -> np.ndarray:
        start = int(self.rng.integers(0, len(self.ids) - length))
        return self.ids[start:start + length]

    def sequence(self, length: int) -> np.ndarray:
        """`length` ids: plain text, or a haystack with a needle task and then plain text."""
        drawn = self.rng.random()
        if drawn >= self.bounds[-1]:
            return self._text(length)
        kind = self.kinds[int(np.searchsorted(self.bounds, drawn, side="right"))]
        room = max(length - 320, length // 4)
        haystack = self._text(int(self.rng.integers(min(600, room // 2), room)))
        piece = training_piece(self.book, kind, self.tokenizer, haystack, self.rng)
        return np.concatenate([piece, [END_OF_TEXT], self._text(length)])[:length]

    def batch(self, rows: int, length: int) -> np.ndarray:
        return np.stack([self.sequence(length).astype(np.int64) for _ in range(rows)])


def prefetch(source: SequenceSource, shape: tuple, stop: threading.Event, depth: int = 16) -> queue.Queue:
    """Fills a queue with batches from a thread until `stop` is set."""
    batches = queue.Queue(depth)

    def work():
        while not stop.is_set():
            batch = torch.from_numpy(source.batch(*shape))
            while not stop.is_set():
                try:
                    batches.put(batch, timeout=0.5)
                    break
                except queue.Full:
                    continue

    threading.Thread(target=work, daemon=True).start()
    return batches


def learning_rate(step: int, share_done: float, settings: Settings) -> float:
    """Linear warm-up, constant to 30% of the time, then cosine to 2% of the peak."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, (share_done - 0.3) / 0.7)))
    return settings.peak_lr * warm * max(0.02, min(1.0, cosine))


class Trainer:
    """Model, optimizer and compiled loss; `warm_up` compiles before the data is there."""

    def __init__(self, settings: Settings, device: torch.device):
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, device
        self.model = LanguageModel(settings.architecture).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.cos, self.sin = rope_tables(settings.architecture, settings.long_context, device)
        self.loss = torch.compile(self.model.loss, dynamic=False) if device.type == "cuda" else self.model.loss
        self.steps = self.tokens = 0

    def shape(self, context: int) -> tuple:
        return (self.settings.micro_tokens // context, context + 1)

    def backward(self, ids, context: int):
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.loss(ids, self.cos[:context], self.sin[:context])
        (loss / self.settings.accumulate).backward()
        return loss.detach()

    def warm_up(self) -> None:
        """Compiles both phases on random ids; gradients are thrown away."""
        for context in (self.settings.context, self.settings.long_context):
            ids = torch.randint(0, self.settings.architecture.vocab_size, self.shape(context), device=self.device)
            self.backward(ids, context)
        self.optimizer.zero_grad(set_to_none=True)

    def phase(self, source: SequenceSource, context: int, share: tuple, seconds: float, log) -> None:
        """Trains for `seconds`; `share` = (first, last) part of the whole schedule that this phase covers."""
        stop = threading.Event()
        batches = prefetch(source, self.shape(context), stop)
        begin, first_tokens = time.time(), self.tokens
        while (elapsed := time.time() - begin) < seconds:
            done = share[0] + (share[1] - share[0]) * elapsed / seconds
            rate = learning_rate(self.steps, done, self.settings)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            losses = [self.backward(batches.get().to(self.device, non_blocking=True), context)
                      for _ in range(self.settings.accumulate)]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            self.tokens += self.settings.accumulate * self.settings.micro_tokens
            if self.steps % 50 == 0 or self.steps < 3:
                speed = (self.tokens - first_tokens) / (time.time() - begin)
                log(f"context {context} step {self.steps} loss {float(sum(losses)) / len(losses):.4f} "
                    f"lr {rate:.2e} {speed / 1e6:.3f} M tokens/s")
            elif self.device.type == "cuda":
                losses[-1].item()  # keeps the clock honest: the schedule follows time, not queued work
        stop.set()
