#!/usr/bin/env python3
"""KV offloading over INT2 pages: what goes to host memory, what comes back, and what never does."""
import contextlib
import os
import unittest
from unittest import mock

import vllm_case as case
import offloading_case
import torch
from overlapped import overlapped
from test_vllm_faults import changed_rows
from vllm_case import needs_vllm

SINK, RECENT, BLOCK = 64, 256, 64
PLACES = 6  # of kept sinks
PAGES = 120  # of host memory; the pool has 35


def most(prompt):
    """Tokens that a prompt of so many may begin with."""
    return (prompt - 1 - RECENT) // BLOCK * BLOCK


@contextlib.contextmanager
def held_loads(engine):
    """Pages that come from host memory have not come yet: loads are reported as soon as this ends."""
    connector = engine.connector_worker
    held, get_finished = [], connector.worker.get_finished

    def without_loads():
        found = get_finished()
        held.extend(result for result in found if result.job_id in connector._load_jobs)
        return [result for result in found if result not in held]

    connector.worker.get_finished = without_loads
    try:
        yield
    finally:
        connector.worker.get_finished = lambda: [held.pop() for _ in list(held)] + get_finished()


class Case(case.EngineTest):
    engine: offloading_case.Engine

    @classmethod
    def setUpClass(cls):
        cls.engine = cls.make_engine()

    @classmethod
    def make_engine(cls, **options):
        from oscar_int2 import load
        from oscar_int2.vllm import settings

        memory = PLACES * settings.bytes_of_sink(load(case.BUNDLE)) + 1
        with mock.patch.dict(os.environ, VLLM_OSCAR_SINK_BYTES=str(memory)):
            return offloading_case.Engine(PAGES, **options)

    def setUp(self):
        super().setUp()
        self.engine.take_counts()

    def ask(self, prompt, tokens=8, **options):
        """(its output, tokens from the pool, tokens from host memory)"""
        engine = self.engine
        name = engine.add(prompt, tokens, **options)
        output = engine.run()[name]
        return output, engine.cached[name] - engine.from_host[name], engine.from_host[name]

    def store(self, prompt, tokens=1, **options):
        """Into host memory; the pool forgets it."""
        self.ask(prompt, tokens, **options)
        self.engine.forget_pool()


class Both:
    """In steps one behind another, and in steps that overlap."""

    def test_a_prompt_comes_back_from_host_memory(self):
        engine, prompt = self.engine, self.engine.prompt(4, 700)
        first, *cached = self.ask(prompt)
        self.assertEqual(cached, [0, 0])
        shared, *cached = self.ask(prompt)
        self.assertEqual(cached, [384, 0])
        engine.forget_pool()
        self.assertEqual(engine.host_pages(), 700 // BLOCK, "whole blocks of the prompt")
        back, *cached = self.ask(prompt)
        self.assertEqual(cached, [0, 384])
        self.assertTrue(self.same(back, shared, "the same 2-bit rows, from host memory and from the pool"))
        self.check(prompt, back)
        self.assertEqual(engine.take_counts(), (2, 0))
        engine.forget()
        _, *cached = self.ask(prompt)
        self.assertEqual(cached, [0, 0], "reset_prefix_cache(reset_connector=True) drops both")

    def test_the_pool_gives_the_beginning_and_host_memory_the_rest(self):
        engine, text = self.engine, self.engine.prompt(1, 1000)
        self.store(text)
        _, *cached = self.ask(text[:450], 1)
        self.assertEqual(cached, [0, most(450)])
        output, *cached = self.ask(text, 12)
        self.assertEqual(cached, [448, most(1000) - 448])
        self.check(text, output)

    def test_pages_of_a_step_with_a_refused_row_stay_out(self):
        """The steps before have stored theirs, which are sound."""
        engine, text = self.engine, self.engine.prompt(0, 1000)
        expected = {0: engine.alone(text, 8)}
        engine.forget()
        with engine.in_chunks(3072, of_one=128):
            self.ask(text[:575], 1)
        expected[128], *cached = self.ask(text)
        self.assertEqual(cached, [512, 0])
        for chunk in (128, 0):
            engine.forget()

            def spoil(k, v):
                if len(k) > 3 and (chunk == 0 or engine.scheduler.running[0].num_computed_tokens > 512):
                    k[3, 0, 0] = torch.nan

            name = engine.add(text[:700], 4)
            with changed_rows(engine, spoil), engine.in_chunks(3072, of_one=chunk):
                output = engine.run()[name]
            self.assertEqual(output.finish_reason, "error")
            engine.forget_pool()
            with self.subTest(chunk=chunk):
                self.assertEqual(engine.host_pages(), 512 // BLOCK if chunk else 0)
                output, *cached = self.ask(text)
                self.assertEqual(cached, [0, 512 if chunk else 0])
                self.same(output, expected[chunk], "behind it")
            self.assertFalse(engine.offloading.refused)

    def test_the_sink_of_a_request_that_waits_for_its_pages_is_nobody_elses(self):
        engine, prefixes, prompt = self.engine, self.engine.prefixes, self.engine.prompt(0, 640)
        self.store(prompt)
        sink = next(reversed(prefixes.places))
        for end in ("goes on", "has no room at first", "is aborted", "is aborted without room"):
            with self.subTest(end), self.no_room("no room" in end or "without" in end) as turned_down:
                finished = {}
                with held_loads(engine):
                    name = engine.add(prompt, 12)
                    engine.step(finished)
                    [(waiting, place, tokens)] = prefixes.moves.taken
                    self.assertEqual((waiting.rsplit("-", 1)[0], tokens), (name, most(640)))
                    for i in range(PLACES + 1):  # each begins in its own way, and they are more than the places
                        other = engine.add(engine.texts[1][40 * i:40 * i + 150], 1)
                        while other not in finished:
                            engine.step(finished)
                    self.assertEqual((len(prefixes.places), prefixes.places[sink]), (PLACES, place))
                    self.assertEqual(prefixes.moves.taken, [(waiting, place, tokens)])
                    if end == "is aborted":
                        engine.core.abort_request([name])
                        self.assertEqual(len(engine.scheduler.requests), 1, "its blocks are being written")
                if "without" in end:
                    while not turned_down:
                        engine.step(finished)
                    engine.core.abort_request([name])
                finished |= engine.run()
                engine.settle()
                self.assertEqual((prefixes.moves.taken, engine.scheduler.requests), ([], {}))
                self.assertEqual(bool(turned_down), "room" in end)
                if "aborted" not in end:
                    self.check(prompt, finished[name])
                free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
                engine.forget_pool()
                self.assertEqual(engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), free)

    def test_a_request_can_be_aborted_while_its_pages_come_and_host_memory_is_reset(self):
        engine, prompt = self.engine, self.engine.prompt(1, 640)
        self.store(prompt)
        with held_loads(engine):
            name = engine.add(prompt, 4)
            engine.step({})
            engine.core.reset_prefix_cache(reset_connector=True)
            engine.core.abort_request([name])
        engine.settle()
        self.assertEqual((engine.prefixes.moves.taken, engine.scheduler.requests, engine.host_pages()), ([], {}, 0))
        output, *cached = self.ask(prompt)
        self.assertEqual(cached, [0, 0])
        self.check(prompt, output)

    @contextlib.contextmanager
    def no_room(self, once):
        """A list; the first request that has its pages from host memory finds no room for more, and goes into it."""
        manager, turned_down = self.engine.scheduler.kv_cache_manager, []
        allocate = manager.allocate_slots

        def allocate_slots(request, *args, **options):
            takers = {taker for taker, *_ in self.engine.prefixes.moves.taken}
            loaded = request.num_computed_tokens and request.request_id in takers
            if once and loaded and not turned_down:
                turned_down.append(request.request_id)
                return None
            return allocate(request, *args, **options)

        with mock.patch.object(manager, "allocate_slots", allocate_slots):
            yield turned_down

    def test_preempted_requests_begin_again(self):
        engine = self.engine
        for i in range(3):
            self.store(engine.prompt(i, 690))
        with engine.preemptions() as preempted:
            plan = {engine.add(engine.prompt(i, 690), 24): i for i in range(3)}
            finished = engine.run()
        self.assertGreaterEqual(len(preempted), 1)
        self.assertEqual([engine.from_host[name] for name in plan], [most(690)] * 3)
        for name, i in plan.items():
            self.check(engine.prompt(i, 690), finished[name])


@needs_vllm
class Offloaded(Both, Case):
    def test_turns_of_more_conversations_than_the_pool_holds_are_found(self):
        """Beside an engine whose pool holds them all."""
        engine = self.engine
        with offloading_case.no_connector():
            large = case.Engine(kv_cache_memory_bytes=73728 * 150)
        chats, found, differ = {i: engine.prompt(i, 430) for i in range(4)}, 0, 0
        for turn in range(3):
            for i, chat in chats.items():
                output, pool, host = self.ask(chat, 5)
                with offloading_case.no_connector():
                    name = large.add(chat, 5)
                    expected = large.run()[name]
                with self.subTest(turn=turn, chat=i):
                    self.assertEqual(pool + host, large.cached[name])
                    differ += not self.same(output, expected, f"turn {turn} of chat {i}")
                found += host
                chats[i] = chat + list(expected.token_ids) + engine.texts[(i + 1) % 5][200 * turn:200 * turn + 200]
        self.assertGreater(found, 1000)
        self.assertLess(differ, 4)
        said = {metric.name: getattr(metric, "value", None) for metric in engine.llm.get_metrics()}
        self.assertGreaterEqual(said["vllm:external_prefix_cache_hits"], found)

    def test_without_its_sink_nothing_is_taken_and_that_is_counted(self):
        engine, prompt, prefixes = self.engine, self.engine.prompt(2, 600), self.engine.prefixes
        self.store(prompt)
        prefixes.free_places.append(prefixes.places.popitem()[1])  # another has taken its place
        output, *cached = self.ask(prompt)
        self.assertEqual((cached, engine.take_counts()), ([0, 0], (0, 1)))
        self.check(prompt, output)
        engine.forget_pool()
        output, *cached = self.ask(prompt)
        self.assertEqual((cached, engine.take_counts()), ([0, most(600)], (1, 0)), "it keeps its sink again")
        self.check(prompt, output)

    def test_a_client_can_ask_for_less(self):
        prompt = self.engine.prompt(3, 700)
        self.store(prompt, extra_args={"kv_transfer_params": {"max_offload_tokens": 200}})
        self.assertEqual(self.engine.host_pages(), 3)
        self.assertEqual(self.ask(prompt)[1:], (0, 192))

    def test_what_vllm_says_of_its_connector_is_published_beside_ours(self):
        engine = self.engine

        def said():
            return {metric.name: getattr(metric, "value", 0) for metric in engine.llm.get_metrics()}, ours()

        def ours():
            from prometheus_client import REGISTRY

            return sum(sample.value for metric in REGISTRY.collect() for sample in metric.samples
                       if sample.name == "oscar_int2_sink_hits_total")

        (before, hits), prompt = said(), engine.prompt(3, 500)
        self.store(prompt)
        self.ask(prompt)
        (after, more) = said()
        grown = {name: after[name] - before.get(name, 0) for name in after if "kv_offload" in name}
        self.assertEqual(grown["vllm:kv_offload_store_bytes"], 7 * 73728)
        self.assertEqual(grown["vllm:kv_offload_load_bytes"], most(500) // BLOCK * 73728)
        self.assertEqual(more - hits, 1)


@needs_vllm
class Overlapped(Both, Case):
    """The same while a step is begun before the tokens of the last one are known."""

    @classmethod
    def make_engine(cls, **options):
        with overlapped():
            return super().make_engine(async_scheduling=True, **options)

    def test_who_reads_pages_of_a_step_with_a_refused_row_stores_none(self):
        """It began while that step ran."""
        engine, text, finished = self.engine, self.engine.prompt(0, 1000), {}

        def spoil(k, v):
            if len(k) == 700:
                v[300] *= 1e9

        with changed_rows(engine, spoil), engine.chunks() as chunks:
            bad = engine.add(text[:700], 4)
            engine.step(finished)
            reader = engine.add(text, 4)
            finished |= engine.run()
        self.assertEqual(chunks[reader][0], 1000 - 640, "it took the other's blocks")
        self.assertEqual({finished[name].finish_reason for name in (bad, reader)}, {"error"})
        engine.settle()
        self.assertEqual(engine.host_pages(), 0)

    def test_a_refused_row_stops_stores_of_all_who_share_a_block(self):
        engine, finished = self.engine, {}
        self.ask(engine.prompt(0, 500), 1)
        sharing = [engine.add(engine.prompt(0, 500), 20) for _ in range(2)]
        other = engine.add(engine.prompt(1, 300), 20)
        engine.step(finished)
        names = {name: request for request in engine.scheduler.requests for name in (*sharing, other)
                 if request.startswith(name)}
        engine.offloading.refuse([names[sharing[0]]])
        self.assertEqual(engine.offloading.refused, {names[name] for name in sharing})
        engine.run()
        engine.settle()
        self.assertEqual(engine.offloading.refused, set())


@needs_vllm
class Canonical(Case):
    """Pages of canonical chunks."""

    CHUNK = 192

    @classmethod
    def make_engine(cls, **options):
        with mock.patch.dict(os.environ, VLLM_OSCAR_CANONICAL_CHUNKS=str(cls.CHUNK)):
            return super().make_engine(max_num_batched_tokens=512, **options)

    def test_they_come_back_up_to_a_chunks_end_and_give_the_same_answer(self):
        prompt = self.engine.prompt(4, 760)
        shared = (760 - 1 - RECENT) // self.CHUNK * self.CHUNK
        cold, *cached = self.ask(prompt)
        self.assertEqual(cached, [0, 0])
        self.engine.forget_pool()
        self.assertEqual(self.engine.host_pages(), shared // BLOCK, "those before the last chunk")
        warm, *cached = self.ask(prompt)
        self.assertEqual(cached, [0, shared])
        self.assertEqual([{token: p.logprob for token, p in step.items()} for step in cold.logprobs],
                         [{token: p.logprob for token, p in step.items()} for step in warm.logprobs])


@needs_vllm
@unittest.skipIf(case.RUNNER == 2, "vLLM's second model runner takes no drafts by ngram")
class Drafts(Case):
    """Drafts by ngram, and answers are stored too."""

    @classmethod
    def make_engine(cls, **options):
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both",
                                    kv_connector_extra_config={"offload_prompt_only": False})
        return super().make_engine(kv_transfer_config=transfer, speculative_config={
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}, **options)

    def test_pages_of_certain_tokens_come_back(self):
        engine, prompt = self.engine, self.engine.prompt(2, 400)
        answer, *_ = self.ask(prompt, 114)
        engine.forget_pool()
        certain = 400 + 114 - 1 - 3  # all but the last step's drafts, which might be wrong: 7 blocks, not 8
        self.assertEqual(engine.host_pages(), certain // BLOCK)
        chat = prompt + list(answer.token_ids) + engine.prompt(3, 270)
        output, *cached = self.ask(chat, 30)
        self.assertEqual(cached, [0, certain // BLOCK * BLOCK])
        self.check(chat, output)


@needs_vllm
class Refusals(unittest.TestCase):
    def config(self, **options):
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(str(case.MODEL), **{**case.OPTIONS, **options}).create_engine_config()

    def refused(self, *words, **options):
        from oscar_int2 import UnsupportedError

        with self.assertRaises(UnsupportedError) as caught:
            self.config(**options)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_what_is_not_offloaded_is_refused_by_name(self):
        from oscar_int2.vllm import layers, versions
        from vllm.config import KVTransferConfig

        def transfer(connector="OffloadingConnector", role="kv_both", **extra):
            return {"kv_transfer_config": KVTransferConfig(
                kv_connector=connector, kv_role=role, kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30, **extra})}

        self.refused("KV transfer by ExampleConnector", **transfer("ExampleConnector"))
        self.refused("KV transfer by SimpleCPUOffloadConnector", **transfer("SimpleCPUOffloadConnector"))
        self.refused("the role kv_producer", **transfer(role="kv_producer"))
        self.refused("KV offloading by TieringOffloadingSpec", **transfer(spec_name="TieringOffloadingSpec"))
        self.refused("KV offloading with blocks_per_chunk", **transfer(blocks_per_chunk=4))
        self.refused("KV offloading without prefix caching", kv_offloading_size=1, enable_prefix_caching=False)
        if case.RUNNER == 1:  # the second one takes none
            self.refused("KV offloading with drafts by draft_model", "ngram", kv_offloading_size=1, speculative_config={
                "method": "draft_model", "model": str(case.MODEL), "num_speculative_tokens": 3})
        with mock.patch.object(layers, "has_others", lambda bundle: True):
            self.refused("KV offloading for a model with windows", kv_offloading_size=1)
        with mock.patch.object(versions, "OFFLOADS", ("0.99",)):
            self.refused("KV offloading in this version of vLLM", "0.99 offloads", kv_offloading_size=1)
        with mock.patch.dict(versions.OFFLOADING, {f"{versions.__name__}:offloads_not": ""}):
            from oscar_int2 import UnsupportedError

            with self.assertRaisesRegex(UnsupportedError, "has no offloads_not"):
                versions.require(versions.OFFLOADING)
        config = self.config(**transfer(offload_prompt_only=False, eviction_policy="arc"))
        self.assertEqual(config.kv_transfer_config.kv_connector, "OffloadingConnector")

    def test_room_for_sinks_grows_with_host_memory(self):
        from oscar_int2.vllm import settings

        one = settings.sink_size(self.config())
        self.assertEqual(settings.kept_sinks(self.config(kv_offloading_size=8)), (2 << 30) // one)
        self.assertEqual(settings.kept_sinks(self.config(kv_offloading_size=64)), (8 << 30) // one)
        with mock.patch.dict(os.environ, VLLM_OSCAR_SINK_BYTES=str(one)):
            self.assertEqual(settings.kept_sinks(self.config(kv_offloading_size=64)), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
