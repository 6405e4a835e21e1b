#!/usr/bin/env python3
"""oscar_int2.status: which bundle serves, and how many tokens lie in 2 bits."""
import copy
import unittest

import torch

from serving_case import BUNDLE, tiny_model
import oscar_int2
import random_models as small
from oscar_int2.transformers import OscarCache, apply, remove


class OfAModel(unittest.TestCase):
    def test_it_names_the_bundle_and_counts_tokens(self):
        model, prompt = copy.deepcopy(small.random_model("Qwen2")), torch.tensor(small.prompts(40, 40))
        self.assertEqual(oscar_int2.status(model), oscar_int2.Status("BF16"))
        self.assertRegex(str(oscar_int2.status(model)), "BF16, no bundle")
        apply(model, small.random_bundle("Qwen2"), demote_block=8, prompts="int2")
        with torch.no_grad():
            found = oscar_int2.status(model)
            self.assertEqual((found.cache, found.bundle, found.model, found.bits, found.prompts),
                             ("INT2", "random.h5", "random", 2, "int2"))
            self.assertEqual((found.tokens_int2, found.tokens_exact, found.refused), (0, 0, 0))
            cache = OscarCache(model, 2, 64)
            model(prompt, past_key_values=cache)
            found = oscar_int2.status(model)
            self.assertEqual((found.tokens_int2, found.tokens_exact), (2 * 24, 2 * 16))
            del cache
            model.generate(prompt, max_new_tokens=3)  # whose memory is kept, but not its logits
            found = oscar_int2.status(model)
            self.assertEqual((found.tokens_int2, found.tokens_exact), (2 * 24, 2 * 18))
            self.assertRegex(str(found), "2 bits by random.h5.*weights as found: not compared.*demote_block=8; 48 tokens held in 2 bits, "
                                         "36 exactly; last run: 48 in 2 bits, 36 exactly; 0 requests.*not run")
            model(prompt[:, :33], use_cache=False)  # which holds nothing when it has read them
            found = oscar_int2.status(model)
            self.assertEqual((found.tokens_int2, found.last_int2, found.last_exact), (2 * 24, 2 * 16, 2 * 17))
            model.model.layers[1].self_attn.v_proj.bias[0] += 1e6
            with self.assertRaises(oscar_int2.CacheRowError):
                model.generate(prompt, max_new_tokens=3)
            self.assertEqual(oscar_int2.status(model).refused, 2)
        for prompts, block in (("int2", 4), ("exact", 16)):  # measured as oscar-eval does, or as servers run it
            apply(model, small.random_bundle("Qwen2", demote_block=4), prompts=prompts)
            self.assertEqual(oscar_int2.status(model).demote_block, block)
        remove(model)
        self.assertEqual(oscar_int2.status(model).cache, "BF16")

    def test_what_is_no_model_is_refused(self):
        for served in (3, "bundle.h5", None):
            with self.assertRaisesRegex(TypeError, "takes a model of transformers or a Generator, found a "):
                oscar_int2.status(served)


class OfAGenerator(unittest.TestCase):
    def test_it_names_the_bundle_and_counts_tokens(self):
        model = copy.deepcopy(small.random_model("Qwen3", torch.bfloat16))
        self.assertEqual(oscar_int2.status(oscar_int2.Generator(model, None, max_tokens=64)).cache, "BF16")
        generator = oscar_int2.Generator(model, small.random_bundle(), max_num_seqs=2, max_tokens=96, demote_block=1)
        generator.submit(small.prompts(30)[0], 40)
        generator.run(looks=1)
        found = oscar_int2.status(generator)
        self.assertEqual((found.bundle, found.bits, found.tokens_int2, found.tokens_exact),
                         ("random.h5", 2, 30 + 16 - 16, 16))
        generator.run()
        found = oscar_int2.status(generator)
        self.assertEqual((found.tokens_int2, found.last_int2, found.last_exact), (0, 30 + 39 - 16, 16))
        generator.generate(small.prompts(60, 50), 2)
        found = oscar_int2.status(generator)
        self.assertEqual((found.last_int2, found.last_exact, found.demote_block), (61 + 51 - 2 * 16, 2 * 16, 1))
        self.assertRegex(str(found), "0 tokens held in 2 bits, 0 exactly; last run: 80 in 2 bits, 32 exactly")
        generator.submit(small.prompts(30)[0], 40)
        generator.run(looks=1)
        generator.cache.status[0] = 2  # what a refused row leaves
        generator.run()
        self.assertEqual(oscar_int2.status(generator).refused, 1)

    def test_the_hash_is_the_bundles(self):
        generator = oscar_int2.Generator(tiny_model(), BUNDLE, max_tokens=64)
        self.assertEqual(oscar_int2.status(generator).content_sha256, oscar_int2.load(BUNDLE).content_sha256)
        self.assertEqual(oscar_int2.status(generator).weights, "same")
        self.assertRegex(str(oscar_int2.status(generator)), "tiny-gqa.h5 .of 'tiny-gqa', content_sha256 [0-9a-f]{12}")


if __name__ == "__main__":
    unittest.main()
