#!/usr/bin/env python3
"""One engine over several processes: tokens are those of a single one."""
import functools
import unittest

import vllm_case as case
import parallel_case
from parallel_case import DEVICES
from vllm_case import needs_vllm

BLOCKS = 19  # the three prompts fill them; the longest one, which comes last, is preempted when it needs one more


class Parallel(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.alone = Parallel.of_one_process()

    @classmethod
    @functools.cache
    def of_one_process(cls):
        return cls.answers()

    @classmethod
    def answers(cls, **options):
        return parallel_case.answers(case.MODEL, cls.texts(), blocks=BLOCKS, **{**case.OPTIONS, **options})[0]

    @staticmethod
    def texts():
        from vllm.tokenizers.registry import cached_get_tokenizer

        return case.texts(cached_get_tokenizer(str(case.MODEL)))

    def compare(self, **options):
        *found, refused, beside, again = self.answers(**options)
        for i, (one, other) in enumerate(zip(self.alone, found, strict=True)):
            self.assertEqual(one.num_cached_tokens, other.num_cached_tokens)
            self.same(one.outputs[0], other.outputs[0], f"answer {i}")
        self.assertGreater(found[3].num_cached_tokens, 300)
        self.assertEqual((refused.outputs[0].finish_reason, len(refused.outputs[0].token_ids)), ("error", 0))
        self.same(self.alone[2].outputs[0], beside.outputs[0], "the request beside one that was refused")
        self.same(self.alone[0].outputs[0], again.outputs[0], "the same request with good rows")


@needs_vllm
@unittest.skipIf(DEVICES == 1, "one GPU")
class TensorParallel(Parallel):
    def test_two_ranks_have_a_kv_head_each(self):
        self.compare(tensor_parallel_size=2, refusing=1)

    def test_two_ranks_keep_pages_of_their_heads_in_host_memory(self):
        found, loaded, tokens = parallel_case.from_host_memory(case.MODEL, self.texts(), 120,
                                                               **{**case.OPTIONS, "tensor_parallel_size": 2})
        self.assertGreater(tokens, 300)
        self.assertEqual(tokens, found.num_cached_tokens)
        self.same(found.outputs[0], loaded.outputs[0], "pages that came from host memory")
        self.same(self.alone[3].outputs[0], loaded.outputs[0], "an answer of one process")


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
