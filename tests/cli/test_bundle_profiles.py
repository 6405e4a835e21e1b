#!/usr/bin/env python3
"""What a bundle stores, its serving profile, and the table of lib/oscar/bundle/SCHEMA.md."""
import json
import re
import subprocess
import sys
import unittest

import h5py
import numpy as np

from bundle.verify_bundle import content_sha256, datasets_of
from support.bundle_case import HEADS, BundleCase, make_file, run, seal
from support.programs import SOURCE

ZOO = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"
EARLIER = SOURCE / "tests" / "bundle" / "version_0_1"
SCHEMA = SOURCE / "lib" / "oscar" / "bundle" / "SCHEMA.md"


class Profiles(BundleCase):
    def fitted(self):
        """Balanced heads with metric and feedback, and the statistics that they were fitted to."""
        path = self.folder / "fitted.h5"
        self.run_ok("oscar-bundle", "fit", make_file(self.folder / "sums.h5", statistics_only=True, seed=1),
                    "-o", path)
        return path

    def strip(self, path, *options):
        out = self.folder / f"{'_'.join(options)}.h5"
        self.run_ok("oscar-bundle", "strip", path, out, *options)
        return out

    def test_who_fitted_a_bundle_outlasts_who_wrote_it(self):
        def tool(path):
            with h5py.File(path) as file:
                return [file.attrs[name].decode() for name in ("tool_commit", "tool_fitted_by")]

        fitted = self.fitted()
        commit, by = tool(fitted)
        self.assertIn(f"({commit})", by)
        with h5py.File(fitted, "r+") as file:  # by an earlier version, which did not say
            file.attrs["tool_commit"] = np.bytes_("earlier")
            file.attrs["tool_version"] = np.bytes_("0")
            del file.attrs["tool_fitted_by"]
        stripped = self.strip(fitted)
        self.assertEqual(tool(stripped), [commit, "0 (earlier)"])
        self.assertEqual(tool(self.strip(stripped, "--profile", "serving")), [commit, "0 (earlier)"])
        self.assertIn("0 (earlier)", run("inspect", stripped, "--all").stdout)

    def test_partners_and_factors_undo_what_they_are_made_of(self):
        """Worked out without a look at the order of operations."""
        with h5py.File(self.fitted()) as file:
            self.assertEqual(file.attrs["required_features"], b"[]")
            layer = {name: item[()] for name, item in file["layers/000"].items() if hasattr(item, "dtype")}
            self.assertEqual(file.attrs["content_sha256"].decode(), content_sha256(file))
        T = layer["k_rotation"].astype(float)
        np.testing.assert_allclose(layer["q_rotation"], np.linalg.inv(T).swapaxes(1, 2), rtol=1e-5, atol=1e-5)
        M = layer["v_metric"].astype(float)
        np.testing.assert_array_equal(M, M.swapaxes(1, 2))
        for u, m in zip(layer["v_feedback"].astype(float), M):
            inverse = np.linalg.inv(u)
            diagonal = inverse @ (m + 0.01 * np.trace(m) / len(m) * np.eye(len(m))) @ inverse.T
            np.testing.assert_allclose(diagonal, np.diag(np.diag(diagonal)), atol=1e-5)

    def test_a_bundle_of_version_0_1_is_written_anew_with_the_same_content(self):
        for name in ("left_out", "wide", "implied_metric", "corrected"):
            earlier, out = EARLIER / f"{name}.h5", self.folder / f"{name}.h5"
            self.run_ok("oscar-bundle", "rewrite", earlier, out)
            self.assertEqual(run("diff", earlier, out).stdout, "equal\n")
            with h5py.File(earlier) as old, h5py.File(out) as new:
                self.assertIn("derived", json.loads(old.attrs["required_features"]))
                self.assertNotIn("derived", json.loads(new.attrs["required_features"]))
                self.assertEqual(old.attrs["content_sha256"].decode(), content_sha256(new))
                self.assertEqual(new["layers/000/q_rotation"].dtype, np.float32)

    def test_profiles_say_by_a_hash_that_they_serve_the_same(self):
        full = self.fitted()
        publish, serving = self.strip(full), self.strip(full, "--profile", "serving")
        found = [json.loads(run("inspect", path, "--json", "-").stdout) for path in (full, publish, serving)]
        self.assertEqual(len({f["serving_sha256"] for f in found}), 1)
        self.assertEqual(len({f["content_sha256"] for f in found}), 3)
        self.assertEqual(found[2]["content_sha256"], found[2]["serving_sha256"])
        self.assertEqual([(f["has_statistics"], f["has_portable"]) for f in found],
                         [(True, True), (False, True), (False, False)])
        sizes = [path.stat().st_size for path in (full, publish, serving)]
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        self.assertEqual(run("strip", full, self.folder / "x.h5", "--profile", "tiny").returncode, 2)

    def test_a_stored_evaluation_is_no_part_of_what_is_served(self):
        full = self.fitted()

        def hashes(path):
            found = json.loads(run("inspect", path, "--json", "-").stdout)
            return found["content_sha256"], found["serving_sha256"]

        before, plain = hashes(full), self.strip(full, "--profile", "serving")
        with h5py.File(full, "r+") as file:
            file.create_group("evaluation").attrs["mode"] = np.bytes_('"decode"')
            seal(file)
        after = hashes(full)
        self.assertNotEqual(after[0], before[0])
        self.assertEqual(after[1], before[1])
        serving = self.folder / "serving.h5"
        self.run_ok("oscar-bundle", "strip", full, serving, "--profile", "serving")
        self.assertEqual(hashes(serving), (before[1], before[1]))
        self.assertEqual(run("diff", plain, serving).stdout, "equal\n")


def listed_datasets():
    """{name: "f32 [Hkv, d, d]"} of the tables in SCHEMA.md."""
    rows = re.findall(r"^\| (`[^|]+`) \| (\w+ (?:\[[^\]]*\]|scalar)) \|", SCHEMA.read_text(), re.M)
    return {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}


class Schema(BundleCase):
    def test_every_dataset_of_a_bundle_is_listed_with_its_type_and_shape(self):
        fitted = self.folder / "fitted.h5"
        self.run_ok("oscar-bundle", "fit", make_file(self.folder / "sums.h5", seed=1), "-o", fitted)
        listed, seen = listed_datasets(), set()
        for path, heads, d in ((fitted, HEADS, 8), (ZOO, 2, 128)):
            with h5py.File(path) as file:
                content = datasets_of(file)
            for place, values in content.items():
                folder, _, name = place.rpartition("/")
                if folder == "/corpus":
                    continue  # its own section
                seen.add(name)
                self.assertIn(name, listed, f"{place} is not in SCHEMA.md")
                kind, _, shape = listed[name].partition(" ")
                self.assertEqual(f"{values.dtype.kind}{8 * values.dtype.itemsize}", kind, place)
                sizes = {"Hkv": heads, "d": d, "2": 2}
                expected = [] if shape == "scalar" else shape.strip("[]").split(", ")
                self.assertEqual(len(values.shape), len(expected), place)
                for extent, symbol in zip(values.shape, expected):
                    self.assertEqual(extent, sizes.get(symbol, extent), place)
        attended = {name for name in listed if "attended" in name or "sink" in name}
        only_sometimes = attended | {"v_energy_moment", "gate_moment"}
        self.assertEqual(set(listed) - seen, only_sometimes)
        self.assertEqual(len(attended), 10)

    def test_the_recipe_of_the_page_runs(self):
        (recipe,) = re.findall(r"```python\n(.*?)```", SCHEMA.read_text(), re.S)
        path = self.folder / "fitted.h5"
        self.run_ok("oscar-bundle", "fit", make_file(self.folder / "sums.h5", seed=1), "-o", path)
        recipe = recipe.replace("my-qwen3.h5", str(path))
        said = subprocess.run([sys.executable, "-c", recipe], capture_output=True, text=True, check=True)
        error, tokens = said.stdout.split()
        self.assertLess(float(error), 1e-5)
        self.assertEqual(int(tokens), 100)


if __name__ == "__main__":
    unittest.main()
