#!/usr/bin/env python3
"""oscar_int2.transformers on the model of the repository: predictions beside oscar-eval's, bytes in
memory beside the independent codec, and tokens beside BF16's."""
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from serving_case import BIN, BUNDLE, MODEL, SOURCE, held_out_ids
import oscar_int2
import oscar_int2.transformers
from oscar_int2.transformers import OscarCache, apply, remove

sys.path[:0] = [str(SOURCE / "tests" / "parity"), str(SOURCE / "tests" / "kernels")]
import int2_reference
from torch_ops_reference import Format, dequantized

U = 2.0**-8  # half a unit in the last place of bf16, relative
ROWS, TOKENS, PROMPT = 4, 511, 448  # 128 and more rows are INT2; of few predictions one decides alone


@functools.cache
def model():
    """In float32, as oscar-eval runs on a CPU."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32,
                                                attn_implementation="sdpa").eval()


def plain_bundle():
    """Hadamard and clipping, `hadamard-clip` of oscar-eval: plain rounding, nothing fitted."""
    bundle = oscar_int2.load(BUNDLE)
    rotation = int2_reference.hadamard(128).expand(2, 128, 128).contiguous()

    def side(old, clip):
        return dataclasses.replace(
            old, forward=rotation, partner=rotation, mean=torch.zeros(2, 128),  # symmetric
            clip_ratio=torch.full((2,), clip), scale_correction=torch.zeros(2, dtype=torch.uint8),
            feedback=None, metric=None, key_centers=None)

    return dataclasses.replace(bundle, layers={
        i: dataclasses.replace(layer, key=side(layer.key, 0.96), value=side(layer.value, 0.92))
        for i, layer in bundle.layers.items()})


class BesideOscarEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ids = torch.tensor(held_out_ids(ROWS * TOKENS)).view(ROWS, TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            np.save(folder / "ids.npy", cls.ids.numpy().astype(np.int32))
            subprocess.run([BIN / "oscar-eval", MODEL, "--corpus", folder / "ids.npy", "--bundle", BUNDLE,
                            "--compare", "hadamard-clip,bundle", "--engine", "reference", "--mode",
                            "prefill", "--first-position", str(PROMPT), "--keep-units", "--separators",
                            "off", "--device", "cpu", "--quiet", "--json", folder / "report.json"],
                           check=True)
            cls.report = json.loads((folder / "report.json").read_text())
        with torch.no_grad():
            cls.exact = model()(cls.ids, use_cache=False).logits[:, PROMPT - 1:-1].double()

    def units(self, logits):
        """Mean NLL and KL of each row, as oscar-eval's resampling units have them."""
        log_p, exact = logits.double().log_softmax(-1), self.exact.log_softmax(-1)
        nll = -log_p.gather(-1, self.ids[:, PROMPT:, None])[..., 0]
        return nll.mean(1).numpy(), (exact.exp() * (exact - log_p)).sum(-1).mean(1).numpy()

    @torch.no_grad()
    def served(self, bundle):
        """Predictions behind the prompts, the right tokens fed in."""
        apply(model(), bundle, demote_block=1)
        try:
            cache = OscarCache(model(), ROWS, TOKENS)
            logits = [model()(self.ids[:, :PROMPT], past_key_values=cache).logits[:, -1]]
            for i in range(PROMPT, TOKENS - 1):
                logits.append(model()(self.ids[:, i:i + 1], past_key_values=cache).logits[:, -1])
            cache.check_rows()
        finally:
            remove(model())
        return torch.stack(logits, 1)

    def test_predictions_are_those_of_its_reference_engine(self):
        self.assertEqual(self.report["unit_tokens"], [TOKENS - PROMPT] * ROWS)
        methods = self.report["methods"]
        nll, _ = self.units(self.exact)
        np.testing.assert_allclose(nll, methods["bf16"]["units"]["nll"], atol=1e-5)
        # kernels/README.md, "In oscar-eval": roundings to bf16 move logits by one U a layer, of their
        # spread. Rows and outputs are rounded once more here, before they are turned and behind.
        bound = 2 * len(oscar_int2.load(BUNDLE).layers) * U * self.exact.std(-1).mean().item()
        for name, bundle in (("bundle", BUNDLE), ("hadamard-clip", plain_bundle())):
            with self.subTest(name):
                ours, kl = self.units(self.served(bundle))
                theirs = methods[name]["units"]
                apart, cost = abs(ours - theirs["nll"]), abs(ours - nll)
                self.assertLess(apart.max(), bound)
                # Both make the same errors: INT2 moves a row's NLL far more than the engines differ.
                self.assertLess(apart.mean(), 0.5 * cost.mean())
                self.assertAlmostEqual(kl.mean() / np.mean(theirs["kl"]), 1, delta=0.25)


class Bytes(unittest.TestCase):
    def test_rows_in_memory_are_those_of_the_independent_codec(self):
        lengths, steps = (420, 350), 30
        ids = held_out_ids(sum(lengths))
        rows = [ids[:lengths[0]], ids[lengths[0]:]]
        width, seen = max(lengths), {}
        batch = {"input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
                 "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])}

        class Recorded(OscarCache):
            def attend(self, module, q, k, v, scaling):
                seen.setdefault(module.layer_idx, []).append((k, v))
                return super().attend(module, q, k, v, scaling)

        apply(model(), plain_bundle(), demote_block=1)
        try:
            cache = Recorded(model(), 2, width + steps)
            model().generate(**batch, past_key_values=cache, max_new_tokens=steps, do_sample=False)
        finally:
            remove(model())
        paged, windows = cache.paged, cache.paged.format
        self.assertEqual(paged.step.seq_lens.tolist(), [n + steps - 1 for n in lengths])
        for layer in (0, 3, 7):
            codec, pages = paged.codecs[layer], paged.layers[layer]
            ours = dequantized(pages.pool, Format())  # [pages, heads, side, token, d]
            for row, length in enumerate(lengths):
                rows = [torch.cat([x[row, :, -length:] for x in side], 1).transpose(0, 1)
                        for side in zip(*seen[layer])]  # [tokens, heads, d]
                rows = codec.transform_kv(*(x.bfloat16().contiguous() for x in rows))
                total = length + steps - 1
                history = windows.history_tokens(total)
                self.assertGreater(history, 50)
                table = paged.block_table[row].long()
                for side, (exact, window, clip) in enumerate(zip(rows, (pages.window_k, pages.window_v),
                                                                 (0.96, 0.92))):
                    self.assertEqual(len(exact), total)
                    held = ours[table, :, side].transpose(1, 2).flatten(0, 1)[:history]
                    old = exact[windows.sink_tokens:windows.sink_tokens + history]
                    for head in range(2):
                        expected = int2_reference.round_trip(old[:, head].float(), clip, 128, 0, None, None)
                        self.assertTrue(torch.equal(held[:, head], expected), (layer, row, side, head))
                    self.assertTrue(torch.equal(window[row, :, :windows.sink_tokens].transpose(0, 1),
                                                exact[:windows.sink_tokens]))
                    behind = torch.arange(history, total - windows.sink_tokens)
                    slots = windows.sink_tokens + behind % windows.ring_tokens()
                    self.assertTrue(torch.equal(window[row][:, slots].transpose(0, 1),
                                                exact[windows.sink_tokens + behind]))


class Tokens(unittest.TestCase):
    def test_they_are_bf16s_while_everything_is_in_the_windows(self):
        ids = held_out_ids(1300)
        for begin in (0, 1000):
            prompt = torch.tensor([ids[begin:begin + 290]])
            exact = model().generate(prompt, max_new_tokens=30, do_sample=False)
            apply(model(), BUNDLE)
            try:
                served = model().generate(prompt, max_new_tokens=30, do_sample=False)
            finally:
                remove(model())
            self.assertEqual(served[0].tolist(), exact[0].tolist())


if __name__ == "__main__":
    unittest.main()
