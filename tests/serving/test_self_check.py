#!/usr/bin/env python3
"""oscar_int2.self_check: what it asks for, and what it makes of the answers."""
import copy
import dataclasses
import unittest
from unittest import mock

from serving_case import BUNDLE, MODEL, tiny_model
import oscar_int2
import random_models as small
from oscar_int2 import self_check
from oscar_int2.recipe import CacheFormat
from oscar_int2.transformers import apply, remove


class Probe(unittest.TestCase):
    def test_the_quote_stands_in_the_prompt_behind_the_line_that_ends_it(self):
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        tokens = self_check.probe_tokens(CacheFormat(0, 64, 256, 16))
        for encode in (lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], None):
            with self.subTest(text=encode is not None):
                probe = self_check.probe(tokens, len(tokenizer), encode)
                self.assertEqual(probe, self_check.probe(tokens, len(tokenizer), encode))
                self.assertEqual(len(probe.quote), self_check.QUOTE)
                line = 12
                whole = probe.prompt[-line:] + probe.quote
                places = [i for i in range(len(probe.prompt) - line)
                          if probe.prompt[i:i + len(whole)] == whole]
                self.assertEqual(len(places), 1, "the passage stands there once")
                self.assertGreater(places[0], 64)
                self.assertLess(places[0] + len(whole), len(probe.prompt) - 256 - 16)

    def test_windows_are_left_whatever_their_size(self):
        self.assertEqual(self_check.probe_tokens(CacheFormat(0, 64, 256, 16)), 2048)
        self.assertEqual(self_check.probe_tokens(CacheFormat(0, 64, 4096, 128)), 4 * (64 + 4096 + 128))


class Comparison(unittest.TestCase):
    def test_log_probabilities_decide(self):
        bundle = oscar_int2.load(BUNDLE)
        probe = self_check.probe(256, 8192)
        exact = [-0.25] * 48
        result = self_check.check(bundle, probe, exact, [-0.5] * 48)
        self.assertEqual((result.exact, result.served, result.distance), (-0.25, -0.5, 0.25))
        self.assertRegex(str(result), r"48 quoted tokens.*-0\.500 over the 2-bit cache, -0\.250 over BF16")
        self.assertNotIn("does not quote", str(result))
        self.assertIn("does not quote", str(self_check.check(bundle, probe, [-7.5] * 48, [-7.4] * 48)))
        for served in (-0.26 - probe.furthest, float("nan"), float("-inf")):
            with self.assertRaisesRegex(oscar_int2.SelfCheckError, "tiny-gqa.*another checkpoint"):
                self_check.check(bundle, probe, exact, [served] * 48)


class InTransformers(unittest.TestCase):
    def test_the_bundle_of_a_model_passes_and_one_of_another_is_found(self):
        model, good = tiny_model(), oscar_int2.load(BUNDLE)
        with mock.patch.object(self_check, "TOKENS", 1024):
            apply(model, good, verify=True)
            self.assertLess(model.oscar_int2.verified.distance, 0.6 * self_check.FURTHEST)
            with self.assertRaisesRegex(oscar_int2.SelfCheckError, "tiny-gqa.*calibrate this very checkpoint"):
                apply(model, of_other_heads(good), verify=True)
        self.assertFalse(hasattr(model, "oscar_int2"), "nothing is served")

    def test_models_that_cannot_quote_pass_too(self):
        with mock.patch.object(self_check, "TOKENS", 512):
            for family, recipe in (("Qwen3", "plain"), ("Glm4Moe", "shaped"), ("Llama", "plain")):
                model = small.random_model(family)
                with self.subTest(family):
                    apply(model, small.random_bundle(family, recipe), verify=True)
                remove(model)

    def test_a_model_in_training_mode_is_refused(self):
        model = copy.deepcopy(small.random_model()).train()
        with self.assertRaisesRegex(oscar_int2.UnsupportedError, r"model.eval\(\) first"):
            apply(model, small.random_bundle(), verify=True)


def of_other_heads(bundle):
    """As a bundle of another checkpoint is: sound by itself, each KV head with the other's transforms."""
    def side(side):
        return dataclasses.replace(side, **{name: value.flip(0).contiguous() for name, value in
                                            vars(side).items() if value is not None})

    return dataclasses.replace(bundle, layers={
        i: dataclasses.replace(layer, key=side(layer.key), value=side(layer.value))
        for i, layer in bundle.layers.items()})


if __name__ == "__main__":
    unittest.main()
