"""The text for choosing constants: apart from what figures come from, and written by its script."""
import contextlib
import io
import json
import sys
import unittest
from unittest import mock

import tokenizers
from support.programs import SOURCE, ProgramTest
from support.scripts import load

MODEL = SOURCE / "datasets" / "tiny-gqa"
RUN = 20  # tokens


def runs_of(text, tokenizer):
    """(tokens, every run of RUN of them within a document)"""
    count, runs = 0, set()
    for line in text.splitlines():
        ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        count += len(ids)
        runs.update(tuple(ids[i:i + RUN]) for i in range(len(ids) - RUN + 1))
    return count, runs


class TuneCorpus(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        cls.others = set()
        for part in ("calibration", "heldout"):
            cls.others |= runs_of((MODEL / f"{part}.jsonl").read_text(), cls.tokenizer)[1]

    def test_it_shares_no_run_of_tokens_with_the_other_parts(self):
        tokens, runs = runs_of((MODEL / "tune.jsonl").read_text(), self.tokenizer)
        self.assertEqual(tokens, 66400)
        self.assertFalse(runs & self.others)
        self.assertGreater(len(self.others), 300_000)  # there is something to share

    def test_its_script_writes_documents_of_their_length_that_share_nothing(self):
        out = self.folder / "tune.jsonl"
        script, said = load(MODEL / "make" / "write_tune_corpus.py"), io.StringIO()
        with mock.patch.multiple(script, STREAMS=2, STREAM_TOKENS=160, LENGTHS=(60, 60)), \
                mock.patch.object(sys, "argv", ["write_tune_corpus.py", str(MODEL), str(out)]), \
                contextlib.redirect_stdout(said):
            script.main()
        said = json.loads(said.getvalue())
        tokens, runs = runs_of(out.read_text(), self.tokenizer)
        self.assertEqual((tokens, said["tokens"], said["documents"]), (120, 120, 2))
        self.assertFalse(runs & self.others)


if __name__ == "__main__":
    unittest.main()
