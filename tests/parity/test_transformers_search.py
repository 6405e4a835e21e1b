#!/usr/bin/env python3
"""The search of models that run in transformers: its choices are those of oscar-calibrate on the same text, KL over 2-bit
rows is not above that without a search, gates count, and what cannot be searched is said."""
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SOURCE, BIN = (pathlib.Path(os.environ[name]) for name in ("OSCAR_SOURCE", "OSCAR_BIN"))
sys.path[:0] = [str(BIN.parent / "python"), str(SOURCE / "tests" / "serving")]
import h5py
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from oscar_int2 import programs
from oscar_int2.calibration import calibrate, evaluate
from oscar_int2.calibration.held_back import hold_back
from oscar_int2.commands import calibrate as calibrate_command
from oscar_int2.recipe import CacheFormat
from random_families import CASES, make_weights, write_checkpoint
from tiny_transformers import InAFolder, first_layers, random_ids, tiny_model

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SHORT = CacheFormat(quant_group_size=0, sink_tokens=4, recent_tokens=12)
WINDOWS = ("--sink", 4, "--recent", 12)
WINDOWED = ["sliding_attention", "full_attention"]
TEXT = random_ids(4, 200, 3).tolist()  # of which two sequences are held back


def one_layer():
    """A model that is searched quickly."""
    return tiny_model("llama", num_hidden_layers=1)


def program(name, *words, status=0):
    done = subprocess.run([BIN / name, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode != status:
        raise AssertionError(f"{name}: {done.returncode}: {done.stderr}")
    return done.stdout if status == 0 else done.stderr


def choices(path):
    """{name: what was chosen} of a bundle: ratios, writers and transforms of all layers and variants."""
    kept = ("clip_ratio", "clip_tried", "kind", "scale_correction")
    with h5py.File(path) as file:
        found = {}
        file.visititems(lambda name, item: found.__setitem__(name, item[()]) if name.endswith(kept) else None)
    return found


def measured(path):
    """Losses of all ratios that were tried, in the order of their names."""
    with h5py.File(path) as file:
        found = []
        file.visititems(lambda name, item: found.append(item[()].ravel()) if name.endswith(("clip_nmse", "predicted_output_nmse"))
                        else None)
    return np.concatenate(found)


def same_search(test, native, ours):
    """Two bundles whose rows differ by the rounding of float32. A code on an edge falls to either side, and its row is
    coded otherwise from there on, so a head whose loss a few rows make may be chosen for otherwise."""
    test.assertEqual(set(choices(native)), set(choices(ours)))
    apart = np.log(measured(ours) / measured(native))
    test.assertLess(np.median(abs(apart)), 2e-4)
    test.assertLess(abs(apart.mean()), 3 * apart.std() / len(apart) ** 0.5)
    differ, heads = heads_that_differ(native, ours)
    test.assertLessEqual(differ, heads / 16)


def heads_that_differ(a, b):
    """(heads and sides whose ratio differs, heads and sides) of the main variants of two bundles."""
    a, b = choices(a), choices(b)
    names = [name for name in a if name.startswith("layers/") and name.endswith("clip_ratio")]
    return sum(int((a[name] != b[name]).sum()) for name in names), sum(a[name].size for name in names)


class Kept:
    """Within it, calibrate() leaves a copy of the folder that it hands to oscar-calibrate."""

    def __init__(self, folder):
        self.folder, self.run = folder, programs.run

    def __enter__(self):
        def keep(name, words, **more):
            if name == "oscar-calibrate":
                shutil.copytree(words[0], self.folder)
            return self.run(name, words, **more)

        self.patch = mock.patch.object(programs, "run", keep)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


class TinyGqa(InAFolder):
    """Four layers of the model of the repository: 16 sequences of 512 tokens, of which four are held back; 8 sequences of other
    text."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        from serving_case import MODEL, held_out_ids
        cls.model, cls.ids = first_layers(MODEL, 4, cls.folder / "model"), cls.folder / "calibration.npy"
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        ids = []
        for line in (MODEL / "calibration.jsonl").read_text().splitlines():
            ids += tokenizer(json.loads(line)["text"])["input_ids"]
            if len(ids) >= 16 * 512:
                break
        np.save(cls.ids, np.array(ids[:16 * 512], np.int32).reshape(16, 512))
        np.save(cls.folder / "heldout.npy", np.array(held_out_ids(8 * 640), np.int32).reshape(8, 640))
        cls.native, cls.ours = cls.folder / "native.h5", cls.folder / "ours.h5"
        program("oscar-calibrate", cls.model, cls.ids, cls.native, "--device", "cpu", "--dtype", "fp32", "--sequence-length", 512,
                "--quiet")
        calibrate(cls.model, cls.ids, cls.ours, sequence_length=512, device="cpu")
        cls.kl = {}
        for path in (cls.native, cls.ours):
            report = path.with_suffix(".json")
            program("oscar-eval", cls.model, "--corpus", cls.folder / "heldout.npy", "--bundle", path, "--compare", "bundle",
                    "--device", "cpu", "--dtype", "fp32", "--sequence-length", 640, "--separators", "off", "--quiet",
                    "--json", report)
            cls.kl[path] = json.loads(report.read_text())["methods"]["bundle"]["kl"]

    def test_choices_and_losses_are_those_of_oscar_calibrate(self):
        same_search(self, self.native, self.ours)
        self.assertTrue(any(len(set(value.ravel().tolist())) > 1
                            for name, value in choices(self.ours).items() if "clip_ratio" in name))

    def test_the_record_says_what_oscar_calibrate_says(self):
        with h5py.File(self.native) as a, h5py.File(self.ours) as b:
            self.assertEqual(json.loads(a.attrs["search"]), json.loads(b.attrs["search"]))
            for name in ("search_search_queries", "search_stage_queries", "search_confirm_queries"):
                self.assertEqual(a["layers/000"].attrs[name], b["layers/000"].attrs[name])
            # Sums are of all text in both.
            for name in ("count_q", "count_kv"):
                self.assertEqual(a[f"layers/000/statistics/{name}"][()], b[f"layers/000/statistics/{name}"][()])
                self.assertEqual(b["layers/000/statistics/count_kv"][()], 16 * 512)

    def test_kl_on_other_text_is_that_of_oscar_calibrate(self):
        native, ours = self.kl[self.native], self.kl[self.ours]
        self.assertLess(abs(ours["mean"] - native["mean"]), 0.1 * native["se"])


class Recorded(InAFolder):
    """The folder that is handed to oscar-calibrate, of a small model of two layers."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ours, cls.kept = cls.folder / "ours.h5", cls.folder / "recording"
        with Kept(cls.kept):
            calibrate(tiny_model("llama", num_hidden_layers=2), TEXT, cls.ours, format=SHORT)

    def test_a_run_says_the_same_of_its_folder_once_more(self):
        again = self.folder / "again.h5"
        said = program("oscar-calibrate", self.kept, "recorded", again, "--device", "cpu")
        self.assertIn("held back  400 tokens", said)
        self.assertEqual(program("oscar-bundle", "diff", self.ours, again), "equal\n")

    def test_rows_of_another_layer_give_other_choices(self):
        wrong, out = self.folder / "wrong", self.folder / "wrong.h5"
        shutil.copytree(self.kept, wrong)
        for file in self.kept.glob("layer-000*"):
            shutil.copy(self.kept / file.name.replace("layer-000", "layer-001"), wrong / file.name)
        program("oscar-calibrate", wrong, "recorded", out, "--device", "cpu", "--quiet")
        a, b = choices(self.ours), choices(out)
        differ = {name for name in a if name.endswith("clip_ratio") and not np.array_equal(a[name], b[name])}
        self.assertTrue(differ)
        self.assertTrue(all("/000/" in name for name in differ), differ)

    def spoiled(self, name, spoil):
        folder = self.folder / name
        shutil.copytree(self.kept, folder)
        spoil(folder)
        return program("oscar-calibrate", folder, "recorded", self.folder / f"{name}.h5", "--device", "cpu", status=1)

    def test_a_folder_that_lacks_something_is_refused_by_its_name(self):
        def other_shape(folder):
            path = next(folder.glob("layer-001-sequence-*"))
            rows = load_file(path)
            save_file({**rows, "v": rows["v"][:, :-1].contiguous()}, path)

        def other_length(folder):
            index = json.loads((folder / "recording.json").read_text())
            index["sequence_lengths"][3] = 100
            (folder / "recording.json").write_text(json.dumps(index | {"sequence_lengths": index["sequence_lengths"] + [512] * 9}))

        for name, spoil, said in (
                ("rows", lambda folder: next(folder.glob("layer-001-sequence-*")).unlink(), "layer-001-sequence-"),
                ("shape", other_shape, "tensor v"),
                ("sums", lambda folder: shutil.copy(folder / "statistics.h5", folder / "fitted.h5"), "different runs"),
                ("split", other_length, "different runs"),
                ("index", lambda folder: (folder / "recording.json").write_text("{}"), "oscar-recording"),
                ("missing", lambda folder: (folder / "fitted.h5").unlink(), "fitted.h5")):
            with self.subTest(name):
                self.assertIn(said, self.spoiled(name, spoil))

    def test_windows_that_leave_too_few_queries_are_refused(self):
        said = program("oscar-calibrate", self.kept, "recorded", self.folder / "a.h5", "--device", "cpu", "--recent", 400, status=1)
        self.assertIn("a held-back sequence is too short for these windows", said)

    def test_options_of_the_engine_that_ran_the_model_are_refused(self):
        for words in (("--sequence-length", 64), ("--for", "vllm"), ("--resume",), ("--gpus", 2), ("--statistics-only",)):
            with self.subTest(words):
                said = program("oscar-calibrate", self.kept, "recorded", self.folder / "a.h5", *words, status=2)
                self.assertIn(f"{words[0]}: is no option of a recorded run", said)


class OtherFamilies(InAFolder):
    def test_choices_are_those_of_oscar_calibrate_with_windows_and_a_short_last_sequence(self):
        folder, ids = self.folder / "model", self.folder / "ids.npy"
        write_checkpoint(folder, CASES["qwen2_windows"], 5, None)
        write_checkpoint(folder, CASES["qwen2_windows"], 5, make_weights(folder, seed=11))
        stream = torch.randint(0, 512, (5 * 256 + 100,), generator=torch.Generator().manual_seed(7)).numpy()
        np.save(ids, stream.astype(np.int32))
        native, ours = self.folder / "native.h5", self.folder / "ours.h5"
        program("oscar-calibrate", folder, ids, native, "--device", "cpu", "--dtype", "fp32", "--sequence-length", 256, *WINDOWS,
                "--quiet")
        calibrate(folder, ids, ours, sequence_length=256, device="cpu", format=SHORT)
        same_search(self, native, ours)


class Gates(InAFolder):
    """Qwen3.5: a layer with linear attention, and one with gated outputs."""

    @staticmethod
    def gated():
        return tiny_model("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])

    def test_kl_of_a_gated_model_is_not_above_that_without_a_search(self):
        model, other, kl = self.gated(), random_ids(4, 256, 4).tolist(), {}
        for search in ("on", "off"):
            out = self.folder / f"{search}.h5"
            calibrate(model, TEXT, out, search=search, format=SHORT)
            kl[search] = evaluate(model, out, other)["kl"]
        self.assertLessEqual(kl["on"], kl["off"])

    def test_choices_are_those_of_oscar_calibrate(self):
        folder, ids = self.folder / "model", self.folder / "ids.npy"
        self.gated().save_pretrained(folder)
        np.save(ids, random_ids(6, 256, 5).numpy().astype(np.int32))
        native, ours = self.folder / "native.h5", self.folder / "ours.h5"
        program("oscar-calibrate", folder, ids, native, "--device", "cpu", "--dtype", "fp32", "--sequence-length", 256, *WINDOWS,
                "--quiet")
        calibrate(folder, ids, ours, sequence_length=256, device="cpu", format=SHORT)
        same_search(self, native, ours)

    def test_losses_are_of_gated_outputs(self):
        """With every gate 1 the search measures something else."""
        kept, plain = self.folder / "kept", self.folder / "plain"
        with Kept(kept):
            calibrate(self.gated(), TEXT, self.folder / "gated.h5", format=SHORT)
        shutil.copytree(kept, plain)
        for file in plain.glob("layer-001-sequence-*"):
            rows = load_file(file)
            self.assertTrue(bool(((rows["gate"] > 0) & (rows["gate"] < 1)).all()))
            save_file({**rows, "gate": torch.ones_like(rows["gate"])}, file)
        program("oscar-calibrate", plain, "recorded", self.folder / "plain.h5", "--device", "cpu", "--quiet")
        gated, ones = measured(self.folder / "gated.h5"), measured(self.folder / "plain.h5")
        self.assertGreater(np.abs(gated / ones - 1).max(), 0.01)


class WhatIsNotSearched(InAFolder):
    def run_of(self, name):
        out = self.folder / f"{name}.h5"
        with self.assertLogs("oscar_int2", "WARNING") as logs:
            calibrate(tiny_model(name, num_hidden_layers=2, layer_types=WINDOWED), TEXT, out, format=SHORT)
        return out, "\n".join(logs.output)

    def test_layers_that_the_loss_does_not_describe_are_said_in_log_and_bundle(self):
        for name, reason in (("gpt_oss", "attention has sinks"), ("gemma2", "scores have a soft cap")):
            with self.subTest(family=name):
                out, said = self.run_of(name)
                self.assertIn(f"nothing was searched, because {reason}", said)
                with h5py.File(out) as file:
                    self.assertNotIn("search", file.attrs)
                    for layer in file["layers"].values():
                        self.assertIn(reason, json.loads(layer.attrs["warnings"])[-1])
                program("oscar-bundle", "inspect", out)

    def test_too_little_text_is_said(self):
        out = self.folder / "short.h5"
        with self.assertLogs("oscar_int2", "WARNING") as logs:
            calibrate(one_layer(), random_ids(8, 100, 3).tolist(), out, format=SHORT)
        self.assertIn("at least 4 sequences of 144 tokens are needed, and there are 0", logs.output[0])
        self.assertFalse(any("clip_tried" in name for name in choices(out)))

    def test_a_disk_without_room_is_said_before_the_layers_run(self):
        with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=1000)), self.assertRaisesRegex(OSError, "--search off"):
            calibrate(one_layer(), TEXT, self.folder / "full.h5", format=SHORT)
        self.assertEqual(list(self.folder.glob("full*")), [])

    def test_a_search_that_is_neither_on_nor_off_is_refused(self):
        with self.assertRaisesRegex(ValueError, "search is 'none'"):
            calibrate(tiny_model("llama"), [[1, 2, 3]], self.folder / "none.h5", search="none")


class EveryKindOfRun(InAFolder):
    def test_without_a_search_no_choice_is_recorded(self):
        out = self.folder / "fixed.h5"
        calibrate(one_layer(), TEXT, out, search="off", format=SHORT)
        with h5py.File(out) as file:
            self.assertNotIn("search", file.attrs)
        self.assertFalse(any("clip_tried" in name for name in choices(out)))

    def test_layers_without_rope_on_neighbours_or_with_windows_are_searched(self):
        for name, layers, searched in (("smollm3", 2, 2), ("cohere", 1, 1), ("gemma3", 2, 1)):
            with self.subTest(family=name):
                out, windows = self.folder / f"{name}.h5", {"layer_types": WINDOWED} if name == "gemma3" else {}
                calibrate(tiny_model(name, num_hidden_layers=layers, **windows), TEXT, out, format=SHORT)
                with h5py.File(out) as file:
                    self.assertEqual(sum("k_clip_nmse" in layer for layer in file["layers"].values()), searched)

    def test_a_model_on_several_devices_gives_the_same_bundle(self):
        whole, layered = self.folder / "whole.h5", self.folder / "layered.h5"
        for out, places in ((layered, {}), (whole, {"a": "cuda:0", "b": "cuda:1"})):
            model = tiny_model("llama", num_hidden_layers=2)
            model.hf_device_map = places
            calibrate(model, TEXT, out, format=SHORT)
        self.assertEqual(program("oscar-bundle", "diff", whole, layered), "equal\n")

    def test_rows_in_bfloat16_are_kept_as_such(self):
        kept, out = self.folder / "bf16", self.folder / "bf16.h5"
        with Kept(kept):
            calibrate(one_layer().bfloat16(), TEXT, out, format=SHORT)
        rows = load_file(next(kept.glob("layer-000-sequence-*")))
        self.assertEqual({name: x.dtype for name, x in rows.items()}, dict.fromkeys("qkv", torch.bfloat16))
        self.assertTrue(any("clip_tried" in name for name in choices(out)))

    def test_sums_alone_are_of_all_text_in_its_order(self):
        on, off = self.folder / "on.h5", self.folder / "off.h5"
        for out, search in ((on, "on"), (off, "off")):
            calibrate(one_layer(), TEXT, out, statistics_only=True, search=search, format=SHORT)
        self.assertEqual(program("oscar-bundle", "diff", on, off), "equal\n")

    def test_the_command_searches_and_leaves_nothing_but_the_bundle(self):
        folder, work = self.folder / "saved", self.folder / "work"
        work.mkdir()
        one_layer().save_pretrained(folder)
        np.save(self.folder / "ids.npy", random_ids(4, 450, 3).numpy().astype(np.int32))
        for search, searched in (("on", True), ("off", False)):
            out = work / f"{search}.h5"
            with contextlib.redirect_stderr(io.StringIO()) as said:
                status = calibrate_command.main([str(folder), str(self.folder / "ids.npy"), str(out), "--device", "cpu",
                                                 "--search", search])
            self.assertEqual(status, 0, said.getvalue())
            self.assertEqual(any("clip_tried" in name for name in choices(out)), searched)
        self.assertEqual({path.name for path in work.iterdir()}, {"on.h5", "off.h5"})

    def test_options_of_the_fit_may_leave_more_to_the_search(self):
        out = self.folder / "method.h5"
        calibrate(one_layer(), TEXT, out, format=SHORT, fit_options=("--method", "auto"))
        with h5py.File(out) as file:
            self.assertEqual(json.loads(file.attrs["search"])["searched"], ["method", "clip"])


class Splits(unittest.TestCase):
    def test_each_sequence_is_in_one_part_and_the_last_long_ones_are_held_back(self):
        for lengths, held in (([256] * 4, [2, 3]), ([256] * 3, []), ([256] * 16, [12, 14, 13, 15]),
                              ([256, 256, 256, 100, 256, 100], [2, 4]), ([256] * 12, [10, 9, 11]),
                              ([256] * 40, [32, 34, 36, 38, 33, 35, 37, 39]), ([100] * 9, [])):
            with self.subTest(lengths=lengths):
                split, reason = hold_back(lengths, SHORT)
                self.assertEqual(split.held, held)
                self.assertEqual(sorted(split.fit + split.held), list(range(len(lengths))))
                self.assertEqual(bool(reason), not held)


if __name__ == "__main__":
    unittest.main(verbosity=2)
