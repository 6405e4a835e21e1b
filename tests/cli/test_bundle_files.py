"""oscar-bundle on good files of another writer: verify, strip, inspect, diff and usage."""
import json
import unittest

import h5py
import numpy as np

from bundle.verify_bundle import content_sha256
from support.bundle_case import DIM, LAYERS, BundleCase, attributes, dataset, make_file, run
from support.programs import SOURCE


class GoodFiles(BundleCase):
    def test_a_file_written_by_another_program_is_sound(self):
        path = make_file(self.folder / "a.h5")
        result = run("verify", path)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("is sound", result.stdout)
        report = json.loads(run("verify", path, "--json", "-").stdout)
        self.assertTrue(report["ok"])
        self.assertGreaterEqual(len(report["findings"]), 5)

    def test_strip_keeps_every_number_in_row_major_order(self):
        path = make_file(self.folder / "a.h5")
        out = self.folder / "b.h5"
        self.assertEqual(run("strip", path, out).returncode, 0)
        with h5py.File(path) as a, h5py.File(out) as b:
            for number in range(LAYERS):
                mine, theirs = a[f"layers/{number:03}"], b[f"layers/{number:03}"]
                self.assertNotIn("statistics", theirs)
                for name in mine:
                    if name != "statistics":
                        np.testing.assert_array_equal(mine[name][()], theirs[name][()])
                        self.assertEqual(mine[name].dtype, theirs[name].dtype)
                        self.assertTrue(theirs[name].fletcher32)
                matrix = theirs["k_rotation"][0]
                self.assertGreater(np.abs(matrix - matrix.T).max(), 0.1)
            self.assertEqual(b.attrs["content_sha256"].decode(), content_sha256(b))
        self.assertEqual(run("verify", out).returncode, 0)

    def test_strip_keeps_losses_of_clipping_ratios(self):
        nmse = np.random.default_rng(0).random((3, 2))

        def add(file):
            dataset(file["layers/000"], "v_clip_tried", [.92, .88, 0], "<f4")
            dataset(file["layers/000"], "v_clip_nmse", nmse, "<f8")

        out = self.folder / "b.h5"
        self.assertEqual(run("strip", self.changed(add), out).returncode, 0)
        with h5py.File(out) as file:
            layer = file["layers/000"]
            np.testing.assert_array_equal(layer["v_clip_tried"][()], np.float32([.92, .88, 0]))
            np.testing.assert_array_equal(layer["v_clip_nmse"][()], nmse)
            self.assertNotIn("k_clip_tried", layer)
            self.assertNotIn("v_clip_tried", file["layers/001"])

    def test_inspect_shows_the_quantizer_cost_within_80_columns(self):
        path = make_file(self.folder / "a.h5")
        result = run("inspect", path)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = [line for line in result.stdout.splitlines() if str(self.folder) not in line]
        self.assertLessEqual(max(map(len, lines)), 80)
        data = json.loads(run("inspect", path, "--json", "-").stdout)
        bits = 2 + 2 * 16 / DIM
        for context in (8192, 32768, 131072):
            expected = (16 * 320 + bits * (context - 320)) / context
            self.assertAlmostEqual(data["bits_per_element"][str(context)], expected, places=12)
        with h5py.File(path) as file:
            values = file["layers/001/k_eigenvalues"][0]
        share = data["layers"][1]["key"]["largest_eigenvalue_share"][0]
        self.assertAlmostEqual(share, values[-1] / values.sum(), places=12)

    def test_inspect_fits_a_screen_and_shows_all_on_demand(self):
        path = SOURCE / "rotation_zoo" / "smollm2-135m-instruct" / "smollm2-135m-instruct.h5"
        short, whole = (run("inspect", path, *options).stdout.splitlines() for options in ((), ("--all",)))
        self.assertLessEqual(len(short), 40)
        layers = {row["layer_id"]: max(row["predicted_output_nmse"])
                  for row in json.loads(run("inspect", path, "--json", "-").stdout)["layers"]}
        worst = sorted(sorted(layers, key=layers.get)[-5:])
        table = short[short.index("the 5 of 30 layers with the largest predicted error"):][2:7]
        self.assertEqual([int(line.split()[0]) for line in table], worst)
        self.assertTrue(set(table) <= set(whole), "the same rows")
        for line in ("runs as is  oscar_int2", "cannot run  llama.cpp, oscar2", "--all shows every layer, hash and backend"):
            self.assertIn(line, short)
        for layer in range(30):
            self.assertEqual(sum(line.startswith(f"{layer:5}  ") for line in whole), 3, "itself and two variants")
        self.assertRegex("\n".join(whole), r"(?m)^fitted by   0\.2\.0 \([0-9a-f]{7}\)$")

    def test_inspect_tells_rounding_by_head(self):
        factors = np.stack([np.eye(DIM), np.eye(DIM)])
        factors[1, 0, DIM - 1] = 0.25
        path = self.changed(lambda f: dataset(f["layers/001"], "k_feedback", factors, "<f4"))
        layer = json.loads(run("inspect", path, "--json", "-").stdout)["layers"][1]
        self.assertEqual(layer["key"]["rounding"] + layer["value"]["rounding"],
                         ["plain", "shaped", "plain", "plain"])

    def test_control_characters_do_not_reach_the_terminal(self):
        path = self.changed(lambda f: attributes(f["model"], name="\x1b[2Jname"))
        result = run("inspect", path)
        self.assertIn("\\x1b[2Jname", result.stdout)
        self.assertNotIn("\x1b", result.stdout)

    def test_unknown_names_are_ignored_but_hashed(self):
        path = self.changed(lambda f: dataset(f.create_group("later"), "x", [1.0], "<f4"))
        self.assertEqual(run("verify", path).returncode, 0)

    def test_help_fits_80_columns(self):
        for arguments in ((), ("inspect",), ("verify",), ("strip",), ("merge",), ("diff",)):
            result = run(*arguments, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertLessEqual(max(map(len, result.stdout.splitlines())), 80, result.stdout)

    def test_wrong_usage_exits_with_2(self):
        for arguments in ((), ("unknown",), ("inspect",), ("merge", "a", "b"), ("diff", "a")):
            self.assertEqual(run(*arguments).returncode, 2, arguments)

    def test_fitting_again_without_recorded_positions_takes_all_that_the_model_serves(self):
        paper = make_file(self.folder / "paper.h5")  # fitted to positions as collected
        out = self.folder / "out.h5"
        self.run_ok("oscar-bundle", "fit", paper, "-o", out)
        with h5py.File(out) as file:
            self.assertEqual(file.attrs["position_span"], 64)
            self.assertEqual(file.attrs["preset"], b"best")
        self.run_ok("oscar-bundle", "verify", out)

        def forget(file):
            attributes(file["model"], rope='{"rope_type": "default", "rope_theta": 1e4}')

        self.refuse("oscar-bundle", ["fit", self.changed(forget), "-o", self.folder / "no.h5"],
                    "which positions are served", "--position-span")

    def test_diff_names_what_differs(self):
        a = make_file(self.folder / "a.h5")
        b = self.changed(lambda f: f["layers/001/k_clip_ratio"].__setitem__(0, 0.5))
        same = run("diff", a, a, "--exit-code")
        self.assertEqual((same.returncode, same.stdout), (0, "equal\n"))
        result = run("diff", a, b)
        self.assertEqual(result.returncode, 0)
        self.assertIn("/layers/001/k_clip_ratio: 1 of 2 elements differ", result.stdout)
        self.assertEqual(run("diff", a, b, "--exit-code").returncode, 1)


if __name__ == "__main__":
    unittest.main()
