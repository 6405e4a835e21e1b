#!/usr/bin/env python3
"""One engine over several processes: tokens are those of a single one."""
import functools
import os
import sys
import unittest
from unittest import mock

import vllm_case as case
import torch
from vllm_case import needs_vllm, vllm

DEVICES = torch.cuda.device_count()
LENGTHS, TOKENS = (700, 350, 90), 24


def enlarge(worker, rank):
    """In the worker of one rank: a row of long prompts becomes finite and too large for 2 bits."""
    if worker.rank != rank:
        return
    [builder] = [builder for groups in worker.model_runner.attn_groups for group in groups
                 for builder in group.metadata_builders]
    codec = builder.layers[0].codec
    transform = codec.transform_qkv

    def transformed(q, k, v):
        q, k, v = transform(q, k, v)
        if len(k) > 500:
            k[100] *= 1e9
        return q, k, v

    codec.transform_qkv = transformed


class Parallel(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.alone = Parallel.of_one_process()

    @classmethod
    @functools.cache
    def of_one_process(cls):
        return cls.answers()

    @classmethod
    def answers(cls, refusing=None, **options):
        """What an engine answers to a few prompts, first together, then to the first one again, behind the
        sink and the pages that it left. `refusing`: a rank that then refuses a row of it; it is asked once
        more, and the last one too."""
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                       "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        if not DEVICES and ranks > 1:  # a core each, as far as there are cores
            cores = sorted(os.sched_getaffinity(0))
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(ranks))
        with mock.patch.dict(os.environ, environment):
            llm = vllm.LLM(str(case.MODEL), **{**case.OPTIONS, **options})
            texts = case.texts(llm.get_tokenizer())
            prompts = [{"prompt_token_ids": texts[i][:length]} for i, length in enumerate(LENGTHS)]
            parameters = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
            found = [output for batch in (prompts, prompts[:1])
                     for output in llm.generate(batch, parameters, use_tqdm=False)]
            if refusing is not None:
                llm.reset_prefix_cache()
                llm.collective_rpc(enlarge, args=(refusing,))
                found += llm.generate([prompts[0], prompts[-1]], parameters, use_tqdm=False)
            llm.llm_engine.engine_core.shutdown()
        return found

    def compare(self, **options):
        *found, refused, beside = self.answers(**options)
        for i, (one, other) in enumerate(zip(self.alone, found, strict=True)):
            self.assertEqual(one.num_cached_tokens, other.num_cached_tokens)
            self.same(one.outputs[0], other.outputs[0], f"answer {i}")
        self.assertGreater(found[-1].num_cached_tokens, 300)
        self.assertEqual((refused.outputs[0].finish_reason, len(refused.outputs[0].token_ids)), ("error", 0))
        self.same(self.alone[2].outputs[0], beside.outputs[0], "the request beside one that was refused")


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class TensorParallel(Parallel):
    def test_two_ranks_have_a_kv_head_each(self):
        self.compare(tensor_parallel_size=2, refusing=1)


@needs_vllm
@unittest.skipIf(0 < DEVICES < 4, "fewer than four GPUs")
class CopiedHeads(Parallel):
    def test_four_ranks_have_a_copy_of_one_of_two_kv_heads_each(self):
        self.compare(tensor_parallel_size=4, refusing=3)


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class PipelineParallel(Parallel):
    def test_two_stages_have_four_layers_each(self):
        self.compare(pipeline_parallel_size=2, refusing=0)


@needs_vllm
class Heads(unittest.TestCase):
    def test_a_rank_has_the_heads_of_vllms_projection(self):
        from oscar_int2.vllm.backend import first_kv_head

        self.assertEqual([first_kv_head(8, 4, rank) for rank in range(4)], [0, 2, 4, 6])
        self.assertEqual([first_kv_head(8, 8, rank) for rank in range(8)], list(range(8)))
        self.assertEqual([first_kv_head(2, 8, rank) for rank in range(8)], [0, 0, 0, 0, 1, 1, 1, 1])


if __name__ == "__main__":
    unittest.main(verbosity=2)
