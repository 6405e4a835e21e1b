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

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

PROGRAM = str(pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-test-render-chats")
PUBLISHED = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
OWN = pathlib.Path(os.environ["OSCAR_SOURCE"]) / "tests/golden/chat_templates"
TEMPLATES = [PUBLISHED / f"{name}.jinja" for name in
             ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1")]
TEMPLATES.append(OWN / "glm4.jinja")
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
        for _ in range(rng.randint(0 if roles else 1, 4)):
            roles += rng.choice([["user", "assistant"], ["user"], ["assistant"],
                                 ["user", "assistant", "user", "assistant"], ["system"]])
        yield {"messages": [{"role": r, "content": content(rng, r)} for r in roles],
               "prompt": rng.random() < 0.3}


def main():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()),
                                        bos_token="<|begin_of_text|>")
    for path in TEMPLATES:
        name, text = path.stem, path.read_bytes()
        items = list(conversations(name))
        lines = "".join(json.dumps(i) + "\n" for i in items)
        result = subprocess.run([PROGRAM, hashlib.sha256(text).hexdigest()], check=True,
                                input=lines.encode(), stdout=subprocess.PIPE).stdout
        ours = [json.loads(line) for line in result.splitlines()]
        assert len(ours) == CONVERSATIONS, len(ours)
        for item, rendered in zip(items, ours):
            expected = tokenizer.apply_chat_template(
                item["messages"], chat_template=text.decode(), tokenize=False,
                add_generation_prompt=item["prompt"])
            assert rendered == expected, f"{name}: {item}\n  ours   {rendered!r}\n" \
                                         f"  theirs {expected!r}"
        print(f"{name}: {CONVERSATIONS} conversations equal")
    unknown = hashlib.sha256(b"another template").hexdigest()
    assert subprocess.run([PROGRAM, unknown], stdin=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, check=False).returncode == 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
