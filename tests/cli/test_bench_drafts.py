#!/usr/bin/env python3
"""The benchmark of drafts: its prompts are edits of code, and its rates are those of the steps in which all decode."""
import os
import pathlib
import sys
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_SOURCE"]) / "benchmarks"))

import bench_drafts


class Words:
    """A tokenizer whose tokens are the words of a text."""

    def __init__(self):
        self.words = []

    def __call__(self, text):
        found = text.split(" ")
        self.words += [word for word in found if word not in self.words]
        return {"input_ids": [self.words.index(word) for word in found]}

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"user: {messages[0]['content']} assistant:"


class MadeUpEngine:
    """Reads one prompt a step, beside requests that decode; each of these gets `taken` tokens in a step of 2 seconds."""

    def __init__(self, taken):
        self.clock, self.taken, self.running = 0.0, taken, {}

    def add_request(self, name, prompt, parameters):
        self.running[name] = [[], parameters.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.clock += 2
        out, read = [], False
        for name, (tokens, most) in list(self.running.items()):
            if not tokens:
                if read:
                    continue
                read = True
            tokens += [7] * min(self.taken if tokens else 1, most - len(tokens))
            finished = len(tokens) == most
            out.append(types.SimpleNamespace(request_id=name, finished=finished,
                                             outputs=[types.SimpleNamespace(token_ids=list(tokens))]))
            if finished:
                del self.running[name]
        return out


class Drafts(unittest.TestCase):
    FILES = [(f"{name}.py", f"def {name}_one(a): " + f"{name} " * 100) for name in ("aaaa", "bbbb", "cccc")] + [
        ("none.py", "x " * 100), ("short.py", "def short(a): pass")]

    def test_a_prompt_ends_with_the_file_that_is_edited(self):
        tokenizer = Words()
        with mock.patch.object(bench_drafts, "SPARE_TOKENS", 20):
            prompts = bench_drafts.edits(self.FILES, 2, 300, 40, tokenizer)
            with self.assertRaisesRegex(ValueError, "4 edits need as many files of 60 to 150 tokens, found 3"):
                bench_drafts.edits(self.FILES, 4, 300, 40, tokenizer)
        for prompt, name, other in zip(prompts, ("aaaa", "bbbb"), ("bbbb", "cccc")):
            text = tokenizer.decode(prompt)
            self.assertTrue(200 < len(prompt) <= 300)
            self.assertIn(f"function {name}_one called new_{name}_one.", text)
            self.assertEqual(text.count(f"# file: {name}.py"), 1)
            self.assertLess(text.index(f"# file: {other}.py"), text.index(f"# file: {name}.py"))

    def test_rates_are_those_of_steps_in_which_all_decode(self):
        for taken in (1, 3):
            engine = MadeUpEngine(taken)
            parameters = types.SimpleNamespace(max_tokens=200)
            found = bench_drafts.measured(engine, parameters, [[1, 2]] * 4, "x", now=lambda: engine.clock)
            self.assertEqual(found[2], 2000)
            self.assertAlmostEqual(found[1], taken, delta=0.03)
            self.assertAlmostEqual(found[0], 4 * found[1] / 2)

    def test_requests_that_do_not_run_side_by_side_are_an_error(self):
        engine = MadeUpEngine(40)
        with self.assertRaisesRegex(RuntimeError, "4 requests of 2 tokens do not decode side by side"):
            bench_drafts.measured(engine, types.SimpleNamespace(max_tokens=60), [[1, 2]] * 4, "x", now=lambda: engine.clock)

    def test_bad_arguments_are_said(self):
        for words in (["--kv", "int2", "--model", "m"], ["--kv", "bf16", "--model", "m", "--bundle", "b"],
                      ["--kv", "bf16", "--model", "m", "--method", "draft_model"], ["--kv", "bf16", "--model", "m", "--answer", "9"]):
            with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
                bench_drafts.arguments_of(words)


if __name__ == "__main__":
    unittest.main()
