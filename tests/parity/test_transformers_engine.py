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
from oscar_int2.calibration.corpus import with_recall
from oscar_int2.calibration.cautions import little_text, stored_convergence
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
from tiny_transformers import FAMILIES, InAFolder, first_layers, random_ids, tiny_model

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
        np.save(self.folder / "few.npy", random_ids(3, TOKENS, 8).numpy().astype(np.int32))
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
    """Four layers of the model of the repository, 12 sequences of 512 tokens, no search; 8 sequences of held-out text."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        from serving_case import MODEL, held_out_ids
        cls.model = first_layers(MODEL, 4, cls.folder / "model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        ids = []
        for line in (MODEL / "calibration.jsonl").read_text().splitlines():
            ids += tokenizer(json.loads(line)["text"])["input_ids"]
            if len(ids) >= 12 * 512:
                break
        np.save(cls.folder / "calibration.npy", np.array(ids[:12 * 512], np.int32).reshape(12, 512))
        np.save(cls.folder / "heldout.npy", np.array(held_out_ids(8 * 640), np.int32).reshape(8, 640))
        cls.native, cls.ours = cls.folder / "native.h5", cls.folder / "ours.h5"
        program("oscar-calibrate", cls.model, cls.folder / "calibration.npy", cls.native, "--search", "off", "--device", "cpu",
                "--dtype", "fp32", "--sequence-length", 512, "--quiet")
        calibrate(cls.model, cls.folder / "calibration.npy", cls.ours, search="off", sequence_length=512, device="cpu")
        reports = {}
        for name, bundle in (("native", cls.native), ("ours", cls.ours)):
            report = cls.folder / f"{name}.json"
            program("oscar-eval", cls.model, "--corpus", cls.folder / "heldout.npy", "--bundle", bundle, "--compare", "bundle",
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
        reports = {bundle: self.report(bundle) for bundle in (self.native, self.ours)}
        native, ours = (report["methods"]["bundle"]["kl"] for report in reports.values())
        self.assertLess(abs(ours["mean"] - native["mean"]), 0.5 * ours["se"])
        for bundle, report in reports.items():
            found = evaluate(self.model, bundle, self.heldout, device="cpu", first_position=16)
            self.assertEqual(found["tokens"], report["tokens"])
            methods = report["methods"]
            self.assertAlmostEqual(found["perplexity"] / methods["bf16"]["ppl"]["mean"], 1, delta=1e-5)
            self.assertAlmostEqual(found["kl"] / methods["bundle"]["kl"]["mean"], 1, delta=0.1)


class OtherModels(InAFolder):
    """Evaluation of models that a bundle is not for, though their classes have one name."""

    def bundle(self, name):
        """That of a tiny model."""
        out = self.folder / f"{name.replace(' ', '-')}.h5"
        if not out.exists():
            calibrate(tiny_model(name), random_ids(4, 120, 3).tolist(), out, format=SHORT, search="off")
        return out

    def evaluated(self, name, model=None, **options):
        return evaluate(model or tiny_model(name), self.bundle(name), random_ids(2, 120, 5).tolist(), **options)

    def refused(self, said, name, **more):
        with self.subTest(name, **more), self.assertRaisesRegex(BundleMismatchError, said):
            self.evaluated(name, tiny_model(name, **more))

    def test_other_weights_are_refused_unless_any_are_accepted(self):
        other = tiny_model("llama")
        with torch.no_grad():
            other.model.layers[2].self_attn.v_proj.weight.mul_(1.5)
        with self.assertRaisesRegex(BundleMismatchError, r'W_V of layer 2 differs, .*weights="any" of evaluate\(\)'):
            self.evaluated("llama", other)
        with self.assertLogs("oscar_int2", "WARNING") as log:
            found = oscar_int2.evaluate(other, self.bundle("llama"), corpus=random_ids(2, 120, 5).tolist(), weights="any",
                                        progress=False)
        self.assertRegex(log.output[0], "was calibrated on other weights than are served: W_V of layer 2")
        self.assertGreater(found.report["methods"]["bundle"]["kl"]["mean"], 0)
        with self.assertNoLogs("oscar_int2", "WARNING"):
            self.evaluated("llama")

    def test_the_command_takes_any_weights_too(self):
        folder, ids = self.folder / "other", self.folder / "ids.npy"
        other = tiny_model("llama")
        with torch.no_grad():
            other.model.layers[0].self_attn.k_proj.weight.neg_()
        other.save_pretrained(folder)
        np.save(ids, random_ids(2, 120, 5).numpy().astype(np.int32))
        words = evaluate_command, folder, self.bundle("llama"), ids, "--device", "cpu"
        status, _, problem = CommandLine.command(*words)
        self.assertEqual(status, 1)
        self.assertIn("W_K of layer 0 differs", problem)
        with self.assertLogs("oscar_int2", "WARNING"):
            status, shown, problem = CommandLine.command(*words, "--weights", "any")
        self.assertEqual(status, 0, problem)
        self.assertIn("over 2-bit rows", shown)

    def test_other_shapes_are_refused(self):
        self.refused("num_kv_heads is 4 here and 2 in the bundle", "llama", num_key_value_heads=4)
        self.refused("num_layers is 3 here and 4", "llama", num_hidden_layers=3)
        self.refused("head_dim is 32 here and 16", "llama", head_dim=32)
        self.refused("layer 0 sees 48 tokens here and 24 in the bundle", "mistral", sliding_window=48)
        self.refused("layer 0 sees 120 tokens here and 24 in the bundle", "mistral", sliding_window=None)

    def test_other_rope_is_refused(self):
        self.refused("rope_theta is 500000.0 here", "llama", rope_parameters=dict(rope_type="default", rope_theta=5e5))
        self.refused("rope_type is yarn here", "llama", rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128))
        # Configs do not say by themselves what these turn by.
        rope = FAMILIES["phi3 longrope"][2]["rope_parameters"]
        self.refused("keys of layer 0 turn by other RoPE here", "phi3 longrope",
                     rope_parameters={**rope, "short_factor": [2.0] * 6})
        self.refused("keys of layer 1 turn by other RoPE here", "llama4", no_rope_layers=[1] * 4,
                     layer_types=["chunked_attention", "full_attention"] * 2)

    def test_a_model_that_turns_otherwise_than_its_config_says_is_not_calibrated(self):
        """As transformers 5.17 does, which does not read rotary_dim of published MiniMax-M2."""
        model, out = tiny_model("minimax_m2"), self.folder / "turned.h5"
        model.config.rope_parameters["partial_rotary_factor"] = 0.75
        with self.assertRaisesRegex(UnsupportedError, f"transformers {transformers.__version__} runs this model with other RoPE.*"
                                                      "partial_rotary_factor is 0.5 here and 0.75 in the config"):
            calibrate(model, random_ids(4, 120, 3).tolist(), out, format=SHORT, search="off")
        del model.config.rope_parameters["partial_rotary_factor"]
        model.config.rotary_dim = 8
        if hasattr(model.config, "partial_rotary_factor"):
            del model.config.partial_rotary_factor
        calibrate(model, random_ids(2, 60, 3).tolist(), out, format=SHORT, statistics_only=True)
        model.config.rotary_dim = 16
        with self.assertRaisesRegex(UnsupportedError, "is 0.5 here and 1.0 in the config"):
            calibrate(model, random_ids(2, 60, 3).tolist(), out, format=SHORT, statistics_only=True, force=True)

    def test_sequences_that_longrope_turns_by_two_kinds_of_frequencies_are_refused(self):
        """Of a model with original_max_position_embeddings 128."""
        mixed = [row.tolist() for row in (random_ids(1, 128, 3)[0], random_ids(1, 129, 4)[0])]
        said = r"LongRoPE turns sequences of more than 128 tokens.*found 128 to 129 tokens; cut them with sequence_length=128"
        for run in (lambda: evaluate(tiny_model("phi3 longrope"), self.bundle("phi3 longrope"), mixed),
                    lambda: calibrate(tiny_model("phi3 longrope"), mixed, self.folder / "mixed.h5", format=SHORT)):
            with self.assertRaisesRegex(ValueError, said):
                run()
        calibrate(tiny_model("phi3 longrope"), mixed, self.folder / "cut.h5", format=SHORT, statistics_only=True, sequence_length=128)

    def test_every_kind_of_model_is_the_one_of_its_own_bundle(self):
        for name in ("phi3 longrope", "cohere2", "exaone4", "llama4", "gpt2", "gpt_neox", "step3p7 whole", "gemma3 whole",
                     "gpt_oss", "smollm3", "qwen3_5", "mistral"):
            with self.subTest(name):
                self.assertGreater(self.evaluated(name)["kl"], 0)

    def test_sequences_are_not_longer_than_the_models_context(self):
        model, ids = tiny_model("llama", max_position_embeddings=100), random_ids(1, 250, 13)[0].tolist()
        found, out = evaluate(model, self.bundle("llama"), ids), self.folder / "short.h5"
        self.assertEqual(found["tokens"], 2 * (100 - 17) + 50 - 17)
        calibrate(model, ids, out, format=SHORT, statistics_only=True)
        with h5py.File(out) as file:
            self.assertEqual(file["corpus"].attrs["chunk_len"], 100)
        said = "sequences would be longer than the model's context: sequence_length is 101, expected at most 100"
        for run in (lambda: evaluate(model, self.bundle("llama"), ids, sequence_length=101),
                    lambda: calibrate(model, ids, self.folder / "long.h5", sequence_length=101)):
            with self.assertRaisesRegex(ValueError, said):
                run()
        # YaRN states the length before scaling.
        scaled = tiny_model("llama", max_position_embeddings=100, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=100))
        calibrate(scaled, ids, self.folder / "scaled.h5", format=SHORT, statistics_only=True, sequence_length=200)
        with self.assertRaisesRegex(ValueError, "is 201, expected at most 200"):
            calibrate(scaled, ids, self.folder / "long.h5", sequence_length=201)


class Callers(InAFolder):
    """What callers give and hold: models, formats, ids."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.bundle = cls.folder / "llama.h5"
        calibrate(tiny_model("llama"), random_ids(4, 120, 3).tolist(), cls.bundle, format=SHORT, search="off")
        cls.ids = random_ids(2, 120, 5).tolist()

    def statistics(self, model, ids=None, **options):
        """Attributes of the cache format in a statistics file."""
        out = self.folder / f"{self.id()}.h5"
        out.unlink(missing_ok=True)
        calibrate(model, self.ids if ids is None else ids, out, statistics_only=True, **{"format": SHORT} | options)
        with h5py.File(out) as file:
            return dict(file["quantizer"].attrs)

    def test_a_model_in_training_goes_on_training(self):
        model = tiny_model("llama", attention_dropout=0.5)
        expected = evaluate(model, self.bundle, self.ids)["perplexity"]
        model.train()
        model.model.layers[1].eval()
        self.assertEqual(evaluate(model, self.bundle, self.ids)["perplexity"], expected)
        self.statistics(model)
        self.assertEqual([model.training, *(layer.training for layer in model.model.layers)], [True, True, False, True, True])

    def test_a_format_is_recorded_whole_and_one_that_does_not_fit_is_refused(self):
        format = CacheFormat(quant_group_size=8, sink_tokens=4, recent_tokens=12, demote_block=4, metadata_dtype=torch.float32)
        found = self.statistics(tiny_model("llama"), format=format)
        self.assertEqual([found[name] for name in ("quant_group_size", "sink_tokens", "recent_tokens", "demote_block")],
                         [8, 4, 12, 4])
        self.assertEqual(found["metadata_dtype"], b"fp32")
        out = self.folder / "group.h5"
        calibrate(tiny_model("llama"), self.ids, out, format=format, search="off")
        self.assertEqual(oscar_int2.load(out).quantizer, format)
        with self.assertRaisesRegex(ValueError, "quant_group_size is 128, expected a divisor of 16"):
            self.statistics(tiny_model("llama"), format=CacheFormat())

    def test_options_that_would_do_nothing_are_refused(self):
        model = tiny_model("llama")
        with self.assertRaisesRegex(ValueError, "dtype is torch.bfloat16, and the model was loaded in torch.float32"):
            evaluate(model, self.bundle, self.ids, dtype=torch.bfloat16)
        self.statistics(model, dtype="float32")
        with self.assertRaisesRegex(ValueError, "fit_options are of the fit, which statistics_only leaves out"):
            self.statistics(model, fit_options=("--method", "oscar"))

    def test_models_that_are_wrapped_or_served_are_named(self):
        model = tiny_model("llama")
        with self.assertRaisesRegex(TypeError, "OptimizedModule.*_orig_mod"):
            evaluate(torch.compile(model, backend="eager"), self.bundle, self.ids)
        apply(model, self.bundle)
        for run in (lambda: evaluate(model, self.bundle, self.ids), lambda: self.statistics(model)):
            with self.assertRaisesRegex(UnsupportedError, r"behind apply\(\).*remove\(model\)"):
                run()
        remove(model)
        evaluate(model, self.bundle, self.ids)

    def test_text_that_reads_no_2_bit_row_is_refused(self):
        """Of windows of 4 + 12 tokens, position 16 reads the first, and position 17 is the first that it predicts."""
        model = tiny_model("llama")
        with self.assertRaisesRegex(ValueError, "no sequence is longer than 17 tokens"):
            evaluate(model, self.bundle, random_ids(3, 17, 5).tolist(), first_position=3)
        ids = random_ids(100, 18, 5).tolist()
        found = evaluate(model, self.bundle, ids, first_position=17)
        self.assertGreater(found["kl"], 0)
        self.assertEqual([one["kind"] for one in found["cautions"]], ["little-text", "predicts-nothing"])  # it is random
        with self.assertRaisesRegex(ValueError, "too few tokens for perplexity from position 17 on: expected at least 100 .*found 99"):
            evaluate(model, self.bundle, ids[1:], first_position=17)

    def test_copies_of_a_text_give_no_intervals(self):
        ids = random_ids(1, 900, 5).tolist()
        found = evaluate(tiny_model("llama"), self.bundle, ids * 6, first_position=17)
        kinds = {one["kind"]: one["sentence"] for one in found["cautions"]}
        self.assertAlmostEqual(found["repeated_share"], 5 / 6)
        self.assertGreater(found["units"], 8)
        self.assertIsNone(found["kl_se"])
        self.assertIn("83% of the evaluation's text repeats itself", kinds["repeated-text"])
        self.assertIn("tokens with copies in", kinds["few-tokens"])
        self.assertEqual(evaluate(tiny_model("llama"), self.bundle, random_ids(6, 900, 5).tolist(),
                                  first_position=17)["repeated_share"], 0)

    def test_tokens_that_read_no_2_bit_row_are_cautioned_of(self):
        for first, said in ((16, []), (15, ["the figures are not those of llama.h5 as it is served: the evaluation counts tokens that "
                                            "read no INT2 row: first_position 15, not 16 or later"])):
            found = evaluate(tiny_model("llama"), self.bundle, self.ids, first_position=first)["cautions"]
            self.assertEqual([one["sentence"] for one in found if one["kind"] == "other-cache"], said)

    def test_a_bundles_verdict_on_its_text_is_the_evaluations(self):
        verdict = {"enough": False, "fall_per_doubling": 0.034, "tokens_needed": 5000, "layers": [1]}
        path = self.folder / "judged.h5"
        for record, said in ((verdict, "is not enough: predicted loss still falls by 3.4% per doubling; use about 5000 tokens"),
                             ({"problem": "too short"}, "could not be judged: too short"), ({"enough": True}, None)):
            with h5py.File(path, "w") as file:
                file.attrs["convergence"] = np.bytes_(json.dumps(record).encode())
            found = stored_convergence(path)
            self.assertNotIn("layers", found)
            self.assertEqual(little_text(found, "judged.h5"), said and f"the calibration text of judged.h5 {said}")

    def test_positions_beyond_the_bundles_are_warned_of(self):
        out, bundle = self.folder / "span.h5", oscar_int2.load(self.bundle)
        calibrate(tiny_model("llama"), self.ids, out, format=SHORT, search="off", fit_options=("--position-span", "0"))
        self.assertEqual((oscar_int2.load(out).positions, bundle.positions), (120, 512))
        for path, warned in ((out, True), (self.bundle, False)):
            with (self.assertLogs if warned else self.assertNoLogs)("oscar_int2", "WARNING") as log:
                evaluate(tiny_model("llama"), path, random_ids(1, 150, 15).tolist())
            if warned:
                self.assertRegex(log.output[0], "150 tokens.*more than the 120 positions")

    def test_centers_are_those_of_the_longest_sequence(self):
        """Whatever sequence comes first."""
        model, ids = tiny_model("llama", max_position_embeddings=2048), random_ids(1, 1500, 6)[0].tolist()
        self.assertIsNotNone(oscar_int2.load(self.bundle).layers[0].key.key_centers)
        one, other = (evaluate(model, self.bundle, order)["int2_perplexity"] for order in ((ids[:600], ids), (ids, ids[:600])))
        self.assertAlmostEqual(one / other, 1, delta=1e-9)

    def test_padding_among_ids_is_warned_of_in_the_words_of_the_programs(self):
        padded = [row[:60] + [0] * 60 for row in self.ids]
        np.save(self.folder / "padded.npy", np.array(padded, np.int32))
        with self.assertLogs("oscar_int2", "WARNING") as log:
            self.statistics(tiny_model("llama"), self.folder / "padded.npy")
        said = "50% of the corpus is token 0 in runs of 32 or more, which looks like padding: leave it out of the ids"
        self.assertEqual([record.getMessage() for record in log.records], [said])
        tiny_model("llama").save_pretrained(self.folder / "saved")
        done = subprocess.run([BIN / "oscar-calibrate", self.folder / "saved", self.folder / "padded.npy", self.folder / "p.h5",
                               "--statistics-only", "--device", "cpu", "--sequence-length", "120"], capture_output=True, text=True,
                              check=True)
        self.assertIn(said, done.stderr)

    def test_stretches_are_repeated_as_oscar_calibrate_repeats_them(self):
        np.save(self.folder / "rows.npy", np.arange(5 * 300, dtype=np.int32).reshape(5, 300) % 61)
        tiny_model("llama").save_pretrained(self.folder / "saved")
        said = {}
        for recall in ("auto", "on"):
            calibrate(tiny_model("llama"), self.folder / "rows.npy", self.folder / f"own-{recall}.h5", statistics_only=True, device="cpu",
                      recall=recall, sequence_length=300, force=True)
            subprocess.run([BIN / "oscar-calibrate", self.folder / "saved", self.folder / "rows.npy", self.folder / f"{recall}.h5",
                            "--statistics-only", "--device", "cpu", "--sequence-length", "300", "--recall", recall, "--force"],
                           capture_output=True, check=True)
            corpora = []
            for name in (f"own-{recall}.h5", f"{recall}.h5"):
                with h5py.File(self.folder / name) as file:
                    corpora.append([str(file["corpus"].attrs.get(key, b""), "utf-8") for key in ("recall", "tokens_sha256")])
            self.assertEqual(*corpora)
            said[recall] = corpora[0]
        self.assertEqual(said["auto"][0], "")  # ids
        self.assertIn(", 300 tokens in all", said["on"][0])
        self.assertNotEqual(said["on"][1], said["auto"][1])
        rows, text = [np.arange(1280)] * 2, [{"kind": "text"}]
        for sources, length, recall, done in ((text, 1280, "auto", True), (text, 1279, "auto", False), ([{}], 1280, "auto", False),
                                              (text, 1280, "off", False), ([{}], 120, "on", True)):
            made, words = with_recall(rows, sources, recall, length, CacheFormat())
            self.assertEqual((words != "", (made[1] != rows[1]).any()), (done, done))
            self.assertTrue((made[0] == np.arange(1280)).all() and (rows[1] == np.arange(1280)).all())
        with self.assertRaisesRegex(ValueError, "recall is 'yes', expected"):
            self.statistics(tiny_model("llama"), self.ids, recall="yes")

    def test_ids_that_are_none_are_refused(self):
        for ids, options, said in (([[3.5] * 50], {}, "expected token ids.*float64"), ([[5]], {}, "^the corpus: no tokens"),
                                   (self.ids, {"max_tokens": -1}, "max_tokens is -1"),
                                   (self.ids, {"sequence_length": 1}, "sequence_length is 1")):
            with self.subTest(said), self.assertRaisesRegex(ValueError, said):
                evaluate(tiny_model("llama"), self.bundle, ids, **options)


class CommandLine(InAFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ids = cls.folder / "ids.npy"
        np.save(cls.ids, random_ids(5, 500, 3).numpy().astype(np.int32))

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
        out.write_text("")  # which --force replaces
        made = subprocess.run([sys.executable, "-m", "oscar_int2", "calibrate", folder, self.ids, out, "--device", "cpu", "--force",
                               "--", "--method", "oscar"], capture_output=True, text=True, check=False,
                              env=os.environ | {"PYTHONPATH": str(BIN.parent / "python")})
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertEqual([layer.attention for layer in oscar_int2.load(out).layers.values()], ["local", "full"] * 2)
        status, shown, problem = self.command(evaluate_command, folder, out, self.ids, "--device", "cpu", "--max-tokens", 1000,
                                              "--json", report)
        self.assertEqual(status, 0, problem)
        found = json.loads(report.read_text())
        self.assertEqual((found["tokens"], found["first_position"]), (2 * (500 - 321), 321))
        self.assertGreater(found["kl"], 0)
        self.assertIn(f"{found['perplexity']:.4f} over exact rows", shown)
        self.assertIn("CAUTION: the evaluation counts 358 tokens in 2 pieces of at most 512 tokens (2 sequences), too few", shown)
        self.assertIn(f"run by      transformers {transformers.__version__}, float32\n", program("oscar-bundle", "inspect", out))

    def test_what_cannot_be_done_is_said_in_a_line(self):
        folder = self.folder / "llama"
        tiny_model("llama").save_pretrained(folder)
        (self.folder / "there.h5").write_text("")
        for words, said in (((folder, "none.npy", "a.h5"), "none.npy: no such file"),
                            ((folder, self.ids, self.folder / "there.h5"), "exists already; choose another name, or replace it with --force"),
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
