"""Built-in chat templates give what transformers' apply_chat_template gives, 1,000 times each.

The published texts are those that the package trl carries to recognise the models by.
"""
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

PROGRAM = str(pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-test-render-chats")
PUBLISHED = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
OWN = pathlib.Path(os.environ["OSCAR_SOURCE"]) / "tests/golden/chat_templates"
TEMPLATES = [PUBLISHED / f"{name}.jinja" for name in
             ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "gemma", "gemma3")]
TEMPLATES.append(OWN / "smollm2.jinja")
# Our own wording of a published text that no package carries, under the hash of that text.
HASHES = {"smollm2": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"}
FEWEST_RENDERED = 200  # a template may refuse conversations: of other orders, with a system
CONVERSATIONS = 1000
PIECES = ["Hello", " ", "\n", "\n\n", "<think>", "</think>", "thought", "<tool_response>",
          "</tool_response>", "é 你好", "\u00a0", "\u3000", "\x1c", "\u2028", "{{ x }}", "{% if %}",
          "'", '"', "\\n", "\t", "\r\n", "<|im_end|>", "<|user|>", "😀", "\u200b", "\x85"]


def content(rng, role):
    kind = rng.randrange(5)
    text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 6)))
    if role == "assistant" and kind < 2:
        return f"<think>{text}</think>\n\n" + "".join(rng.choice(PIECES) for _ in range(3))
    if role == "user" and kind == 0:
        return f"<tool_response>{text}</tool_response>"
    return text


def conversations(seed):
    rng = random.Random(seed)
    for _ in range(CONVERSATIONS):
        roles = ["system"] if rng.random() < 0.4 else []
        for _ in range(rng.randint(0 if roles else 1, 3)):
            roles += rng.choice([["user", "assistant"], ["user"], ["assistant"],
                                 ["user", "assistant", "user", "assistant"], ["system"]])
        yield {"messages": [{"role": r, "content": content(rng, r)} for r in roles],
               "prompt": rng.random() < 0.3}


def main():
    for path in TEMPLATES:
        bos = "<bos>" if path.stem.startswith("gemma") else "<|begin_of_text|>"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=bos)
        name, text = path.stem, path.read_bytes()
        items = list(conversations(name))
        lines = "".join(json.dumps(i) + "\n" for i in items)
        sha256 = HASHES.get(name, hashlib.sha256(text).hexdigest())
        result = subprocess.run([PROGRAM, sha256], check=True, input=lines.encode(),
                                stdout=subprocess.PIPE).stdout
        ours = [json.loads(line) for line in result.splitlines()]
        assert len(ours) == CONVERSATIONS, len(ours)
        for item, rendered in zip(items, ours):
            try:
                expected = tokenizer.apply_chat_template(
                    item["messages"], chat_template=text.decode(), tokenize=False,
                    add_generation_prompt=item["prompt"])
            except TemplateError:
                expected = None
            assert rendered == expected, f"{name}: {item}\n  ours   {rendered!r}\n" \
                                         f"  theirs {expected!r}"
        rendered = sum(r is not None for r in ours)
        assert rendered >= FEWEST_RENDERED, (name, rendered)
        print(f"{name}: {CONVERSATIONS} conversations equal, {rendered} rendered")
    unknown = hashlib.sha256(b"another template").hexdigest()
    assert subprocess.run([PROGRAM, unknown], stdin=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, check=False).returncode == 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
