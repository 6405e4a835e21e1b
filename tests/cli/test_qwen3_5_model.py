#!/usr/bin/env python3
"""Qwen3.5 as MODEL of the programs: linear layers cache nothing, outputs of the others are gated."""
import json
import subprocess
import time
import unittest

import h5py
import numpy as np

from support.checkpoints import QWEN3_5_MINI, qwen3_5_tensors, write_checkpoint
from support.programs import BIN, ENVIRONMENT, ProgramTest

FULL = [2, 5]
CALIBRATE = ["--sequence-length", "512", "--search", "off", "--quant-group-size", "32"]
EVALUATE = ["--sequence-length", "512", "--max-tokens", "1024", "--separators", "off"]


class Qwen35Model(ProgramTest):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(1)
        self.ids, self.held_out = self.folder / "ids.npy", self.folder / "held_out.npy"
        np.save(self.ids, rng.integers(0, 256, 8192).astype(np.int32))
        np.save(self.held_out, rng.integers(0, 256, 2048).astype(np.int32))
        self.model = write_checkpoint(self.folder / "model", QWEN3_5_MINI,
                                      qwen3_5_tensors(QWEN3_5_MINI))

    def calibrate(self, name="own.h5", *options):
        out = self.folder / name
        result = self.run_ok("oscar-calibrate", self.model, self.ids, out,
                             *(options or CALIBRATE))
        return out, result.stdout

    def evaluate(self, bundle, *options):
        report = self.folder / "report.json"
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.held_out,
                    *EVALUATE, *options, "--force", "--json", report)
        return json.loads(report.read_text())

    def test_linear_layers_are_in_the_bundle_without_rows(self):
        bundle, said = self.calibrate()
        self.assertIn("4 linear layers are not listed: they cache no keys and values", said)
        with h5py.File(bundle) as file:
            for i, layer in enumerate(file["layers"].values()):
                kind = (layer.attrs["attention"].decode(), "k_rotation" in layer,
                        "q_moment" in layer.get("statistics", {}))
                self.assertEqual(kind, ("full", True, True) if i in FULL else ("none", False, False))
                self.assertNotIn("gate_moment", layer.get("statistics", {}))
        self.run_ok("oscar-bundle", "verify", bundle)
        shown = json.loads(self.run_ok("oscar-bundle", "inspect", bundle, "--json", "-").stdout)
        self.assertEqual([s["layer_id"] for s in shown["statistics"]], FULL)
        self.assertFalse(shown["has_weight_samples"])

    def test_files_of_such_bundles_can_be_merged_and_fitted_again(self):
        bundle, _ = self.calibrate()
        other, merged, fitted = (self.folder / f"{n}.h5" for n in ("other", "merged", "fitted"))
        self.run_ok("oscar-calibrate", self.model, self.held_out, other, *CALIBRATE,
                    "--statistics-only")
        self.run_ok("oscar-bundle", "merge", bundle, other, "-o", merged)
        self.run_ok("oscar-bundle", "fit", merged, "-o", fitted)
        self.run_ok("oscar-bundle", "verify", fitted)
        metric = "layers/005/statistics/o_proj_metric"
        with h5py.File(bundle) as a, h5py.File(other) as b, h5py.File(merged) as both:
            # Means over 8192 and 2048 tokens.
            np.testing.assert_allclose(both[metric][()], 0.8 * a[metric][()] + 0.2 * b[metric][()],
                                       rtol=1e-12, atol=1e-15)

    def test_the_evaluation_rounds_full_layers_alone_in_every_engine(self):
        bundle, _ = self.calibrate()
        found = self.evaluate(bundle)
        self.assertEqual(found["model"]["cache_elements_per_token"], 2 * 2 * 2 * 32)
        self.assertNotIn("local_windows", found["model"])
        errors = found["methods"]["bundle"]["output_nmse"]
        self.assertEqual(errors[:2], [0, 0])  # nothing before layer 2 is rounded
        self.assertGreater(errors[2], 0)
        self.assertEqual(found["methods"]["bf16"]["bpe"]["131072"], 16)
        windows, length = 64 + 256, 131072
        self.assertAlmostEqual(found["methods"]["bundle"]["bpe"]["131072"],
                               (16 * windows + 3 * (length - windows)) / length)
        kl = found["methods"]["bundle"]["kl"]["mean"]
        self.assertGreater(kl, 0)
        paged = self.evaluate(bundle, "--engine", "reference", "--compare", "bundle")
        self.assertAlmostEqual(paged["methods"]["bundle"]["kl"]["mean"], kl, delta=1e-3)
        exact = self.evaluate(bundle, "--compare", "exact")["methods"]["exact"]["kl"]["mean"]
        self.assertLess(exact, 1e-6)
        self.refuse("oscar-eval", [self.model, "--bundle", bundle, "--corpus", self.held_out,
                                   *EVALUATE, "--compare", "bundle@layer:0"], "layer:0", code=2)

    def test_generated_answers_keep_the_state_of_linear_layers(self):
        bundle, _ = self.calibrate()
        report = self.evaluate(bundle, "--tasks", "niah", "--needle-lengths", "400",
                               "--needle-prompts", "4", "--needle-kinds", "single",
                               "--needle-generate", "--compare", "bundle,exact")
        self.assertIn("niah", json.dumps(report))

    def test_the_search_a_second_pass_and_a_dry_run_know_linear_layers(self):
        dry = self.folder / "dry.json"
        self.run_ok("oscar-calibrate", self.model, self.ids, self.folder / "x.h5", "--sequence-length",
                    "512", "--dry-run", "--json", dry)
        self.assertGreater(json.loads(dry.read_text())["host_bytes"], 0)
        bundle, _ = self.calibrate("searched.h5", "--sequence-length", "512", "--quant-group-size", "32")
        self.run_ok("oscar-bundle", "verify", bundle)
        self.calibrate("energy.h5", *CALIBRATE, "--objective-v", "energy", "--max-tokens", "4096")

    def test_what_has_no_place_for_linear_layers_or_gates_is_refused_by_name(self):
        bundle, _ = self.calibrate("plain.h5", *CALIBRATE, "--center", "off")
        self.refuse("oscar-bundle", ["fold", bundle, self.model, self.folder / "folded"],
                    "cannot be folded through an output gate")
        self.refuse("oscar-bundle", ["export", bundle, "--for", "npz", "-o", self.folder / "x"],
                    "linear or shared layers have none", "layer 0")
        shown = json.loads(self.run_ok("oscar-bundle", "inspect", bundle, "--json", "-").stdout)
        for backend in shown["stacks"]:
            self.assertEqual(backend["verdict"], "cannot", backend)

    def test_plans_of_memory_count_the_rows_of_full_layers(self):
        bundle, _ = self.calibrate()
        for of in (self.model, bundle):
            plan = json.loads(self.run_ok("oscar-bundle", "plan", of, "--context", "2048",
                                          "--json", "-").stdout)
            row = next(r for r in plan["contexts"] if r["context"] == 2048)
            # In 4 layers bf16 [4 heads, 16, 16] and three columns of q, k and v; a bundle does not know them.
            states = 4 * 2 * (4 * 16 * 16 + 3 * (2 * 2 * 16 + 4 * 16)) if of is self.model else 0
            self.assertEqual(plan.get("state_bytes") or 0, states)
            self.assertEqual(row["request_bytes"]["bf16"], 2 * 2048 * (2 * 2 * 32) * 2 + states)

    def test_several_processes_write_the_same_bytes_with_and_without_a_search(self):
        for search in ("on", "off"):
            options = ["--sequence-length", "256", "--sink", "4", "--recent", "16", "--batch-tokens",
                       "512", "--max-tokens", "4096", "--search", search]
            one, _ = self.calibrate(f"one-{search}.h5", *options)
            two, _ = self.calibrate(f"two-{search}.h5", *options, "--gpus", "2")
            self.assertEqual(one.read_bytes(), two.read_bytes(), search)

    def test_a_stopped_run_gives_the_same_bytes(self):
        options = [*CALIBRATE, "--checkpoint-every", "1"]
        whole, _ = self.calibrate("whole.h5", *options)
        again = self.folder / "again.h5"
        command = [BIN / "oscar-calibrate", self.model, self.ids, again, *options]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not list(self.folder.glob("again.h5.*")):
                time.sleep(0.001)
            process.kill()
        self.run_ok("oscar-calibrate", self.model, self.ids, again, *options, "--resume")
        self.assertEqual(whole.read_bytes(), again.read_bytes())


if __name__ == "__main__":
    unittest.main(verbosity=2)
