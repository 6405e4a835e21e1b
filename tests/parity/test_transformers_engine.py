#!/usr/bin/env python3
"""Both engines on the same checkpoints: sums of oscar-calibrate and of transformers, the bundles that are fitted to them,
and KL over 2-bit rows by oscar-eval and by the package. Then apply() over bundles of families that transformers runs."""
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SOURCE, BIN = (pathlib.Path(os.environ[name]) for name in ("OSCAR_SOURCE", "OSCAR_BIN"))
sys.path[:0] = [str(BIN.parent / "python"), str(SOURCE / "tests" / "serving")]
import h5py
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import oscar_int2
from oscar_int2.calibration import calibrate, evaluate
from oscar_int2.calibration.evaluation import Int2Rows, _over
from oscar_int2.calibration.layers import run_layers
from oscar_int2.calibration.model import observed
from oscar_int2.calibration.shared_text import CAPACITY, caution, ngram_hashes, overlap
from oscar_int2.commands import calibrate as calibrate_command
from oscar_int2.commands import evaluate as evaluate_command
from oscar_int2.errors import BundleMismatchError, UnsupportedError
from oscar_int2.recipe import CacheFormat
from oscar_int2.transformers import apply, remove
from random_families import CASES, make_weights, write_checkpoint
from tiny_transformers import InAFolder, random_ids, tiny_model

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Windows, scaled RoPE, RoPE on a part, experts, other norms, biases: every kind of sum both engines have.
BOTH = ("llama3_biases", "llama_yarn_all_keys", "qwen2_windows", "glm4_moe", "gemma3_scaled", "ministral3", "phi3",
        "minimax_m2")
# Models of images and text, of which both run the text half.
WHOLE = ("qwen3_vl whole", "mistral3 whole", "gemma3 whole")
# Linear layers, which both leave without rows, and gates between attention and W_O.
HYBRID = ("qwen3_5 whole", "qwen3_5_moe", "qwen3_next")
TOKENS = 256  # which the smallest of them serves
# Relative Frobenius norms of float32 runs. Both engines add in float64, but of rows that they round in other orders, which
# grows from layer to layer: at most 9e-7 in the first layer and 2.5e-6 in the last. Sums by attention have an exponential
# on top, of scores that these sharp random models make large: 2.5e-5.
FIRST_BOUND, SUM_BOUND, ATTENDED_BOUND = 2e-6, 1e-5, 1e-4
SERVED = ("llama", "qwen2", "qwen3_moe", "glm4", "glm4_moe", "hy_v3", "seed_oss", "smollm3", "cohere", "olmo2", "minimax_m2",
          "ministral3", "mistral3 whole", "qwen3_vl whole")
NATIVE = ("hy_v3", "seed_oss", "minimax_m2", "ministral3", "mistral3 whole", "qwen3_vl whole")
SHORT = CacheFormat(quant_group_size=0, sink_tokens=4, recent_tokens=12)


def program(name, *words):
    done = subprocess.run([BIN / name, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{name}: {done.stderr}")
    return done.stdout


def relative(a, b):
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300))


class SameCheckpoints(InAFolder):
    def test_sums_and_what_is_said_of_model_and_text_are_those_of_oscar_calibrate(self):
        ids = torch.randint(0, 512, (3, TOKENS), generator=torch.Generator().manual_seed(7)).numpy()
        np.save(self.folder / "ids.npy", ids.astype(np.int32))
        np.save(self.folder / "few.npy", random_ids(3, TOKENS, 7).numpy().astype(np.int32))
        for name in BOTH + WHOLE + HYBRID:
            with self.subTest(model=name):
                tiny = name in WHOLE + HYBRID
                folder, ids = self.folder / name, self.folder / ("few.npy" if tiny else "ids.npy")
                if tiny:
                    tiny_model(name).save_pretrained(folder)
                else:
                    write_checkpoint(folder, CASES[name], 5, None)
                    write_checkpoint(folder, CASES[name], 5, make_weights(folder, seed=11))
                native, ours = self.folder / f"{name}.h5", self.folder / f"{name}-ours.h5"
                program("oscar-calibrate", folder, ids, native, "--statistics-only", "--device", "cpu",
                        "--dtype", "fp32", "--sequence-length", TOKENS, "--sink", 4, "--recent", 12, "--quiet")
                calibrate(folder, ids, ours, statistics_only=True, sequence_length=TOKENS, device="cpu", format=SHORT)
                self.compare(native, ours)

    def compare(self, native, ours):
        with h5py.File(native) as a, h5py.File(ours) as b:
            theirs, own = {}, {}
            for file, found in ((a, theirs), (b, own)):
                file.visititems(lambda path, item, found=found: found.__setitem__(path, item))
            self.assertEqual(set(theirs), set(own))
            self.assertEqual(b["model"].attrs["engine"].decode(), f"transformers {transformers.__version__}, float32")
            for path, item in theirs.items():
                if isinstance(item, h5py.Dataset):
                    self.assertEqual((item.dtype, item.shape), (own[path].dtype, own[path].shape), path)
                    if item.dtype.kind == "f" and "samples" not in path:
                        bound = FIRST_BOUND if path.startswith("layers/000") else (
                            ATTENDED_BOUND if "attended" in path or "sink" in path else SUM_BOUND)
                        self.assertLess(relative(own[path][()], item[()]), bound, path)
                    else:
                        np.testing.assert_array_equal(own[path][()], item[()], path)
                elif path == "model" or path.count("/") == 1:
                    attributes = dict(own[path].attrs)
                    attributes.pop("engine", None)
                    self.assertEqual(dict(item.attrs), attributes, path)
            for name in ("tokens", "tokens_sha256", "chunk_len"):
                self.assertEqual(a["corpus"].attrs[name], b["corpus"].attrs[name], name)


class SharedText(unittest.TestCase):
    """The sample of n-grams: what tests/text/ngram_fingerprint_test.cpp asks of the C++ one."""

    def test_hashes_are_those_of_the_written_rule(self):
        for ids, expected in ((range(13), 7438678305273411068), ([8191] * 13, 8872423469563703425),
                              ([0] * 13, 3010792084047725210)):
            self.assertEqual(ngram_hashes([list(ids)]).tolist(), [expected])

    def test_overlap_is_all_of_the_same_text_and_nothing_of_another(self):
        text, other = np.random.default_rng(8).integers(0, 8192, (2, 20, 5000))
        known = ngram_hashes(text)
        self.assertEqual((len(known), (np.diff(known) > 0).all()), (CAPACITY, True))
        same, none = overlap(known, text), overlap(known, other)
        self.assertEqual((same["sampled"], same["found"]), (CAPACITY, CAPACITY))
        self.assertGreater(none["sampled"], CAPACITY / 2)
        self.assertEqual((none["found"], caution(none, "a.h5")), (0, None))
        self.assertEqual(overlap(known[:0], text), {"known": False})
        self.assertFalse(overlap(known, [text[0][:5]])["known"])


class TinyGqa(InAFolder):
    """The model of the repository, 12 sequences of 512 tokens, no search; 8 sequences of held-out text."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        from serving_case import MODEL, held_out_ids
        cls.model = MODEL
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        ids = []
        for line in (MODEL / "calibration.jsonl").read_text().splitlines():
            ids += tokenizer(json.loads(line)["text"])["input_ids"]
            if len(ids) >= 12 * 512:
                break
        np.save(cls.folder / "calibration.npy", np.array(ids[:12 * 512], np.int32).reshape(12, 512))
        np.save(cls.folder / "heldout.npy", np.array(held_out_ids(8 * 640), np.int32).reshape(8, 640))
        cls.native, cls.ours = cls.folder / "native.h5", cls.folder / "ours.h5"
        program("oscar-calibrate", MODEL, cls.folder / "calibration.npy", cls.native, "--search", "off", "--device", "cpu",
                "--dtype", "fp32", "--sequence-length", 512, "--quiet")
        calibrate(MODEL, cls.folder / "calibration.npy", cls.ours, search="off", sequence_length=512, device="cpu")
        reports = {}
        for name, bundle in (("native", cls.native), ("ours", cls.ours)):
            report = cls.folder / f"{name}.json"
            program("oscar-eval", MODEL, "--corpus", cls.folder / "heldout.npy", "--bundle", bundle, "--compare", "bundle",
                    "--device", "cpu", "--dtype", "fp32", "--sequence-length", 640, "--separators", "off", "--quiet",
                    "--json", report)
            reports[name] = json.loads(report.read_text())
        cls.reports = reports

    def test_bundles_of_both_engines_have_one_kl_on_held_out_text(self):
        native, ours = (self.reports[name]["methods"]["bundle"]["kl"] for name in ("native", "ours"))
        self.assertLess(abs(ours["mean"] - native["mean"]), 0.5 * ours["se"])

    def test_transforms_are_those_of_oscar_calibrate(self):
        with h5py.File(self.native) as a, h5py.File(self.ours) as b:
            for layer in a["layers"]:
                for name in ("k_rotation", "v_rotation"):
                    ours, theirs = (file[f"layers/{layer}/{name}"][()].astype(float) for file in (b, a))
                    # What codes depend on: T T^T says how errors of a row are shaped, whatever signs columns have.
                    self.assertLess(relative(ours @ ours.transpose(0, 2, 1), theirs @ theirs.transpose(0, 2, 1)), 1e-2)
                for side in "kv":
                    np.testing.assert_array_equal(a[f"layers/{layer}/{side}_kind"][()], b[f"layers/{layer}/{side}_kind"][()])

    def test_figures_of_the_package_are_those_of_oscar_eval(self):
        found = evaluate(self.model, self.ours, self.folder / "heldout.npy", device="cpu", first_position=320)
        methods = self.reports["ours"]["methods"]
        self.assertEqual(found["tokens"], self.reports["ours"]["tokens"])
        self.assertAlmostEqual(found["perplexity"] / methods["bf16"]["ppl"]["mean"], 1, delta=1e-5)
        self.assertAlmostEqual(found["kl"] / methods["bundle"]["kl"]["mean"], 1, delta=0.1)
        self.assertEqual(found["overlap"], self.reports["ours"]["bundle"]["overlap"])
        self.assertTrue(found["overlap"]["known"])

    def test_calibration_text_is_cautioned_of_in_the_words_of_oscar_eval(self):
        text, report = self.folder / "calibration.npy", self.folder / "same.json"
        program("oscar-eval", self.model, "--corpus", text, "--bundle", self.ours, "--compare", "bundle", "--device", "cpu",
                "--sequence-length", 512, "--max-tokens", 1024, "--separators", "off", "--quiet", "--json", report)
        with self.assertLogs("oscar_int2", "WARNING") as log:
            found = evaluate(self.model, self.ours, text, device="cpu", sequence_length=512, max_tokens=1024)
        self.assertEqual(found["overlap"], json.loads(report.read_text())["bundle"]["overlap"])
        self.assertEqual(found["overlap"]["share"], 1)
        said = ("CAUTION: 100% of the evaluation's 13-grams are in the calibration text of ours.h5: the figures flatter the "
                "bundle; evaluate on other text")
        self.assertEqual([record.getMessage() for record in log.records], [said])


class Hybrid(InAFolder):
    """A model with linear layers and output gates: bundles of both engines without a search, and KL on other text."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model, cls.heldout = cls.folder / "model", cls.folder / "heldout.npy"
        tiny_model("qwen3_5 whole").save_pretrained(cls.model)
        np.save(cls.folder / "ids.npy", random_ids(12, TOKENS, 7).numpy().astype(np.int32))
        np.save(cls.heldout, random_ids(8, TOKENS, 8).numpy().astype(np.int32))
        cls.native, cls.ours = cls.folder / "native.h5", cls.folder / "ours.h5"
        program("oscar-calibrate", cls.model, cls.folder / "ids.npy", cls.native, "--search", "off", "--device", "cpu",
                "--dtype", "fp32", "--sequence-length", TOKENS, "--sink", 4, "--recent", 12, "--quiet")
        calibrate(cls.model, cls.folder / "ids.npy", cls.ours, search="off", sequence_length=TOKENS, device="cpu",
                  format=SHORT)

    def report(self, bundle):
        out = self.folder / "report.json"
        program("oscar-eval", self.model, "--corpus", self.heldout, "--bundle", bundle, "--compare", "bundle", "--device",
                "cpu", "--dtype", "fp32", "--sequence-length", TOKENS, "--separators", "off", "--quiet", "--force", "--json",
                out)
        return json.loads(out.read_text())

    def test_transforms_are_those_of_oscar_calibrate(self):
        with h5py.File(self.native) as a, h5py.File(self.ours) as b:
            self.assertEqual([a["layers"][layer].attrs["attention"].decode() for layer in a["layers"]],
                             ["none", "none", "none", "full"])
            for name in ("k_rotation", "v_rotation"):
                ours, theirs = (file[f"layers/003/{name}"][()].astype(float) for file in (b, a))
                self.assertLess(relative(ours @ ours.transpose(0, 2, 1), theirs @ theirs.transpose(0, 2, 1)), 1e-2)

    def test_kl_is_one_whoever_calibrates_and_whoever_measures(self):
        native, ours = (self.report(bundle)["methods"]["bundle"]["kl"] for bundle in (self.native, self.ours))
        self.assertLess(abs(ours["mean"] - native["mean"]), 0.5 * ours["se"])
        for bundle in (self.native, self.ours):
            report = self.report(bundle)
            found = evaluate(self.model, bundle, self.heldout, device="cpu", first_position=16)
            self.assertEqual(found["tokens"], report["tokens"])
            methods = report["methods"]
            self.assertAlmostEqual(found["perplexity"] / methods["bf16"]["ppl"]["mean"], 1, delta=1e-5)
            self.assertAlmostEqual(found["kl"] / methods["bundle"]["kl"]["mean"], 1, delta=0.1)


class CommandLine(InAFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ids = cls.folder / "ids.npy"
        np.save(cls.ids, random_ids(5, 700, 3).numpy().astype(np.int32))

    @staticmethod
    def command(command, *words):
        """(exit status, standard output, standard error) of a command of the package, run in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command.main([str(word) for word in words])
        return status, out.getvalue(), err.getvalue()

    def test_a_saved_model_is_calibrated_and_evaluated(self):
        folder, out, report = (self.folder / name for name in ("cohere2", "cohere2.h5", "report.json"))
        tiny_model("cohere2").save_pretrained(folder)
        made = subprocess.run([sys.executable, "-m", "oscar_int2", "calibrate", folder, self.ids, out, "--device", "cpu", "--",
                               "--method", "oscar"], capture_output=True, text=True, check=False,
                              env=os.environ | {"PYTHONPATH": str(BIN.parent / "python")})
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertEqual([layer.attention for layer in oscar_int2.load(out).layers.values()], ["local", "full"] * 2)
        status, shown, problem = self.command(evaluate_command, folder, out, self.ids, "--device", "cpu", "--max-tokens", 1400,
                                              "--json", report)
        self.assertEqual(status, 0, problem)
        found = json.loads(report.read_text())
        self.assertEqual((found["tokens"], found["first_position"]), (2 * (700 - 321), 321))
        self.assertGreater(found["kl"], 0)
        self.assertIn(f"{found['perplexity']:.4f} over exact rows", shown)
        self.assertIn(f"run by      transformers {transformers.__version__}, float32\n", program("oscar-bundle", "inspect", out))

    def test_what_cannot_be_done_is_said_in_a_line(self):
        folder = self.folder / "llama"
        tiny_model("llama").save_pretrained(folder)
        (self.folder / "there.h5").write_text("")
        for words, said in (((folder, "none.npy", "a.h5"), "none.npy: no such file"),
                            ((folder, self.ids, self.folder / "there.h5"), "exists already"),
                            ((folder, self.ids, "a.h5", "--dtype", "int8"), "--dtype is 'int8'"),
                            ((folder, self.ids, "a.h5", "--max-tokens", "1"), "--max-tokens is 1")):
            with self.subTest(said):
                status, _, problem = self.command(calibrate_command, *words)
                self.assertEqual((status, problem.count("\n")), (1, 1), problem)
                self.assertIn(said, problem)

    def test_code_of_a_checkpoint_is_not_run(self):
        folder = self.folder / "own-code"
        tiny_model("llama").save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "modeling_own.py").write_text("raise SystemExit('it was run')\n")
        status, _, problem = self.command(calibrate_command, folder, self.ids, "a.h5")
        self.assertEqual(status, 1)
        self.assertIn("--trust-remote-code", problem)


class Served(InAFolder):
    """apply() of bundles of both engines, whichever of them runs the model."""

    def out(self, name):
        return self.folder / f"{name.replace(' ', '-')}.h5"

    def native(self, name):
        """The folder of a model, and its bundle by oscar-calibrate."""
        folder, bundle = self.folder / name, self.out(f"{name} native")
        if not bundle.exists():
            tiny_model(name).save_pretrained(folder)
            np.save(self.folder / "few.npy", random_ids(4, 120, 3).numpy().astype(np.int32))
            program("oscar-calibrate", folder, self.folder / "few.npy", bundle, "--search", "off", "--device", "cpu",
                    "--dtype", "fp32", "--sequence-length", 120, "--sink", 4, "--recent", 12, "--position-span", 512, "--quiet")
        return folder, oscar_int2.load(bundle)

    def check(self, model, bundle):
        ids = random_ids(1, 70, 9)
        with torch.no_grad(), observed(model):
            expected = run_layers(model, [ids], visit=_over(Int2Rows(bundle).of_layer)).logits(0)
            exact = model(ids, use_cache=False).logits
        apply(model, bundle, demote_block=1, prompts="int2")
        try:
            with torch.no_grad():
                served = model(ids, use_cache=False).logits
            answer = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        finally:
            remove(model)
        self.assertEqual(answer.shape, (1, 75))
        scale = exact.std()
        self.assertLess(float((served - expected).abs().mean() / scale), 0.25 * float((served - exact).abs().mean() / scale))

    def test_passes_behind_apply_predict_what_evaluation_does(self):
        for name in SERVED:
            with self.subTest(family=name):
                model = tiny_model(name)
                calibrate(model, random_ids(4, 120, 3).tolist(), self.out(name), format=SHORT, search="off",
                          fit_options=("--position-span", "512"))
                self.check(model, oscar_int2.load(self.out(name)))

    def test_bundles_of_oscar_calibrate_are_those_of_the_model_in_its_folder(self):
        for name in NATIVE:
            with self.subTest(family=name):
                folder, bundle = self.native(name)
                kind = AutoModelForImageTextToText if name in WHOLE else AutoModelForCausalLM
                self.check(kind.from_pretrained(folder), bundle)

    def test_bundles_of_other_models_and_of_local_layers_are_refused(self):
        _, bundle = self.native("qwen3_vl whole")
        for other in ("mistral3 whole", "qwen3"):
            with self.subTest(model=other), self.assertRaisesRegex(BundleMismatchError, "Qwen3VLForConditionalGeneration"):
                apply(tiny_model(other), bundle)
        model = tiny_model("qwen3_vl whole")
        with torch.no_grad():
            model.model.language_model.layers[1].self_attn.k_proj.weight.mul_(1.5)
        with self.assertRaisesRegex(BundleMismatchError, "other weights"):
            apply(model, bundle)
        folder, bundle = self.native("gemma3 whole")
        with self.assertRaises(UnsupportedError):
            apply(AutoModelForImageTextToText.from_pretrained(folder), bundle)


if __name__ == "__main__":
    unittest.main(verbosity=2)
