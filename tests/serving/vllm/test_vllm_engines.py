#!/usr/bin/env python3
"""Several engines in one process, one after another: over BF16, and over INT2 with two bundles."""
import gc
import os
import pathlib
import tempfile
import unittest
from unittest import mock

import vllm_case as case
from vllm_case import needs_vllm, vllm

PROMPT, ANSWER = 640, 8
OPTIONS = {**case.OPTIONS, "kv_cache_memory_bytes": 1 << 24, "block_size": 64}


def recent_tokens(tokens):
    def edit(file):
        file["quantizer"].attrs["recent_tokens"] = tokens
    return edit


@needs_vllm
class Engines(unittest.TestCase):
    """BF16, a bundle, another one in the place of the first, BF16: prefix caching is on in all."""

    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "bundle.h5"
            cls.found = [cls.run_engine(None)]
            for recent in (256, 128):
                case.write_bundle(path, recent_tokens(recent))
                cls.found.append(cls.run_engine(path))
            cls.found.append(cls.run_engine(None))

    @classmethod
    def run_engine(cls, bundle):
        """What an engine says of itself, and of a prompt that is read twice."""
        # Keys of blocks that mean the same everywhere, as servers have them that share what they store.
        with case.bundle_variable(bundle), mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
            llm = vllm.LLM(str(case.MODEL), **OPTIONS)
        core = llm.llm_engine
        runner = core.model_executor.driver_worker.worker.model_runner
        scheduler = core.engine_core.engine_core.scheduler
        group = runner.attn_groups[0][0]
        prompt = {"prompt_token_ids": case.texts(llm.get_tokenizer())[4][:PROMPT]}
        parameters = vllm.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
        outputs = [llm.generate([prompt], parameters, use_tqdm=False)[0] for _ in range(2)]
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        found = {
            "keys": {block.block_hash for block in blocks} - {None},
            "impl": type(group.get_metadata_builder()).__name__,
            "format": getattr(group.get_metadata_builder(), "format", None),
            "manager": type(scheduler.kv_cache_manager.coordinator.single_type_managers[0]).__name__,
            "block bytes": group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size,
            "hash": core.vllm_config.compute_hash(),
            "cached": [output.num_cached_tokens for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [[step[token].logprob for step, token in zip(
                output.outputs[0].logprobs, output.outputs[0].token_ids)] for output in outputs]}
        core.engine_core.shutdown()
        del llm, core, runner, scheduler, group
        gc.collect()
        return found

    def test_each_engine_has_the_cache_that_it_was_configured_with(self):
        first, int2, narrow, last = self.found
        for name in ("impl", "format", "manager", "block bytes", "hash"):
            self.assertEqual(first[name], last[name], name)
        self.assertNotIn("Oscar", first["impl"])
        for found in (int2, narrow):
            self.assertEqual((found["impl"], found["manager"], found["block bytes"]),
                             ("OscarMetadataBuilder", "PrefixManager", 144))
        self.assertEqual((int2["format"].recent_tokens, narrow["format"].recent_tokens), (256, 128))
        self.assertEqual(len({found["hash"] for found in self.found}), 3)

    def test_blocks_that_were_never_written_are_not_counted(self):
        """And the last tokens of a prompt, as many as the window holds, are computed."""
        for recent, found in zip((256, 128), self.found[1:3]):
            self.assertEqual(found["cached"], [0, (PROMPT - 1 - recent) // 64 * 64])

    def test_blocks_of_other_bundles_have_other_keys(self):
        first, int2, narrow, last = (found["keys"] for found in self.found)
        self.assertEqual(len(first), (PROMPT + ANSWER - 1) // 64, "of the same tokens")
        self.assertEqual(first, last)
        self.assertEqual([len(keys) for keys in (int2, narrow)], [len(first)] * 2)
        self.assertFalse(first & int2 or first & narrow or int2 & narrow)

    def test_answers_are_those_of_the_same_cache_elsewhere(self):
        """The BF16 engines agree to the last bit; log probabilities of INT2 are near BF16's."""
        first, int2, narrow, last = self.found
        self.assertEqual(first["tokens"], last["tokens"])
        self.assertEqual(first["logprobs"], last["logprobs"])
        for found in (int2, narrow):
            for ours, theirs in zip(found["logprobs"], first["logprobs"]):
                self.assertNotEqual(ours, theirs)
                self.assertLess(abs(ours[0] - theirs[0]), case.DRIFT)


if __name__ == "__main__":
    unittest.main(verbosity=2)
