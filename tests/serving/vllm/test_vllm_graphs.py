#!/usr/bin/env python3
"""Whole-step CUDA graphs of vLLM over the INT2 cache. On a GPU alone: vLLM's CPU engine has none."""
import unittest

import vllm_case as case
import test_vllm_faults as faults
import torch

# A step of so many requests runs as the graph of so many.
GRAPHS = {1: 1, 2: 2, 3: 4, 5: 8, 6: 8, 7: 8}


@case.needs_vllm
@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class PromptsOfAStep(unittest.TestCase):
    def test_rows_that_are_not_finite_reach_no_prompt_beside_them(self):
        """FlashAttention 3 multiplies values of the sequence behind with probabilities of 0."""
        from oscar_int2.vllm.prompts import Packed, causal_attention
        from vllm.v1.attention.backends import fa_utils

        def packed(*starts):
            return Packed(list(starts), torch.tensor(starts, dtype=torch.int32, device="cuda"))

        for d in (64, 128):
            version = fa_utils.get_flash_attn_version(head_size=d)
            for n in (1, 50, 130, 350):
                q, k, v = (torch.randn(n + 200, heads, d, device="cuda", dtype=torch.bfloat16)
                           for heads in (4, 2, 2))
                alone, together = torch.empty_like(q), torch.empty_like(q)
                causal_attention(q[:n], k[:n], v[:n], alone[:n], packed(0, n), packed(0, n), d**-0.5, version)
                for rows in (q, k, v):
                    rows[n:] = torch.nan
                both = packed(0, n, n + 200)
                causal_attention(q, k, v, together, both, both, d**-0.5, version)
                torch.testing.assert_close(together[:n], alone[:n], rtol=0, atol=1e-2)


@case.needs_vllm
@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class Graphs(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.engine = case.Engine(
            max_num_seqs=8, kv_cache_memory_bytes=128 << 20, enforce_eager=False,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})

    def windows(self):
        """The bits of all exact rows, [layers, 2, slots, KV heads, rows, d]."""
        torch.cuda.synchronize()
        layers = self.engine.builder.layers
        return torch.stack([torch.stack((layer.window_k, layer.window_v))
                            for layer in layers]).view(torch.int16)

    def rows_of_next_tokens(self, requests):
        """{(slot, row)} where as many requests are running and each has one token to come, else None."""
        running = self.engine.scheduler.running
        if len(running) != requests or any(
                r.num_tokens - r.num_computed_tokens != 1 for r in running):
            return None
        sink = self.engine.builder.format.sink_tokens
        ring = self.engine.builder.layers[0].window_k.shape[2] - sink
        rows = set()
        for request in running:
            token = request.num_computed_tokens
            rows.add((self.engine.builder.slots.of[request.request_id],
                      token if token < sink else sink + (token - sink) % ring))
        return rows

    def test_a_step_writes_the_rows_of_its_tokens_and_no_other(self):
        engine, lengths = self.engine, (420, 350, 500, 333, 90, 460, 380)
        prompts = [engine.prompt(i % len(engine.texts), n) for i, n in enumerate(lengths)]
        alone = [engine.alone(prompt, 24) for prompt in prompts]
        for requests, graph in GRAPHS.items():
            with self.subTest(requests=requests), engine.metadata() as built:
                names = [engine.add(prompt, 24) for prompt in prompts[:requests]]
                finished, steps = {}, 0
                while engine.core.has_unfinished_requests():
                    expected, before = self.rows_of_next_tokens(requests), self.windows()
                    engine.step(finished)
                    if not expected:
                        continue
                    steps += 1
                    self.assertEqual(built[-1].num_decodes, graph)
                    changed = (self.windows() != before).transpose(3, 4).flatten(4).any(-1)
                    rows = changed.flatten(0, 1).any(0).nonzero().tolist()
                    self.assertEqual({tuple(row) for row in rows}, expected)
                self.assertGreater(steps, 20)
                for i, name in enumerate(names):
                    self.same(finished[name], alone[i], f"request {i} of {requests}")


@case.needs_vllm
@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class FaultsInGraphs(faults.Faults):
    """The same with graphs, and with a step begun before the last has ended."""

    options = {"max_num_seqs": 8, "kv_cache_memory_bytes": 128 << 20, "enforce_eager": False,
               "async_scheduling": True,
               "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


if __name__ == "__main__":
    unittest.main(verbosity=2)
