#!/usr/bin/env python3
"""Several ranks of models that are not full attention alone, and of experts: tokens are those of one process.

Random models. What vLLM's CPU engine lacks for experts of several ranks is added (parallel_case.py)."""
import asyncio
import os
import tempfile
import unittest
from unittest import mock

import vllm_case as case
import family_case as family
import parallel_case
from parallel_case import DEVICES
from vllm_case import needs_vllm

OPTIONS = {**case.OPTIONS, "skip_tokenizer_init": True}


class Ranks(case.EngineTest):
    """One model, in one process first."""

    name, keys, options = "", {}, {}

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.model = family.Family(cls.name, folder.name, **cls.keys)
        variable = case.bundle_variable(cls.model.path)
        variable.__enter__()
        cls.addClassCleanup(variable.__exit__, None, None, None)
        cls.alone, cls.sizes = cls.answers()

    @classmethod
    def answers(cls, **options):
        return parallel_case.answers(cls.model.folder, cls.model.texts, **{**OPTIONS, **cls.options, **options})

    def compare(self, refusing, **options):
        """Returns the bytes of a block, and sizes() of each rank."""
        (*found, refused, beside, again), sizes = self.answers(refusing=refusing, **options)
        self.agree([output.outputs[0] for output in self.alone], [output.outputs[0] for output in found])
        self.assertEqual((refused.outputs[0].finish_reason, len(refused.outputs[0].token_ids)), ("error", 0))
        self.same(found[2].outputs[0], beside.outputs[0], "the request beside one that was refused")
        [unshared, *_] = [output for output in (found[3], found[0]) if not output.num_cached_tokens]
        self.same(unshared.outputs[0], again.outputs[0], "the same request with good rows")
        [size] = {size for found, _, _ in sizes for size in found}  # of all ranks
        return size, sizes

    def agree(self, alone, found):
        for i, (one, other) in enumerate(zip(alone, found, strict=True)):
            self.same(one, other, f"answer {i}")


@needs_vllm
@unittest.skipIf(0 < DEVICES < 4, "fewer than four GPUs")
class Windows(Ranks):
    """Gemma 3 with its window in the last layer: the first stage holds 2-bit rows alone, the last one none."""

    name = "gemma3"
    keys = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    options = {"kv_cache_memory_bytes": 1 << 22}

    def test_two_stages_of_one_kind_of_layer_have_two_ranks_each(self):
        with mock.patch.dict(os.environ, VLLM_PP_LAYER_PARTITION="2,1"):
            size, sizes = self.compare(0, tensor_parallel_size=2, pipeline_parallel_size=2)
        [(alone, tokens, _)] = self.sizes
        self.assertEqual({2 * size}, alone)
        for first, last in zip(sizes[:2], sizes[2:]):  # of each rank
            self.assertEqual((len(first[1]), len(last[1]), first[1] | last[1]), (2, 1, tokens))
            self.assertEqual((first[2], last[2]), ({1}, set()))


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class LinearAttention(Ranks):
    """Qwen3-Next: half of a state on each rank, and one of two experts."""

    name = "qwen3_next"
    options = {**family.STATES, "kv_cache_memory_bytes": 1 << 22}

    def test_two_ranks_have_half_a_state_and_an_expert_each(self):
        size, sizes = self.compare(1, tensor_parallel_size=2, enable_expert_parallel=True)
        self.assertEqual({2 * size}, self.sizes[0][0])

    def agree(self, alone, found):
        """Codes turn on the order of sums, and tokens on codes: both are held to the definition of the cache."""
        for outputs in alone, found:
            apart, exact = zip(*(self.model.distances(self.model.texts[i][:length], outputs[i])
                                 for i, length in enumerate(parallel_case.LENGTHS)))
            self.assertLess(sum(apart), family.SHARE * sum(exact), f"from the definition {apart}, from BF16 {exact}")


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class AttentionSinks(Ranks):
    """gpt-oss: each rank has the sinks of its own query heads."""

    name = "gpt_oss"
    options = {"kv_cache_memory_bytes": 1 << 22}

    def test_two_ranks_have_half_the_sinks_each(self):
        size, _ = self.compare(1, tensor_parallel_size=2, enable_expert_parallel=True)
        self.assertEqual({2 * size}, self.sizes[0][0])


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class DataParallel(Ranks):
    """Qwen3-MoE: two engines, whose ranks meet in every layer of experts."""

    name = "qwen3_moe"
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True}

    def test_dummy_steps_leave_a_rank_as_it_is(self):
        found, dummies, sums = asyncio.run(self.ask())
        self.assertGreater(dummies, 2 * parallel_case.TOKENS + 2 * 10, "beside its own steps, and while it is idle")
        for i, (one, other) in enumerate(zip((0, 1, 2, 3, 0), found)):
            self.same(self.alone[one].outputs[0], other.outputs[0], f"answer {i}")
        self.assertEqual([output.num_cached_tokens > 300 for output in found], [False] * 3 + [True, False])
        for name, expected in (("oscar_int2_sink_hits_total", [1, 0]), ("oscar_int2_info", [1, 1])):
            self.assertEqual(sums[name], expected, name)

    async def ask(self):
        """The answers of the engines, dummy steps of the first one, and their metrics."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def ask(number, rank):
            prompt = {"prompt_token_ids": self.model.texts[number][:parallel_case.LENGTHS[number]]}
            outputs = llm.generate(prompt, parallel_case.parameters(), request_id=f"{number}-{rank}",
                                   data_parallel_rank=rank)
            return [output async for output in outputs][-1]

        with parallel_case.several_processes(2, VLLM_ENABLE_V1_MULTIPROCESSING="1"):
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
                str(self.model.folder), worker_extension_cls="parallel_case.Extension", **OPTIONS, **self.ranks))
            await llm.collective_rpc("attend_in_dummy_steps")
            found = await asyncio.gather(ask(0, 0), ask(1, 1))
            found += [await ask(2, 1), await ask(0, 0), await ask(0, 1)]
            dummies = (await llm.collective_rpc("count_dummy_steps"))[0]
            sums = self.metrics()
            llm.shutdown()
        return found, dummies, sums

    def metrics(self):
        """{name: its values by engine}"""
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples
                   if sample.name.startswith("oscar_int2")]
        return {name: [sum(s.value for s in samples if (s.name, s.labels["engine"]) == (name, engine))
                       for engine in "01"] for name in {s.name for s in samples}}


if __name__ == "__main__":
    unittest.main(verbosity=2)
