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

import h5py
import numpy as np
import torch
import transformers

from serving_case import BUNDLE, MODEL, SOURCE, tiny_model
import oscar_int2
import oscar_int2.transformers
from oscar_int2 import programs

DATA = SOURCE / "datasets" / "tiny-gqa"
CALIBRATION, HELDOUT = DATA / "calibration.jsonl", DATA / "heldout.jsonl"
FAST = {"device": "cpu", "search": "off", "separators": "off", "max_tokens": 2048, "sequence_length": 512}
SHORT = {"device": "cpu", "progress": False, "max_tokens": 1280, "sequence_length": 640, "separators": "off",
         "compare": ["bf16", "bundle"]}  # of an evaluation


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
        for program, off in ((("oscar-calibrate",), {"center", "clip", "recall", "search", "separators"}), (("oscar-eval",), {"separators"}),
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
                    with self.assertRaisesRegex(ValueError, f"{name}=False: {name} of"):
                        programs.options(program, {name: False})
            self.assertEqual(turned, off)
        with self.assertRaisesRegex(ValueError, "unknown option no_such"):
            oscar_int2.plan("tiny-gqa", no_such=False)
        with self.assertRaisesRegex(ValueError, "search"):
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
        self.assertEqual(int(np.ravel(layer["count_kv"])[0]), 2048)
        for name in ("tiny-gqa.h5", "tiny-gqa.serving.h5"):
            with self.assertRaisesRegex(oscar_int2.BundleError, f"{name} holds no statistics: .*The full bundle"):
                oscar_int2.load(SOURCE / "rotation_zoo" / "tiny-gqa" / name).statistics()

    def test_layers_show_shapes_and_no_numbers(self):
        self.assertEqual(repr(self.bundle.layers[3]), "<Layer 3: full attention, rows in 2 bits, key [2, 128, 128], value [2, 128, 128]>")
        self.assertRegex(repr(self.bundle.layers[3].key), r"^<SideRecipe balanced: kind \[2\], forward \[2, 128, 128\], [^()]*>$")
        self.assertLess(len(repr(self.bundle.layers)), 1000)

    def test_a_folder_is_no_bundle_and_those_in_it_are_named(self):
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        zoo = SOURCE / "rotation_zoo" / "tiny-gqa"
        for call in (lambda: oscar_int2.load(zoo), lambda: oscar_int2.transformers.apply(model, zoo)):
            with self.assertRaisesRegex(oscar_int2.BundleError, f"{zoo} is a folder; name the bundle in it: {zoo / 'tiny-gqa.h5'} or "):
                call()
        with tempfile.TemporaryDirectory() as empty, self.assertRaisesRegex(oscar_int2.BundleError, "is a folder; a bundle is a .h5 file"):
            oscar_int2.load(empty)

    def test_a_fit_from_statistics_needs_no_model(self):
        fitted = oscar_int2.fit(self.bundle, self.place / "paper.h5", preset="paper", force=True)
        self.assertEqual(fitted.inspect()["preset"], "paper")
        self.assertEqual(fitted.layers[0].key.kind.tolist(), [2, 2])

    def test_own_matrices_become_a_bundle(self):
        numbers = np.random.default_rng(5)
        keys, values = (np.linalg.qr(numbers.standard_normal((8, 2, 128, 128)))[0] for _ in range(2))
        made = oscar_int2.import_rotation(keys, torch.from_numpy(values), "tiny-gqa", self.place / "own.h5", force=True)
        self.assertEqual(oscar_int2.api._matrices("keys", torch.eye(8, dtype=torch.bfloat16)[None]).dtype, np.float64)
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
            "tiny-gqa", {"written": made.path, "plain": plain.path}, corpus=HELDOUT, progress=False, device="cpu", max_tokens=1280,
            sequence_length=640, compare=["bf16", "written", "plain"], separators="off").rows()
            if row["metric"] == "kl" and row["position"] is None}
        self.assertLess(kl["written"], kl["plain"])
        with self.assertRaisesRegex(ValueError, "statistics="):
            oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "part.h5", force=True, rounding="shaped")
        with self.assertRaisesRegex(oscar_int2.OscarError, "no statistics"):
            oscar_int2.import_rotation(keys, values, "tiny-gqa", self.place / "part.h5", force=True,
                                       statistics=SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5")

    def test_own_matrices_may_have_key_centers(self):
        numbers = np.random.default_rng(6)
        keys, centers = np.linalg.qr(numbers.standard_normal((8, 2, 128, 128)))[0], numbers.standard_normal((8, 2, 2, 128))
        for given in (centers, torch.from_numpy(centers), centers[:, 0]):
            made = oscar_int2.import_rotation(keys, keys, "tiny-gqa", self.place / "centers.h5", force=True, k_centers=given)
            np.testing.assert_allclose(made.layers[3].key.key_centers[0], centers[3, 0], atol=1e-6)
        for wrong, text in ((centers[:3], r"k_centers is \[3, 2, 2, 128\], expected \[8, heads, 2, 128\]"), (centers * np.nan, "not finite")):
            with self.assertRaisesRegex(ValueError, text):
                oscar_int2.import_rotation(keys, keys, "tiny-gqa", self.place / "centers.h5", force=True, k_centers=wrong)

    def test_true_of_an_option_that_takes_a_value_names_its_values(self):
        def calibrate(**options):
            return lambda: oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "never.h5", **options)
        for call, text in ((calibrate(search=True), '^search=True: search of oscar-calibrate takes a value: "on", "off"$'),
                           (calibrate(center=True), 'takes a value: "auto", "on", "off"$'),
                           (calibrate(max_tokens=True), "^max_tokens=True: .*takes a value: INT, Use this many tokens"),
                           (lambda: oscar_int2.evaluate("tiny-gqa", corpus=HELDOUT, separators=True), r"^separators=True: .*N\|off"),
                           (lambda: oscar_int2.fit(self.bundle, self.place / "never.h5", preset=True), '^preset=True: .*"best", "paper"')):
            with self.assertRaisesRegex(ValueError, text):
                call()

    def test_own_matrices_without_an_inverse_are_named_by_argument_and_layer(self):
        good = np.broadcast_to(np.eye(128), (8, 2, 128, 128))
        for place, value, text in (((3, 1), 0, "^keys: the matrix of layer 3, head 1, is zero"),
                                   ((5, 0, 7), 0, "^keys: the matrix of layer 5, head 0, has rank 127 of 128"),
                                   ((0, 0, 1, 1), np.nan, "^keys: the matrix of layer 0, head 0, holds a number that is not finite")):
            keys = good.copy()
            keys[place] = value
            with self.assertRaisesRegex(ValueError, text):
                oscar_int2.import_rotation(keys, good, "tiny-gqa", self.place / "bad.h5")
            with self.assertRaisesRegex(ValueError, text.replace("keys", "values").replace(", head 1,", "").replace(", head 0,", "")):
                oscar_int2.import_rotation(good, keys[:, place[1] if len(place) > 1 else 0], "tiny-gqa", self.place / "bad.h5")
        for turned in (good * (1 + 0j), torch.from_numpy(good.copy()) * (1 + 0j)):
            with self.assertRaisesRegex(ValueError, r"^values holds complex numbers \(complex128\), expected real ones"):
                oscar_int2.import_rotation(good, turned, "tiny-gqa", self.place / "bad.h5")
        with self.assertRaisesRegex(ValueError, r"^keys is \[128, 128\], expected \[layers, heads, d, d\]"):
            oscar_int2.import_rotation(np.eye(128), good, "tiny-gqa", self.place / "bad.h5")
        with self.assertRaisesRegex(oscar_int2.OscarError, "keys and values") as failed:
            oscar_int2.import_rotation(good[:5], good[:5], "tiny-gqa", self.place / "bad.h5")
        self.assertNotIn("rotations.npz", str(failed.exception))

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

    def test_what_is_printed_names_no_file_that_is_gone(self):
        self.assertIn('save_html("REPORT.html")', str(self.evaluated))
        self.assertNotRegex(str(self.evaluated), r"oscar-\w+/out|oscar-bundle report")

    def test_the_report_is_kept_where_json_says(self):
        file = self.place / "kept.json"
        found = oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, json=file, **SHORT)
        self.assertEqual(json.loads(file.read_text()), found.report)
        self.assertIn(f"wrote {file}", str(found))
        with self.assertRaisesRegex(oscar_int2.OscarError, "force=True"):
            oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, json=file, **SHORT)
        again = oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, json=str(file), resume=True, **SHORT)  # it is finished
        self.assertEqual(again.report, found.report)
        row = next(line for line in str(found).splitlines() if line.startswith("bundle "))
        self.assertIn(row, str(again))  # the table
        page = self.place / "kept.html"
        again = oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, json=file, resume=True, html=page, **SHORT)
        self.assertIn("<html", page.read_text())
        self.assertIn(f"wrote {page}", str(again))
        as_served = oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, engine="reference", **SHORT | {"max_tokens": 500})
        self.assertEqual(as_served.report["engine"], "reference")
        for options, text in (({"json": "-"}, "the figures are what is returned"), ({"resume": True}, "give json=")):
            with self.assertRaisesRegex(ValueError, text):
                oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, **SHORT, **options)
        planned = oscar_int2.plan("tiny-gqa", json=self.place / "plan.json")
        self.assertEqual(json.loads((self.place / "plan.json").read_text()), planned)

    def test_a_stopped_evaluation_says_what_was_kept(self):
        with mock.patch.object(programs, "run", side_effect=KeyboardInterrupt("what was counted is in /tmp/oscar-1/out.json.checkpoint")):
            with self.assertRaisesRegex(KeyboardInterrupt, "nothing was kept. With json=FILE"):
                oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, **SHORT)
            with self.assertRaisesRegex(KeyboardInterrupt, "what was counted is in"):
                oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, json=self.place / "stopped.json", **SHORT)

    def test_texts_and_token_ids_in_memory_are_corpora(self):
        rows = [json.loads(line) for line in CALIBRATION.read_text().splitlines()]
        options = FAST | {"progress": False, "force": True, "statistics_only": True, "max_tokens": 2048}

        def sums(corpus, **more):
            with contextlib.ExitStack() as stack:
                path = oscar_int2.calibrate("tiny-gqa", corpus, self.place / "memory.h5", **options | more)
                file = stack.enter_context(h5py.File(path))
                return file["corpus"].attrs["tokens_sha256"], file["layers/003/statistics/q_moment"][()]
        expected = sums(CALIBRATION)
        for corpus in ([row["text"] for row in rows], tuple(rows)):
            found = sums(corpus)
            self.assertEqual(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])
        ids = np.random.default_rng(3).integers(0, 500, (2, 1024))
        np.save(self.place / "ids.npy", ids)
        expected = sums(self.place / "ids.npy")
        for corpus in (list(ids), torch.from_numpy(ids)):
            self.assertEqual(sums(corpus)[0], expected[0])
        self.assertNotEqual(sums([ids[0], ids[1, :700], ids[1, :1]])[0], expected[0])
        text = [json.loads(line)["text"] for line in HELDOUT.read_text().splitlines()]
        found = oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=text, **SHORT)
        self.assertEqual(found.report["corpus"]["sources"][0]["name"], "texts.jsonl")

    def test_a_corpus_is_files_or_lies_in_memory(self):
        from oscar_int2.corpora import kind_of

        for corpus, kind in ((HELDOUT, "files"), ("self:100", "files"), ({HELDOUT: 1}, "files"), ([HELDOUT, "a b.jsonl:0.5"], "files"),
                             (["missing.jsonl"], "files"), (["nosuch"], "files"), (["a text", "word"], "rows"), ([{"text": "a"}], "rows"),
                             ([1, 2], "ids"), ([[1], [2, 3]], "ids"), (np.zeros((2, 3), int), "ids"), (torch.zeros(3), "ids")):
            self.assertEqual(kind_of(corpus), kind, corpus)
        for corpus, error, text in (([], ValueError, "empty"), ([HELDOUT, "a text"], ValueError, "files .*and texts"), (5, TypeError, "is a int"),
                                    ("Once, there was: a text.", ValueError, r"corpus is a text \('Once, .*go in as a list: \[text\]"),
                                    ([[1.5]], ValueError, "expected token ids.*float64"), ([["a"]], ValueError, "expected token ids")):
            with self.assertRaisesRegex(error, text):
                oscar_int2.calibrate("tiny-gqa", corpus, self.place / "c.h5")
        with self.assertRaisesRegex(ValueError, "go in as a list"):
            oscar_int2.calibrate(MODEL, "Once, there was: a text.", self.place / "c.h5", engine="transformers")
        with self.assertRaisesRegex(oscar_int2.OscarError, "token id is outside.*\\n  where:    corpus, position 1") as failed:
            oscar_int2.calibrate("tiny-gqa", [1, 10 ** 6], self.place / "c.h5", device="cpu")
        self.assertNotIn("token_ids.npy", str(failed.exception))

    def test_tables_of_rows_are_corpora(self):
        """As pandas and datasets have them, which are not imported."""
        from oscar_int2 import corpora

        class Frame:
            columns = "text", "score"

            def iterrows(self):
                raise AssertionError("row by row")

            def to_dict(self, orient="dict"):
                return {"records": [{"text": "a", "score": float("nan")}, {"messages": np.array([{"role": "user"}])}]}[orient]

        class Dataset(list):
            def to_dict(self):
                raise AssertionError("columns")

        for table in (Frame(), Dataset(Frame().to_dict("records"))):
            with corpora.as_files(table) as path:
                self.assertEqual([json.loads(line) for line in path.read_text().splitlines()],
                                 [{"text": "a"}, {"messages": [{"role": "user"}]}])

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
        self.assertEqual({(row["metric"], row["against"]) for row in oscar_int2.Evaluation(zoo).rows() if row["against"]},
                         {("kl_difference", "bundle")})
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
        with self.assertRaisesRegex(oscar_int2.OscarError, "force=True"):
            self.evaluated.save_html(self.place / "page.html")
        self.evaluated.save_html(self.place / "page.html", force=True)

    def test_what_a_program_refuses_is_an_exception_with_its_words(self):
        with self.assertRaisesRegex(ValueError, "unknown option no_such_option"):
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

    def test_errors_name_keywords_and_no_options(self):
        def calibrate(**options):
            return lambda: oscar_int2.calibrate("tiny-gqa", CALIBRATION, self.place / "x.h5", progress=False, **FAST | options)
        eye, there = np.broadcast_to(np.eye(128), (8, 2, 128, 128)), self.place / "there.h5"
        there.touch()
        for call, said in (
                (calibrate(), "force=True"), (calibrate(max_tokens=-1), "max_tokens: "), (calibrate(max_tokenz=5), "did you mean max_tokens"),
                (calibrate(clip="1,2,3", force=True), "clip"), (calibrate(for_="nosuch"), "for_"), (calibrate(for_="llama.cpp"), "for_"),
                (calibrate(search="on", clip="off"), "search"), (calibrate(statistics_only=True, no_statistics=True), "statistics_only=True"),
                (calibrate(sequence_length=1 << 20, force=True), "sequence_length"), (calibrate(device="cuda:99", force=True), "device"),
                (calibrate(host_memory="1x", force=True), "host_memory"),
                (lambda: oscar_int2.evaluate("tiny-gqa", self.bundle, corpus=HELDOUT, compare=["nosuch"], progress=False), "compare"),
                (lambda: oscar_int2.evaluate("tiny-gqa", corpus=HELDOUT, write_back=True, progress=False), "write_back"),
                (lambda: oscar_int2.evaluate("tiny-gqa", corpus=HELDOUT, engine="oscar", sink="many", progress=False), "sink"),
                (lambda: oscar_int2.fit(self.bundle, there), "force=True"),
                (lambda: oscar_int2.fit(self.bundle, self.place / "e.h5", objective_v="energy"), 'objective_v="energy"'),
                (lambda: oscar_int2.import_rotation(eye, eye, "tiny-gqa", self.place / "e.h5", rounding="shaped"), "statistics=FILE"),
                (lambda: oscar_int2.plan("tiny-gqa", gpu_memory="much"), "gpu_memory")):
            with self.assertRaises((ValueError, oscar_int2.OscarError)) as failed:
                call()
            with self.subTest(said):
                self.assertIn(said, str(failed.exception))
                self.assertNotIn("--", str(failed.exception))

    def test_texts_of_programs_are_put_into_the_words_of_python(self):
        for text, expected in (("replace it with --force", "replace it with force=True"), ("use --device cpu, or", 'use device="cpu", or'),
                               ("lower --sink or --recent", "lower sink= or recent="), ("  where:    --max-tokens", "  where:    max_tokens"),
                               ("--max-tokens: Value -5", "max_tokens: Value -5"), ("name it: --bundle NAME=FILE", 'name it: bundle={"NAME": "FILE"}'),
                               ("with oscar-calibrate --resume", "with calibrate(..., resume=True)"), ("OUT exists", "out exists"),
                               ("calibrate --for sglang-v1", 'calibrate for_="sglang-v1"'), ("in /my/OUT/x", "in /my/OUT/x"),
                               ("fetch it: hf download A/B --local-dir C", "fetch it: hf download A/B --local-dir C")):
            self.assertEqual(programs.in_python(text, "oscar-calibrate"), expected)

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

    def test_rows_that_are_left_out_are_warned_of(self):
        corpus = self.place / "half.jsonl"
        corpus.write_text(CALIBRATION.read_text() + '{"messages": 5}\n')
        with self.assertLogs("oscar_int2", logging.WARNING) as log:
            oscar_int2.calibrate("tiny-gqa", corpus, self.place / "half.h5", **FAST)
        [said] = [record.getMessage() for record in log.records if "left out" in record.getMessage()]
        self.assertRegex(said, r"half.jsonl: left out rows without a document: 1\n  line \d+: ")

    def test_ctrl_c_saves_and_the_run_goes_on_from_there(self):
        out = self.place / "stopped.h5"
        options = FAST | {"max_tokens": 8192}
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
            example.main("tiny-gqa", CALIBRATION, HELDOUT, self.place / "compared", tokens=2048)
        self.assertRegex(printed.getvalue(), r"(?ms)^bf16 .*^hadamard-clip .*^pca .*^default ")
        own = oscar_int2.load(self.place / "compared" / "pca.h5").layers[4].key.forward
        covariance = example.pca(oscar_int2.load(self.place / "compared" / "default.h5").statistics(), "k")[4]
        np.testing.assert_allclose(own, covariance, atol=1e-5)
        np.testing.assert_allclose(covariance.swapaxes(1, 2) @ covariance, np.broadcast_to(np.eye(128), (2, 128, 128)), atol=1e-9)

    def test_arguments_become_options(self):
        self.assertEqual(programs.options(("oscar-eval",), {
            "max_tokens": 5, "force": True, "resume": False, "search": None, "compare": ["a", "b"], "rope_scaling": {"factor": 2.0}}),
                         ["--max-tokens=5", "--force", "--compare=a,b", '--rope-scaling={"factor": 2.0}'])
        self.assertEqual(programs.options(("oscar-calibrate",), {"for_": "sglang-v1"}), ["--for=sglang-v1"])

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
        short = {"engine": "transformers", "max_tokens": 640, "sequence_length": 640, "device": "cpu", "progress": False}
        text = [json.loads(line)["text"] for line in HELDOUT.read_text().splitlines()]
        with mock.patch("tqdm.auto.tqdm", side_effect=AssertionError("a bar")):
            found = oscar_int2.evaluate(MODEL, bundle, corpus=HELDOUT, json=self.place / "t.json", **short)
            self.assertEqual(oscar_int2.evaluate(MODEL, bundle, corpus=text, **short).report, found.report)
        self.assertEqual(json.loads((self.place / "t.json").read_text()), found.report)
        with self.assertRaisesRegex(oscar_int2.OscarError, "t.json exists already.*force=True"):
            oscar_int2.evaluate(MODEL, bundle, corpus=HELDOUT, json=self.place / "t.json", **short)
        # 319 tokens behind position 320, of a bundle that does not say whether its text was enough.
        self.assertRegex(repr(found), "caution: few-tokens; caution: little-text>$")
        self.assertRegex(str(found), r"\nCAUTION: the evaluation counts 319 tokens in 1 piece of at most 512 tokens \(1 sequence\), too "
                                     r"few for 95% intervals; use 8 sequences or 4,096 tokens and more\nCAUTION: the calibration text "
                                     "of t.h5 could not be judged: the file keeps no verdict on it$")
        with self.assertRaisesRegex(oscar_int2.OscarError, "gives figures alone; evaluate with engine=\"oscar\""):
            found.save_html(self.place / "t.html")

    def test_the_command_prints_standard_errors_or_why_there_are_none(self):
        from oscar_int2.commands import evaluate

        figures = {"perplexity": 8.0, "int2_perplexity": 8.5, "kl": .01, "top1": .9, "tokens": 5000, "first_position": 320,
                   "overlap": {"known": True}, "cautions": [{"kind": "few-tokens", "sentence": "too few"}]}
        for errors, said in ((0.25, ("8.0000 ±0.2500 over exact", "0.01000 ±0.25000 nats", "from position 320 on; ± standard error")),
                             (None, ("8.0000 over exact", "no standard errors: these take 4096 tokens or more"))):
            printed = io.StringIO()
            with mock.patch("oscar_int2.calibration.evaluate", return_value=figures | {
                    f"{name}_se": errors for name in ("perplexity", "int2_perplexity", "kl")}), contextlib.redirect_stdout(printed):
                evaluate.main([str(MODEL), str(BUNDLE), str(HELDOUT)])
            for words in (*said, "CAUTION: too few\n"):
                self.assertIn(words, printed.getvalue())

    def test_statistics_alone_are_a_path_that_fit_takes(self):
        sums = oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "sums.h5", engine="transformers", statistics_only=True,
                                    max_tokens=1024, sequence_length=512, device="cpu", progress=False)
        self.assertEqual(sums, self.place / "sums.h5")
        again = {"engine": "transformers", "statistics_only": True, "max_tokens": 640, "sequence_length": 320, "device": "cpu",
                 "progress": False}
        with self.assertRaisesRegex(FileExistsError, "sums.h5 exists already; .*force=True"):
            oscar_int2.calibrate(MODEL, CALIBRATION, sums, **again)
        with self.assertLogs("oscar_int2", "WARNING") as log:
            oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "short.h5", **again)
            oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "short.h5", force=True, **again | {"max_tokens": 322})
        said = ("no sequence is longer than the exact windows (64 + 256 tokens): no row is in 2 bits, so rows are weighted evenly "
                "and keys have no centers; use longer sequences")
        self.assertEqual([record.getMessage() for record in log.records], [said] * 2)
        self.assertEqual(list(oscar_int2.fit(sums, self.place / "fitted.h5").layers), list(range(8)))

    def test_what_that_engine_does_not_take_is_said(self):
        for text, call in (
                ("without weights", lambda: oscar_int2.calibrate(MODEL, {CALIBRATION: 2}, self.place / "w.h5", engine="transformers")),
                ("compares one bundle", lambda: oscar_int2.evaluate(MODEL, corpus=HELDOUT, engine="transformers")),
                ("compares one bundle", lambda: oscar_int2.evaluate(MODEL, {"a": "a.h5"}, corpus=HELDOUT, engine="transformers")),
                ("expected \"oscar\" or", lambda: oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "w.h5", engine="torch")),
                ('^seed is an option of engine="oscar", the program oscar-calibrate, and not of engine="transformers"', lambda:
                 oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "w.h5", engine="transformers", seed=1)),
                ('^compare is an option of engine="oscar", the program oscar-eval.* takes batch_tokens, device, ', lambda:
                 oscar_int2.evaluate(MODEL, BUNDLE, corpus=HELDOUT, engine="transformers", compare=["bf16"])),
                ('^unknown option devise; engine="transformers" takes', lambda:
                 oscar_int2.evaluate(MODEL, BUNDLE, corpus=HELDOUT, engine="transformers", devise="cpu")),
                ('expected "oscar" or "transformers", or "simulate", or "reference"', lambda:
                 oscar_int2.evaluate(MODEL, BUNDLE, corpus=HELDOUT, engine="torch")),
                ('give its folder for engine="reference"', lambda:
                 oscar_int2.evaluate(tiny_model(), BUNDLE, corpus=HELDOUT, engine="reference"))):
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                call()
        with mock.patch.object(transformers, "__version__", "5.25.0"):
            for call in (lambda: oscar_int2.calibrate(MODEL, CALIBRATION, self.place / "w.h5", engine="transformers"),
                         lambda: oscar_int2.evaluate(MODEL, BUNDLE, corpus=HELDOUT, engine="transformers")):
                with self.assertRaisesRegex(oscar_int2.UnsupportedError, "transformers 5.25.0; install"):
                    call()
        self.assertEqual(list(self.place.glob("w*")), [])


if __name__ == "__main__":
    unittest.main()
