#!/usr/bin/env python3
"""An FP8 folder as MODEL of the programs: calibrated, inspected, evaluated, and told from others."""
import json
import pathlib
import sys
import unittest

import numpy as np
import torch
from safetensors.torch import save_file

from support.checkpoints import QWEN3_MINI, qwen3_tensors
from support.programs import ProgramTest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import fp8_layouts

CALIBRATE = ["--sequence-length", "128", "--search", "off", "--quant-group-size", "32"]
# Seven matrices a layer; norms and the embedding stay as they were.
TYPES = "F8_E4M3 with a scale a tensor (21 tensors), F32 (14); 21 scales of activations or of the " \
        "cache not used"


class Fp8Model(ProgramTest):
    def setUp(self):
        super().setUp()
        self.ids = self.folder / "ids.npy"
        rng = np.random.default_rng(1)
        np.save(self.ids, rng.integers(0, 256, 4096).astype(np.int32))
        self.tensors = {n: torch.from_numpy(v) for n, v in qwen3_tensors(QWEN3_MINI).items()}

    def write(self, name, layout="static", change=None):
        folder = self.folder / name
        folder.mkdir()
        config, tensors = dict(QWEN3_MINI), self.tensors
        if layout:
            config["quantization_config"] = fp8_layouts.quantization_config(layout)
            tensors = fp8_layouts.store(tensors, layout)
        if change:
            change(tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    def calibrate(self, model):
        out = self.folder / f"{model.stem}.h5"
        self.run_ok("oscar-calibrate", model, self.ids, out, *CALIBRATE)
        return out

    def test_the_bundle_names_the_types_and_belongs_to_these_weights(self):
        def rescale(tensors):
            tensors["model.layers.1.self_attn.q_proj.weight_scale"] *= 1.01
        model, other = self.write("one"), self.write("other", change=rescale)
        bundle = self.calibrate(model)
        shown = self.run_ok("oscar-bundle", "inspect", bundle, "--json", "-").stdout
        about = json.loads(shown)["model"]
        self.assertEqual(about["quantization"], TYPES)
        self.assertNotIn("file_sha256", about)
        self.assertIn("F8_E4M3 with a scale a tensor",
                      self.run_ok("oscar-bundle", "inspect", bundle).stdout)
        evaluate = ["--bundle", bundle, "--corpus", self.ids, "--sequence-length", "512", "--max-tokens",
                    "1024", "--separators", "off"]
        report = self.folder / "report.json"
        self.run_ok("oscar-eval", model, *evaluate, "--json", report)
        self.assertEqual(json.loads(report.read_text())["model"]["quantization"], TYPES)
        self.refuse("oscar-eval", [other, *evaluate], "of another model", "W_Q of layer 1 differs, and 0 more")
        self.refuse("oscar-bundle", ["fold", bundle, model, self.folder / "out"],
                    "cannot be folded into quantized weights", "F8_E4M3")

    def test_memory_is_planned_for_the_dtype_of_the_run_and_served_weights_as_stored(self):
        report = self.folder / "report.json"

        def host_bytes(model):
            result = self.run_ok("oscar-calibrate", model, self.ids, self.folder / "x.h5",
                                 *CALIBRATE, "--dry-run", "--json", report)
            found = json.loads(report.read_text())["host_bytes"]
            report.unlink()
            return found, result.stderr
        stored, said = host_bytes(self.write("one"))
        self.assertEqual(stored, host_bytes(self.write("plain", layout=None))[0])
        self.assertIn(TYPES, said)
        (self.folder / "one" / "model.safetensors").unlink()
        plan = json.loads(self.run_ok("oscar-bundle", "plan", self.folder / "one",
                                      "--json", "-").stdout)
        layers = sum(t.numel() for n, t in self.tensors.items() if fp8_layouts.is_quantized(n))
        others = sum(t.numel() for n, t in self.tensors.items() if not fp8_layouts.is_quantized(n))
        self.assertEqual(plan["weight_bytes"], layers + 2 * others)

    def test_codes_that_are_no_numbers_and_missing_scales_are_refused_by_name(self):
        name = "model.layers.2.self_attn.v_proj.weight"

        def poison(tensors):
            tensors[name].view(torch.uint8)[3, 5] = 0x7f

        def drop(tensors):
            del tensors[name + "_scale"]
        out = self.folder / "x.h5"
        self.refuse("oscar-calibrate", [self.write("nan", change=poison), self.ids, out, *CALIBRATE],
                    "a weight is not finite", name)
        self.refuse("oscar-calibrate", [self.write("bare", change=drop), self.ids, out, *CALIBRATE],
                    "has no scales", name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
