#!/usr/bin/env python3
"""One engine over several processes: tokens are those of a single one."""
import os
import sys
import unittest
from unittest import mock

import vllm_case as case
import torch
from vllm_case import needs_vllm, vllm

DEVICES = torch.cuda.device_count()
LENGTHS, TOKENS = (700, 350, 90), 24


class Parallel(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.alone = cls.answers()

    @classmethod
    def answers(cls, **options):
        """What an engine answers to a few prompts, first together, then to the first one again, behind the
        sink and the pages that it left."""
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if not DEVICES and ranks > 1:  # a core each, as far as there are cores
            cores = sorted(os.sched_getaffinity(0))
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(ranks))
        with mock.patch.dict(os.environ, environment):
            llm = vllm.LLM(str(case.MODEL), **{**case.OPTIONS, "enable_prefix_caching": True, **options})
            texts = case.texts(llm.get_tokenizer())
            prompts = [{"prompt_token_ids": texts[i][:length]} for i, length in enumerate(LENGTHS)]
            parameters = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
            found = [output for batch in (prompts, prompts[:1])
                     for output in llm.generate(batch, parameters, use_tqdm=False)]
            llm.llm_engine.engine_core.shutdown()
        return found

    def compare(self, **options):
        for i, (one, other) in enumerate(zip(self.alone, self.answers(**options), strict=True)):
            self.assertEqual(one.num_cached_tokens, other.num_cached_tokens)
            self.same(one.outputs[0], other.outputs[0], f"answer {i}")
        self.assertGreater(other.num_cached_tokens, 300)


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class TensorParallel(Parallel):
    def test_two_ranks_have_a_kv_head_each(self):
        self.compare(tensor_parallel_size=2)

    @unittest.skipIf(0 < DEVICES < 4, "less than four GPUs")
    def test_four_ranks_have_copies_of_two_kv_heads(self):
        self.compare(tensor_parallel_size=4)


@needs_vllm
class Heads(unittest.TestCase):
    def test_a_rank_has_the_heads_of_vllms_projection(self):
        from oscar_int2.vllm.backend import first_kv_head

        self.assertEqual([first_kv_head(8, 4, rank) for rank in range(4)], [0, 2, 4, 6])
        self.assertEqual([first_kv_head(8, 8, rank) for rank in range(8)], list(range(8)))
        self.assertEqual([first_kv_head(2, 8, rank) for rank in range(8)], [0, 0, 0, 0, 1, 1, 1, 1])


if __name__ == "__main__":
    unittest.main(verbosity=2)
