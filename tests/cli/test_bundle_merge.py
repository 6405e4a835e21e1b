"""oscar-bundle merge: what is added, and what is refused."""
import json
import unittest

import h5py
import numpy as np

from bundle.verify_bundle import datasets_of
from support.bundle_case import (DIM, HEADS, LAYERS, STATISTICS, SUMS, BundleCase, attributes, dataset, make_file,
                                 run, seal)


class Merging(BundleCase):
    def test_sums_and_counts_add_and_both_corpora_are_listed(self):
        a = make_file(self.folder / "a.h5", statistics_only=True, seed=1)
        b = make_file(self.folder / "b.h5", seed=2)
        out = self.folder / "c.h5"
        result = run("merge", a, b, "-o", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        with h5py.File(a) as x, h5py.File(b) as y, h5py.File(out) as z:
            self.assertEqual(z.attrs["format"], b"oscar-statistics")
            p, q, r = datasets_of(x), datasets_of(y), datasets_of(z)
            for number in range(LAYERS):
                for name in STATISTICS[:4] + SUMS + ("count_q", "count_kv"):
                    path = f"/layers/{number:03}/statistics/{name}"
                    np.testing.assert_array_equal(r[path], p[path] + q[path])
            names = [s["name"] for s in json.loads(z["corpus"].attrs["sources"])]
            self.assertEqual(names, ["corpus 1", "corpus 2"])
            self.assertEqual(z["corpus"].attrs["tokens"], 200)
        self.assertEqual(run("verify", out).returncode, 0)

    def test_the_same_corpus_twice_is_refused_until_it_is_allowed(self):
        a = make_file(self.folder / "a.h5", statistics_only=True)
        out = self.folder / "c.h5"
        for options in ([], ["--force"]):  # which replaces a file, no more
            self.refuse("oscar-bundle", ["merge", a, a, "-o", out, *options], "counted twice", "--allow-repeats")
        self.assertFalse(out.exists())
        self.run_ok("oscar-bundle", "merge", a, a, "-o", out, "--allow-repeats")

    def test_other_models_and_stripped_files_are_refused(self):
        a = make_file(self.folder / "a.h5", statistics_only=True, seed=1)
        other = self.changed(lambda f: attributes(f["model"], weights_fingerprint="x"))
        stripped = self.folder / "s.h5"
        run("strip", make_file(self.folder / "b.h5", seed=2), stripped)
        out = self.folder / "c.h5"
        for path, word in ((other, "weights_fingerprint"), (stripped, "no statistics")):
            result = run("merge", a, path, "-o", out)
            self.assertEqual(result.returncode, 1)
            self.assertIn(word, result.stderr)
            self.assertFalse(out.exists())

    def sampled(self, name, seed, shift=0.0):
        path = make_file(self.folder / name, statistics_only=True, seed=seed)
        with h5py.File(path, "r+") as file:
            for number, layer in enumerate(file["layers"].values()):
                values = np.arange(HEADS * 64).reshape(HEADS, 4, 16) + 1.0
                values[0, 2, 7] += shift * number
                dataset(layer, "weight_samples", values, "<f4")
            seal(file)
        return path

    def test_sums_of_other_weights_of_the_same_files_are_refused(self):
        a, same, other = self.sampled("a.h5", 1), self.sampled("b.h5", 2), self.sampled("o.h5", 3, 1.0)
        self.run_ok("oscar-bundle", "merge", a, same, "-o", self.folder / "c.h5")
        result = run("merge", a, same, other, "-o", self.folder / "d.h5")
        self.assertEqual(result.returncode, 1)
        for word in ("different weights", "o.h5: weight_samples", "W_V of layer 1 differs, and 0 more of 8 tensors"):
            self.assertIn(word, result.stderr)
        self.assertFalse((self.folder / "d.h5").exists())

    def test_files_that_say_nothing_of_their_weights_are_warned_of(self):
        a, b = (make_file(self.folder / f"{seed}.h5", statistics_only=True, seed=seed) for seed in (1, 2))
        self.assertNotIn("nothing says", run("merge", a, b, "-o", self.folder / "named.h5").stderr)
        for path in (a, b):
            with h5py.File(path, "r+") as file:
                attributes(file["model"], weights_fingerprint="")
                seal(file)
        said = self.run_ok("oscar-bundle", "merge", a, b, "-o", self.folder / "c.h5").stderr
        self.assertIn(f"warning: {b}: nothing says that it is of the same weights as {a}", " ".join(said.split()))

    def weighted(self, name, seed, **windows):
        """A file with sums by attention, made with other windows than the usual ones."""
        path = make_file(self.folder / name, statistics_only=True, seed=seed)
        with h5py.File(path, "r+") as file:
            attributes(file["quantizer"], **windows)
            for layer in file["layers"].values():
                sums = layer["statistics"]
                for side in "qkv":
                    dataset(sums, f"{side}_attended_moment", sums[f"{side}_moment"][()], "<f8")
                    dataset(sums, f"{side}_attended_weight", np.full(HEADS, 9), "<f8")
                for side in "kv":
                    dataset(sums, f"{side}_attended_sum", sums[f"{side}_sum"][()], "<f8")
                dataset(sums, "k_sink_sum", np.zeros((HEADS, DIM)), "<f8")
                dataset(sums, "k_sink_weight", np.zeros(HEADS), "<f8")
            seal(file)
        return path

    def test_sums_by_attention_of_different_windows_are_refused_by_name(self):
        a, b = self.weighted("a.h5", 1), self.weighted("b.h5", 2, sink_tokens=16, demote_block=8)
        refit, out = self.folder / "refit.h5", self.folder / "c.h5"
        self.run_ok("oscar-bundle", "fit", b, "-o", refit, "--sink", 64, "--demote-block", 1)
        for other in (b, refit):  # whatever windows the bundle is for
            self.refuse("oscar-bundle", ["merge", a, other, "-o", out], "different windows", str(other),
                        "--sink 64 --demote-block 1 (", "--sink 16 --demote-block 8", "sums by attention are then left out")
        same, even = self.weighted("same.h5", 3), make_file(self.folder / "even.h5", seed=4)
        self.run_ok("oscar-bundle", "merge", a, same, "-o", out)
        self.run_ok("oscar-bundle", "merge", b, even, "-o", out, "--force")  # drops what both lack

    def merged(self, *files):
        out = self.folder / "merged.h5"
        said = " ".join(self.run_ok("oscar-bundle", "merge", *files, "-o", out, "--force").stderr.split())
        with h5py.File(out) as file:
            return said, file.attrs["row_weights"], "q_attended_moment" in file["layers/000/statistics"]

    def test_sums_by_attention_that_one_file_lacks_are_left_out_with_a_warning(self):
        a, b, even = self.weighted("a.h5", 1), self.weighted("b.h5", 2), make_file(self.folder / "even.h5", seed=3)
        said, weights, kept = self.merged(a, b)
        self.assertEqual((weights, kept), (b"attention", True))
        self.assertNotIn("left out", said)
        said, weights, kept = self.merged(a, even, b)
        self.assertEqual((weights, kept), (b"even", False))
        self.assertIn(f"sums by attention are of {a}, {b} alone and are left out (none in {even}): "
                      "fits of the result count rows alike", said)
        self.assertNotIn("left out", self.merged(even, make_file(self.folder / "other.h5", seed=4))[0])

    def partly(self, name, seed):
        """Sums by attention of layer 1 alone."""
        path = self.weighted(name, seed)
        with h5py.File(path, "r+") as file:
            sums = file["layers/000/statistics"]
            for part in [part for part in sums if "attended" in part or "sink" in part]:
                del sums[part]
            seal(file)
        return path

    def test_layers_that_differ_in_how_rows_count_are_mixed(self):
        part, whole = self.partly("part.h5", 1), self.weighted("whole.h5", 2)
        said, weights, kept = self.merged(part, whole)
        self.assertEqual((weights, kept), (b"mixed", False))
        self.assertIn(f"are of {whole} alone in 1 of 2 layers and are left out (none in {part}): "
                      "fits of the result count rows alike there", said)
        out = self.folder / "fit.h5"
        self.run_ok("oscar-bundle", "fit", part, "-o", out)
        with h5py.File(out) as file:
            self.assertEqual(file.attrs["row_weights"], b"mixed")
        shown = " ".join(self.run_ok("oscar-bundle", "inspect", out).stdout.split())
        self.assertIn("rows by attention in some layers and alike in others", shown)
        self.assertIn("layer 0: all rows count alike", shown)

    def of_text(self, name, seed, hashes):
        path = make_file(self.folder / name, statistics_only=True, seed=seed)
        with h5py.File(path, "r+") as file:
            sample = dataset(file["corpus"], "ngram_hashes", np.sort(hashes), "<i8")
            attributes(sample, ngram=13, capacity=8192, rule="smallest of ngram_hash 1")
            seal(file)
        return path

    def test_the_same_text_under_another_name_is_refused_and_a_part_of_it_warned_of(self):
        hashes = np.random.default_rng(0).choice(1 << 40, 3000, replace=False)
        a, same, part, other = (self.of_text(f"{name}.h5", seed, hashes[begin:begin + 1000]) for seed, (name, begin) in
                                enumerate((("a", 0), ("same", 400), ("part", 900), ("other", 2000)), 1))
        out = self.folder / "no.h5"
        self.refuse("oscar-bundle", ["merge", a, same, "-o", out], "counted twice", "about 60% of the smaller text, also in",
                    "--allow-repeats")
        self.assertIn("about 60% of the smaller text", " ".join(self.run_ok(
            "oscar-bundle", "merge", a, same, "-o", out, "--allow-repeats").stderr.split()))
        self.assertIn(f"{part}: about 10% of the smaller text is in {a} too, and counts twice", self.merged(a, part)[0])
        self.assertNotIn("smaller text", self.merged(a, other)[0])

    def test_a_fit_keeps_the_format_of_the_file(self):
        sums = self.weighted("a.h5", 1, sink_tokens=16, recent_tokens=32, quant_group_size=4)
        out = self.folder / "fit.h5"

        def fitted(*options):
            said = self.run_ok("oscar-bundle", "fit", sums, "-o", out, "--force", *options).stderr
            with h5py.File(out) as file:
                return said, [int(file["quantizer"].attrs[name]) for name in
                              ("sink_tokens", "recent_tokens", "quant_group_size", "demote_block")]

        said, found = fitted()
        self.assertEqual(found, [16, 32, 4, 1])
        self.assertNotIn("collected with", said)
        said, found = fitted("--recent", 64)
        self.assertEqual(found, [16, 64, 4, 1])
        words = "sums weighted by attention were collected with --recent 32, and the bundle is for --recent 64"
        self.assertIn(words, said)
        shown = " ".join(self.run_ok("oscar-bundle", "inspect", out).stdout.split())
        self.assertIn(words, shown)
        self.assertIn("sums by attention: of first 16 and last 32 tokens exact", shown)
        self.run_ok("oscar-bundle", "verify", out)

    def test_a_fit_of_what_another_server_codes_otherwise_says_that_it_is_not_for_that_server(self):
        sums = self.weighted("a.h5", 1, zero="minimum", ties="even", metadata_dtype="fp32")
        out = self.folder / "fit.h5"
        words = "a.h5: it was made for the codec of onnxruntime, and this fit is for this toolkit's own"
        said = " ".join(self.run_ok("oscar-bundle", "fit", sums, "-o", out).stderr.split())
        self.assertIn(words, said)
        self.assertIn("oscar-calibrate --for NAME", said)
        own = self.run_ok("oscar-bundle", "fit", self.weighted("b.h5", 1), "-o", self.folder / "own.h5")
        self.assertNotIn("codec of", own.stderr)


if __name__ == "__main__":
    unittest.main()
