#!/usr/bin/env python3
"""Each family that vLLM serves over INT2 pages: a small random model, its bundle from transformers' engine, and
its answers beside the definition of the cache, which is worked out in float32 without the plugin."""
import functools
import unittest

import vllm_case as case
import family_case as family
from draft_case import add_mtp_layer
from vllm_case import needs_vllm

RECENT = 32  # a short window makes short prompts enough
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2", "hy_v3")


def for_each_family(test):
    @functools.wraps(test)
    def run(self):
        for name in FAMILIES:
            with self.subTest(name):
                test(self, name)
    return run


@needs_vllm
class Families(case.EngineTest):
    @for_each_family
    def test_answers_follow_the_definition(self, name):
        with family.serving(name, RECENT) as (model, engine):
            family.check_attention(engine, model.bundle, 3, 3, engine.prompt(2, 260))
            prompts = [engine.prompt(0, 230), engine.prompt(1, 170)]
            names = [engine.add(prompt, 10) for prompt in prompts]
            finished = engine.run()
        apart, exact = zip(*(model.distances(prompt, finished[name]) for prompt, name in zip(prompts, names)))
        self.assertLess(sum(apart), family.SHARE * sum(exact), f"from the definition {apart}, from BF16 {exact}")


@needs_vllm
class Mtp(case.EngineTest):
    """A model's own layers for drafts (GLM-4.5)."""

    def test_answers_follow_the_definition(self):
        with family.serving("glm4_moe", 32, keys={"tie_word_embeddings": False}, finish=add_mtp_layer,
                            speculative_config={"method": "mtp", "num_speculative_tokens": 2}) as (model, engine):
            kinds = [type(layer.impl).__name__ for layer in
                     engine.core.vllm_config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
            held = len(model.bundle.layers)
            self.assertEqual((kinds.count("OscarAttention"), len(kinds)), (held, held + 1))
            prompts = [engine.prompt(0, 230), engine.prompt(1, 170)]
            names = [engine.add(prompt, 40) for prompt in prompts]
            finished = engine.run()
        apart, exact = zip(*(model.distances(prompt, finished[name]) for prompt, name in zip(prompts, names)))
        self.assertLess(sum(apart), family.SHARE * sum(exact), f"from the definition {apart}, from BF16 {exact}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
