#!/usr/bin/env python3
"""Weights of 4 bits (GPTQ, AWQ) beside the 2-bit cache: layers without a plain `weight` are served."""
import json
import os
import pathlib
import shutil
import tempfile
import unittest
from unittest import mock

import vllm_case as case
import torch
from safetensors.torch import load_file, save_file
from vllm_case import needs_vllm

BITS, GROUP, ZERO = 4, 128, 8
LANES = 32 // BITS
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight columns, from the lowest bits on


def quantize(weight):
    """Codes [inputs, outputs], scales [groups of inputs, outputs] and the weight [outputs, inputs] that they are."""
    groups = weight.float().T.reshape(-1, GROUP, len(weight))
    scales = (groups.abs().amax(1) / (ZERO - 1)).half()
    codes = (groups / scales.float()[:, None]).round().clamp(-ZERO, ZERO - 1).int() + ZERO
    values = ((codes - ZERO) * scales.float()[:, None]).reshape(-1, len(weight)).T
    return codes.reshape(-1, len(weight)), scales, values.bfloat16()


def packed(codes):
    """int32 [rows, columns / 8] of codes [rows, columns], the first in the lowest bits."""
    lanes = codes.reshape(len(codes), -1, LANES).long() << torch.arange(0, 32, BITS)
    words = lanes.sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def gptq(codes, scales):
    return {"qweight": packed(codes.T.contiguous()).T.contiguous(), "scales": scales,
            "qzeros": packed(torch.full(scales.shape, ZERO - 1)),  # as stored: one less than the zero
            "g_idx": (torch.arange(len(codes)) // GROUP).int()}


def awq(codes, scales):
    def ordered(values):
        return values.reshape(len(values), -1, LANES)[:, :, AWQ_ORDER].reshape(values.shape)

    return {"qweight": packed(ordered(codes)), "scales": scales,
            "qzeros": packed(ordered(torch.full(scales.shape, ZERO)))}


LAYOUTS = {"gptq": (gptq, {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True}),
           "awq": (awq, {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"})}


def write(folder, layout):
    """The embedded model with the products of its layers in 4 bits, and beside it (plain/) the same numbers in bf16."""
    store, described = LAYOUTS[layout]
    stored, plain = {}, {}
    for shard in sorted(case.MODEL.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            plain[name] = tensor
            if not name.startswith("model.layers.") or not name.endswith("_proj.weight"):
                stored[name] = tensor
                continue
            codes, scales, plain[name] = quantize(tensor)
            plain[name] = plain[name].contiguous()
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in store(codes, scales).items()}
    for kept, tensors in ((folder, stored), (folder / "plain", plain)):
        kept.mkdir(exist_ok=True)
        for file in case.MODEL.iterdir():
            if file.suffix == ".json" and "index" not in file.name:
                shutil.copy(file, kept)
        save_file(tensors, kept / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))


class OfFourBits:
    layout = ""

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        write(cls.folder, cls.layout)
        with mock.patch.dict(os.environ, VLLM_OSCAR_WEIGHTS="any"):
            cls.engine = case.Engine(cls.folder)

    def test_answers_follow_the_definition_with_the_weights_that_they_are(self):
        engine, plain = self.engine, case.model_in_transformers(self.folder / "plain")
        for number, length in ((0, 500), (1, 90)):
            prompt = engine.prompt(number, length)
            name = engine.add(prompt, 40)
            output = engine.run()[name]
            self.check(prompt, output, model=plain)
        # The definition tells these weights from those before: a bound that both would pass shows nothing.
        with self.assertRaises(AssertionError):
            self.check(prompt, output)

    def test_the_bundle_of_the_model_before_is_refused_unless_it_is_accepted(self):
        from oscar_int2 import BundleMismatchError

        with self.assertRaisesRegex(BundleMismatchError, "a quantized form or a fine-tune of the calibrated.*VLLM_OSCAR_WEIGHTS=any"):
            case.Engine(self.folder)
        self.engine.log.find("was calibrated on other weights than are served")


@needs_vllm
class Gptq(OfFourBits, case.EngineTest):
    layout = "gptq"


@needs_vllm
class Awq(OfFourBits, case.EngineTest):
    layout = "awq"


if __name__ == "__main__":
    unittest.main()
