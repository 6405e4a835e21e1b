"""A bundle beside a config.json that was changed since: what it stores is compared, the rest said."""
import json
import unittest

from support import checkpoints
from support.programs import ProgramTest

CONFIG = checkpoints.QWEN3_MINI


class AnotherConfig(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.corpus = self.folder / "corpus.txt"
        self.corpus.write_text("".join(checkpoints.sample_text()))
        self.bundle = self.folder / "bundle.h5"
        self.run_ok("oscar-calibrate", self.model, self.corpus, self.bundle, "--device", "cpu",
                    "--search", "off", "--max-tokens", 2048, "--sequence-length", 512, "--quiet")
        self.evaluation = [self.model, "--bundle", self.bundle, "--corpus", self.corpus, "--device",
                           "cpu", "--max-tokens", 2048, "--sequence-length", 512, "--compare", "bundle"]

    def write_config(self, **changes):
        (self.model / "config.json").write_text(json.dumps(CONFIG | changes))

    def test_another_epsilon_is_said_by_eval_and_fold(self):
        folds = iter(range(10))

        def said():
            fold = ["fold", self.bundle, self.model, self.folder / f"folded{next(folds)}"]
            return [self.run_ok("oscar-eval", *self.evaluation).stderr,
                    self.run_ok("oscar-bundle", *fold).stderr]

        for text in said():
            self.assertNotIn("config_sha256", text)
        self.write_config(rms_norm_eps=1e-5)
        for text in said():
            self.assertIn("config_sha256", text)
            self.assertIn("bundle.h5", text)

    def test_another_kind_of_attention_is_refused_by_eval_and_fold(self):
        self.write_config(use_sliding_window=True, sliding_window=512, max_window_layers=1)
        words = ("layer 1, attention differs", "sliding", "full", "oscar-calibrate")
        self.refuse("oscar-eval", self.evaluation, *words)
        self.refuse("oscar-bundle", ["fold", self.bundle, self.model, self.folder / "folded"], *words)


if __name__ == "__main__":
    unittest.main()
