"""oscar-calibrate as a user calls it: what it writes, that it repeats itself, and resume."""
import json
import os
import pty
import signal
import subprocess
import time
import unittest

import h5py
import numpy as np

from support import checkpoints
from support.programs import BIN, ENVIRONMENT, ProgramTest


# For tests to which the amount of text is nothing.
SHORT = ["--max-tokens", 4096]


class CalibrateTest(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.corpus = self.folder / "corpus.jsonl"
        self.corpus.write_text("".join(json.dumps({"text": text}) + "\n"
                                       for text in checkpoints.sample_text()))
        self.out = self.folder / "out.h5"

    def calibrate(self, corpus, out, *options):
        return self.run_ok("oscar-calibrate", "--device", "cpu", self.model, corpus, out, *options)

    def long_text(self, documents):
        text = self.folder / "long.txt"
        text.write_text("".join(checkpoints.sample_text(documents)))
        return text

    def start(self, corpus, out, *options, stderr=subprocess.DEVNULL):
        return subprocess.Popen(
            [BIN / "oscar-calibrate", "--device", "cpu", self.model, corpus, out, *map(str, options)],
            env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=stderr)

    def stop_at(self, stage, seconds, with_signal, corpus, out, *options):
        """Sends the signal so long after the stage has begun; returns what was said until the end.

        On a terminal, because only there a stage is announced when it begins."""
        terminal, stderr = pty.openpty()
        self.addCleanup(os.close, terminal)
        process = self.start(corpus, out, *options, stderr=stderr)
        os.close(stderr)
        said, sent = b"", False
        while True:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # the program has ended
                break
            if not sent and stage in said:
                time.sleep(seconds)
                process.send_signal(with_signal)
                sent = True
        code = process.wait(timeout=60)
        said = said.decode()
        self.assertEqual(code, 130 if with_signal == signal.SIGTERM else -with_signal, said)
        self.assertFalse(out.exists(), said)
        return said

    def random_moments(self):
        seed = int(os.environ.get("OSCAR_TEST_SEED", "1"))
        print(f"{self.id()}: OSCAR_TEST_SEED={seed}")
        return np.random.default_rng(seed)


class WhatItWrites(CalibrateTest):
    def test_a_bundle_that_verifies(self):
        self.calibrate(self.corpus, self.out, "--sequence-length", 256)
        self.run_ok("oscar-bundle", "verify", self.out)
        with h5py.File(self.out) as file:
            self.assertEqual(file.attrs["preset"], b"best")
            self.assertEqual(file["layers/002/k_rotation"].shape, (2, 32, 32))
            self.assertEqual(int(file["layers/000/statistics/count_kv"][()]),
                             int(file["corpus"].attrs["tokens"]))

    def test_each_method_shows_in_the_bundle(self):
        for method, kind in {"balanced": 3, "oscar": 2, "hadamard": 1, "identity": 0}.items():
            self.calibrate(self.corpus, self.out, *SHORT, "--method", method, "--search", "off", "--force")
            with h5py.File(self.out) as file:
                self.assertEqual(set(file["layers/000/k_kind"][()].tolist()), {kind})

    def test_the_paper_preset_is_shared_uncentered_and_plain(self):
        self.calibrate(self.corpus, self.out, "--preset", "paper")
        with h5py.File(self.out) as file:
            layer = file["layers/001"]
            self.assertEqual(file.attrs["granularity"], b"shared")
            np.testing.assert_array_equal(layer["k_rotation"][0], layer["k_rotation"][1])
            self.assertFalse(layer["k_mean"][()].any())
            self.assertNotIn("k_feedback", layer)
            np.testing.assert_allclose(layer["k_clip_ratio"][()], 0.96)

    def test_the_released_preset_runs_the_second_pass_and_options_override_it(self):
        self.calibrate(self.corpus, self.out, "--preset", "released", "--clip", "0.9,0.8")
        with h5py.File(self.out) as file:
            self.assertIn("v_energy_moment", file["layers/000/statistics"])
            np.testing.assert_allclose(file["layers/000/v_clip_ratio"][()], 0.8)

    def test_statistics_alone_or_none(self):
        self.calibrate(self.corpus, self.out, *SHORT, "--statistics-only")
        with h5py.File(self.out) as file:
            self.assertEqual(file.attrs["format"], b"oscar-statistics")
            self.assertNotIn("k_rotation", file["layers/000"])
        self.calibrate(self.corpus, self.out, *SHORT, "--no-statistics", "--search", "off", "--force")
        with h5py.File(self.out) as file:
            self.assertNotIn("statistics", file["layers/000"])

    def test_a_dry_run_writes_nothing_but_the_tokens_asked_for(self):
        ids = self.folder / "ids.npy"
        options = ["--sequence-length", 256, "--max-tokens", 1024]
        result = self.calibrate(self.corpus, self.out, "--dry-run", "--tokens-out", ids, *options)
        for word in ("time", "memory", "disk", "1,024"):
            self.assertIn(word, result.stdout)
        self.assertFalse(self.out.exists())
        self.assertEqual(np.load(ids).shape, (4, 256))
        again = self.folder / "again.h5"
        self.calibrate(self.corpus, self.out, *options)
        self.calibrate(ids, again, *options)
        with h5py.File(self.out) as one, h5py.File(again) as two:
            np.testing.assert_array_equal(one["layers/000/statistics/q_moment"],
                                          two["layers/000/statistics/q_moment"])

    def test_ids_with_padding_are_warned_of(self):
        ids, shown = self.folder / "ids.npy", "20% of the corpus is token 3 in runs of 32 or more"
        rows = np.random.default_rng(0).integers(4, 60, (4, 250))
        for name, left, right in (("left", 50, 0), ("right", 0, 50), ("none", 0, 0)):
            padded = np.pad(rows[:, :250 - left - right], ((0, 0), (left, right)), constant_values=3)
            np.save(ids, padded.astype(np.int32))
            calibrated = self.calibrate(ids, self.out, "--dry-run", "--sequence-length", 250)
            evaluated = self.run_ok("oscar-eval", self.model, "--corpus", ids, "--compare", "identity",
                                    "--sequence-length", 250, "--device", "cpu", "--sink", 4, "--recent", 16)
            for result in (calibrated, evaluated):
                said = " ".join((result.stdout + result.stderr).split())
                (self.assertNotIn if name == "none" else self.assertIn)(shown, said, name)

    def test_the_model_can_write_its_own_corpus(self):
        ids = self.folder / "ids.npy"
        options = ["--sequence-length", 128, "--tokens-out", ids, "--force"]
        self.calibrate("self:512", self.out, *options)
        first = np.load(ids)
        self.assertEqual(first.size, 512)
        self.assertGreater(len(np.unique(first)), 10)
        self.calibrate("self:512", self.out, *options)
        np.testing.assert_array_equal(np.load(ids), first)


# Windows so small that short sequences can be held back.
SEARCH = ["--sequence-length", 256, "--sink", 4, "--recent", 16, "--max-tokens", 6144]
ALL_PARTS = [word for name in ("method", "center", "granularity", "rounding", "scale-correction")
             for word in (f"--{name}", "auto")]
FIXED = ["--method", "balanced", "--granularity", "per-head", "--center", "on", "--clip", ".95,.96",
         "--rounding", "shaped", "--scale-correction", "metric"]


class HeldBackSearch(CalibrateTest):
    searched = None  # what SEARCH writes, and with --search off: one run of each for all tests
    unsearched = None

    def setUp(self):
        super().setUp()
        self.text = self.long_text(400)
        if HeldBackSearch.searched is None:
            HeldBackSearch.searched = self.bytes_of()
            HeldBackSearch.unsearched = self.bytes_of("--search", "off")

    def bytes_of(self, *options):
        self.calibrate(self.text, self.out, *SEARCH, *options)
        found = self.out.read_bytes()
        self.out.unlink()
        return found

    def test_choices_are_stored_with_the_losses_that_decided_them(self):
        self.out.write_bytes(self.searched)
        self.run_ok("oscar-bundle", "verify", self.out)
        with h5py.File(self.out) as file:
            search = json.loads(file.attrs["search"])
            self.assertGreaterEqual(search["search_chunks"], 1)
            self.assertTrue(search["fallback"])
            self.assertGreaterEqual(search["confirm_chunks"], search["search_chunks"])
            self.assertGreater(search["held_back_tokens"], 0)
            for layer in file["layers"].values():
                self.assertEqual(int(layer["statistics/count_kv"][()]), int(file["corpus"].attrs["tokens"]))
            for layer in file["layers"].values():
                nmse = layer["predicted_output_nmse"][()]
                self.assertTrue(((nmse > 0) & (nmse < 1)).all(), nmse)
                for side in ("key", "value"):
                    record = json.loads(layer.attrs[f"search_{side}"])
                    self.assertEqual([s["stage"] for s in record["stages"]],
                                     ["clip", "clip"])
                    self.assertEqual(len(record["heads"]), 2)
                    for head in record["heads"]:
                        self.assertLessEqual(head["nmse"], head["default_nmse"])
                for head, pair in enumerate(json.loads(layer.attrs["search_pair"])):
                    self.assertLessEqual(pair["nmse"], pair["default_nmse"])
                    self.assertAlmostEqual(pair["nmse"], nmse[head], delta=1e-3 * nmse[head])

    def test_what_was_chosen_is_fitted_to_all_text(self):
        self.out.write_bytes(self.searched)
        off = self.folder / "off.h5"
        off.write_bytes(self.unsearched)
        with h5py.File(self.out) as one, h5py.File(off) as two:
            for layer in two["layers"]:
                for name, sums in two[f"layers/{layer}/statistics"].items():
                    np.testing.assert_allclose(one[f"layers/{layer}/statistics/{name}"], sums, rtol=1e-9,
                                               atol=1e-9 * np.abs(sums).max(), err_msg=name)
                balanced = one[f"layers/{layer}/k_kind"][()] == two[f"layers/{layer}/k_kind"][()]
                self.assertTrue(balanced.any())
                np.testing.assert_allclose(one[f"layers/{layer}/k_rotation"][balanced],
                                           two[f"layers/{layer}/k_rotation"][balanced], rtol=.02, atol=1e-2)

    def test_a_search_of_all_parts_goes_through_all_stages(self):
        self.calibrate(self.text, self.out, *SEARCH, *ALL_PARTS)
        with h5py.File(self.out) as file:
            self.assertEqual(json.loads(file.attrs["search"])["searched"],
                             ["method", "center", "granularity", "clip", "rounding", "scale correction"])
            record = json.loads(file["layers/000"].attrs["search_key"])
            self.assertEqual([s["stage"] for s in record["stages"]], ["transform", "clip", "clip", "writer"])

    def test_a_method_that_is_named_has_no_fallback_and_is_another_run(self):
        self.calibrate(self.text, self.out, *SEARCH, "--method", "balanced")
        with h5py.File(self.out) as file:
            self.assertFalse(json.loads(file.attrs["search"])["fallback"])
            key = file.attrs["run_key"]
        self.out.write_bytes(self.searched)
        with h5py.File(self.out) as file:
            self.assertNotEqual(file.attrs["run_key"], key)

    def test_losses_of_clipping_ratios_are_kept_where_they_were_searched(self):
        self.out.write_bytes(self.searched)
        with h5py.File(self.out) as file:
            for number, layer in file["layers"].items():
                portable = file[f"portable/layers/{number}"]
                for variant in (layer, portable["shared"], portable["per_head"]):
                    for side, word in (("k", "key"), ("v", "value")):
                        tried, nmse = variant[f"{side}_clip_tried"][()], variant[f"{side}_clip_nmse"][()]
                        self.assertTrue(set(variant[f"{side}_clip_ratio"][()]) <= set(tried))
                        stage = next(stage for stage in
                                     json.loads(variant.attrs[f"search_{word}"])["stages"]
                                     if stage["stage"] == "clip")
                        # The record says the same in four digits.
                        self.assertEqual([f"{ratio:.2f}" for ratio in tried[1:]],
                                         stage["variants"][1:])
                        np.testing.assert_allclose(stage["nmse"], nmse, rtol=5e-4)
        self.out.write_bytes(self.unsearched)
        with h5py.File(self.out) as file:
            self.assertNotIn("k_clip_tried", file["layers/000"])
            self.assertNotIn("k_clip_tried", file["portable/layers/000/shared"])

    def test_the_portable_variant_is_plain_and_has_its_own_prediction(self):
        self.out.write_bytes(self.searched)
        with h5py.File(self.out) as file:
            for layer in file["portable/layers"].values():
                shared, per_head = layer["shared"], layer["per_head"]
                np.testing.assert_array_equal(shared["k_rotation"][0], shared["k_rotation"][1])
                for variant in (shared, per_head):
                    self.assertTrue(set(variant["k_kind"][()]) <= {1, 2})
                    self.assertEqual(len(set(variant["k_clip_ratio"][()])), 1)
                    self.assertFalse(variant["k_mean"][()].any())
                    self.assertNotIn("k_feedback", variant)
                    self.assertEqual(variant["predicted_output_nmse"].shape, (2,))
        text = self.run_ok("oscar-bundle", "inspect", self.out, "--all").stdout
        self.assertIn("portable variant, one rotation per KV head", text)
        self.assertIn("decided on", text)
        result = self.run_ok("oscar-eval", self.model, "--device", "cpu", "--bundle", self.out,
                             "--corpus", self.corpus, "--sequence-length", 256, "--max-tokens", 2048, "--compare",
                             "bf16,exact,bundle,portable,portable-perhead")
        self.assertIn("portable-perhead", result.stdout)

    def test_the_same_bytes_twice(self):
        self.calibrate(self.text, self.out, *SEARCH)
        self.assertEqual(self.out.read_bytes(), self.searched)

    def test_a_stopped_search_resumes_with_the_same_sums_under_smaller_shards(self):
        said = self.stop_at(b"searching", 0, signal.SIGTERM, self.text, self.out, *SEARCH,
                            "--checkpoint-every", 100000)
        for words in ("out.h5.checkpoint", "--resume", "the search begins again"):
            self.assertIn(words, said)
        self.calibrate(self.text, self.out, *SEARCH, "--checkpoint-every", 1, "--resume")
        self.assertEqual(self.out.read_bytes(), self.searched)

    def test_value_energies_are_not_collected_again_once_they_are_complete(self):
        whole, options = self.folder / "whole.h5", [*SEARCH, "--objective-v", "energy"]
        self.calibrate(self.text, whole, *options)
        said = self.stop_at(b"second pass", 0, signal.SIGTERM, self.text, self.out, *options)
        self.assertIn("the second pass, over value energies, begins again", said)
        said = self.stop_at(b"searching", 0, signal.SIGTERM, self.text, self.out, *options,
                            "--resume")
        self.assertIn("second pass", said)
        result = self.calibrate(self.text, self.out, *options, "--resume")
        self.assertNotIn("second pass", result.stderr)
        self.assertEqual(self.out.read_bytes(), whole.read_bytes())

    def test_values_that_are_given_are_not_searched_and_all_text_is_fitted(self):
        self.calibrate(self.text, self.out, *SEARCH, *FIXED)
        with h5py.File(self.out) as file:
            self.assertNotIn("search", file.attrs)
            self.assertNotIn("predicted_output_nmse", file["layers/000"])
            self.assertEqual(int(file["layers/000/statistics/count_kv"][()]),
                             int(file["corpus"].attrs["tokens"]))
        off = self.folder / "off.h5"
        off.write_bytes(self.unsearched)
        with h5py.File(self.out) as one, h5py.File(off) as two:
            np.testing.assert_array_equal(one["layers/001/k_rotation"], two["layers/001/k_rotation"])
            # clip_v of the preset "best"
            np.testing.assert_allclose(two["layers/001/v_clip_ratio"], 0.92)

    def test_one_open_choice_leaves_the_others_fixed(self):
        self.calibrate(self.text, self.out, *SEARCH, "--preset", "paper", "--clip", "search")
        with h5py.File(self.out) as file:
            self.assertEqual(json.loads(file.attrs["search"])["searched"], ["clip"])
            for layer in file["layers"].values():
                self.assertEqual(set(layer["k_kind"][()]), {2})
                self.assertFalse(layer["k_mean"][()].any())
                self.assertNotIn("k_feedback", layer)

    def test_a_small_corpus_keeps_the_preset_and_says_so(self):
        result = self.calibrate(self.corpus, self.out, "--sequence-length", 512, "--max-tokens", 1536)
        self.assertIn("to hold text back", result.stderr)
        with h5py.File(self.out) as file:
            self.assertNotIn("search", file.attrs)
            # clip_k of the preset "best"
            np.testing.assert_allclose(file["layers/000/k_clip_ratio"][()], 0.92)
            self.assertIn("portable", file)

    def test_a_dry_run_says_what_the_search_costs(self):
        for options in ([], ["--objective-v", "energy"]):
            dry = self.calibrate(self.text, self.out, *SEARCH, *options, "--dry-run")
            self.assertIn("to search on", dry.stdout)

    def test_fitting_again_from_statistics_equals_a_run_without_search(self):
        statistics, again = self.folder / "statistics.h5", self.folder / "again.h5"
        paper = ["--preset", "paper", "--clip", "off"]
        self.calibrate(self.text, statistics, *SEARCH, "--statistics-only")
        for fitted, same in ((self.unsearched, []), (self.bytes_of(*paper), paper)):
            self.out.write_bytes(fitted)
            self.run_ok("oscar-bundle", "fit", statistics, "-o", again, "--force", *same)
            self.run_ok("oscar-bundle", "verify", again)
            with h5py.File(self.out) as one, h5py.File(again) as two:
                names = []
                one.visititems(lambda name, item: names.append(name)
                               if isinstance(item, h5py.Dataset) else None)
                self.assertGreater(len(names), 100)
                for name in names:
                    np.testing.assert_array_equal(one[name], two[name], name)
                for attribute in ("method", "preset", "granularity", "position_span"):
                    self.assertEqual(one.attrs[attribute], two.attrs[attribute])
                self.assertEqual(dict(one["quantizer"].attrs), dict(two["quantizer"].attrs))

    def test_fitting_again_refuses_what_it_cannot_do(self):
        self.calibrate(self.corpus, self.out, *SHORT, "--no-statistics", "--search", "off")
        other = self.folder / "other.h5"
        self.refuse("oscar-bundle", ["fit", self.out, "-o", other], "no statistics")
        self.calibrate(self.corpus, self.out, *SHORT, "--search", "off", "--force")
        self.refuse("oscar-bundle", ["fit", self.out, "-o", other, "--objective-v", "energy"],
                    "energy")
        self.refuse("oscar-bundle", ["fit", self.out, "-o", other, "--clip", "search"],
                    "needs the model", code=2)


# Above what two layers and a half and one batch need (311 MiB), below what all layers need (344).
STREAMED_MODEL = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024}
TIGHT_MEMORY = "354M"


class Repeats(CalibrateTest):
    def test_the_same_bytes_whatever_the_sharding(self):
        other = self.folder / "other.h5"
        self.calibrate(self.corpus, self.out, "--sequence-length", 128)
        self.calibrate(self.corpus, other, "--sequence-length", 128, "--checkpoint-every", 1)
        self.assertEqual(self.out.read_bytes(), other.read_bytes())

    def test_the_same_bytes_when_weights_stream(self):
        other = self.folder / "other.h5"
        checkpoints.write_checkpoint(self.model, STREAMED_MODEL)
        options = [*SHORT, "--sequence-length", 128]
        tight = [*options, "--host-memory", TIGHT_MEMORY]
        self.calibrate(self.corpus, self.out, *options)
        dry = self.calibrate(self.corpus, other, *tight, "--dry-run")
        self.assertIn("stream", dry.stdout)
        self.calibrate(self.corpus, other, *tight)
        self.assertEqual(self.out.read_bytes(), other.read_bytes())

    def stop_and_resume(self, text, before, after, options):
        """SIGTERM while collecting under one plan, resumed under another: the bytes of one run."""
        checkpoint = self.folder / "out.h5.checkpoint"
        whole = self.folder / "whole.h5"
        if not whole.exists():
            began = time.monotonic()
            self.calibrate(text, whole, *options)
            self.seconds = time.monotonic() - began
        # Collecting takes most of them, also when the machine is a few times faster now.
        moment = self.random_moments().uniform(0, self.seconds / 6)
        said = self.stop_at(b"collecting", moment, signal.SIGTERM, text, self.out, *options, *before)
        self.assertIn("--resume", said)
        self.assertTrue(checkpoint.exists())
        self.refuse("oscar-calibrate", ["--device", "cpu", self.model, text, self.out, *options, *after],
                    "has left its checkpoint here", "--resume continues that run")
        result = self.calibrate(text, self.out, *options, *after, "--resume")
        self.assertNotIn("starting anew", result.stderr)
        self.assertEqual(self.out.read_bytes(), whole.read_bytes())
        self.assertFalse(checkpoint.exists())
        self.out.unlink()

    def test_sigterm_saves_a_checkpoint_and_resume_continues_from_it_under_any_plan(self):
        text, options = self.long_text(250), ["--sequence-length", 256, "--search", "off"]
        every = {n: ["--checkpoint-every", n] for n in (1, 40, 100000)}
        for before, after in (([], []), (every[1], every[100000]), (every[100000], every[1]),
                              (every[40], every[1])):
            with self.subTest(before=before, after=after):
                self.stop_and_resume(text, before, after, options)

    def test_sigterm_and_resume_with_another_memory_limit(self):
        checkpoints.write_checkpoint(self.model, STREAMED_MODEL)
        text = self.long_text(20)
        tight = ["--host-memory", TIGHT_MEMORY]
        for before, after in ((tight, []), ([], tight)):
            with self.subTest(before=before, after=after):
                self.stop_and_resume(text, before, after, ["--sequence-length", 128])

    def test_resume_without_a_checkpoint_starts_anew_and_says_so(self):
        result = self.calibrate(self.corpus, self.out, *SHORT, "--search", "off", "--resume")
        self.assertIn("starting anew", result.stderr)

    def test_resume_of_a_finished_run_does_nothing(self):
        self.calibrate(self.corpus, self.out, *SHORT, "--search", "off")
        before = self.out.stat().st_mtime_ns
        again = self.calibrate(self.corpus, self.out, *SHORT, "--search", "off", "--resume")
        self.assertIn("finished already", again.stdout)
        self.assertEqual(self.out.stat().st_mtime_ns, before)


if __name__ == "__main__":
    unittest.main()
