"""oscar-bundle merge: what is added, and what is refused."""
import json
import unittest

import h5py
import numpy as np

from bundle.verify_bundle import datasets_of
from support.bundle_case import LAYERS, STATISTICS, SUMS, BundleCase, attributes, make_file, run


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

    def test_the_same_corpus_twice_needs_force(self):
        a = make_file(self.folder / "a.h5", statistics_only=True)
        out = self.folder / "c.h5"
        result = run("merge", a, a, "-o", out)
        self.assertEqual(result.returncode, 1)
        self.assertIn("counted twice", result.stderr)
        self.assertFalse(out.exists())
        self.assertEqual(run("merge", a, a, "-o", out, "--force").returncode, 0)

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


if __name__ == "__main__":
    unittest.main()
