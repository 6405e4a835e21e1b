#!/usr/bin/env python3
"""Canonical chunks in vLLM: a request is answered to the bit alike, whatever others have left in the cache."""
import contextlib
import os
import random
import unittest
from unittest import mock

import vllm_case as case
import family_case as family
import test_vllm_mixed as mixed
from vllm_case import needs_vllm

CHUNK, RECENT, BLOCK = 192, 256, 64
NEEDED = CHUNK + RECENT + case.MAX_NUM_SEQS


def hit(prompt, other, common):
    """Tokens that a prompt takes of another one of so many, with which it has the first ones in common."""
    return min(prompt - 1 - RECENT, other - 1 - RECENT, common) // CHUNK * CHUNK


def chunks_of(prompt, begin=0):
    """Tokens of each chunk of a prompt that begins with so many in shared blocks."""
    ends = [begin]
    while ends[-1] < prompt:
        following = ends[-1] + CHUNK
        ends.append(following if following + RECENT < prompt else prompt)
    return [end - start for start, end in zip(ends, ends[1:])]


class Canonical(case.EngineTest):
    """One engine, of the embedded model or of a family."""

    name, chunk, options = "", CHUNK, {"max_num_batched_tokens": NEEDED}

    @classmethod
    def setUpClass(cls):
        with mock.patch.dict(os.environ, VLLM_OSCAR_CANONICAL_CHUNKS=str(cls.chunk)), contextlib.ExitStack() as stack:
            if cls.name:
                _, cls.engine = stack.enter_context(family.serving(cls.name, **cls.options))
            else:
                cls.engine = case.Engine(**cls.options)
            cls.addClassCleanup(stack.pop_all().close)

    def run_one(self, prompt, tokens):
        """(its output, its tokens that came from shared blocks, tokens of each of its steps)"""
        with self.engine.chunks() as steps:
            name = self.engine.add(prompt, tokens)
            output = self.engine.run()[name]
        return output, self.engine.cached[name], steps[name]

    def same_to_the_bit(self, one, other):
        self.assertEqual(list(one.token_ids), list(other.token_ids))
        for x, y in zip(one.logprobs, other.logprobs):
            self.assertEqual({token: p.logprob for token, p in x.items()}, {token: p.logprob for token, p in y.items()})


@needs_vllm
class Chunks(Canonical):
    def test_a_prompt_is_computed_in_whole_chunks(self):
        for tokens in (100, CHUNK + RECENT, CHUNK + RECENT + 1, 2 * CHUNK + RECENT, 760):
            with self.subTest(tokens=tokens):
                self.engine.forget()
                _, cached, steps = self.run_one(self.engine.prompt(0, tokens), 3)
                self.assertEqual(cached, 0)
                self.assertEqual(steps, [*chunks_of(tokens), 1, 1])

    def test_an_answer_is_the_same_with_and_without_shared_blocks(self):
        prompt = self.engine.prompt(4, 760)
        cold, cached, _ = self.run_one(prompt, 24)
        self.assertEqual(cached, 0)
        again, cached, steps = self.run_one(prompt, 24)
        self.assertEqual(cached, hit(760, 760, 760))
        self.assertEqual(steps[:1], chunks_of(760, cached))
        self.same_to_the_bit(cold, again)
        longer = prompt[:650] + self.engine.prompt(1, 200)  # another text from there on
        warm, cached, _ = self.run_one(longer, 24)
        self.assertEqual(cached, hit(850, 760, 650))
        self.same_to_the_bit(warm, self.engine.alone(longer, 24))

    def test_without_them_an_answer_differs(self):
        """The claim above is no truism: vLLM's own chunks give other log probabilities behind shared blocks."""
        engine = case.Engine()
        prompt = engine.prompt(4, 760)
        answers = []
        for _ in range(2):
            name = engine.add(prompt, 4)
            answers.append(engine.run()[name])
        first, second = (answer.logprobs[0][answer.token_ids[0]].logprob for answer in answers)
        self.assertEqual(answers[0].token_ids[0], answers[1].token_ids[0])
        self.assertNotEqual(first, second)

    def test_the_next_turn_of_a_chat_shares_no_answer(self):
        first = self.engine.prompt(2, 460)
        answer, _, _ = self.run_one(first, 200)  # past another multiple of a chunk
        chat = first + list(answer.token_ids) + self.engine.prompt(3, RECENT)
        warm, cached, _ = self.run_one(chat, 16)
        self.assertEqual(cached, hit(len(chat), 460, 460))
        self.assertGreater(hit(len(chat), 660, 660), cached, "an answer could have been shared")
        self.same_to_the_bit(warm, self.engine.alone(chat, 16))

    def test_prompts_beside_each_other_wait_for_room_and_all_are_answered(self):
        engine, source, requests = self.engine, random.Random(3), {}
        with engine.chunks() as steps:
            finished = {}
            for _ in range(8):
                prompt = engine.prompt(source.randrange(3), source.randrange(300, 800))
                requests[engine.add(prompt, source.randrange(4, 20))] = prompt
                for _ in range(source.randrange(4)):
                    engine.step(finished)
            finished |= engine.run()
        for name, prompt in requests.items():
            cached, tokens = engine.cached[name], len(finished[name].token_ids)
            self.assertEqual(steps[name], [*chunks_of(len(prompt), cached), *[1] * (tokens - 1)])
            self.same(finished[name], engine.alone_once(prompt, tokens), name)


class Beside:
    """Tests beside something else, of which chunks and hits may be others."""

    def test_an_answer_is_the_same_with_and_without_shared_blocks(self):
        prompt = self.engine.prompt(0, 760)
        self.engine.forget()
        cold, cached, _ = self.run_one(prompt, 24)
        self.assertEqual(cached, 0)
        again, cached, _ = self.run_one(prompt, 24)
        self.assertGreater(cached, 0)
        self.assertEqual(cached % self.chunk, 0)
        self.same_to_the_bit(cold, again)
        longer = prompt[:650] + self.engine.prompt(1, 200)
        warm, cached, _ = self.run_one(longer, 24)
        self.assertGreater(cached, 0)
        self.same_to_the_bit(warm, self.engine.alone(longer, 24))


@needs_vllm
class OfWindows(Beside, Canonical):
    chunk = mixed.Windows.block  # heads have other sizes on a GPU, and blocks other tokens
    name, options = mixed.Windows.name, {**mixed.Windows.options,
                                         "max_num_batched_tokens": chunk + RECENT + case.MAX_NUM_SEQS}


@needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM's second model runner takes no drafts by ngram")
class OfDrafts(Beside, Canonical):
    options = {"max_num_batched_tokens": NEEDED + 3 * case.MAX_NUM_SEQS, "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}


@needs_vllm
class Refusals(unittest.TestCase):
    def check(self, error, pattern, value, **options):
        with mock.patch.dict(os.environ, VLLM_OSCAR_CANONICAL_CHUNKS=value), self.assertRaisesRegex(error, pattern):
            case.Engine(**options)

    def test_by_name(self):
        from oscar_int2.errors import BundleError, UnsupportedError

        for value in ("100", "x", "-64", ""):
            self.check(BundleError, "VLLM_OSCAR_CANONICAL_CHUNKS is .*a multiple of 64", value)
        self.check(UnsupportedError, f"in steps of {NEEDED - 1} tokens .*room for {NEEDED}", str(CHUNK),
                   max_num_batched_tokens=NEEDED - 1)
        self.check(UnsupportedError, f"in steps of {NEEDED - 1} tokens", str(CHUNK), max_num_batched_tokens=2048,
                   max_num_scheduled_tokens=NEEDED - 1)
        with case.edited_bundle(lambda file: file["quantizer"].attrs.modify("sink_tokens", 256)) as path:
            with case.bundle_variable(path):
                self.check(UnsupportedError, "with 256 first tokens kept exactly in vLLM; 256 or more", str(CHUNK))
        self.check(UnsupportedError, "without chunked prefill", str(CHUNK), enable_chunked_prefill=False,
                   max_num_batched_tokens=2048)
        self.check(UnsupportedError, "long-prefill-token-threshold", str(CHUNK), long_prefill_token_threshold=100,
                   max_num_batched_tokens=2048)


if __name__ == "__main__":
    unittest.main(verbosity=2)
