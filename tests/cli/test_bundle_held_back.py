"""oscar-bundle fit and merge: a file made from another's sums says what text these leave out."""
import json
import unittest

import h5py

from support.bundle_case import BundleCase, attributes, make_file, run, seal


class HeldBackText(BundleCase):
    SEARCH = {"searched": ["clip"], "effort": "quick", "search_chunks": 1, "confirm_chunks": 2,
              "held_back_tokens": 30, "seed": 0}
    KEPT = {"searched": [], "search_chunks": 1, "confirm_chunks": 2, "held_back_tokens": 30,
            "sink_tokens": 64, "recent_tokens": 256}

    def searched(self, name, seed, search=SEARCH):
        path = make_file(self.folder / name, seed=seed)
        with h5py.File(path, "r+") as file:
            for layer in file["layers"].values():
                layer["statistics/count_kv"][()] = 70
                layer["statistics/count_q"][()] = 140
            attributes(file, search=json.dumps(search), run_key="r")
            seal(file)
        return path

    def made(self, *arguments):
        """The file that a command makes, as `search` and the tokens that its sums lack."""
        out = self.folder / "made.h5"
        result = run(*arguments, "-o", out, "--force")
        self.assertEqual(result.returncode, 0, result.stderr)
        with h5py.File(out) as file:
            lacking = int(file["corpus"].attrs["tokens"])
            lacking -= int(file["layers/000/statistics/count_kv"][()])
            return json.loads(file.attrs["search"]) if "search" in file.attrs else None, lacking

    def test_fitting_again_keeps_it_through_other_windows(self):
        path = self.searched("a.h5", seed=1)
        fit = ["fit", path, "--preset", "paper", "--position-span", 0]
        self.assertEqual(self.made(*fit), (self.KEPT, 30))
        once = self.folder / "once.h5"
        self.assertEqual(run(*fit, "-o", once, "--sink", 4, "--recent", 16).returncode, 0)
        fit[1] = once
        self.assertEqual(self.made(*fit), (self.KEPT, 30))
        text = run("inspect", once).stdout
        self.assertIn("30 tokens of the corpus are in no sum", text)
        self.assertNotIn("decided on", text)

    def test_merging_adds_it_up(self):
        one, whole = self.searched("a.h5", seed=1), make_file(self.folder / "b.h5", seed=2)
        two = self.searched("c.h5", seed=3, search=self.SEARCH | {"held_back_tokens": 30,
                                                                  "search_chunks": 5})
        with h5py.File(two, "r+") as file:
            attributes(file["quantizer"], sink_tokens=4)
            seal(file)
        both = self.KEPT | {"search_chunks": 6, "confirm_chunks": 4, "held_back_tokens": 60}
        self.assertEqual(self.made("merge", one, whole), (self.KEPT, 30))
        self.assertEqual(self.made("merge", whole, one), (self.KEPT, 30))
        self.assertEqual(self.made("merge", one, two), (both | {"sink_tokens": None}, 60))
        with h5py.File(self.folder / "made.h5") as file:
            self.assertEqual(file.attrs["run_key"], b"")
        self.assertEqual(run("verify", self.folder / "made.h5").returncode, 0)

    def test_nothing_is_lacking_where_all_text_was_added_up_after_the_search(self):
        path = make_file(self.folder / "a.h5", seed=1)
        with h5py.File(path, "r+") as file:
            attributes(file, search=json.dumps(self.SEARCH))
            seal(file)
        self.assertEqual(self.made("merge", path, make_file(self.folder / "b.h5", seed=2)), (None, 0))

    def test_records_that_make_no_sense_are_left_out(self):
        for tokens in (0, -5, 101, 1 << 63, "many", None, [1]):
            with self.subTest(tokens):
                path = self.searched("a.h5", 1, self.SEARCH | {"held_back_tokens": tokens})
                self.assertIsNone(self.made("merge", path, make_file(self.folder / "b.h5",
                                                                     seed=2))[0])


if __name__ == "__main__":
    unittest.main()
