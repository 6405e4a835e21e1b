"""oscar-calibrate --row-weights, --key-centers and --separators: what they change, and what the bundle says of it."""
import json
import unittest

import h5py
import numpy as np

from support import checkpoints
from support.programs import ProgramTest

ATTENDED = {f"{side}_attended_{part}" for side in "kv" for part in ("moment", "sum", "weight")} | {
    "q_attended_moment", "q_attended_weight", "k_sink_sum", "k_sink_weight"}
EVEN = ["--row-weights", "even"]
ONE = ["--key-centers", "one"]
# Longer than the exact windows, so that queries read 2-bit rows.
LENGTH = ["--sequence-length", 512]


class RowWeights(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model", {})
        self.corpus = self.folder / "long.txt"
        self.corpus.write_text("".join(checkpoints.sample_text(100)))

    def calibrate(self, name, *options):
        out = self.folder / f"{name}.h5"
        result = self.run_ok("oscar-calibrate", "--device", "cpu", self.model, self.corpus, out, *LENGTH, *options)
        return out, result

    def test_by_attention_is_another_fit_from_sums_that_are_in_the_file(self):
        even, _ = self.calibrate("even", "--search", "off", *EVEN)
        attention, result = self.calibrate("attention", "--search", "off", *ONE)
        self.assertNotIn("count alike", result.stderr)
        with h5py.File(even) as a, h5py.File(attention) as b:
            self.assertEqual((a.attrs["row_weights"], b.attrs["row_weights"]), (b"even", b"attention"))
            sums, weighted = a["layers/001/statistics"], b["layers/001/statistics"]
            self.assertEqual(set(weighted) - set(sums), ATTENDED)
            for name in sums:
                np.testing.assert_array_equal(sums[name][()], weighted[name][()], name)
            for name in ("k_rotation", "v_rotation", "v_mean"):
                self.assertGreater(abs(a["layers/001"][name][()] - b["layers/001"][name][()]).max(), 1e-3, name)
        self.assertIn("rows by attention", self.run_ok("oscar-bundle", "inspect", attention).stdout)
        self.assertNotIn("rows by attention", self.run_ok("oscar-bundle", "inspect", even).stdout)

        # What a run would have fitted can be fitted later, but only from sums that it collected.
        again = self.folder / "again.h5"
        self.run_ok("oscar-bundle", "fit", attention, "-o", again, *ONE)
        with h5py.File(again) as a, h5py.File(attention) as b:
            np.testing.assert_array_equal(a["layers/001/k_rotation"][()], b["layers/001/k_rotation"][()])
        lacking = self.folder / "lacking.h5"
        self.run_ok("oscar-bundle", "fit", even, "-o", lacking)
        with h5py.File(lacking) as a, h5py.File(even) as b:
            self.assertIn("all rows count alike", a["layers/001"].attrs["warnings"].decode())
            np.testing.assert_array_equal(a["layers/001/k_rotation"][()], b["layers/001/k_rotation"][()])
            self.assertEqual(a.attrs["row_weights"], b"even")  # as it was done, not as it was asked for
        self.assertNotIn("rows by attention", self.run_ok("oscar-bundle", "inspect", lacking).stdout)

    def test_a_text_without_2_bit_rows_counts_rows_alike_and_says_so(self):
        out = self.folder / "short.h5"
        self.run_ok("oscar-calibrate", "--device", "cpu", self.model, self.corpus, out, "--sequence-length", 256, "--search", "off")
        with h5py.File(out) as file:
            self.assertEqual(file.attrs["row_weights"], b"even")

    def test_keys_have_two_centers_unless_one_is_asked_for(self):
        two, _ = self.calibrate("two", "--search", "off")
        one, _ = self.calibrate("one", "--search", "off", *ONE)
        with h5py.File(two) as a, h5py.File(one) as b:
            self.assertEqual(a.attrs["required_features"], b'["key_centres"]')
            self.assertEqual(b.attrs["required_features"], b'[]')
            layer = a["layers/001"]
            self.assertEqual(layer["k_centres"].shape, (layer["k_mean"].shape[0], 2, layer["k_mean"].shape[1]))
            self.assertNotIn("k_centres", b["layers/001"])
            np.testing.assert_array_equal(layer["v_mean"][()], b["layers/001/v_mean"][()])
        self.assertIn("keys about two centers", self.run_ok("oscar-bundle", "inspect", two).stdout)
        self.assertNotIn("two centers", self.run_ok("oscar-bundle", "inspect", one).stdout)
        result = self.run_ok("oscar-eval", "--device", "cpu", self.model, "--bundle", two, "--bundle", f"one={one}",
                             "--corpus", self.corpus, "--sequence-length", 512, "--max-tokens", 4096, "--compare", "bundle,one",
                             "--json", self.folder / "eval.json", "--separators", 32)
        methods = json.loads((self.folder / "eval.json").read_text())["methods"]
        self.assertGreater(methods["bundle"]["kl"]["mean"], 0)
        self.assertNotEqual(methods["bundle"]["kl"]["mean"], methods["one"]["kl"]["mean"])
        self.assertIn("rows / attention", result.stdout)

    def test_two_centers_need_rows_by_attention(self):
        for other in (EVEN, ["--center", "off"], ["--position-span", 0]):
            self.refuse("oscar-calibrate", [self.model, self.corpus, self.folder / "no.h5", "--key-centers", "two",
                                            *other], "keys can't have two centers", code=2)

    def test_auto_leaves_it_to_the_search(self):
        out, _ = self.calibrate("auto", "--row-weights", "auto", "--key-centers", "auto")
        with h5py.File(out) as file:
            self.assertIn("row weights", json.loads(file.attrs["search"])["searched"])
            (stage,) = [s for s in json.loads(file["layers/001"].attrs["search_key"])["stages"]
                        if s["stage"] == "transform"]
            self.assertIn("balanced centred per-head", stage["variants"])  # against "before", the default
            self.assertIn("balanced centred by-attention per-head", stage["variants"])

    def test_separators_are_put_in_and_recorded(self):
        plain, _ = self.calibrate("plain", "--search", "off", "--separators", "off")
        out, _ = self.calibrate("separators", "--search", "off", "--tokens-out", self.folder / "ids.npy")
        with h5py.File(plain) as a, h5py.File(out) as b:
            self.assertEqual(a["corpus"].attrs["separators"], b"none")
            self.assertIn("ids 256 in every second sequence", b["corpus"].attrs["separators"].decode())
            self.assertNotEqual(a["corpus"].attrs["tokens_sha256"], b["corpus"].attrs["tokens_sha256"])
        self.assertIn("separators: ids 256", self.run_ok("oscar-bundle", "inspect", out).stdout)

    def test_a_text_without_separators_gets_a_note(self):
        ids = self.folder / "ids.npy"
        np.save(ids, np.random.default_rng(1).integers(0, 200, (8, 512), dtype=np.int32))
        arguments = ["--device", "cpu", self.model, ids, self.folder / "out.h5", "--search", "off", "--force"]
        self.assertIn("0 of 4096 tokens end a document", self.run_ok("oscar-calibrate", *arguments).stderr)
        told = self.run_ok("oscar-calibrate", *arguments, "--separators", "on")
        self.assertNotIn("tokens end a document", told.stderr)


if __name__ == "__main__":
    unittest.main()
