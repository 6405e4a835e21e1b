"""A bundle beside a config.json that was changed since: what it stores is compared, the rest said."""
import json
import unittest

import h5py
import numpy as np
from bundle.verify_bundle import content_sha256
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

    def fold(self, name):
        return ["fold", self.bundle, self.model, self.folder / name]

    def test_a_key_that_changes_nothing_is_said_by_eval_and_fold(self):
        said = [self.run_ok("oscar-eval", *self.evaluation).stderr, self.run_ok("oscar-bundle", *self.fold("a")).stderr]
        self.assertNotIn("config_sha256", "".join(said))
        self.write_config(attention_dropout=.1)
        for text in (self.run_ok("oscar-eval", *self.evaluation).stderr,
                     self.run_ok("oscar-bundle", *self.fold("b")).stderr):
            self.assertIn("config_sha256", text)
            self.assertIn("bundle.h5", text)

    def test_another_epsilon_is_refused_by_eval_and_fold(self):
        self.write_config(rms_norm_eps=1e-5)
        words = ("rms_norm_eps differs", "1e-05", "1e-06", "config.json of the calibration")
        self.refuse("oscar-eval", self.evaluation, *words)
        self.refuse("oscar-bundle", self.fold("folded"), *words)
        with h5py.File(self.bundle, "r+") as file:  # as files of earlier versions are
            del file["model"].attrs["numerics"]
            file.attrs["content_sha256"] = np.bytes_(content_sha256(file))
        self.assertIn("config_sha256", self.run_ok("oscar-eval", *self.evaluation).stderr)

    def test_another_kind_of_attention_is_refused_by_eval_and_fold(self):
        self.write_config(use_sliding_window=True, sliding_window=512, max_window_layers=1)
        words = ("layer 1, attention differs", "sliding", "full", "oscar-calibrate")
        self.refuse("oscar-eval", self.evaluation, *words)
        self.refuse("oscar-bundle", ["fold", self.bundle, self.model, self.folder / "folded"], *words)


if __name__ == "__main__":
    unittest.main()
