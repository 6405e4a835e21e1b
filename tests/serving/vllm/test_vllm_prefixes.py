#!/usr/bin/env python3
"""vLLM's prefix caching over INT2 pages: what is shared, when, and what it changes."""
import os
import random
import unittest
from types import SimpleNamespace
from unittest import mock

import vllm_case as case
import torch
from chunk_reference import Recorder
from vllm_case import DRIFT, needs_vllm

SINK, RECENT, BLOCK = 64, 256, 64


PLACES = 4  # of kept sinks, one more than requests run at a time


def offered(computed):
    """Tokens in blocks that others may read once a request has computed so many: all whole ones."""
    return computed // BLOCK * BLOCK if computed >= SINK + BLOCK else 0


def taken(prompt, computed):
    """Tokens that a prompt takes from a request that began with all of it."""
    return min((prompt - 1 - RECENT) // BLOCK * BLOCK, offered(computed))


@needs_vllm
class Prefixes(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.engine = cls.make_engine()
        cls.prefixes = cls.engine.scheduler.oscar_prefixes

    @classmethod
    def make_engine(cls, **options):
        from oscar_int2 import load
        from oscar_int2.vllm import settings

        memory = PLACES * settings.bytes_of_sink(load(case.BUNDLE)) + 1
        with mock.patch.dict(os.environ, VLLM_OSCAR_SINK_BYTES=str(memory)):
            return case.Engine(**options)

    def run_one(self, prompt, tokens):
        """(its output, its tokens that came from shared blocks)"""
        name = self.engine.add(prompt, tokens)
        return self.engine.run()[name], self.engine.cached[name]

    def test_what_has_left_the_window_is_shared_when_a_request_has_ended(self):
        first = self.engine.prompt(4, 700)
        _, cached = self.run_one(first, 20)
        self.assertEqual(cached, 0)
        longer = first + self.engine.prompt(1, 60)
        output, cached = self.run_one(longer, 12)
        self.assertEqual(cached, taken(760, 719))
        self.assertEqual(cached, 448)
        self.check(longer, output)
        # The last 256 tokens of a prompt are its own.
        output, cached = self.run_one(first, 12)
        self.assertEqual(cached, 384)
        self.check(first, output)
        # Another text behind the sink shares the sink's block alone.
        other = first[:SINK] + self.engine.prompt(2, 400)
        output, cached = self.run_one(other, 12)
        self.assertEqual(cached, SINK)
        self.check(other, output)
        _, cached = self.run_one(first[:SINK - 1] + other, 2)
        self.assertEqual(cached, 0)

    def test_a_shared_page_is_read_and_not_written(self):
        engine, first = self.engine, self.engine.prompt(3, 650)
        with Recorder(engine, 2) as recorder:
            self.run_one(first, 8)
        pages = recorder.block_table[0, :(offered(657) - SINK) // BLOCK].long()
        before = recorder.pool[pages].clone()
        self.assertEqual(len(pages), 9)
        with Recorder(engine, 2) as recorder:
            _, cached = self.run_one(first + engine.prompt(0, 250), 40)
        self.assertEqual(cached, offered(657))
        self.assertEqual(recorder.block_table[0, :len(pages)].tolist(), pages.tolist())
        self.assertTrue(torch.equal(recorder.pool[pages], before))

    def test_prompts_of_one_step_share_nothing_and_a_later_one_does(self):
        engine, prompt = self.engine, self.engine.prompt(1, 600)
        pair = [engine.add(prompt, 24) for _ in range(2)]
        finished = {}
        for _ in range(4):
            engine.step(finished)
        late = engine.add(prompt, 6)
        finished |= engine.run()
        self.assertEqual([engine.cached[name] for name in (*pair, late)], [0, 0, taken(600, 603)])
        self.same(finished[pair[0]], finished[pair[1]], "two at once")
        self.check(prompt, finished[late])

    def test_a_prompt_is_shared_between_its_chunks(self):
        engine, prompt = self.engine, self.engine.prompt(0, 760)
        with engine.in_chunks(120):
            early = engine.add(prompt, 4)
            finished = {}
            for _ in range(5):
                engine.step(finished)
            late = engine.add(prompt[:700], 10)
            finished |= engine.run()
        # It began in the step behind the sixth chunk: until then the steps were full.
        self.assertEqual((engine.cached[early], engine.cached[late]), (0, taken(700, 720)))
        self.check(prompt[:700], finished[late], DRIFT / 2)  # most of it was read as 2-bit rows

    def test_the_next_turn_of_a_chat_takes_every_whole_block_of_the_last_one(self):
        """Its last 256 tokens and what was answered among them, once the new text is long enough to leave the
        exact window to the request."""
        first = self.engine.prompt(2, 450)
        answer, _ = self.run_one(first, 40)
        chat = first + list(answer.token_ids) + self.engine.prompt(3, RECENT)
        output, cached = self.run_one(chat, 12)
        self.assertEqual(cached, offered(450 + 40 - 1))
        self.assertEqual(cached, 448)
        self.check(chat, output)
        chat += list(output.token_ids) + self.engine.prompt(0, 100)  # and it is offered whole
        self.assertEqual(self.run_one(chat, 2)[1], taken(len(chat), len(chat) - 100 - 1))

    def test_more_beginnings_than_places_are_counted_and_computed_anew(self):
        """One more than requests run at a time are kept; then the one unused for longest is given up."""
        prompts = [self.engine.prompt(i, 330) for i in range(PLACES + 1)]  # 6 blocks each of 35
        self.prefixes.take_counts()
        for prompt in prompts[:PLACES]:
            self.run_one(prompt, 1)
        self.assertEqual(len(self.prefixes.places), PLACES)
        self.assertEqual([self.run_one(prompts[i], 1)[1] for i in (0, PLACES - 1)], [SINK, SINK])
        self.assertEqual(self.prefixes.take_counts(), (2, 0))
        self.run_one(prompts[PLACES], 1)  # in the place of the second
        self.assertEqual(self.prefixes.take_counts(), (0, 0), "its blocks were nowhere")
        output, cached = self.run_one(prompts[1], 6)
        self.assertEqual(cached, 0)
        self.assertEqual(self.prefixes.take_counts(), (0, 1))
        self.check(prompts[1], output)
        self.assertEqual(self.run_one(prompts[1], 1)[1], SINK)
        self.assertEqual(self.prefixes.take_counts(), (1, 0))

    def test_a_sink_that_is_about_to_be_taken_is_not_replaced(self):
        prefixes = self.prefixes
        for i in range(PLACES):
            self.run_one(self.engine.prompt(i, 130), 2)
        before = dict(prefixes.places)
        self.assertEqual(len(before), PLACES)
        prefixes.moves.taken = [("request", place, 128) for place in before.values()]
        another = SimpleNamespace(request_id="another", block_hashes=[b"another"])
        prefixes.keep(another)
        self.assertEqual((dict(prefixes.places), prefixes.moves.kept), (before, []))
        prefixes.moves.taken.pop()
        prefixes.keep(another)
        prefixes.keep(another)  # as another group of layers does
        self.assertEqual(prefixes.moves.kept, [("another", list(before.values())[-1])])
        prefixes.take_moves(("request",))
        prefixes.free_places.append(prefixes.places.pop(b"another"))

    def test_a_preempted_request_takes_its_own_blocks_again(self):
        engine, moves, take = self.engine, [], self.prefixes.take_moves
        self.prefixes.take_moves = lambda scheduled: moves.append(take(scheduled)) or moves[-1]
        try:
            with engine.preemptions() as preempted:
                plan = {engine.add(engine.prompt(i, 690), 24): i for i in range(3)}
                finished = engine.run()
        finally:
            del self.prefixes.take_moves
        self.assertGreaterEqual(len(preempted), 1)
        self.assertTrue(any(move.taken for move in moves))
        for name, i in plan.items():
            self.check(engine.prompt(i, 690), finished[name])

    def test_what_was_evicted_is_computed_again(self):
        engine = self.engine
        for i in (0, 1, 2, 3, 4):  # 12 blocks each of 35
            self.run_one(engine.prompt(i, 710), 1)
        prompt = engine.prompt(0, 710)
        output, cached = self.run_one(prompt, 8)
        self.assertEqual(cached, 0)
        self.check(prompt, output)

    def test_requests_at_random_get_the_answers_of_single_runs(self):
        engine, source, finished, requests = self.engine, random.Random(7), {}, {}
        with engine.in_chunks(300, of_one=200):
            for _ in range(10):
                prompt = (engine.prompt(source.randrange(2), source.randrange(300, 700))
                          + engine.prompt(source.randrange(2, 5), source.randrange(1, 60)))
                requests[engine.add(prompt, source.randrange(4, 30))] = prompt
                for _ in range(source.randrange(6)):
                    engine.step(finished)
            finished |= engine.run()
        shared = [engine.cached[name] for name in requests]
        self.assertGreaterEqual(sum(tokens > 0 for tokens in shared), 5, shared)
        for name, prompt in requests.items():
            self.check(prompt, finished[name], DRIFT / 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
