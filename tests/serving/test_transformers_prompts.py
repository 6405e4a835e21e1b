#!/usr/bin/env python3
"""apply(..., prompts="int2"): a pass over many tokens reads what decode steps read."""
import contextlib
import copy
import json
import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from serving_case import BIN, BUNDLE, MODEL, held_out_ids, kl_divergence, tiny_model
import oscar_int2
import oscar_int2.transformers
import random_models as small
from oscar_int2 import attention
from oscar_int2.transformers import OscarCache, apply, remove


@contextlib.contextmanager
def applied(model, bundle, **options):
    try:
        yield apply(model, bundle, **{"prompts": "int2"} | options)
    finally:
        remove(model)


@torch.no_grad()
def stepped(model, ids, **options):
    """Logits [batch, tokens, vocab] of ids [batch, tokens] that come one by one over an OscarCache."""
    cache = OscarCache(model, *ids.shape)
    return torch.cat([model(ids[:, i:i + 1], past_key_values=cache, **options).logits
                      for i in range(ids.shape[1])], 1)


class AsSteps(unittest.TestCase):
    def test_a_pass_gives_what_its_tokens_give_one_by_one(self):
        rows = small.prompts(70, 70)
        for family, recipe, block in (("Qwen3", "shaped", 1), ("Llama", "plain", 8), ("Glm4Moe", "shaped", 24)):
            model, bundle = small.random_model(family), small.random_bundle(family, recipe)
            with torch.no_grad():
                exact = model(torch.tensor(rows)).logits
            with self.subTest(family), applied(model, bundle, demote_block=block), torch.no_grad():
                steps, at_once = stepped(model, torch.tensor(rows)), model(torch.tensor(rows)).logits
                with mock.patch.object(attention, "QUERY_BLOCK", 16):
                    in_blocks = model(torch.tensor(rows)).logits
                cache = OscarCache(model, 2, 70)
                in_prompts = torch.cat([model(part, past_key_values=cache).logits for part in
                                        torch.tensor(rows).split((30, 25, 15), 1)], 1)
                cost = kl_divergence(exact[0], steps[0])
                self.assertGreater(cost.mean().item(), 0.1, "this case would show nothing")
                # Behind the windows a rounding may carry values over the threshold between codes.
                for found in (at_once, in_blocks, in_prompts):
                    distance = kl_divergence(steps, found)
                    self.assertLess(distance[:, :small.SINK + small.RECENT].max().item(), 1e-4)
                    self.assertLess(distance.mean().item(), 0.05 * cost.mean().item())

    def test_padding_does_not_matter(self):
        rows = small.prompts(60, 37)
        model = small.random_model()
        with applied(model, small.random_bundle()), torch.no_grad():
            alone = [model(torch.tensor([row])).logits[0] for row in rows]
            left = model(**small.left_padded(rows)).logits
            right = model(torch.tensor([row + [0] * (60 - len(row)) for row in rows])).logits  # as lm-eval's
            for row, expected in enumerate(alone):
                for found in (left[row, -len(expected):], right[row, :len(expected)]):
                    self.assertLess(kl_divergence(expected, found).max().item(), 0.05)
                    self.assertLess(kl_divergence(expected, found).mean().item(), 1e-3)

    def test_prompts_of_generate_read_so_too_and_leave_the_same_rows(self):
        model, prompt = small.random_model(), torch.tensor(small.prompts(50))
        first, held = [], []
        for prompts in ("exact", "int2"):
            with applied(model, small.random_bundle(), prompts=prompts, demote_block=16), torch.no_grad():
                cache = OscarCache(model, 1, 60)
                output = model.generate(prompt, past_key_values=cache, max_new_tokens=2, do_sample=False,
                                        output_logits=True, return_dict_in_generate=True)
                first.append(output.logits[0])
                held.append(cache.paged.layers[0])
                if prompts == "int2":
                    last = model(prompt).logits[:, -1]
        self.assertLess(kl_divergence(first[1], last).max().item(), 1e-4)
        self.assertGreater(kl_divergence(*first).max().item(), 0.01)
        self.assertTrue(torch.equal(held[0].pool, held[1].pool), "layer 0 has the same rows")

    def test_what_it_does_not_serve_is_refused_by_name(self):
        model, ids = small.random_model("Qwen2"), torch.tensor(small.prompts(30))
        with self.assertRaisesRegex(ValueError, "prompts='INT2'.*'exact', 'int2'"):
            apply(model, small.random_bundle("Qwen2"), prompts="INT2")
        self.assertFalse(hasattr(model, "oscar_int2"))
        with applied(copy.deepcopy(model), small.random_bundle("Qwen2"), demote_block=1) as model:
            with self.assertRaisesRegex(oscar_int2.UnsupportedError, "gradients.*no_grad.*prompts='exact'"):
                model(ids)
            with torch.no_grad():
                model.model.layers[1].self_attn.v_proj.bias[0] += 1e6
                with self.assertRaises(oscar_int2.CacheRowError):
                    model(ids)

    def says_once(self, tokens, words, silent, **options):
        """A pass over `tokens` warns in these words, the first time alone; generate() over them and a pass over
        `silent` tokens do not."""
        model = small.random_model()
        warned, unwarned = (torch.tensor(small.prompts(n)) for n in (tokens, silent))
        with applied(model, small.random_bundle(), **options), torch.no_grad():
            with self.assertNoLogs("oscar_int2"):
                model(unwarned)
                model.generate(warned, max_new_tokens=2)
            with self.assertLogs("oscar_int2") as logged:
                model(warned)
                model(warned)
        self.assertEqual(len(logged.output), 1)
        self.assertRegex(logged.output[0], words)

    def test_the_exact_way_says_once_what_its_logits_are(self):
        self.says_once(17, "17 tokens.*BF16 baseline's.*prompts='int2'", silent=16, prompts="exact")

    def test_a_pass_without_2_bit_rows_says_so_once(self):
        self.says_once(16, "a pass of 16 tokens reads no row in 2 bits: .* at 17 tokens.*longer texts", silent=17)


class BesideOscarEval(unittest.TestCase):
    def test_likelihoods_are_those_of_its_decode_mode(self):
        rows, tokens, first = 4, 640, 320
        ids = torch.tensor(held_out_ids(rows * tokens)).view(rows, tokens)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            np.save(folder / "ids.npy", ids.numpy().astype(np.int32))
            subprocess.run([BIN / "oscar-eval", MODEL, "--corpus", folder / "ids.npy", "--bundle", BUNDLE,
                            "--compare", "bundle", "--mode", "decode", "--first-position", str(first),
                            "--keep-units", "--separators", "off", "--device", "cpu", "--quiet",
                            "--json", folder / "report.json"], check=True)
            methods = json.loads((folder / "report.json").read_text())["methods"]
        # Means over all rows, and of one: queries, rows and outputs are rounded to bf16, as served. A model in
        # bf16 rounds its codes another way with each number of threads: .0025 a row.
        for dtype, all_rows, one_row in ((torch.float32, 1e-3, 5e-3), (torch.bfloat16, 4e-3, 1e-2)):
            model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
            with torch.no_grad(), self.subTest(dtype):
                exact, nll = scores(model, ids, first)
                with applied(model, BUNDLE):
                    ours, ours_nll = scores(model, ids, first)
                apart = ours_nll.mean(1).numpy() - methods["bundle"]["units"]["nll"]
                self.assertLess(abs(apart.mean()), all_rows)
                self.assertLess(abs(apart).max(), one_row)
                kl = (exact.exp() * (exact - ours)).sum(-1).mean().item()
                self.assertAlmostEqual(kl / np.mean(methods["bundle"]["units"]["kl"]), 1, delta=0.2)


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class OnCuda(unittest.TestCase):
    def test_the_device_computes_what_the_cpu_computes(self):
        ids, logits = torch.tensor([held_out_ids(700)]), {}
        for device in ("cpu", "cuda"):
            model = copy.deepcopy(tiny_model()).to(device)
            with applied(model, BUNDLE), torch.no_grad():
                logits[device] = model(ids.to(device)).logits[0].cpu()
        distance = kl_divergence(logits["cpu"], logits["cuda"]).mean().item()
        self.assertLess(distance, 2e-3)  # sums in another order, rounded to bf16, and coded


def scores(model, ids, first):
    """Log probabilities [rows, tokens from `first` on, vocab], and NLL of these tokens."""
    log_p = model(ids).logits[:, first - 1:-1].double().log_softmax(-1)
    return log_p, -log_p.gather(-1, ids[:, first:, None])[..., 0]


if __name__ == "__main__":
    unittest.main()
