"""python -m oscar_int2 prepare-corpus: the way out for chat templates that are not built in, and its errors."""
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

import numpy as np
from transformers import AutoTokenizer

from support import checkpoints
from support.programs import BIN, SOURCE, ProgramTest, run
from support.scripts import run_command

sys.path.insert(0, str(BIN.parent / "python"))
from oscar_int2.commands import prepare_corpus

PUBLISHED = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
UNKNOWN_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CONVERSATIONS = [[{"role": "user", "content": f"question {i}?"},
                  {"role": "assistant", "content": f"answer {i}. " * 20}] for i in range(12)]


class PrepareCorpus(ProgramTest):
    def checkpoint(self, template):
        model = checkpoints.write_checkpoint(self.folder / "model")
        (model / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
             "chat_template": template}))
        return model

    def chat(self):
        path = self.folder / "chat.jsonl"
        path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
        return path

    def prepare(self, *arguments):
        return run_command(prepare_corpus, *arguments)

    def expected_ids(self, model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = []
        for conversation in CONVERSATIONS:
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.append(tokenizer.eos_token_id)
        return ids

    def test_the_line_that_the_refusal_names_makes_a_corpus_that_runs(self):
        model, chat = self.checkpoint(UNKNOWN_TEMPLATE), self.chat()
        refusal = run("oscar-calibrate", model, chat, self.folder / "out.h5", "--device", "cpu")
        self.assertEqual(refusal.returncode, 1, refusal.stderr)
        line = re.search(r"run: python -m oscar_int2 (prepare-corpus .*), then pass (\S+)",
                         " ".join(refusal.stderr.split()))
        self.assertIsNotNone(line, refusal.stderr)
        # As from a fresh clone: a Python without packages, which finds the one that has them.
        environment = {**os.environ, "OSCAR_PYTHON": sys.executable, "PYTHONPATH": str(SOURCE / "python")}
        result = subprocess.run([sys.executable, "-S", "-m", "oscar_int2", *line[1].split()], env=environment,
                                capture_output=True, text=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(np.load(line[2]).tolist(), self.expected_ids(model))
        self.run_ok("oscar-calibrate", model, line[2], self.folder / "out.h5", "--device", "cpu",
                    "--sequence-length", 64, "--dry-run")

    def test_a_built_in_template_gives_the_ids_of_the_script(self):
        model, chat = self.checkpoint((PUBLISHED / "qwen3.jinja").read_text()), self.chat()
        ours = self.folder / "ours.npy"
        self.run_ok("oscar-calibrate", model, chat, self.folder / "out.h5", "--device", "cpu",
                    "--sequence-length", 64, "--dry-run", "--tokens-out", ours)
        sequences = np.load(ours)
        stream = np.array(self.expected_ids(model))
        documents = np.split(stream, np.flatnonzero(stream == 256) + 1)[:-1]
        text = sequences.reshape(-1).tobytes()
        found = sum(text.find(d.astype(sequences.dtype).tobytes()) >= 0 for d in documents)
        # Documents are shuffled and packed; the tail shorter than a sequence is dropped.
        self.assertGreaterEqual(found, len(documents) - 2)

    def test_rows_have_the_asked_length_and_the_rest_is_counted(self):
        model, chat, out = self.checkpoint(UNKNOWN_TEMPLATE), self.chat(), self.folder / "ids.h5"
        result = self.prepare(model, chat, out, "--rows", 100)
        self.assertEqual(result.returncode, 0, result.stderr)
        import h5py
        with h5py.File(out) as file:
            rows = file["tokens"][:]
        expected = self.expected_ids(model)
        self.assertEqual(rows.shape, (len(expected) // 100, 100))
        self.assertEqual(rows.reshape(-1).tolist(), expected[:rows.size])
        self.assertIn(f"{len(expected) % 100} tokens dropped", result.stdout)

    def test_bad_lines_are_named_and_nothing_is_written(self):
        model, bad, out = self.checkpoint(UNKNOWN_TEMPLATE), self.folder / "bad.jsonl", \
            self.folder / "ids.npy"
        for text, word in (('{"text": "a"}\n{"text": ', "line 2"), ('{"prompt": "a"}', "completion"),
                           ("", "no tokens")):
            bad.write_text(text)
            result = self.prepare(model, bad, out)
            with self.subTest(word):
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(word, result.stderr)
                self.assertFalse(out.exists())


if __name__ == "__main__":
    unittest.main()
