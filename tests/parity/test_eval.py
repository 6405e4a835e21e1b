#!/usr/bin/env python3
"""oscar-eval against a PyTorch reference: NLL 1e-5 relative, KL 1% relative, exact under 1e-6."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import h5py
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import int2_reference

BIN = pathlib.Path(os.environ["OSCAR_BIN"])
SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
SINK, RECENT, TOKENS = 8, 40, 260
NLL_BOUND, KL_BOUND, EXACT_BOUND = 1e-5, 1e-2, 1e-6


def run(program, *arguments):
    result = subprocess.run([BIN / program, *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        raise AssertionError(f"{program} {arguments}: {result.stderr}")
    return result


class Workspace:
    """A checkpoint, token rows, and reports of oscar-eval on them."""

    def __init__(self, folder, checkpoint, rows):
        self.folder, self.checkpoint, self.rows = pathlib.Path(folder), checkpoint, rows
        self.corpus = self.folder / f"{len(list(self.folder.iterdir()))}.npy"
        np.save(self.corpus, rows.astype(np.int32))
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation=int2_reference.NAME).eval()
        self.config = self.model.config

    def report(self, methods, *options):
        out = self.folder / "report.json"
        run("oscar-eval", self.checkpoint, "--corpus", self.corpus, "--compare", ",".join(methods),
            "--device", "cpu", "--separators", "off", "--json", out, "--force", "--quiet", *options)
        return json.loads(out.read_text())

    def reference(self, first, offset=0):
        exact = int2_reference.Rule(0, 1, layers=[None] * self.config.num_hidden_layers)
        return int2_reference.scores(self.model, exact, self.rows, first, offset)


def random_model(folder):
    torch.manual_seed(3)
    config = Qwen3Config(vocab_size=400, hidden_size=96, intermediate_size=160,
                         num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                         head_dim=32, max_position_embeddings=4096, initializer_range=0.15,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # sharp attention, and channels that differ
                weight.copy_(torch.exp(0.4 * torch.randn_like(weight)) * (1.6 if "_norm" in name else 1))
    model.save_pretrained(folder)
    return np.random.default_rng(1).integers(0, 400, size=(3, TOKENS))


class RandomModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        folder = pathlib.Path(cls.temporary.name) / "model"
        rows = random_model(folder)
        cls.space = Workspace(cls.temporary.name, folder, rows)
        cls.windows = ["--sink", SINK, "--recent", RECENT, "--sequence-length", TOKENS]

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def expect_reference(self, report, name, rule, first, offset=0):
        reference_nll, reference = self.space.reference(first, offset)
        nll, log_p = int2_reference.scores(self.space.model, rule, self.space.rows, first, offset)
        got = report["methods"]
        self.assertAlmostEqual(got["bf16"]["nll"]["mean"] / reference_nll, 1, delta=NLL_BOUND)
        kl = int2_reference.divergence(reference, log_p)
        self.assertGreater(kl, 1e-3, "this case would show nothing")
        self.assertAlmostEqual(got[name]["kl"]["mean"] / kl, 1, delta=KL_BOUND)
        self.assertAlmostEqual(got[name]["nll"]["mean"], nll, delta=KL_BOUND * kl + 1e-4)
        agrees = (reference.argmax(-1) == log_p.argmax(-1)).double().mean().item()
        self.assertAlmostEqual(got[name]["top1"]["mean"], agrees, delta=5e-3)

    def rule(self, kind, clip, **settings):
        return int2_reference.Rule(SINK, RECENT, layers=int2_reference.data_free_layers(
            kind, self.space.config, *(clip or (0, 0))), **settings)

    def test_every_mode_and_demote_block_equals_the_reference(self):
        first = SINK + RECENT
        for mode, prompt, block in (("decode", 0, 1), ("decode", 0, 16), ("prefill", 120, 1),
                                    ("chunked:64", 10**9, 1), ("chunked:50", 10**9, 16)):
            with self.subTest(mode=mode, block=block):
                start = prompt if mode == "prefill" else first
                report = self.space.report(["identity", "hadamard-clip"], *self.windows, "--mode",
                                           mode, "--demote-block", block, "--first-position", start)
                self.assertEqual(report["mode"], mode)
                settings = dict(mode=mode, prompt=prompt, block=block)
                self.expect_reference(report, "identity", self.rule("identity", None, **settings), start)
                self.expect_reference(report, "hadamard-clip",
                                 self.rule("hadamard", (0.96, 0.92), **settings), start)

    def test_groups_position_offset_and_single_sides_equal_the_reference(self):
        first = 60
        report = self.space.report(["hadamard", "hadamard@k", "hadamard@layer:1"], *self.windows,
                                   "--first-position", first, "--position-offset", 3000,
                                   "--quant-group-size", 8)
        rule = self.rule("hadamard", None, group=8)
        self.expect_reference(report, "hadamard", rule, first, 3000)
        only = self.rule("hadamard", None, group=8)
        only.layers = [None, only.layers[1], None]
        self.expect_reference(report, "hadamard@layer:1", only, first, 3000)
        self.assertLess(report["methods"]["hadamard@k"]["kl"]["mean"],
                        report["methods"]["hadamard"]["kl"]["mean"])

    def test_with_the_codec_off_nothing_changes(self):
        report = self.space.report(["exact"], *self.windows)
        self.assertLessEqual(abs(report["methods"]["exact"]["kl"]["mean"]), EXACT_BOUND)
        self.assertEqual(report["methods"]["exact"]["top1"]["mean"], 1.0)

    @unittest.skipUnless((BIN / "oscar-calibrate").exists(), "oscar-calibrate is not built")
    def test_bundles_of_every_preset_equal_the_reference(self):
        corpus = self.space.folder / "calibration.npy"
        np.save(corpus, np.random.default_rng(2).integers(0, 400, size=(6, TOKENS)).astype(np.int32))
        for preset in ("best", "paper"):
            with self.subTest(preset=preset):
                bundle = self.space.folder / f"{preset}.h5"
                run("oscar-calibrate", self.space.checkpoint, corpus, bundle, "--preset", preset,
                    "--sink", SINK, "--recent", RECENT, "--sequence-length", TOKENS, "--device", "cpu",
                    "--quiet")
                first = SINK + RECENT
                report = self.space.report(["bundle", "exact"], "--bundle", bundle, "--sequence-length",
                                           TOKENS, "--first-position", first)
                self.assertLessEqual(abs(report["methods"]["exact"]["kl"]["mean"]), EXACT_BOUND)
                with h5py.File(bundle) as file:
                    rule = int2_reference.Rule(SINK, RECENT, layers=int2_reference.bundle_layers(file))
                self.expect_reference(report, "bundle", rule, first)
                if preset == "best":  # keys have other centers there
                    report = self.space.report(["bundle"], "--bundle", bundle, "--sequence-length", TOKENS,
                                               "--first-position", first, "--position-offset", 3000)
                    self.expect_reference(report, "bundle", rule, first, 3000)


class DefaultModel(unittest.TestCase):
    def check_mode(self, space, reference, mode, prompt):
        """Without a rotation, with Hadamard's, and with the balanced and shaped bundle of the zoo."""
        bundle = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"
        got = space.report(["identity", "hadamard-clip", "bundle"], "--sequence-length", 600, "--mode",
                           mode, "--first-position", 320, "--bundle", bundle)["methods"]
        with h5py.File(bundle) as file:
            layers = {"bundle": int2_reference.bundle_layers(file),
                      "identity": int2_reference.data_free_layers("identity", space.config, 0, 0),
                      "hadamard-clip": int2_reference.data_free_layers("hadamard", space.config, .96, .92)}
        for name in layers:
            with self.subTest(mode=mode, method=name):
                rule = int2_reference.Rule(64, 256, mode=mode, prompt=prompt, layers=layers[name])
                _, log_p = int2_reference.scores(space.model, rule, space.rows, 320)
                kl = int2_reference.divergence(reference, log_p)
                self.assertAlmostEqual(got[name]["kl"]["mean"] / kl, 1, delta=KL_BOUND)

    def test_the_default_model_equals_the_reference_in_every_mode(self):
        checkpoint = SOURCE / "datasets" / "tiny-gqa"
        from transformers import AutoTokenizer
        texts = (json.loads(line)["text"] for line in open(checkpoint / "heldout.jsonl"))
        ids = AutoTokenizer.from_pretrained(checkpoint)("\n".join(
            text for text, _ in zip(texts, range(20))))["input_ids"]
        rows = np.array(ids[:600]).reshape(1, 600)
        with tempfile.TemporaryDirectory() as folder:
            space = Workspace(folder, checkpoint, rows)
            nll, reference = space.reference(320)
            got = space.report(["exact"], "--sequence-length", 600)["methods"]
            self.assertAlmostEqual(got["bf16"]["nll"]["mean"] / nll, 1, delta=NLL_BOUND)
            self.assertLessEqual(abs(got["exact"]["kl"]["mean"]), EXACT_BOUND)
            for mode, prompt in (("decode", 0), ("prefill", 320), ("chunked:128", 10**9)):
                self.check_mode(space, reference, mode, prompt)


if __name__ == "__main__":
    unittest.main()
