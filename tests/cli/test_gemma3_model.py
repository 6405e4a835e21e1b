#!/usr/bin/env python3
"""Gemma 3 as MODEL of the programs: only its global layers are fitted and get a 2-bit cache."""
import json
import subprocess
import time
import unittest

import h5py
import numpy as np
import safetensors.numpy

from support.checkpoints import GEMMA3_MINI, gemma3_tensors, write_checkpoint
from support.programs import BIN, ENVIRONMENT, ProgramTest

GLOBAL, LOCAL = [2, 5], [0, 1, 3, 4]
CALIBRATE = ["--sequence-length", "512", "--search", "off", "--quant-group-size", "32"]
EVALUATE = ["--sequence-length", "512", "--max-tokens", "1024", "--separators", "off"]


class Gemma3Model(ProgramTest):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(1)
        self.ids, self.held_out = self.folder / "ids.npy", self.folder / "held_out.npy"
        np.save(self.ids, rng.integers(0, 256, 8192).astype(np.int32))
        np.save(self.held_out, rng.integers(0, 256, 2048).astype(np.int32))
        self.model = write_checkpoint(self.folder / "model", GEMMA3_MINI,
                                      gemma3_tensors(GEMMA3_MINI))

    def calibrate(self, name="own.h5", *options):
        out = self.folder / name
        result = self.run_ok("oscar-calibrate", self.model, self.ids, out,
                             *(options or CALIBRATE))
        return out, result.stdout

    def kinds(self, bundle):
        """Of each layer: the kind of its attention, and whether it has transforms and sums."""
        with h5py.File(bundle) as file:
            return [(layer.attrs["attention"].decode(), "k_rotation" in layer,
                     "q_moment" in layer.get("statistics", {}))
                    for layer in file["layers"].values()]

    def test_local_layers_are_in_the_bundle_with_their_window_and_nothing_else(self):
        bundle, said = self.calibrate()
        expected = [("full", True, True) if i in GLOBAL else ("local", False, False)
                    for i in range(6)]
        self.assertEqual(self.kinds(bundle), expected)
        with h5py.File(bundle) as file:
            for i in LOCAL:
                attributes = file[f"layers/{i:03}"].attrs
                self.assertEqual((attributes["sliding_window"], attributes["quantized"]), (300, 0))
        self.assertIn("4 local layers are not listed", said)
        self.run_ok("oscar-bundle", "verify", bundle)
        layers = json.loads(self.run_ok("oscar-bundle", "inspect", bundle, "--json", "-").stdout)
        self.assertEqual([layer["attention"] for layer in layers["layers"]],
                         [kind for kind, *_ in expected])
        self.assertIn("(BF16)", self.run_ok("oscar-bundle", "inspect", bundle).stdout)
        self.assertEqual([s["layer_id"] for s in layers["statistics"]], GLOBAL)

    def test_a_model_of_images_and_text_is_proposed_to_serve_by_its_text_half(self):
        config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": GEMMA3_MINI,
                  "vision_config": {"model_type": "siglip_vision_model"}}
        self.model = write_checkpoint(self.folder / "whole", None, {
            f"language_model.{name}": tensor for name, tensor in gemma3_tensors(GEMMA3_MINI).items()})
        (self.model / "config.json").write_text(json.dumps(config))
        bundle, _ = self.calibrate()
        said = self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.held_out, "--compare", "bundle",
                           *EVALUATE).stdout
        self.assertIn(f"VLLM_OSCAR_BUNDLE={bundle} python -m vllm.entrypoints.openai.api_server --model {self.model} "
                      "--dtype bfloat16 --language-model-only", " ".join(said.replace("\\\n", " ").split()))

    def test_files_of_such_bundles_can_be_merged_fitted_again_and_stripped(self):
        bundle, _ = self.calibrate()
        other = self.folder / "other.h5"
        self.run_ok("oscar-calibrate", self.model, self.held_out, other, *CALIBRATE,
                    "--statistics-only")
        merged, fitted, lean = (self.folder / f"{n}.h5" for n in ("merged", "fitted", "lean"))
        self.run_ok("oscar-bundle", "merge", bundle, other, "-o", merged)
        # No recent window is small enough for a local layer to be quantized.
        self.run_ok("oscar-bundle", "fit", merged, "-o", fitted, "--recent", "64")
        self.run_ok("oscar-bundle", "strip", fitted, lean)
        for path in (fitted, lean):
            self.assertEqual([kind[:2] for kind in self.kinds(path)],
                             [kind[:2] for kind in self.kinds(bundle)])
            self.run_ok("oscar-bundle", "verify", path)
        self.run_ok("oscar-bundle", "card", fitted, "-o", self.folder / "card.md")
        same = self.run_ok("oscar-bundle", "coverage", bundle, other, "--json", "-").stdout
        self.assertEqual([file["tokens"] for file in json.loads(same)["files"]], [8192, 2048])

    def test_sums_are_exported_of_global_layers_and_transforms_of_every_layer_or_none(self):
        bundle, _ = self.calibrate()
        out = self.folder / "sums"
        self.run_ok("oscar-bundle", "export", bundle, "--for", "statistics", "-o", out)
        arrays = np.load(out / "statistics.npz")
        self.assertEqual(list(arrays["layer_id"]), GLOBAL)
        self.assertEqual(len(arrays["q_moment"]), len(GLOBAL))
        self.refuse("oscar-bundle", ["export", bundle, "--for", "npz", "-o", self.folder / "x"],
                    "local layers have none", "layer 0")

    def test_matrices_of_local_layers_are_not_imported(self):
        rotations = np.broadcast_to(np.eye(32, dtype=np.float32)[::-1], (6, 2, 32, 32))
        np.savez(self.folder / "mine.npz", k_rotation=rotations, v_rotation=rotations)
        bundle = self.folder / "imported.h5"
        self.run_ok("oscar-bundle", "import", self.folder / "mine.npz", "--model", self.model,
                    "-o", bundle)
        self.assertEqual([has for _, has, _ in self.kinds(bundle)], [i in GLOBAL for i in range(6)])

    def test_the_evaluation_rounds_global_layers_and_leaves_local_ones_alone(self):
        bundle, _ = self.calibrate()
        report, page = self.folder / "report.json", self.folder / "page.html"
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.held_out,
                    *EVALUATE, "--json", report, "--html", page)
        self.assertIn("of the layers that attend to all tokens", page.read_text())
        found = json.loads(report.read_text())
        self.assertEqual(found["model"]["cache_elements_per_token"], 2 * 2 * 2 * 32)
        self.assertEqual(found["model"]["local_windows"],
                         {"layers": 4, "window": 300, "elements_per_token": 4 * 2 * 2 * 32})
        errors = found["methods"]["bundle"]["output_nmse"]
        self.assertEqual(errors[:2], [0, 0])  # nothing before layer 2 is rounded
        self.assertGreater(errors[2], 0)
        # BF16 counts 16 bits, and the rows of global layers as in a model that has no others.
        self.assertEqual(found["methods"]["bf16"]["bpe"]["131072"], 16)
        d, windows, length = 32, 64 + 256, 131072
        self.assertAlmostEqual(found["methods"]["bundle"]["bpe"]["131072"],
                               (16 * windows + (2 + 32 / d) * (length - windows)) / length)
        self.assertGreater(found["methods"]["bundle"]["kl"]["mean"], 0)
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.held_out,
                    *EVALUATE, "--engine", "reference", "--compare", "bundle", "--json",
                    self.folder / "paged.json")
        paged = json.loads((self.folder / "paged.json").read_text())
        self.assertAlmostEqual(paged["methods"]["bundle"]["kl"]["mean"],
                               found["methods"]["bundle"]["kl"]["mean"], delta=1e-3)
        self.refuse("oscar-eval", [self.model, "--bundle", bundle, "--corpus", self.held_out,
                                   *EVALUATE, "--compare", "bundle@layer:0"], "layer:0", code=2)

    def test_a_bundle_without_error_at_global_layers_is_the_model_itself(self):
        bundle, _ = self.calibrate()
        report = self.folder / "report.json"
        self.run_ok("oscar-eval", self.model, "--bundle", bundle, "--corpus", self.held_out,
                    *EVALUATE, "--compare", "exact", "--json", report)
        self.assertLess(json.loads(report.read_text())["methods"]["exact"]["kl"]["mean"], 1e-6)

    def test_the_search_a_second_pass_and_a_dry_run_know_local_layers(self):
        dry = self.folder / "dry.json"
        self.run_ok("oscar-calibrate", self.model, self.ids, self.folder / "x.h5", "--sequence-length",
                    "512", "--dry-run", "--json", dry)
        self.assertGreater(json.loads(dry.read_text())["host_bytes"], 0)
        bundle, _ = self.calibrate("searched.h5", "--sequence-length", "512", "--quant-group-size", "32",
                                   "--objective-v", "energy", "--max-tokens", "4096")
        self.assertEqual([has for _, has, _ in self.kinds(bundle)], [i in GLOBAL for i in range(6)])

    def test_value_transforms_fold_into_global_layers_alone(self):
        bundle, _ = self.calibrate("plain.h5", *CALIBRATE, "--center", "off")
        out = self.folder / "folded"
        self.run_ok("oscar-bundle", "fold", bundle, self.model, out)
        before, after = (safetensors.numpy.load_file(f / "model.safetensors")
                         for f in (self.model, out))
        changed = {n for n in before if not np.array_equal(before[n], after[n])}
        self.assertEqual(changed, {f"model.layers.{i}.self_attn.{m}_proj.weight"
                                   for i in GLOBAL for m in "vo"})

    def test_plans_of_memory_count_windows_in_bf16(self):
        bundle, _ = self.calibrate()
        for of in (self.model, bundle):
            plan = json.loads(self.run_ok("oscar-bundle", "plan", of, "--context", "2048",
                                          "--json", "-").stdout)
            row = next(r for r in plan["contexts"] if r["context"] == 2048)
            rows = 2 * 2 * 32  # keys and values of both heads
            windows = 4 * 300 * rows * 2
            self.assertEqual(row["request_bytes"]["bf16"], windows + 2 * 2048 * rows * 2)
            bits = 16 * (64 + 256 + 16 + 1) + 2048 * (2 + 32 / 32)
            self.assertAlmostEqual(row["request_bytes"]["int2"], windows + 2 * rows * bits / 8)

    def test_servers_refuse_such_a_bundle_by_name(self):
        bundle, _ = self.calibrate()
        shown = json.loads(self.run_ok("oscar-bundle", "inspect", bundle, "--json", "-").stdout)
        for backend in shown["stacks"]:
            self.assertEqual(backend["verdict"], "cannot", backend)
        self.refuse("oscar-bundle", ["export", bundle, "--for", "sglang-v2", "-o", self.folder / "out"],
                    "can run nothing of this bundle")

    def test_a_checkpoint_of_a_stopped_run_continues_to_the_same_bytes(self):
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
