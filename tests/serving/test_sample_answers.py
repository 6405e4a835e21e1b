#!/usr/bin/env python3
"""python -m oscar_int2 answers on the CPU, and its answers on the page and on the card of the bundle."""
import json
import pathlib
import subprocess
import tempfile
import unittest

from serving_case import BIN, BUNDLE, MODEL
from oscar_int2.commands import answers as sample_answers

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class SampleAnswers(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.model = self.folder / "chatting"
        self.model.mkdir()
        for file in MODEL.iterdir():
            (self.model / file.name).symlink_to(file)
        settings = self.model / "tokenizer_config.json"
        text = json.loads(settings.read_text()) | {"chat_template": TEMPLATE}
        settings.unlink()
        settings.write_text(json.dumps(text))

    def oscar_bundle(self, *arguments, code=0):
        result = subprocess.run([BIN / "oscar-bundle", *map(str, arguments)], capture_output=True, text=True,
                                timeout=120)
        self.assertEqual(result.returncode, code, result.stderr)
        return result

    def test_answers_reach_the_page_and_the_card_of_their_bundle(self):
        words, answers = self.folder / "a.md", self.folder / "a.json"
        command = [self.model, BUNDLE, words, "--json", answers, "--tokens", 6, "--turns", 4,
                   "--device", "cpu"]
        sample_answers.main(list(map(str, command)))
        data = json.loads(answers.read_text())
        self.assertEqual([turn["question"] for turn in data["turns"]], list(sample_answers.QUESTIONS[:4]))
        self.assertEqual((data["most_tokens"], data["exact_tokens"], data["device"]), (6, 320, "cpu"))
        for turn in data["turns"]:
            self.assertLess(turn["tokens_before"], 320)
            # Nothing is in 2 bits yet: both generators read the same rows.
            self.assertTrue(turn["same"])
            self.assertEqual(turn["bf16"], turn["int2"])
            self.assertIn(turn["question"], words.read_text())

        page, card = self.folder / "p.html", self.folder / "c.md"
        report = BUNDLE.parent / "evaluation.json"
        self.oscar_bundle("report", report, "--answers", answers, "-o", page)
        self.oscar_bundle("card", BUNDLE, "--answers", answers, "-o", card)
        for text in (page.read_text(), card.read_text()):
            self.assertIn("4 turns of one chat, all of them, unselected.", text)
            for question in sample_answers.QUESTIONS[:4]:
                self.assertIn(question, text)
        self.assertIn("<h3>2 bits</h3>", page.read_text())

        data["bundle_serving_sha256"] = "of another"
        answers.write_text(json.dumps(data))
        for made in (["report", report], ["card", BUNDLE]):
            result = self.oscar_bundle(*made, "--answers", answers, "-o", self.folder / "none", code=1)
            self.assertIn("the answers are of another bundle", result.stderr)
            self.assertFalse((self.folder / "none").exists())


if __name__ == "__main__":
    unittest.main()
