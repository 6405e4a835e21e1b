#!/usr/bin/env python3
"""Calibration and evaluation from Python: the bytes and figures of the programs, their errors, progress, and Ctrl-C."""
import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import numpy as np
import torch
import transformers

from serving_case import BUNDLE, MODEL, SOURCE
import oscar_int2
import oscar_int2.transformers
from oscar_int2 import programs

DATA = SOURCE / "datasets" / "tiny-gqa"
CALIBRATION, HELDOUT = DATA / "calibration.jsonl", DATA / "heldout.jsonl"
FAST = {"device": "cpu", "search": "off", "separators": "off", "max_tokens": 4096, "sequence_length": 1024}


class Api(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.place = pathlib.Path(cls.folder.name)
        cls.bundle = oscar_int2.calibrate("tiny-gqa", CALIBRATION, cls.place / "x.h5", progress=False, **FAST)
        cls.evaluated = oscar_int2.evaluate("tiny-gqa", cls.bundle, corpus=HELDOUT, progress=False, device="cpu", max_tokens=4096,
                                            sequence_length=1024, compare=["bf16", "bundle"], separators=16, layer_errors=True)

    def program(self, name, *words):
        result = subprocess.run([programs.find(name), *map(str, words)], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_a_bundle_is_the_one_that_the_program_writes(self):
        self.program("oscar-calibrate", "tiny-gqa", CALIBRATION, self.place / "y.h5", *programs.options(("oscar-calibrate",), FAST))
        self.assertEqual(oscar_int2.load(self.place / "y.h5").content_sha256, self.bundle.content_sha256)

    def test_false_turns_off_what_it_names_or_is_refused(self):
        for program, off in ((("oscar-calibrate",), {"center", "clip", "search", "separators"}), (("oscar-eval",), {"separators"}),
                             (("oscar-bundle", "fit"), {"center", "clip"}), (("oscar-bundle", "import"), {"center"}),
                             (("oscar-bundle", "plan"), set())):
            found = programs.switched(*program)
            self.assertIn("force", found)
            del found["help"]
            turned = set()
            for name, (flag, takes_off) in found.items():
                if flag:  # to the program too
                    self.assertEqual(programs.options(program, {name: False}), [])
                    self.assertEqual(programs.options(program, {name: True}), ["--" + name])
                    words = [programs.find(program[0]), *program[1:], f"--{name}=neither"]
                    self.assertIn("neither", subprocess.run(words, capture_output=True, text=True, check=False).stderr, name)
                elif takes_off:
                    self.assertEqual(programs.options(program, {name: False}), [f"--{name}=off"])
                    turned.add(name)
                else:
                    with self.assertRaisesRegex(ValueError, f"--{name} of"):
                        programs.options(program, {name: False})
            self.assertEqual(turned, off)
        with self.assertRaisesRegex(ValueError, "unknown option --no-such"):
            oscar_int2.plan("tiny-gqa", no_such=False)
        with self.assertRaisesRegex(ValueError, "--search"):
            oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "n.h5", progress=False, **FAST | {"search": True})

    def test_false_is_what_off_is(self):
        same = oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "off.h5", progress=False, resume=False,
                                    **FAST | {"search": False, "separators": False})
        self.assertEqual(same.content_sha256, self.bundle.content_sha256)
        off, false, left = (oscar_int2.fit(self.bundle, self.place / "part.h5", force=True, key_centers="one", center=value,
                                           clip=value).content_sha256 for value in ("off", False, None))
        self.assertEqual(off, false)
        self.assertNotEqual(off, left)

    def test_a_bundle_says_what_it_is_on_one_line_and_all_when_asked(self):
        self.assertRegex(repr(self.bundle), r"^<Bundle .*x\.h5: tiny-gqa, 8 of 8 layers in 2 bits, sha256 [0-9a-f]{16}>$")
        self.assertEqual(self.bundle.inspect()["content_sha256"], self.bundle.content_sha256)

    def test_statistics_are_sums_and_counts(self):
        found = self.bundle.statistics()
        self.assertEqual(list(found), list(self.bundle.layers))
        layer = found[3]
        self.assertEqual(layer["q_moment"].shape, (2, 128, 128))
        np.testing.assert_allclose(layer["q_moment"], layer["q_moment"].swapaxes(1, 2))
        self.assertEqual(int(np.ravel(layer["count_kv"])[0]), 4096)
        published = oscar_int2.load(SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5")
        self.assertEqual(published.statistics(), {})

    def test_a_fit_from_statistics_needs_no_model(self):
        fitted = oscar_int2.fit(self.bundle, self.place / "paper.h5", preset="paper", force=True)
        self.assertEqual(fitted.inspect()["preset"], "paper")
        self.assertEqual(fitted.layers[0].key.kind.tolist(), [2, 2])

    def test_own_matrices_become_a_bundle(self):
        numbers = np.random.default_rng(5)
        keys, values = (np.linalg.qr(numbers.standard_normal((8, 2, 128, 128)))[0] for _ in range(2))
        made = oscar_int2.import_rotation(keys, torch.from_numpy(values), "tiny-gqa", self.place / "own.h5", force=True)
        np.testing.assert_allclose(made.layers[5].key.forward, keys[5], atol=1e-6)
        np.testing.assert_allclose(made.layers[5].value.forward, values[5], atol=1e-6)

    def test_own_matrices_get_the_writer_of_a_calibration(self):
        keys, values = (torch.stack([getattr(layer, side).forward for layer in self.bundle.layers.values()]) for side in ("key", "value"))
        made = oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "written.h5", force=True, statistics=self.bundle.path)
        for layer_id, layer in self.bundle.layers.items():
            for side in ("key", "value"):
                ours, own = getattr(layer, side), getattr(made.layers[layer_id], side)
                np.testing.assert_allclose(own.feedback, ours.feedback, atol=1e-4, err_msg=f"layer {layer_id}, {side}")
                np.testing.assert_allclose(own.metric, ours.metric, atol=1e-3, rtol=1e-3)
                self.assertEqual(own.scale_correction.tolist(), [2, 2])
            np.testing.assert_allclose(made.layers[layer_id].value.mean, layer.value.mean, atol=1e-6)
        plain = oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "plain.h5", force=True)
        self.assertIsNone(plain.layers[0].key.feedback)
        part = oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "part.h5", force=True, statistics=self.bundle.path,
                                          rounding="plain", scale_correction="unbiased", center="off")
        self.assertIsNone(part.layers[0].key.feedback)
        self.assertEqual((part.layers[0].key.scale_correction.tolist(), part.layers[0].key.mean.any().item()), ([1, 1], False))
        kl = {row["method"]: row["mean"] for row in oscar_int2.evaluate(
            "tiny-gqa", {"written": made.path, "plain": plain.path}, corpus=HELDOUT, progress=False, device="cpu", max_tokens=4096,
            sequence_length=1024, compare=["bf16", "written", "plain"], separators="off").rows()
            if row["metric"] == "kl" and row["position"] is None}
        self.assertLess(kl["written"], kl["plain"])
        with self.assertRaisesRegex(ValueError, "--statistics"):
            oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "part.h5", force=True, rounding="shaped")
        with self.assertRaisesRegex(oscar_int2.OscarError, "no statistics"):
            oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "part.h5", force=True,
                                       statistics=SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5")

    def test_a_plan_is_a_dictionary(self):
        self.assertEqual(oscar_int2.plan("tiny-gqa", gpu_memory="80G", context=4096),
                         json.loads(self.program("oscar-bundle", "plan", "tiny-gqa", "--gpu-memory", "80G", "--context", 4096,
                                                 "--json", "-")))

    def test_an_evaluation_has_the_figures_of_the_report(self):
        report = json.loads(self.program("oscar-eval", "tiny-gqa", "--bundle", self.bundle.path, "--corpus", HELDOUT, "--device", "cpu",
                                         "--max-tokens", 4096, "--sequence-length", 1024, "--compare", "bf16,bundle", "--separators", 16,
                                         "--layer-errors", "--json", "-"))
        report["command"] = self.evaluated.report["command"]
        self.assertEqual(self.evaluated.report, report)
        self.assertEqual(self.evaluated.methods, ["bf16", "bundle"])
        self.assertRegex(repr(self.evaluated), r"^<Evaluation of [\d,]+ tokens: bf16, bundle KL [\d.e-]+>$")
        self.assertIn("bundle", str(self.evaluated))

    def one(self, **where):
        found = [row for row in self.evaluated.rows() if where.items() <= row.items()]
        self.assertEqual(len(found), 1, where)
        return found[0]

    def test_every_figure_has_a_row(self):
        method = self.evaluated.report["methods"]["bundle"]
        row = self.one(text="as is", method="bundle", metric="kl", position=None)
        self.assertEqual((row["mean"], row["se"], row["low"]), (method["kl"]["mean"], method["kl"]["se"], None))
        row = self.one(text="as is", method="bundle", metric="nll_increase")
        self.assertEqual((row["low"], row["high"]), (method["nll_increase"]["low"], method["nll_increase"]["high"]))
        self.assertEqual(self.one(text="as is", method="bundle", metric="output_nmse", layer=6, head=1)["mean"],
                         method["output_nmse_heads"][6][1])
        self.assertEqual(self.one(text="as is", method="bundle", metric="layer_error_key", layer=2, head=0)["mean"],
                         method["layer_errors"]["key"][2][0])
        self.assertEqual(self.one(text="as is", method="bundle", metric="kl_p99")["mean"], method["kl"]["percentiles"]["99"])
        positions = self.evaluated.report["positions"]
        self.assertEqual(self.one(text="as is", method="bundle", metric="kl", position=positions[-2])["mean"],
                         method["kl"]["by_position"][-1])
        apart = self.evaluated.report["separators"]["methods"]["bundle"]
        self.assertEqual(self.one(text="separators", method="bundle", metric="top1")["mean"], apart["top1"]["mean"])

    def test_needles_have_rows_by_kind_length_and_depth(self):
        zoo = json.loads((SOURCE / "rotation_zoo" / "smollm2-135m-instruct" / "evaluation.json").read_text())
        rows = [row for row in oscar_int2.Evaluation(zoo).rows() if row["method"] == "bundle" and row["metric"] == "needles"]
        needles = zoo["methods"]["bundle"]["niah"]
        self.assertEqual([row["mean"] for row in rows if row["kind"] is None and row["length"] is None], [needles["rate"]])
        self.assertEqual({row["kind"]: row["mean"] for row in rows if row["kind"]},
                         {kind: values["rate"] for kind, values in needles["kinds"].items()})
        self.assertEqual(sum(row["length"] is not None for row in rows), len(needles["cells"]))

    def test_a_frame_is_of_pandas_where_that_is_there(self):
        with mock.patch.dict(sys.modules, pandas=None):
            self.assertEqual(self.evaluated.frame(), self.evaluated.rows())
        made = mock.Mock()
        with mock.patch.dict(sys.modules, pandas=made):
            self.assertIs(self.evaluated.frame(), made.DataFrame.return_value)
        (rows,), columns = made.DataFrame.call_args
        self.assertEqual(set(rows[0]), set(columns["columns"]))

    def test_the_page_is_drawn_from_the_report(self):
        self.evaluated.save_html(self.place / "page.html")
        self.assertIn("<html", (self.place / "page.html").read_text())

    def test_what_a_program_refuses_is_an_exception_with_its_words(self):
        with self.assertRaisesRegex(ValueError, "--no-such-option"):
            oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "z.h5", no_such_option=True)
        with self.assertRaisesRegex(oscar_int2.OscarError, "nosuch.jsonl") as failed:
            oscar_int2.calibrate("tiny-gqa", "nosuch.jsonl", self.place / "z.h5", device="cpu")
        self.assertNotIn("error:", str(failed.exception))
        with self.assertRaisesRegex(oscar_int2.OscarError, "exists"):
            oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "x.h5", **FAST)
        with self.assertRaisesRegex(TypeError, "not int"):
            oscar_int2.calibrate(3, CALIBRATION, self.place / "z.h5")
        with mock.patch.object(programs, "find", side_effect=oscar_int2.OscarError("not installed")), \
                self.assertRaisesRegex(oscar_int2.OscarError, "not installed"):
            oscar_int2.plan("tiny-gqa")

    def test_an_option_that_makes_nothing_to_return_is_refused_by_name(self):
        there, loaded = self.bundle.path, mock.Mock(spec=["named_parameters"])
        calls = {"oscar-calibrate": lambda **o: oscar_int2.calibrate("tiny-gqa", CALIBRATION, there, **o),
                 "oscar-calibrate ": lambda **o: oscar_int2.calibrate(loaded, CALIBRATION, there, **o),
                 "oscar-eval": lambda **o: oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, **o),
                 "oscar-eval ": lambda **o: oscar_int2.evaluate(loaded, self.bundle, corpus=HELDOUT, **o)}
        others = {"oscar-bundle fit": lambda **o: oscar_int2.fit(self.bundle, there, **o),
                  "oscar-bundle import": lambda **o: oscar_int2.import_rotation([], [], "tiny-gqa", there, **o),
                  "oscar-bundle plan": lambda **o: oscar_int2.plan("tiny-gqa", **o)}
        with mock.patch.object(programs, "run", side_effect=AssertionError("it ran")):
            for program, call in (calls | others).items():
                for name, option in (("dry_run", "--dry-run"), ("help", "--help"), ("version", "--version")):
                    with self.subTest(program=program, name=name), self.assertRaisesRegex(
                            ValueError, f"^{name}=True: .*`{program.strip()} ... {option}` itself"):
                        call(**{name: True})
            with self.assertRaisesRegex(ValueError, "or plan.. for the memory"):
                calls["oscar-calibrate"](dry_run=True)
            with self.assertRaisesRegex(AssertionError, "it ran"):
                calls["oscar-calibrate"](dry_run=False)

    def test_statistics_alone_are_a_path_that_fit_takes(self):
        sums = oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "sums.h5", progress=False, statistics_only=True, **FAST)
        self.assertEqual(sums, self.place / "sums.h5")
        ours, whole = (oscar_int2.fit(source, self.place / f"of_{i}.h5", preset="paper") for i, source in enumerate((sums, self.bundle)))
        self.assertTrue(torch.equal(ours.layers[3].key.forward, whole.layers[3].key.forward))

    def test_a_bundle_whose_file_has_changed_is_refused(self):
        path = self.place / "replaced.h5"
        shutil.copy(self.bundle.path, path)
        bundle = oscar_int2.load(path)
        options = {"corpus": HELDOUT, "progress": False, "max_tokens": 1280, "sequence_length": 640, "device": "cpu"}
        oscar_int2.fit(bundle, self.place / "other.h5", preset="paper")  # the file is as it was
        for text, change in (("replaced.h5 has changed since it was loaded.*load.. it again", lambda: shutil.copy(self.place / "other.h5", path)),
                             ("can't be read any more", path.unlink)):
            change()
            for call in (lambda: oscar_int2.evaluate("tiny-gqa", bundle, **options),
                         lambda: oscar_int2.evaluate("tiny-gqa", {"a": bundle}, **options),
                         lambda: oscar_int2.fit(bundle, self.place / "never.h5"), bundle.inspect, bundle.statistics):
                with self.assertRaisesRegex(oscar_int2.BundleError, text):
                    call()
            if path.exists():
                with self.assertRaisesRegex(oscar_int2.BundleError, text):
                    oscar_int2.evaluate(MODEL, bundle, engine="transformers", **options)
        self.assertFalse((self.place / "never.h5").exists())

    def test_a_bundle_that_was_edited_is_refused(self):
        edits = (lambda b: b.layers[2].key.forward[0].copy_(torch.eye(128)), lambda b: b.layers[7].value.mean.numpy().fill(1),
                 lambda b: b.layers.pop(3), lambda b: b.model.rope.update(rope_theta=1.0), lambda b: b.layers[1].weight_samples.data.zero_())
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        for edit in edits:
            bundle = oscar_int2.load(self.bundle.path)
            bundle.require_as_in_file()
            edit(bundle)
            for call in (lambda: oscar_int2.evaluate("tiny-gqa", bundle, corpus=HELDOUT), lambda: oscar_int2.transformers.apply(model, bundle),
                         lambda: oscar_int2.evaluate(model, bundle, corpus=HELDOUT), lambda: oscar_int2.Generator(model, bundle)):
                with self.assertRaisesRegex(oscar_int2.BundleError, "was edited in memory.*load.. it again; .*import_rotation"):
                    call()
        made = dataclasses.replace(self.bundle, positions=5)
        with self.assertRaisesRegex(oscar_int2.BundleError, "not the one that load.. read.*Give a path"):
            oscar_int2.evaluate("tiny-gqa", made, corpus=HELDOUT)

    def test_a_missing_program_is_named(self):
        with mock.patch.dict(os.environ, PATH="", OSCAR_BIN=""), mock.patch.object(programs, "CHECKOUT", None), \
                self.assertRaisesRegex(oscar_int2.OscarError, "oscar-eval is not installed"):
            programs.find("oscar-eval")

    def test_stages_become_bars_and_notes_become_a_log(self):
        bars = []

        def bar(**words):
            bars.append((words, mock.Mock(n=0)))
            return bars[-1][1]
        with mock.patch("tqdm.auto.tqdm", bar), self.assertLogs("oscar_int2", logging.INFO) as log:
            oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "bars.h5", **FAST)
        self.assertTrue(bars)
        self.assertTrue(all(made.close.called for _, made in bars))
        self.assertIn(" token-layers", [words["unit"] for words, _ in bars])
        self.assertTrue(any("token-layers" in line for line in log.output), log.output)
        self.assertTrue(any("end a document or a turn" in line for line in log.output), log.output)  # a note

    def test_ctrl_c_saves_and_the_run_goes_on_from_there(self):
        out = self.place / "stopped.h5"
        options = FAST | {"max_tokens": 16384}
        begun = threading.Event()

        def stop():
            begun.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
        show = programs.Bars.show

        def seen(bars, told):
            if told["done"] > 0:
                begun.set()
            show(bars, told)
        thread = threading.Thread(target=stop)
        thread.start()
        with mock.patch.object(programs.Bars, "show", seen), self.assertRaisesRegex(KeyboardInterrupt, "resume"):
            oscar_int2.calibrate("tiny-gqa", CALIBRATION, out, progress=False, **options)
        thread.join()
        self.assertFalse(out.exists())
        with self.assertLogs("oscar_int2", logging.INFO):
            resumed = oscar_int2.calibrate("tiny-gqa", CALIBRATION, out, progress=False, resume=True, **options)
        whole = oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "whole.h5", progress=False, **options)
        self.assertEqual(resumed.content_sha256, whole.content_sha256)

    def test_the_example_compares_pca_with_the_default(self):
        spec = importlib.util.spec_from_file_location("compare_rotation", SOURCE / "python" / "examples" / "compare_rotation.py")
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            example.main("tiny-gqa", CALIBRATION, HELDOUT, self.place / "compared", tokens=4096)
        self.assertRegex(printed.getvalue(), r"(?ms)^bf16 .*^hadamard-clip .*^pca .*^default ")
        own = oscar_int2.load(self.place / "compared" / "pca.h5").layers[4].key.forward
        covariance = example.pca(oscar_int2.load(self.place / "compared" / "default.h5").statistics(), "k")[4]
        np.testing.assert_allclose(own, covariance, atol=1e-5)
        np.testing.assert_allclose(covariance.swapaxes(1, 2) @ covariance, np.broadcast_to(np.eye(128), (2, 128, 128)), atol=1e-9)

    def test_arguments_become_options(self):
        self.assertEqual(programs.options(("oscar-eval",), {
            "max_tokens": 5, "force": True, "resume": False, "search": None, "compare": ["a", "b"], "rope_scaling": {"factor": 2.0}}),
                         ["--max-tokens=5", "--force", "--compare=a,b", '--rope-scaling={"factor": 2.0}'])

    def test_there_are_fewer_than_25_public_names(self):
        self.assertLess(len(oscar_int2.__all__), 25)
        for name in oscar_int2.__all__:
            self.assertTrue(hasattr(oscar_int2, name), name)


class InTransformers(unittest.TestCase):
    """The engine "transformers" behind the same two functions."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.place = pathlib.Path(cls.folder.name)
        transformers.utils.logging.disable_progress_bar()  # of weights that are loaded
        cls.addClassCleanup(transformers.utils.logging.enable_progress_bar)

    def test_bundle_figures_and_progress_are_those_of_that_engine(self):
        bars = []

        def bar(**words):
            bars.append((words, mock.Mock(n=0)))
            return bars[-1][1]
        with mock.patch("tqdm.auto.tqdm", bar), self.assertLogs("oscar_int2", logging.INFO) as log:
            bundle = oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "t.h5", engine="transformers", max_tokens=2048,
                                          sequence_length=512, device="cpu")
            found = oscar_int2.evaluate(MODEL, bundle, corpus=[HELDOUT], engine="transformers", max_tokens=1280,
                                        sequence_length=640, device="cpu")
        self.assertEqual([(words["desc"], words["total"], words["unit"]) for words, _ in bars],
                         [("calibrate", 8, " layers"), ("evaluate", 16, " layers")])
        self.assertTrue(all(made.close.called for _, made in bars))
        self.assertEqual([record.getMessage() for record in log.records if "layers" in record.getMessage()],
                         ["searching: 8 layers", "calibrate: 8 layers", "evaluate: 16 layers"])
        self.assertIn("transformers", bundle.inspect()["model"]["engine"])
        self.assertEqual(found.methods, ["bf16", "bundle"])
        rows = {(row["method"], row["metric"]): row["mean"] for row in found.rows()}
        figures = found.report["methods"]
        self.assertEqual(rows["bundle", "kl"], figures["bundle"]["kl"]["mean"])
        self.assertEqual(rows["bf16", "ppl"], figures["bf16"]["ppl"]["mean"])
        self.assertGreater(rows["bundle", "ppl"], 1)
        with mock.patch("tqdm.auto.tqdm", side_effect=AssertionError("a bar")):
            oscar_int2.evaluate(MODEL, bundle, corpus=HELDOUT, engine="transformers", max_tokens=640, sequence_length=640,
                                device="cpu", progress=False)

    def test_statistics_alone_are_a_path_that_fit_takes(self):
        sums = oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "sums.h5", engine="transformers", statistics_only=True,
                                    max_tokens=1024, sequence_length=512, device="cpu", progress=False)
        self.assertEqual(sums, self.place / "sums.h5")
        self.assertEqual(list(oscar_int2.fit(sums, self.place / "fitted.h5").layers), list(range(8)))

    def test_what_that_engine_does_not_take_is_said(self):
        for text, call in (
                ("without weights", lambda: oscar_int2.calibrate(MODEL, {CALIBRATION: 2}, self.place / "w.h5", engine="transformers")),
                ("compares one bundle", lambda: oscar_int2.evaluate(MODEL, corpus=HELDOUT, engine="transformers")),
                ("compares one bundle", lambda: oscar_int2.evaluate(MODEL, {"a": "a.h5"}, corpus=HELDOUT, engine="transformers")),
                ("expected \"oscar\" or", lambda: oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "w.h5", engine="torch"))):
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                call()
        with mock.patch.object(transformers, "__version__", "5.24.0"):
            for call in (lambda: oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "w.h5", engine="transformers"),
                         lambda: oscar_int2.evaluate(MODEL, BUNDLE, corpus=HELDOUT, engine="transformers")):
                with self.assertRaisesRegex(oscar_int2.UnsupportedError, "transformers 5.24.0; install"):
                    call()
        self.assertEqual(list(self.place.glob("w*")), [])


if __name__ == "__main__":
    unittest.main()
