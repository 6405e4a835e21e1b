#!/usr/bin/env python3
"""Chats with a checkpoint over the 2-bit cache, and over BF16 beside it.

    python/examples/chat.py /models/my-qwen3 my-qwen3.h5                     asks for your turns
    python/examples/chat.py /models/my-qwen3 my-qwen3.h5 "Why is the sky blue?"
    python/examples/chat.py datasets/tiny-gqa rotation_zoo/tiny-gqa/tiny-gqa.h5 "Once upon a time"

Without a chat template the text is continued. Each turn is a new prompt of the whole chat.
"""
import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import oscar_int2
import oscar_int2.transformers

LONG = 32768  # tokens of a chat for which memory is stated besides


def encoded(tokenizer, turns):
    """input_ids [1, tokens] of a chat, a list of texts that begins with the user's."""
    if tokenizer.chat_template is None:
        return tokenizer("".join(turns), return_tensors="pt")["input_ids"]
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


def answer(model, tokenizer, ids, options, show):
    """The answer's text, its tokens, and tokens a second of all but the first."""
    class Clock(TextStreamer):
        times = []

        def put(self, value):
            self.times.append(time.perf_counter())
            if show:
                super().put(value)

        def end(self):
            if show:
                super().end()

    clock = Clock(tokenizer, skip_prompt=True)
    clock.times = []
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=clock,
                            max_new_tokens=options.tokens, do_sample=options.sample)
    tokens = output.shape[1] - ids.shape[1]
    seconds = clock.times[-1] - clock.times[1]  # times[0] is the prompt's
    text = tokenizer.decode(output[0, ids.shape[1]:], skip_special_tokens=True)
    return text, tokens, (tokens - 1) / seconds if tokens > 1 else float("nan")


def mebibytes(model, tokens):
    """Of a BF16 cache and of the 2-bit one that hold so many tokens."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exact = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim * tokens
    small = sum(oscar_int2.transformers.OscarCache(model, 1, tokens).memory_bytes())
    return exact / 2**20, small / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("bundle", help="of oscar-calibrate, for this model")
    parser.add_argument("text", nargs="?", help="one turn; without it you are asked")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--sample", action="store_true", help="by the model's own temperature")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    model = model.to(options.device).eval()
    turns = []
    while True:
        turns.append(options.text or input("> "))
        ids = encoded(tokenizer, turns).to(options.device)
        oscar_int2.transformers.remove(model)
        _, exact_tokens, exact_rate = answer(model, tokenizer, ids, options, show=False)
        oscar_int2.transformers.apply(model, options.bundle)
        text, tokens, rate = answer(model, tokenizer, ids, options, show=True)
        turns.append(text)
        print(f"\n{'':8}{'prompt':>8}{'answer':>8}{'tokens/s':>10}{'MiB held':>10}{f'at {LONG // 1024}K':>8}")
        held = mebibytes(model, ids.shape[1] + options.tokens)
        for name, n, speed, now, long in zip(("BF16", "INT2"), (exact_tokens, tokens), (exact_rate, rate),
                                             held, mebibytes(model, LONG)):
            print(f"{name:8}{ids.shape[1]:8}{n:8}{speed:10.1f}{now:10.1f}{long:8.1f}")
        if options.text:
            break


if __name__ == "__main__":
    main()
