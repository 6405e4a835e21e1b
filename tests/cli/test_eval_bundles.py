#!/usr/bin/env python3
"""oscar-eval with several bundles in one run, and the figures of each resampling unit."""
import json
import pathlib
import shutil
import tempfile
import unittest

import h5py
import numpy as np

from bundle.verify_bundle import content_sha256
from support.programs import SOURCE, run

MODEL = SOURCE / "datasets" / "tiny-gqa"


class SeveralBundles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.one, cls.two, cls.other = (cls.folder / name for name in ("one.h5", "two.h5", "other.h5"))
        for program, *arguments in (
                ("oscar-calibrate", MODEL, MODEL / "calibration.jsonl", cls.one, "--max-tokens", 1024,
                 "--sequence-length", 512, "--device", "cpu", "--search", "off", "--quiet"),
                ("oscar-bundle", "fit", cls.one, "-o", cls.two, "--preset", "paper"),
                ("oscar-bundle", "fit", cls.one, "-o", cls.other, "--recent", 128)):
            result = run(program, *arguments)
            assert result.returncode == 0, result.stderr

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def evaluate(self, *arguments, code=0):
        """The report, or what was said when it fails."""
        out = self.folder / "report.json"
        out.unlink(missing_ok=True)
        result = run("oscar-eval", MODEL, "--max-tokens", 800, "--sequence-length", 400, "--device", "cpu",
                     "--separators", "off", "--quiet", "--json", out, *arguments)
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(out.exists(), code == 0)
        return json.loads(out.read_text()) if code == 0 else result.stderr

    def test_a_bundle_of_a_model_that_was_changed_in_memory_is_refused(self):
        """It names the fingerprint of the files, and has samples of the weights that ran."""
        changed = self.folder / "changed.h5"
        shutil.copy(self.one, changed)
        with h5py.File(changed, "r+") as file:
            file["layers/003/weight_samples"][:, 1] *= 2
            file.attrs["content_sha256"] = np.bytes_(content_sha256(file))
        text = self.evaluate("--bundle", changed, "--compare", "bundle", code=1)
        self.assertRegex(text, "changed.h5(.|\n)*W_K of layer 3 differs, and 0 more of")
        self.assertIn("changed.h5", self.evaluate("--bundle", self.one, "--bundle", f"other={changed}", "--compare",
                                                  "bundle,other", code=1))
        folded = run("oscar-bundle", "fold", changed, MODEL, self.folder / "folded")
        self.assertEqual(folded.returncode, 1)
        self.assertIn("W_K of layer 3 differs", folded.stderr)
        self.assertFalse((self.folder / "folded").exists())

    def test_a_named_bundle_gives_the_figures_it_gives_alone(self):
        report = self.evaluate("--bundle", self.one, "--bundle", f"paper={self.two}", "--bundle",
                               f"1.st={self.one}", "--compare", "bundle,1.st,paper,paper@k")
        self.assertEqual(list(report["methods"]), ["bf16", "bundle", "1.st", "paper", "paper@k"])
        methods = report["methods"]
        self.assertEqual(methods["bundle"]["kl"], methods["1.st"]["kl"])
        self.assertEqual(methods["paper"]["summary"], "bundle paper")
        self.assertEqual({name: m["kl_difference"]["against"] for name, m in methods.items() if "kl_difference" in m},
                         {name: "bundle" for name in ("1.st", "paper", "paper@k")})
        alone = self.evaluate("--bundle", self.two, "--compare", "bundle")
        self.assertEqual(alone["methods"]["bundle"]["kl"], methods["paper"]["kl"])
        own = self.evaluate("--bundle", f"1.st={self.one}", "--compare", "1.st,fp8,identity")["methods"]
        self.assertEqual({name: m.get("kl_difference", {}).get("against") for name, m in own.items()},
                         {"bf16": None, "1.st": None, "fp8": "1.st", "identity": "1.st"})
        self.assertNotEqual(methods["paper"]["kl"], methods["bundle"]["kl"])
        self.assertEqual(report["bundle"]["file"], "one.h5")
        self.assertEqual({name: b["file"] for name, b in report["bundles"].items()},
                         {"paper": "two.h5", "1.st": "one.h5"})
        self.assertEqual(report["bundles"]["paper"]["content_sha256"],
                         alone["bundle"]["content_sha256"])
        self.assertNotIn("bundles", alone)
        self.assertIn(" --bundle one.h5 --bundle paper=two.h5 --bundle 1.st=one.h5 ", report["command"])

    def test_the_serving_profile_gives_the_bytes_of_the_full_bundle(self):
        folders = [self.folder / "full", self.folder / "serving"]
        for folder in folders:
            folder.mkdir()
        shutil.copy(self.one, folders[0] / "a.h5")
        result = run("oscar-bundle", "strip", self.one, folders[1] / "a.h5", "--profile", "serving")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertLess((folders[1] / "a.h5").stat().st_size, self.one.stat().st_size / 4)
        full, serving = (self.evaluate("--bundle", folder / "a.h5", "--compare", "identity,bundle")
                         for folder in folders)
        # What tells the files apart: the hash of all that they hold, which counts for the run's key,
        # and the text's fingerprint.
        self.assertNotEqual(full["bundle"].pop("content_sha256"), serving["bundle"]["content_sha256"])
        self.assertEqual(serving["bundle"].pop("content_sha256"), full["bundle"]["serving_sha256"])
        self.assertNotEqual(full.pop("run_key"), serving.pop("run_key"))
        self.assertTrue(full["bundle"].pop("overlap")["known"])
        self.assertFalse(serving["bundle"].pop("overlap")["known"])
        full.pop("channels"), serving.pop("channels")  # of the statistics
        self.assertGreater(full["methods"]["bundle"]["kl"]["mean"], 0)
        self.assertEqual(json.dumps(full), json.dumps(serving))

    def test_without_a_comparison_all_are_measured(self):
        report = self.evaluate("--bundle", f"a={self.two}", "--bundle", f"b={self.one}")
        self.assertEqual(list(report["methods"])[-2:], ["a", "b"])
        self.assertIsNone(report["bundle"])

    def test_names_are_one_for_each_and_no_methods(self):
        error = self.evaluate("--bundle", f"hadamard={self.one}", code=1)
        self.assertIn("--bundle hadamard=FILE", error)
        error = self.evaluate("--bundle", f"a={self.one}", "--bundle", f"a={self.two}", code=1)
        self.assertIn("--bundle a=FILE", error)
        error = self.evaluate("--bundle", self.one, "--bundle", self.two, code=2)
        self.assertIn("--bundle NAME=FILE", error)
        error = self.evaluate("--bundle", f"a={self.one}", "--compare", "b", code=2)
        self.assertRegex(error, r"portable-perhead, a\b")
        error = self.evaluate("--bundle", f"a={self.one}", "--compare", "bundle", code=1)
        self.assertIn("--bundle", error)

    def test_statistics_without_the_energy_moment_are_told_from_none(self):
        error = self.evaluate("--bundle", self.one, "--compare", "oscar-released", code=1)
        self.assertIn("the energy moment, which the bundle's statistics lack", error)
        self.assertIn("--objective-v energy", error)

    def test_bundles_of_different_formats_need_one_that_is_given(self):
        bundles = ["--bundle", f"a={self.one}", "--bundle", f"b={self.other}"]
        error = self.evaluate(*bundles, code=1)
        self.assertIn('"recent":256', error)
        self.assertIn('"recent":128', error)
        report = self.evaluate(*bundles, "--recent", 128, "--compare", "a,b")
        self.assertEqual(report["quantizer"]["recent"], 128)

    def test_units_give_back_the_means(self):
        report = self.evaluate("--compare", "identity,hadamard", "--keep-units")
        tokens = report["unit_tokens"]
        self.assertEqual(len(tokens), report["resampling_units"])
        self.assertEqual(sum(tokens), report["tokens"])
        for method in report["methods"].values():
            for figure in ("kl", "nll"):
                mean = sum(m * t for m, t in zip(method["units"][figure], tokens)) / sum(tokens)
                self.assertAlmostEqual(mean, method[figure]["mean"], delta=1e-9 * (1 + mean))
        plain = self.evaluate("--compare", "identity")
        self.assertNotIn("unit_tokens", plain)
        self.assertNotIn("units", plain["methods"]["identity"])


if __name__ == "__main__":
    unittest.main()
