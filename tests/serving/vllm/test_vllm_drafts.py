#!/usr/bin/env python3
"""Speculative decoding over INT2 pages: drafts that are taken and drafts that are not, k of them at a time."""
import pathlib
import tempfile
import unittest
from unittest import mock

import vllm_case as case
import family_case as family
import test_vllm_mixed as mixed
import torch
from draft_case import Drafts, write_eagle_head
from overlapped import overlapped
from vllm_case import needs_vllm

MODEL_DRAFTS = {"method": "draft_model", "model": str(case.MODEL)}
# Of 1,000 tokens 672 are coded, in 11 pages, and the ring wraps. An interpreter takes long.
TOKENS = 160 if case.INTERPRETED else 600
WRITTEN = []  # the answer of so many tokens that the first engine of this file gave: drafts for those behind it
# The graphs of a GPU, where there is one: a step of drafts runs in them.
GRAPHS = {"enforce_eager": False, "compilation_config": {
    "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if torch.cuda.is_available() else {}


class WithDrafts(case.EngineTest):
    k = 0
    ragged = False      # requests have different numbers of drafts
    overlapped = False  # a step begins before the last one has ended: only the device knows lengths
    speculative = MODEL_DRAFTS

    @classmethod
    def setUpClass(cls):
        if not cls.k:
            raise unittest.SkipTest("its subclasses have drafts")
        if cls.overlapped:
            cls.enterClassContext(overlapped())
        cls.engine = case.Engine(
            kv_cache_memory_bytes=96 << 20, async_scheduling=cls.overlapped, **GRAPHS,
            speculative_config={**cls.speculative, "num_speculative_tokens": cls.k})

    def steps(self):
        """Runs what was added. Returns ({id: CompletionOutput}, steps), and finds history where it must be."""
        engine, format, steps, finished = self.engine, self.engine.builder.format, 0, {}
        while engine.core.has_unfinished_requests():
            certain = {r.request_id: r.num_tokens for r in engine.scheduler.running
                       if r.num_tokens - r.num_computed_tokens == 1 and not self.overlapped}
            engine.step(finished)
            steps += 1
            history, written = (numbers.tolist() for numbers in (
                engine.builder.tables.history, engine.builder.tables.written))
            for request, tokens in certain.items():
                if request in engine.builder.slots.of:
                    slot = engine.builder.slots.of[request]
                    self.assertEqual((history[slot], written[slot]),
                                     (format.history_tokens(tokens), format.page_tokens(tokens)),
                                     "INT2 tokens of a request, and those in pages, by those that were certain")
        return finished, steps

    def like_one_at_a_time(self, prompt, output):
        """Log probabilities of an answer are those of the package's cache, read one token at a time."""
        ours = torch.tensor(case.log_probabilities_in_transformers(prompt, output.token_ids))
        theirs = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, output.token_ids)])
        apart = (ours - theirs).abs()
        said = f"{len(apart)} tokens, {apart.mean():.4f} apart in the mean, at most {apart.sort(descending=True)[0][:5].tolist()}"
        self.assertLess(apart.max(), case.DRIFT, said)
        self.assertLess(apart.mean(), case.DRIFT / (25 if len(apart) > 100 else 8), said)

    def test_the_text_is_that_without_drafts(self):
        if self.overlapped and case.RUNNER == 1:
            self.skipTest("the first runner asks for drafts before anybody knows what they follow")
        engine, prompt = self.engine, self.engine.prompt(3, 400)
        with Drafts(engine, self.k, ragged=self.ragged) as drafts:
            if not WRITTEN:
                WRITTEN.append(self.with_wrong_drafts(prompt))
            for _ in range(2):
                long = engine.add(prompt, TOKENS)
                drafts.texts[long] = list(WRITTEN[0].token_ids)
                short = engine.add(engine.prompt(1, 330), 120)  # nearly none of its drafts is right
                tiny = engine.add(engine.prompt(2, 2), 20)
                finished, steps = self.steps()
                if self.same(finished[long], WRITTEN[0], "with drafts that are taken"):
                    break
                WRITTEN[0] = finished[long]  # engines may part where two tokens are equally probable
        self.assertLess(steps, 0.8 * TOKENS if not self.ragged else TOKENS, "drafts were taken")
        self.like_one_at_a_time(prompt, finished[long])
        self.like_one_at_a_time(engine.prompt(1, 330), finished[short])
        self.like_one_at_a_time(engine.prompt(2, 2), finished[tiny])

    def with_wrong_drafts(self, prompt):
        """The answer to a prompt. Nearly no draft is right, all along."""
        name = self.engine.add(prompt, TOKENS)
        finished, steps = self.steps()
        self.assertGreater(steps, 0.9 * TOKENS)
        self.like_one_at_a_time(prompt, finished[name])
        return finished[name]

    def test_the_drafters_own_layers_stay_as_vllm_has_them(self):
        """And what they propose is taken or not."""
        engine = self.engine
        kinds = [type(layer.impl).__name__ for layer in self.attention_layers()]
        self.assertEqual(kinds.count("OscarAttention"), 8)
        self.assertEqual(len(kinds) > 8, self.speculative["method"] != "ngram")
        prompt = engine.prompt(0, 420)
        name = engine.add(prompt, 40)  # a page is full behind 448 tokens
        self.like_one_at_a_time(prompt, engine.run()[name])

    def attention_layers(self):
        layers = self.engine.core.vllm_config.compilation_config.static_forward_context.values()
        return [layer for layer in layers if hasattr(layer, "impl")]


@needs_vllm
class Eagle(WithDrafts):
    """Its random head is never right by itself."""

    k, method = 3, "eagle"

    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            write_eagle_head(pathlib.Path(folder), cls.method, case.MODEL)
            cls.speculative = {"method": cls.method, "model": folder}
            super().setUpClass()


@needs_vllm
class Eagle3(Eagle):
    k, method = 2, "eagle3"


@needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM 0.26's second model runner takes no draft models")
class One(WithDrafts):
    k = 1


@needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM 0.26's second model runner takes no draft models")
class Three(WithDrafts):
    """Some requests have fewer drafts than others."""

    k = 3
    ragged = True


@needs_vllm
class Five(Eagle):
    """More than a call of the attention kernel takes."""

    k = 5


@needs_vllm
class Seven(Eagle):
    """As many as two calls take."""

    k = 7


@needs_vllm
class Fifteen(Eagle):
    """Four calls."""

    k = 15


@needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM 0.26's second model runner takes no drafts of the text itself")
class Ngram(WithDrafts):
    k = 5
    speculative = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}

    def test_a_request_has_k_drafts_whatever_the_text_gives(self):
        """A text may hold what was written before, or not: steps have the same rows of each request."""
        published, batches = self.engine.builder.publish, []

        def publish(slots, drafts):
            batches.append(list(drafts))
            published(slots, drafts)

        prompts = self.engine.prompt(0, 420), self.engine.prompt(1, 5)
        with mock.patch.object(self.engine.builder, "publish", publish):
            names = [self.engine.add(prompt, 40) for prompt in prompts]
            finished = self.engine.run()
        both = [drafts for drafts in batches if len(drafts) == 2 and any(drafts)]
        self.assertGreater(len(both), 5)
        self.assertEqual({tuple(drafts) for drafts in both}, {(self.k, self.k)})
        for prompt, name in zip(prompts, names):
            self.like_one_at_a_time(prompt, finished[name])

    def crossing(self):
        """A prompt. One token behind it no row leaves the recent window yet, with drafts a block of them would."""
        format = self.engine.builder.format
        tokens = format.sink_tokens + format.recent_tokens + 6 * format.demote_block - 2
        certain = tokens + 1
        self.assertEqual(format.history_tokens(certain), format.history_tokens(certain + 1) - format.demote_block)
        return self.engine.prompt(0, tokens)

    @unittest.skipIf(torch.cuda.is_available(), "operators check tables on a CPU alone")
    def test_a_ring_of_too_few_rows_for_drafts_would_be_seen(self):
        """One row too few, and no rows for drafts at all. Two drafts and fewer need none: a ring of single tokens has
        two rows more than these need."""
        from oscar_int2.recipe import CacheFormat

        single = self.engine.builder.format.ring_tokens()
        for k, rows in (1, single - 2), (2, single - 1), (self.k, single + self.k - 3), (self.k, single):
            with mock.patch.object(CacheFormat, "ring_tokens", lambda *_, rows=rows: rows):
                engine = case.Engine(kv_cache_memory_bytes=96 << 20, speculative_config={
                    **self.speculative, "num_speculative_tokens": k})
            engine.add(self.crossing(), 12)
            with self.subTest(k=k, rows=rows), self.assertRaisesRegex(
                    RuntimeError, f"at most ring_tokens {rows} exact rows behind it"):
                engine.run()

    def test_a_history_that_counts_drafts_would_be_seen(self):
        engine = self.engine
        publish = engine.builder.publish
        name = engine.add(self.crossing(), 12)
        with mock.patch.object(engine.builder, "publish", lambda slots, drafts: publish(slots, [0] * len(drafts))), \
                self.assertRaisesRegex(AssertionError, "by those that were certain"):
            self.steps()
        engine.core.abort_request([name])
        engine.settle()

    def test_fewer_drafts_than_k_are_proposed_where_vllm_says_so(self):
        from oscar_int2.vllm.steps import fill_up

        self.assertEqual(fill_up([[], [7], [7, 8], []], [[5], [6], [4, 9], []], 2), [[5, 5], [7, 6], [7, 8], []])
        self.assertEqual(fill_up([[], []], [[5], []], 0), [[], []])

    def test_greedy_requests_beside_sampled_ones_get_what_they_get_alone(self):
        engine = self.engine
        prompts = [engine.prompt(i, 370 + 7 * i) for i in range(3)]  # a page is full behind 384 tokens
        alone = [engine.alone(prompt, 24) for prompt in prompts[:2]]
        names = [engine.add(prompt, 24, **options) for prompt, options in
                 zip(prompts, ({}, {}, {"temperature": 1.5}))]
        finished = engine.run()
        for name, one in zip(names, alone):
            self.same(one, finished[name], "beside a request with a temperature")
        self.assertGreater(len(set(finished[names[2]].token_ids)), 10)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM 0.26's second model runner takes no drafts of the text itself")
class OfWindows(mixed.OneEngine, case.EngineTest):
    """Gemma 3: drafts of the text itself, of which a random model takes nearly none, and drafts that are taken."""

    name, layers, kept = mixed.Windows.name, mixed.Windows.layers, mixed.Windows.kept
    options = {**mixed.Windows.options, "speculative_config": NGRAM}

    def answers(self, expected):
        """Of three requests at a time: those of which `expected` names the answers get drafts of it, and some wrong
        ones. Returns ([CompletionOutput], steps)."""
        engine, finished, steps = self.engine, {}, 0
        prompts = [engine.prompt(number, length) for number, length in ((0, 470), (1, 400), (2, 420))]
        names = [engine.add(prompt, 70) for prompt in prompts]
        with Drafts(engine, NGRAM["num_speculative_tokens"], vocabulary=family.VOCAB) as drafts:
            drafts.texts |= dict(zip(names, expected))
            while engine.core.has_unfinished_requests():
                engine.step(finished)
                steps += 1
        apart, exact = zip(*(self.family.distances(prompt, finished[name]) for prompt, name in zip(prompts, names)))
        self.assertLess(sum(apart), family.SHARE * sum(exact), f"from the definition {apart}, from BF16 {exact}")
        return [finished[name] for name in names], steps

    def test_answers_are_the_same_with_drafts_that_are_taken_and_that_are_not(self):
        outputs, slow = self.answers([])
        for _ in range(3):
            before = outputs
            outputs, fast = self.answers([list(output.token_ids) for output in before])
            for pair in zip(before, outputs):
                self.same(*pair, "with other drafts")
            if fast < 0.8 * slow:  # or an answer took another way where two tokens are equally probable
                return
        self.fail(f"{fast} steps with drafts that are right, {slow} with wrong ones")

    def test_drafts_of_the_text_itself(self):
        prompt = self.engine.prompt(3, 300) * 2
        apart, exact = self.family.distances(prompt, self.engine.alone(prompt, 60))
        self.assertLess(apart, family.SHARE * exact)


@needs_vllm
class OfSinks(OfWindows):
    """gpt-oss: the rows of drafts have their sinks too."""

    name, layers, kept = mixed.AttentionSinks.name, mixed.AttentionSinks.layers, mixed.AttentionSinks.kept


@needs_vllm
class OverlappedEagle(Eagle):
    overlapped = True


@needs_vllm
class OverlappedThree(Three):
    ragged, overlapped = False, True


if __name__ == "__main__":
    unittest.main(verbosity=2)
