#!/usr/bin/env python3
"""--recall of oscar-calibrate. Texts of studies/recall.py: what a row asks for stands in it, and rows are of one length."""
import os
import pathlib
import random
import re
import sys
import types
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_SOURCE"]) / "studies"))
import recall
from support.programs import SOURCE, ProgramTest

TINY = SOURCE / "datasets" / "tiny-gqa"


class Program(ProgramTest):
    def ids(self, corpus, length, *options):
        """Token ids that a run takes, [rows, length]."""
        out = self.folder / "ids.npy"
        self.run_ok("oscar-calibrate", TINY, corpus, self.folder / "made.h5", "--device", "cpu", "--sequence-length", length,
                    "--max-tokens", 4 * length, "--separators", "off", "--statistics-only", "--tokens-out", out, "--force", *options)
        return np.load(out).reshape(-1, length)

    def said(self):
        return self.run_ok("oscar-bundle", "inspect", self.folder / "made.h5").stdout

    def test_long_sequences_of_text_repeat_stretches_unless_they_must_not(self):
        text = TINY / "calibration.jsonl"
        plain = self.ids(text, 1280, "--recall", "off")
        self.assertNotIn("recall", self.said())
        made = self.ids(text, 1280)
        self.assertIn("recall: the second half of every second sequence", self.said())
        self.assertTrue((made[::2] == plain[::2]).all() and (made[:, :640] == plain[:, :640]).all())
        self.assertTrue((made[1::2, 640:] != plain[1::2, 640:]).any(1).all())
        np.save(self.folder / "given.npy", plain.astype(np.int32))
        self.assertTrue((self.ids(self.folder / "given.npy", 1280) == plain).all(), "ids stay as they came")
        self.assertTrue((self.ids(self.folder / "given.npy", 1280, "--recall", "on") == made).all())

    def test_shorter_sequences_stay_as_they_are(self):
        text = TINY / "calibration.jsonl"
        self.assertTrue((self.ids(text, 512) == self.ids(text, 512, "--recall", "off")).all())
        self.assertNotIn("recall", self.said())


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text):
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids):
        return "".join(map(chr, ids))


class Rows(unittest.TestCase):
    def test_a_tail_repeats_stretches_of_its_row(self):
        rows = np.arange(4 * 400, dtype=np.int32).reshape(4, 400)
        made = recall.with_tails(rows, random.Random(1))
        self.assertEqual((made.shape, made.dtype), (rows.shape, np.int32))
        for row, before in zip(made, rows):
            self.assertTrue((row[:300] == before[:300]).all())
            self.assertTrue(set(row[300:]) <= set(row[:300]))
            starts = np.flatnonzero(np.diff(row[300:]) != 1) + 1
            self.assertTrue((np.diff([0, *starts])[:-1] >= 24).all(), "stretches of 24 tokens and more")

    def test_every_second_row_alone_may_have_a_tail_of_short_stretches(self):
        rows = np.arange(4 * 400, dtype=np.int32).reshape(4, 400)
        made = recall.with_tails(rows, random.Random(1), 0.5, 6, 24, second=True)
        self.assertTrue((made[::2] == rows[::2]).all())
        for row in made[1::2]:
            self.assertTrue(set(row[200:]) <= set(row[:200]))
            lengths = np.diff([0, *np.flatnonzero(np.diff(row[200:]) != 1) + 1])
            self.assertTrue(((lengths >= 6) & (lengths <= 24)).all())

    def test_the_tail_repeats_strings_behind_what_stands_before_them(self):
        rows = np.arange(2 * 1024, dtype=np.int32).reshape(2, 1024)
        made = recall.with_records(rows, random.Random(1), second=True)
        self.assertTrue((made[0] == rows[0]).all())
        body, tail = made[1, :768].tolist(), made[1, 768:].tolist()
        text = " ".join(map(str, body))
        found = [" ".join(map(str, tail[at:at + 12])) in text for at in range(len(tail) - 12)]
        self.assertGreater(sum(found), 10, "8 tokens and at least 4 of the string behind them")
        self.assertNotEqual(body, rows[1, :768].tolist())

    def test_a_value_that_a_sentence_names_stands_beside_its_key(self):
        texts = types.SimpleNamespace(tokenizer=Letters(), ids=lambda text: Letters()(text)["input_ids"])
        rows = np.array([list(map(ord, ("words and words\n" * 600)[:8192]))], np.int32)
        [made] = recall.as_pairs(rows, texts, random.Random(2))
        text = Letters().decode(made)
        self.assertEqual(len(text), 8192)
        named = re.findall(r"The value of (\S+) is (\w{12})\.", text)
        self.assertGreater(len(named), 10)
        for key, value in named:
            self.assertIn(f'"{key}": "{value}"', text)

    def test_an_answer_stands_in_the_line_that_is_asked_for(self):
        numbers, used = random.Random(3), set()
        for _ in range(200):
            line, questions = recall.record(numbers, used)
            for question, answer in questions:
                self.assertIn(answer, line)
                self.assertIn(re.search(r"\d{5}", question)[0], line)
        self.assertEqual(len(used), 200)

    def test_a_chat_asks_for_lines_of_its_own_message(self):
        texts = types.SimpleNamespace(tokenizer=Letters(), ids=lambda text: Letters()(text)["input_ids"])
        line = "some words that a reader may quote from here\n"
        rows = np.array([list(map(ord, (line * 400)[:6000]))], np.int32)
        [made] = recall.as_chats(rows, texts, random.Random(2))
        text = Letters().decode(made)
        self.assertEqual(len(text), 6000)
        message, *turns = text.split("<|im_start|>assistant\n")
        self.assertGreater(len(turns), 5)
        answers = [turn.partition("<|im_end|>")[0] for turn in turns[:-1]]
        found = sum(answer in message for answer in answers)
        self.assertGreaterEqual(found, 0.7 * len(answers), "a message may be cut behind a record")

    def test_every_second_row_is_of_the_others(self):
        made = recall.every_second(np.zeros((4, 3), int), np.ones((4, 3), int))
        self.assertEqual(made[:, 0].tolist(), [0, 1, 0, 1])


if __name__ == "__main__":
    unittest.main()
