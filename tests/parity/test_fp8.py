#!/usr/bin/env python3
"""FP8 checkpoints as MODEL: logits and moments as transformers' on the dequantized weights.

Qwen3 models of random weights are stored in FP8 in every layout that is read, with partial last
blocks in both directions and scales that differ between neighbours. Logits are held to 1e-4 of max
|logit| and every moment to 1e-5, as in test_forward.py; then scales are misread on the side of the
reference, and the same comparison must fail.
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import fp8_layouts
from forward_runs import compare, ours, reference
from random_families import config_json, family, make_weights, write_checkpoint

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

# q_proj has 2 x 2 blocks, gate_proj 3 x 2 and down_proj 2 x 3, the last ones partial.
CASE = family("qwen3", theta=1e6, hidden_size=144, intermediate_size=328, head_dim=32,
              num_hidden_layers=2, max_position_embeddings=4096)
IDS = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(3))


def transposed(codes, scales, layout):
    if scales.shape[0] == scales.shape[1]:
        scales = scales.t().contiguous()
    return fp8_layouts.dequantize(codes, scales, layout)


def cut_equally(codes, scales, _):
    rows, columns = (-(-size // count) for size, count in zip(codes.shape, scales.shape))
    return codes.float() * fp8_layouts.spread(scales.float(), codes.shape, (rows, columns))


def inverted(codes, scales, layout):
    # Only the ratios of neighbouring scales: magnitudes stay, so that nothing overflows.
    mean = scales.float().log().mean().exp()
    return fp8_layouts.dequantize(codes, mean * mean / scales.float(), layout)


class Fp8(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(2)
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.plain = cls.folder / "plain"
        write_checkpoint(cls.plain, CASE, 4, None)
        cls.state = make_weights(cls.plain, seed=5)
        generator = torch.Generator().manual_seed(1)
        for name, value in cls.state.items():
            if fp8_layouts.is_quantized(name):
                patches = torch.randn(-(-value.shape[0] // 16), -(-value.shape[1] // 16),
                                      generator=generator).exp()
                value *= fp8_layouts.spread(patches, value.shape, (16, 16))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def write(self, layout, scale_dtype):
        folder = self.folder / f"{layout} {scale_dtype}"
        folder.mkdir(exist_ok=True)
        config = config_json(CASE, 4) | {
            "quantization_config": fp8_layouts.quantization_config(layout)}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(fp8_layouts.store(self.state, layout, scale_dtype), folder / "model.safetensors")
        return folder

    def expected(self, layout, scale_dtype, dequantize=fp8_layouts.dequantize):
        """What transformers computes with the weights that FP8 leaves."""
        state = {n: dequantize(*fp8_layouts.quantize(v, layout, scale_dtype), layout)
                 if fp8_layouts.is_quantized(n) else v for n, v in self.state.items()}
        save_file(state, self.plain / "model.safetensors", metadata={"format": "pt"})
        return reference(self.plain, IDS)

    def test_every_layout_agrees_with_transformers(self):
        for layout in fp8_layouts.LAYOUTS:
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(layout=layout, scales=dtype):
                    found = ours(self.write(layout, dtype), IDS)
                    self.assertEqual(compare(found, self.expected(layout, dtype), IDS)[0], [])

    def test_misread_scales_are_caught(self):
        found = ours(self.write("block", torch.float32), IDS)
        for mistake in (transposed, cut_equally, inverted):
            with self.subTest(mistake=mistake.__name__):
                wrong = self.expected("block", torch.float32, mistake)
                self.assertNotEqual(compare(found, wrong, IDS)[0], [])

    def test_whole_blocks_are_dequantized_to_the_bit_as_transformers_does(self):
        # Its own dequantization takes no partial blocks.
        weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
        codes, scales = fp8_layouts.quantize(weight, "block")
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales)
        self.assertTrue(torch.equal(fp8_layouts.dequantize(codes, scales, "block"), theirs))


if __name__ == "__main__":
    unittest.main(verbosity=2)
