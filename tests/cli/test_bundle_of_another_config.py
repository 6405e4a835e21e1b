"""A bundle beside a config.json that was changed since: what it stores is compared, the rest said."""
import json
import subprocess
import sys
import unittest

import h5py
import numpy as np
from bundle.verify_bundle import content_sha256
from safetensors.numpy import save_file
from support import checkpoints
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest

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

    def test_card_and_publish_compare_the_config_as_eval_and_fold_do(self):
        card = ["card", self.bundle, "--model", self.model, "-o", self.folder / "card.md"]
        self.assertEqual(self.run_ok("oscar-bundle", *card).stderr, "")
        self.assertEqual(self.publish("a").returncode, 0)
        for changes, words in (({"rms_norm_eps": 1e-5}, ("rms_norm_eps differs", "config.json of the calibration")),
                               ({"rope_theta": 5e5}, ("rope differs", "--rope-scaling"))):
            self.write_config(**changes)
            self.refuse("oscar-bundle", [*card, "--force"], *words)
            refused = self.publish("b")
            self.assertNotEqual(refused.returncode, 0, refused.stdout)
            for word in words:
                self.assertIn(word, refused.stderr)
        self.write_config(attention_dropout=.1)
        for text in (self.run_ok("oscar-bundle", *card, "--force").stderr, self.publish("c").stderr):
            self.assertIn("config_sha256", text)

    def test_an_adapter_beside_the_model_is_said_and_not_folded(self):
        (self.model / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
        save_file({"base_model.model.lora_A.weight": np.ones((2, 2), np.float32)}, self.model / "adapter_model.safetensors")
        (self.model / "notes.txt").write_text("kept")
        folded = self.run_ok("oscar-bundle", *self.fold("folded"))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            self.assertIn(f"not copied  {name} (the adapter is not folded)\n", folded.stdout)
            self.assertFalse((self.folder / "folded" / name).exists())
        self.assertTrue((self.folder / "folded" / "notes.txt").exists())
        card = self.run_ok("oscar-bundle", "card", self.bundle, "--model", self.model, "-o", self.folder / "card.md")
        published = self.publish("published")
        self.assertEqual(published.returncode, 0, published.stderr)
        for text in (folded.stderr, card.stderr, published.stderr):
            self.assertIn("beside the model lies an adapter of org/base", text)

    def publish(self, name):
        command = [sys.executable, "-m", "oscar_int2", "publish", self.model, self.bundle, "--no-exports", "--allow", "little-text",
                   "-o", self.folder / name]
        return subprocess.run(command, capture_output=True, text=True, check=False,
                              env=ENVIRONMENT | {"OSCAR_BIN": str(BIN), "PYTHONPATH": str(SOURCE / "python")})

    def test_another_kind_of_attention_is_refused_by_eval_and_fold(self):
        self.write_config(use_sliding_window=True, sliding_window=512, max_window_layers=1)
        words = ("layer 1, attention differs", "sliding", "full", "oscar-calibrate")
        self.refuse("oscar-eval", self.evaluation, *words)
        self.refuse("oscar-bundle", ["fold", self.bundle, self.model, self.folder / "folded"], *words)


if __name__ == "__main__":
    unittest.main()
