"""Perplexity and needle accuracy of a finished folder, through transformers, so that the figures do not rest on our own forward."""

import json
import math
from pathlib import Path

import numpy as np
import torch

from .needles import TaskBook, prompt_and_answer
from .settings import END_OF_TEXT, Settings


def load(folder: Path, dtype: torch.dtype, device: torch.device):
    """The folder as a transformers model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()


@torch.no_grad()
def perplexity(model, ids: np.ndarray, context: int, rows: int) -> dict:
    """Over whole chunks of `context` tokens: mean negative log likelihood in nats, its exponential, tokens predicted."""
    chunks = ids[:len(ids) // context * context].reshape(-1, context).astype(np.int64)
    total, count = 0.0, 0
    for begin in range(0, len(chunks), rows):
        batch = torch.from_numpy(chunks[begin:begin + rows]).to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        total += losses.double().sum().item()
        count += losses.numel()
    return {"nll": total / count, "ppl": math.exp(total / count), "tokens": count}


@torch.no_grad()
def needle_accuracy(model, kind: str, tokenizer, text_ids: np.ndarray, length: int, prompts: int, rows: int, seed: int) -> dict:
    """Teacher-forced exact match: every answer token is the most likely one given the prompt and the right answer so far."""
    book, rng = TaskBook(), np.random.default_rng(seed)
    right = 0
    made = [prompt_and_answer(book, kind, tokenizer, text_ids, length, rng) for _ in range(prompts)]
    for begin in range(0, prompts, rows):
        part = made[begin:begin + rows]
        longest = max(len(answer) for _, answer in part)
        batch = np.full((len(part), length + longest), END_OF_TEXT, dtype=np.int64)
        for row, (prompt, answer) in enumerate(part):
            batch[row, :length], batch[row, length:length + len(answer)] = prompt, answer
        out = model(input_ids=torch.from_numpy(batch).to(model.device), use_cache=False, logits_to_keep=longest + 1)
        best = out.logits.argmax(dim=-1).cpu().numpy()
        right += sum(bool((best[row, :len(answer)] == answer).all()) for row, (_, answer) in enumerate(part))
    return {"accuracy": right / prompts, "right": right, "prompts": prompts, "prompt_tokens": length}


def stream_of(path: Path, tokenizer) -> np.ndarray:
    """The documents of a .jsonl as one stream, each followed by end-of-text."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return np.concatenate([np.array(tokenizer.encode(t).ids + [END_OF_TEXT], dtype=np.uint16) for t in texts])


def all_needles(model, tokenizer, streams: dict, settings: Settings) -> dict:
    """Accuracy of every kind, in real and in shipped held-out text."""
    figures, rows = {}, max(1, settings.micro_tokens // settings.prompt_tokens)
    for name, ids in streams.items():
        for kind in TaskBook().kinds:
            count = settings.prompts if kind == "multikey" else settings.prompts_other_kinds
            figures[f"{kind} in {name} text"] = needle_accuracy(
                model, kind, tokenizer, ids, settings.prompt_tokens, count, rows, settings.seed + 7)
    figures["multikey in real text, long"] = needle_accuracy(
        model, "multikey", tokenizer, streams["real"], settings.long_prompt_tokens, settings.long_prompts,
        max(1, rows // 4), settings.seed + 8)
    return figures


def all_perplexities(folders: dict, streams: dict, settings: Settings, device: torch.device) -> dict:
    """Perplexity of each folder in bf16 and fp32 on each stream."""
    figures = {}
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, folder in folders.items():
        for dtype in (torch.bfloat16, torch.float32):
            model = load(folder, dtype, device)
            for text, ids in streams.items():
                figures[f"{name}, {text} text, {str(dtype).split('.')[1]}"] = perplexity(
                    model, ids[:settings.measured_tokens], settings.context, max(1, settings.micro_tokens // 4 // settings.context))
    return figures
