"""Chats in one command, and python -m oscar_int2 prepare-corpus: the way out for tokenizers that are not implemented."""
import gzip
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest

import numpy as np
from transformers import AutoTokenizer

from support import checkpoints
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest, run
from support.scripts import run_command

sys.path.insert(0, str(BIN.parent / "python"))
from oscar_int2.commands import prepare_corpus

PUBLISHED = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CONVERSATIONS = [[{"role": "user", "content": f"question {i}?"},
                  {"role": "assistant", "content": f"answer {i}. " * 20}] for i in range(12)]


EOS = 256


def documents_in(ids):
    """Documents in any order: the pieces that end with EOS, sorted."""
    pieces = np.split(np.asarray(ids), np.flatnonzero(np.asarray(ids) == EOS) + 1)
    return sorted(piece.tolist() for piece in pieces if piece.size)


class PrepareCorpus(ProgramTest):
    def checkpoint(self, template):
        model = checkpoints.write_checkpoint(self.folder / "model")
        (model / "tokenizer_config.json").write_text(json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>",
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
            if EOS not in ids[-2:]:
                ids.append(EOS)
        return ids

    def calibrated_ids(self, model, chat, *options, environment=None):
        """The ids that one run of oscar-calibrate takes, as a multiset of documents."""
        out = self.folder / "ours.npy"
        result = subprocess.run([BIN / "oscar-calibrate", model, chat, self.folder / "out.h5", "--device", "cpu",
                                 "--separators", "off", "--recall", "off", "--dry-run", "--force", "--tokens-out", out, *options],
                                capture_output=True, text=True, env=environment or ENVIRONMENT, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        return documents_in(np.load(out).reshape(-1)), result.stderr

    def test_chats_of_published_templates_have_the_ids_of_transformers(self):
        names = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "llama3", "llama3_1", "gemma", "gemma3",
                 "glm4moe", "phi3", "deepseekv3", "gptoss", "lfm2", "cohere2")
        for name in names:
            with self.subTest(name):
                model = self.checkpoint((PUBLISHED / f"{name}.jinja").read_text())
                found, _ = self.calibrated_ids(model, self.chat(), environment=ENVIRONMENT | {"SOURCE_DATE_EPOCH": ""})
                self.assertEqual(found, documents_in(self.expected_ids(model)))

    def test_the_line_that_a_refusal_names_makes_a_corpus_that_runs(self):
        model, chat = self.checkpoint(TEMPLATE), self.chat()
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "BertPreTokenizer"}, tokenizer["pre_tokenizer"]]}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        refusal = run("oscar-calibrate", model, chat, self.folder / "out.h5", "--device", "cpu")
        self.assertEqual(refusal.returncode, 1, refusal.stderr)
        self.assertIn("(python -m oscar_int2 prepare-corpus)", " ".join(refusal.stderr.split()))
        # As from a fresh clone: a Python without packages, which finds the one that has them.
        environment = {**os.environ, "OSCAR_PYTHON": sys.executable, "PYTHONPATH": str(SOURCE / "python")}
        out = self.folder / "ids.npy"
        result = subprocess.run([sys.executable, "-S", "-m", "oscar_int2", "prepare-corpus", model, chat, out],
                                env=environment, capture_output=True, text=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(np.load(out).tolist(), self.expected_ids(model))
        self.run_ok("oscar-calibrate", model, out, self.folder / "out.h5", "--device", "cpu",
                    "--sequence-length", 64, "--dry-run")

    def test_rows_without_a_document_are_left_out_or_end_a_strict_run(self):
        model, chat = self.checkpoint(TEMPLATE), self.chat()
        whole, _ = self.calibrated_ids(model, chat)
        lines = chat.read_text().splitlines(keepends=True)
        chat.write_text("".join([*lines[:2], '{"messages": [\n', '{"messages": 5}\n', *lines[2:]]))
        found, said = self.calibrated_ids(model, chat)
        self.assertEqual(found, whole)
        for word in ("chat.jsonl: left out rows without a document: 2", "line 3: no valid JSON", "line 4: "):
            self.assertIn(word, said)
        self.refuse("oscar-calibrate", [model, chat, self.folder / "out.h5", "--dry-run", "--strict"], "line 3",
                    "--strict")
        self.refuse("oscar-eval", [model, "--corpus", chat, "--strict", "--json", "-"], "line 3")

    def test_packed_files_lists_and_folders_are_read(self):
        model, chat = self.checkpoint(TEMPLATE), self.chat()
        whole, _ = self.calibrated_ids(model, chat)
        folder = self.folder / "texts"
        folder.mkdir()
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(chat.read_bytes()))
        (folder / "config.json").write_text("{}")
        entries = self.folder / "chat.json"
        entries.write_text(json.dumps([{"messages": c} for c in CONVERSATIONS]))
        for corpus in (folder, folder / "a.jsonl.gz", entries):
            self.assertEqual(self.calibrated_ids(model, corpus)[0], whole)

    def test_the_python_that_is_asked_is_named_when_it_fails(self):
        model, chat = self.checkpoint(TEMPLATE), self.chat()
        for python, words in (("/nowhere/python", ["Python cannot be run: /nowhere/python", "OSCAR_PYTHON="]),
                              ("/bin/false", ["/bin/false ended"])):
            result = subprocess.run([BIN / "oscar-calibrate", model, chat, self.folder / "out.h5", "--dry-run"], text=True,
                                    capture_output=True, env=ENVIRONMENT | {"OSCAR_PYTHON": python}, check=False)
            self.assertEqual(result.returncode, 1)
            for word in words:
                self.assertIn(word, " ".join(result.stderr.split()))

    def test_rows_have_the_asked_length_and_the_rest_is_counted(self):
        model, chat, out = self.checkpoint(TEMPLATE), self.chat(), self.folder / "ids.h5"
        result = self.prepare(model, chat, out, "--rows", 100)
        self.assertEqual(result.returncode, 0, result.stderr)
        import h5py
        with h5py.File(out) as file:
            rows = file["tokens"][:]
        expected = self.expected_ids(model)
        self.assertEqual(rows.shape, (len(expected) // 100, 100))
        self.assertEqual(rows.reshape(-1).tolist(), expected[:rows.size])
        self.assertIn(f"{len(expected) % 100} tokens dropped", result.stdout)

    def test_a_bad_row_of_a_folder_names_its_file_and_a_file_without_documents_is_left_out(self):
        model, folder, out = self.checkpoint(TEMPLATE), self.folder / "texts", self.folder / "ids.npy"
        folder.mkdir()
        (folder / "a.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
        (folder / "b.jsonl").write_text("")
        (folder / "c.jsonl").write_text('{"text": "c"}\n{"text": \n')
        result = self.prepare(model, folder, out)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(documents_in(np.load(out))), 2)
        for words in (f"left out rows without a document: 2\n  {folder}/a.jsonl, 2: no 'messages'", f"{folder}/c.jsonl, 2: no valid JSON",
                      f"left out files without a document: 1\n  {folder}/b.jsonl: no document"):
            self.assertIn(words, result.stderr)
        (folder / "a.jsonl").write_text('{"text": "a"}\n')
        strict = self.prepare(model, folder, out, "--strict")
        self.assertEqual((strict.returncode, strict.stderr), (1, f"error: {folder}/b.jsonl: no document\n"))
        (folder / "d.jsonl.gz").write_bytes(b"no gzip")
        broken = self.prepare(model, folder, out)
        self.assertEqual(broken.returncode, 1)
        self.assertRegex(broken.stderr, f"^error: {folder}/d.jsonl.gz: not a sound .gz file")

    def test_the_command_that_is_named_for_utf_16_makes_a_file_that_is_read(self):
        model, out = self.checkpoint(TEMPLATE), self.folder / "ids.npy"
        text = '{"text": "first"}\n{"text": "second"}\n'
        for encoding, named in (("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE")):
            with self.subTest(encoding):
                file = self.folder / "my chat.jsonl"
                file.write_bytes(text.encode(encoding))
                said = self.prepare(model, file, out).stderr
                self.assertIn(f"{file}: the text is {named}, expected UTF-8", said)
                command = said.strip().split("write it anew: ")[1]
                subprocess.run(command, shell=True, check=True)
                result = self.prepare(model, self.folder / "my chat-utf8.jsonl", out)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn("2 documents", result.stdout)

    def test_bad_lines_are_named_and_without_others_nothing_is_written(self):
        model, bad, out = self.checkpoint(TEMPLATE), self.folder / "bad.jsonl", self.folder / "ids.npy"
        for text, words, options in (('{"text": "a"}\n{"text": ', ("bad.jsonl, 2: no valid JSON",), ("--strict",)),
                                     ('{"prompt": "a"}', ("completion", "no tokens"), ()), ("", ("no tokens",), ())):
            bad.write_text(text)
            result = self.prepare(model, bad, out, *options)
            with self.subTest(text):
                self.assertNotEqual(result.returncode, 0)
                for word in words:
                    self.assertIn(word, result.stderr)
                self.assertFalse(out.exists())


if __name__ == "__main__":
    unittest.main()
