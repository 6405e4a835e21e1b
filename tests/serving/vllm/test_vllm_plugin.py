#!/usr/bin/env python3
"""The INT2 cache inside vLLM's engine, with the embedded model and its bundle."""
import contextlib
import dataclasses
import io
import json
import logging
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import vllm_case as case
import torch
from safetensors.torch import load_file, save_file
from chunk_reference import ROUNDINGS, Recorder, flash_attention
from vllm_case import DRIFT, needs_vllm, vllm


@contextlib.contextmanager
def padded_steps(max_num_seqs):
    """Steps of single tokens are padded to `max_num_seqs` requests as vLLM pads them for a graph: without
    new tokens, of length 0, with rows of large numbers. Yields a list of the layers' padded steps."""
    from oscar_int2.vllm.backend import OscarAttention, OscarMetadataBuilder

    build, forward, padded = OscarMetadataBuilder.build, OscarAttention.forward, []

    def more(tensor, rows, value):
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

    def padded_build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        missing = max_num_seqs - common.num_reqs
        if common.max_query_len == 1 and len(self.batch.slots) and missing > 0:
            starts = common.query_start_loc_cpu[:common.num_reqs + 1]
            tokens = int(starts[-1])
            common = dataclasses.replace(
                common, num_reqs=max_num_seqs, num_actual_tokens=max_num_seqs,
                query_start_loc=more(common.query_start_loc[:common.num_reqs + 1], missing, tokens), query_start_loc_cpu=more(starts, missing, tokens),
                seq_lens=more(common.seq_lens[:common.num_reqs], missing, 0),
                slot_mapping=more(common.slot_mapping[:tokens], missing, -1),
                block_table_tensor=more(common.block_table_tensor[:max_num_seqs - missing], missing, 0))
        return build(self, common_prefix_len, common, fast_build)

    def padded_forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                       output_scale=None, output_block_scale=None):
        missing = attn_metadata.num_decodes - attn_metadata.num_tokens if attn_metadata is not None else 0
        if missing <= 0:
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output)
        padded.append(missing)
        tokens = attn_metadata.num_tokens
        query, key, value, room = (more(x[:tokens], missing, 100) for x in (query, key, value, output))
        forward(self, layer, query, key, value, kv_cache, attn_metadata, room)
        return output[:tokens].copy_(room[:tokens])

    with mock.patch.object(OscarMetadataBuilder, "build", padded_build), \
            mock.patch.object(OscarAttention, "forward", padded_forward):
        yield padded


@needs_vllm
class Serving(case.EngineTest):
    """One engine of 3 requests at a time (max_num_seqs) and 35 blocks, for all cases."""

    @classmethod
    def setUpClass(cls):
        cls.engine = case.Engine()

    def test_the_pool_holds_seven_times_the_tokens_of_bf16(self):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        tokens = int(self.engine.log.find(r"KV cache size: ([\d,]+) tokens")[1].replace(",", ""))
        bf16 = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
        their_tokens = case.POOL_BYTES // (8 * bf16.page_size_bytes) * 16
        self.assertGreaterEqual(tokens / their_tokens, 7.0)
        self.engine.log.find(r"OSCAR INT2: blocks of 64 tokens take 9216 bytes a layer, BF16 takes "
                             r"65536 \(.*tiny-gqa.h5\)")
        windows = 3 * 8 * 2 * 2 * (64 + 256 + 16 + 1) * 128 * 2 / 2**20
        self.engine.log.find(f"exact windows take {windows:.1f} MiB .* for each of 3 requests")
        scratch = 1024 * 2 * 2 * 128 * 2 / 2**20
        self.engine.log.find(f"prompts in chunks of up to 3072 tokens take {scratch:.1f} MiB, once")
        self.assertEqual(len({id(layer.scratch) for layer in self.engine.builder.layers}), 1)

    def test_requests_that_come_and_go_get_the_tokens_of_single_runs(self):
        engine = self.engine
        plan = [(0, 420, 12), (1, 350, 20), (2, 100, 6), (3, 460, 10), (4, 330, 9)]
        requests = {}
        finished = {}
        for number, length, tokens in plan:  # one every third step: more come than max_num_seqs
            name = engine.add(engine.prompt(number, length), tokens)
            requests[name] = (number, length, tokens)
            for _ in range(3):
                engine.step(finished)
        finished |= engine.run()
        equal = 0
        for name, (number, length, tokens) in requests.items():
            single = engine.alone_once(engine.prompt(number, length), tokens)
            self.assertEqual(len(finished[name].token_ids), tokens)
            equal += self.same(finished[name], single, f"{length} tokens of text {number}")
        self.assertGreaterEqual(equal, 3)

    def test_requests_that_pad_a_graph_touch_no_window(self):
        """On a GPU, steps of fewer requests than a graph has come with empty ones behind them."""
        engine, plan = self.engine, ((0, 420, 12), (1, 350, 20))
        with padded_steps(case.MAX_NUM_SEQS) as padded:
            names = [engine.add(engine.prompt(number, length), tokens) for number, length, tokens in plan]
            finished = engine.run()
        self.assertGreaterEqual(len(padded), 8 * 10, "a step of all 8 layers for each token")
        for name, (number, length, tokens) in zip(names, plan):
            single = engine.alone_once(engine.prompt(number, length), tokens)
            self.same(finished[name], single, f"{length} tokens of text {number}")

    def test_dummy_steps_touch_no_window(self):
        from oscar_int2.codec import LayerPages
        from oscar_int2.vllm.backend import OscarMetadataBuilder

        engine, layer, steps = self.engine, self.engine.builder.layers[0], []
        build = OscarMetadataBuilder.build

        def recorded(self, common_prefix_len, common_attn_metadata, fast_build=False):
            steps.append(common_attn_metadata)
            return build(self, common_prefix_len, common_attn_metadata, fast_build)

        with mock.patch.object(OscarMetadataBuilder, "build", recorded):
            engine.add(engine.prompt(0, 100), 4)
            engine.run()
        device = layer.window_k.device
        lost = torch.full_like(steps[-1].slot_mapping, -1)
        pages = LayerPages(
            torch.zeros(36, 2, layer.codec.page_bytes, dtype=torch.uint8, device=device),
            layer.window_k, layer.window_v)
        before = layer.window_k.view(torch.int16).clone()
        # vLLM gives their rows no slot, whoever is said to be in the batch.
        for slots in ((), (0,)):
            engine.builder.publish(slots, [0] * len(slots))
            metadata = engine.builder.build(0, dataclasses.replace(steps[-1], slot_mapping=lost))
            layer.codec.append(pages, metadata.decodes.tables, *torch.ones(2, 1, 2, 128).bfloat16().to(device))
            self.assertTrue(torch.equal(layer.window_k.view(torch.int16), before))
            self.assertFalse(engine.builder.tables.history.any())

    def test_windows_that_nobody_holds_are_poisoned(self):
        engine, finished = self.engine, {}
        engine.add(engine.prompt(0, 400), 5)
        engine.add(engine.prompt(1, 70), 2)
        held_before = 0
        while engine.step(finished):
            written, held = engine.slots()
            self.assertEqual(written, held)
            held_before = max(held_before, len(held))
        self.assertEqual(held_before, 2)
        engine.alone(engine.prompt(2, 70), 2)  # vLLM says with the next step who has ended
        written, held = engine.slots()
        self.assertEqual((written, len(held)), (held, 1))

    def test_preempted_requests_begin_again_and_get_the_same_tokens(self):
        engine = self.engine
        # 3 x 11 blocks of 35 at first; 3 x 12 do not fit.
        with engine.preemptions() as preempted:
            plan = {engine.add(engine.prompt(i, 690), 24): i for i in range(1, 4)}
            finished = engine.run()
        self.assertGreaterEqual(len(preempted), 1)
        equal = 0
        for name, i in plan.items():
            equal += self.same(finished[name], engine.alone(engine.prompt(i, 690), 24), f"text {i}")
        self.assertGreaterEqual(equal, 1)

    def test_an_aborted_request_leaves_the_others_as_they_are(self):
        engine, finished = self.engine, {}
        stays, goes = engine.add(engine.prompt(1, 420), 12), engine.add(engine.prompt(2, 400), 50)
        for _ in range(4):
            engine.step(finished)
        engine.core.abort_request([goes])
        late = engine.add(engine.prompt(3, 380), 6)
        finished |= engine.run()
        self.assertNotIn(goes, finished)
        for name, number, length, tokens in ((stays, 1, 420, 12), (late, 3, 380, 6)):
            self.same(finished[name], engine.alone(engine.prompt(number, length), tokens), name)

    def test_a_requests_list_of_allowed_tokens_is_its_own(self):
        """One that joins as another ends changes places with those that run."""
        engine, allowed = self.engine, list(range(300, 350))

        def answers(limited, which):
            names = {k: engine.add(engine.prompt(k, 20 + k), (3, 20, 20, 20)[k],
                                   **({"allowed_token_ids": allowed} if k == limited else {})) for k in which}
            finished = engine.run()
            return {k: finished[name] for k, name in names.items()}

        for limited in (2, 3):
            with self.subTest(limited=limited):
                together = answers(limited, range(4))
                self.assertLessEqual(set(together[limited].token_ids), set(allowed))
                for k in range(4):
                    self.same(answers(limited, [k])[k], together[k], f"request {k}")

    def test_a_row_of_the_batch_keeps_no_list_of_allowed_tokens(self):
        """One with a list moves up as the first ends, and another comes to where it was."""
        engine, finished = self.engine, {}
        prompts = [engine.prompt(k, 20 + k) for k in range(3)]
        first, _ = engine.add(prompts[0], 3), engine.add(prompts[1], 20, allowed_token_ids=list(range(300, 350)))
        while first not in finished:
            engine.step(finished)
        engine.step(finished)
        last = engine.add(prompts[2], 6)
        finished |= engine.run()
        self.same(engine.alone(prompts[2], 6), finished[last], "a request without a list")

    def test_short_prompts_sampling_and_prompt_log_probabilities_work(self):
        engine = self.engine
        drawn = {} if case.INTERPRETED else {"temperature": 0.8, "seed": 7}  # Triton draws with libdevice's log
        names = [engine.add(engine.prompt(1, 2), 4), engine.add(engine.prompt(0, 1), 4),
                 engine.add(engine.prompt(2, 90), 4, **drawn),
                 engine.add(engine.prompt(3, 70), 4, prompt_logprobs=1)]
        finished = engine.run()
        self.assertEqual([len(finished[n].token_ids) for n in names], [4] * 4)
        self.same(finished[names[1]], engine.alone(engine.prompt(0, 1), 4), "one token of text 0")

    def test_chunks_attend_over_sinks_int2_rows_and_recent_rows(self):
        engine = self.engine
        # Chunks that end inside the sink and at it, at pages and between them, before the first INT2
        # row (token 336) and with it; the last chunk of 641 tokens is one token.
        for layer, tokens, chunk in ((0, 655, 40), (4, 520, 64), (7, 700, 336), (2, 641, 320)):
            with self.subTest(layer=layer, tokens=tokens, chunk=chunk), engine.in_chunks(chunk), \
                    Recorder(engine, layer) as recorder:
                engine.alone(engine.prompt(4, tokens), 3)
                reading, error = recorder.check()
                self.assertGreaterEqual(reading, 3)
                self.assertLess(error, ROUNDINGS)

    @unittest.skipIf(torch.cuda.is_available(), "FlashAttention itself runs")
    def test_flash_attention_would_get_what_it_asks_for(self):
        """As on a GPU: tables that are copied there, and one call for each kind of prompt."""
        engine, calls = self.engine, []

        def look(q, k, v, queries, keys, longest, sums, causal, fa_version):
            self.assertFalse(sums)  # without sinks
            for starts, rows, longest in zip((queries.indptr, keys.indptr), (q, k), longest):
                self.assertTrue(starts.is_contiguous() and rows.stride(-1) == 1)
                self.assertEqual((starts.dtype, rows.dtype), (torch.int32, torch.bfloat16))
                self.assertEqual((starts[0], starts[-1]), (0, len(rows)))
                self.assertEqual(starts.diff().max(), longest)
            self.assertEqual((len(k), causal, fa_version), (len(v), True, 3))
            calls.append((len(starts) - 1, len(k) > len(q)))

        with flash_attention(engine, look), engine.in_chunks(450):
            with Recorder(engine, 5) as recorder:
                engine.alone(engine.prompt(4, 500), 3)
            names = [engine.add(engine.prompt(i, n), 2) for i, n in ((0, 200), (1, 90), (2, 400))]
            finished = engine.run()
        self.assertLess(recorder.check()[1], ROUNDINGS)
        self.assertEqual(set(calls), {(1, False), (1, True), (3, False)})
        self.same(finished[names[2]], engine.alone(engine.prompt(2, 400), 2), "the last prompt")

    def test_log_probabilities_of_a_prompt_in_chunks_are_those_of_a_whole_one(self):
        prompt = self.engine.prompt(4, 700)
        whole = self.engine.prompt_log_probabilities(prompt)
        with self.engine.in_chunks(100):
            apart = self.engine.prompt_log_probabilities(prompt) - whole
        self.assertLess(apart[:319].abs().max(), DRIFT, "while every row is exact")
        # KL to BF16 is .0054 nats a token (README.md): in the mean a few hundredths either way.
        self.assertLess(apart[319:].abs().mean(), DRIFT / 4)
        self.assertLess(abs(apart.mean()), DRIFT / 16)

    def test_chunks_of_several_prompts_beside_decodes_give_the_tokens_of_single_runs(self):
        engine, finished, seen, requests = self.engine, {}, set(), {}
        plan = [(1, 350, 20), (0, 420, 12), (2, 100, 6), (3, 460, 10)]
        with engine.in_chunks(150, of_one=60), engine.metadata() as steps:
            # Those of the second list begin beside a chunk, whatever a vLLM makes of a prompt alone.
            for requested, apart in ((plan, 3), ([(4, 330, 9), (0, 120, 6)], 1)):
                for number, length, tokens in requested:
                    name = engine.add(engine.prompt(number, length), tokens)
                    requests[name] = number, length, tokens
                    for _ in range(apart):
                        engine.step(finished)
                finished |= engine.run()
        for step in steps:
            prompts = step.prompts
            seen.add((step.num_decodes > 0, prompts and len(prompts.chunks),
                      bool(prompts and prompts.begun)))
        for what in ((True, 2, False), (True, 1, True), (False, 1, True)):
            self.assertIn(what, seen, "decodes, chunks, prompts that begin")
        equal = 0
        for name, (number, length, tokens) in requests.items():
            single = engine.alone_once(engine.prompt(number, length), tokens)
            self.assertEqual(len(finished[name].token_ids), tokens)
            equal += self.same(finished[name], single, f"{length} tokens of text {number}")
        self.assertGreaterEqual(equal, 3)

    def test_a_prompt_preempted_between_its_chunks_begins_again(self):
        engine = self.engine
        # 13 and 13 blocks of 35 while the third, which needs 10, is read in 16 chunks.
        plan = [(0, 755, 45), (1, 755, 20), (2, 630, 8)]
        with engine.in_chunks(40), engine.preemptions() as preempted:
            requests = {engine.add(engine.prompt(i, length), tokens): (i, length, tokens)
                        for i, length, tokens in plan}
            finished = engine.run()
        self.assertTrue(any(0 < computed < 630 for computed in preempted), preempted)
        for name, (_, _, tokens) in requests.items():
            self.assertEqual(len(finished[name].token_ids), tokens)
        youngest = list(requests)[-1]
        self.same(finished[youngest], engine.alone(engine.prompt(2, 630), 8), "the youngest")

    def test_log_probabilities_are_those_of_the_package_in_transformers(self):
        length, tokens = 470, 12  # 144 INT2 rows in 3 pages at first, 160 at last
        prompt = self.engine.prompt(4, length)
        answer = self.engine.alone(prompt, tokens)
        ours = case.log_probabilities_in_transformers(prompt, answer.token_ids)
        theirs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)]
        apart = [abs(a - b) for a, b in zip(ours, theirs)]
        self.assertLess(max(apart), DRIFT)
        self.assertLess(sum(apart) / tokens, DRIFT / 4)


@unittest.skipIf(case.RUNNER == 2, "vLLM's second model runner refuses some itself, in its own words")
@needs_vllm
class Refusals(unittest.TestCase):
    def config(self, bundle=case.BUNDLE, **options):
        """The engine's configuration, by the way that `vllm serve` takes. `bundle`: the variable; None:
        it is not set."""
        from vllm.engine.arg_utils import EngineArgs

        arguments = {"model": str(case.MODEL), **case.OPTIONS, **options}
        with case.bundle_variable(bundle):
            return EngineArgs(**arguments).create_engine_config()

    def refused(self, error, *words, **options):
        with self.assertRaises(error) as caught:
            self.config(**options)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_the_plugin_sets_what_it_needs(self):
        config = self.config(max_num_seqs=None)
        self.assertIsNone(config.attention_config.backend, "each layer is given its own")
        self.assertEqual(config.cache_config.block_size, 64)
        self.assertTrue(config.cache_config.enable_prefix_caching, "as vLLM has it")
        self.assertFalse(self.config(enable_prefix_caching=False).cache_config.enable_prefix_caching)
        self.assertTrue(config.scheduler_config.enable_chunked_prefill)
        self.assertEqual(config.scheduler_config.max_num_seqs, 64)
        whole = self.config(enable_chunked_prefill=False)
        self.assertFalse(whole.scheduler_config.enable_chunked_prefill)

    def test_the_model_runner_is_vllms_choice(self):
        from vllm.config import vllm as configuration

        with mock.patch.dict(os.environ), mock.patch.object(configuration, "HAS_TRITON", True):
            del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
            self.assertTrue(self.config().use_v2_model_runner)
            for options in {}, {"enable_prompt_embeds": True}:
                self.assertEqual(self.config(**options).use_v2_model_runner,
                                 self.config(bundle=None, **options).use_v2_model_runner)

    def test_what_is_not_served_is_refused_by_name(self):
        from oscar_int2 import UnsupportedError

        for options, words in (
                ({"block_size": 32}, ("--block-size 32", "--block-size 64")),
                ({"kv_cache_dtype": "fp8"}, ("--kv-cache-dtype fp8",)),
                ({"dtype": "float32"}, ("float32", "bfloat16")),
                ({"attention_backend": "FLASH_ATTN"}, ("FLASH_ATTN",)),
                ({"kv_cache_dtype_skip_layers": ["1"]}, ("skip-layers", "the bundle says")),
                ({"model_impl": "transformers"}, ("--model-impl transformers",)),
                ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, ("--scheduler-cls",)),
                ({"worker_cls": "another.Worker"}, ("--worker-cls another.Worker", "--worker-extension-cls")),
                ({"enable_lora": True}, ("LoRA adapters", "VLLM_OSCAR_WEIGHTS=any")),
                ({"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2,
                                         "prompt_lookup_max": 3}},
                 ("drafts by ngram_gpu", "ngram, draft_model, eagle, eagle3, mtp"))):
            with self.subTest(**options):
                self.refused(UnsupportedError, *words, **options)
        with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):
            self.refused(UnsupportedError, "VLLM_BATCH_INVARIANT=1")

    def test_what_no_cpu_takes_is_refused_by_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm import settings

        config = self.config()
        sees_less = types.SimpleNamespace(method="draft_model", draft_model_config=types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(layer_types=["full_attention", "sliding_attention"])))
        device_decides = types.SimpleNamespace(method="eagle", enable_adaptive_verification=True)
        for owner, name, value, words in (
                (config.parallel_config, "enable_fault_tolerance", True, "fault tolerance"),
                (config.model_config, "enable_cumem_allocator", True, "sleep mode"),
                (config.cache_config, "sliding_window", 64, "layers with a window that have none in the bundle"),
                (config.model_config.hf_text_config, "is_causal", False, "attention that is not causal"),
                (config.model_config.hf_text_config, "dual_chunk_attention_config", {"chunk_size": 8192},
                 "dual chunk attention in vLLM; leave dual_chunk_attention_config out of config.json"),
                (config, "speculative_config", device_decides, "adaptive verification"),
                (config, "speculative_config", sees_less, "drafts by a model with windows or linear attention in vLLM; one")):
            with self.subTest(name), mock.patch.object(owner, name, value, create=True), \
                    self.assertRaisesRegex(UnsupportedError, words):
                settings.check(config)

    def test_models_that_vllm_runs_through_transformers_are_refused_by_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm import settings

        config = self.config()
        with mock.patch.object(config.model_config, "using_transformers_backend", lambda: True), self.assertRaisesRegex(
                UnsupportedError, "Qwen3ForCausalLM: this vLLM has no model of its own for it.*; use oscar_int2.transformers"):
            settings.check(config)

    def test_any_weights_let_adapters_in(self):
        from oscar_int2 import BundleError

        with mock.patch.dict(os.environ, VLLM_OSCAR_WEIGHTS="any"):
            with self.assertLogs("vllm.oscar_int2", "WARNING") as said:
                self.assertIsNotNone(self.config(enable_lora=True).lora_config)
            self.assertIn("LoRA adapters are other weights", "\n".join(said.output))
        with mock.patch.dict(os.environ, VLLM_OSCAR_WEIGHTS="yes"):
            self.refused(BundleError, "VLLM_OSCAR_WEIGHTS is 'yes'", "'same' or 'any'")

    def test_positions_beyond_those_of_the_bundle_are_warned_of(self):
        def warned(**options):
            with self.assertLogs("vllm.oscar_int2", "WARNING") as log:
                logging.getLogger("vllm.oscar_int2").warning("begins")
                self.config(**options)
            return "\n".join(log.output[1:])

        longer = {"max_position_embeddings": 262144}
        text = warned(max_model_len=200000, hf_overrides=longer)
        self.assertRegex(text, r"room for 200000 tokens a request is more than the 131072 positions that "
                         r".*tiny-gqa.h5 was made for.*2\.7 times .*--position-span 200000")
        self.assertEqual(warned(max_model_len=131072, hf_overrides=longer), "")

    def test_key_centers_go_on_behind_the_positions_of_the_bundle(self):
        from oscar_int2 import load
        from oscar_int2.codec import key_center_table

        bundle = load(case.BUNDLE)
        short, long = key_center_table(bundle, 3), key_center_table(bundle, 3, 200000)
        self.assertEqual((len(short), len(long)), (128, 196))
        self.assertTrue(torch.equal(short, long[:128]))
        self.assertFalse(torch.equal(long[127], long[195]))

    def test_prefixes_without_exact_first_tokens_are_not_shared(self):
        from oscar_int2 import UnsupportedError

        def no_sink(file):
            file["quantizer"].attrs["sink_tokens"] = 0

        with case.edited_bundle(no_sink) as path:
            with self.assertLogs("vllm.oscar_int2", "WARNING") as log:
                config = self.config(bundle=path)
            self.assertFalse(config.cache_config.enable_prefix_caching)
            said = [line for line in log.output if "prefix caching is off, since" in line]
            self.assertEqual(len(said), 1, log.output)
            self.assertRegex(said[0], "bundle.h5 keeps no first tokens exact")
            self.refused(UnsupportedError, "prefix caching without exact first tokens", bundle=path,
                         enable_prefix_caching=True)

    def test_memory_of_kept_sinks_is_what_the_variable_allows(self):
        from oscar_int2 import BundleError, UnsupportedError
        from oscar_int2.vllm import settings

        one = 64 * 8 * 2 * 2 * 128 * 2  # tokens, layers, sides, KV heads, dimensions, bytes
        for value, kept in ((None, (2 << 30) // one), (one, 1), (3 * one - 1, 2)):
            with mock.patch.dict(os.environ, {} if value is None else {settings.SINK_BYTES: str(value)}):
                self.assertEqual(settings.kept_sinks(self.config()), kept)
        self.assertEqual(settings.kept_sinks(self.config(enable_prefix_caching=False)), 0)
        sizes = [settings.bytes_of_sink(settings.bundle(self.config()), ranks) for ranks in (1, 2, 4)]
        self.assertEqual(sizes, [one, one, 2 * one], "four ranks have copies of two heads")
        with mock.patch.dict(os.environ, {settings.SINK_BYTES: str(one - 1)}):
            self.refused(UnsupportedError, f"VLLM_OSCAR_SINK_BYTES={one - 1}", f"take {one} bytes")
            self.config(enable_prefix_caching=False)
        for value in ("", "0", "2GiB", "-1", "1e9"):
            with self.subTest(value=value), mock.patch.dict(os.environ, {settings.SINK_BYTES: value}):
                self.refused(BundleError, f"VLLM_OSCAR_SINK_BYTES is {value!r}", "a number of bytes")

    def test_layers_with_other_attention_are_refused_by_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm.layers import check_layer

        plain = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None,
                 "attn_type": "decoder", "kv_sharing_target_layer_name": None, "others": {}}
        for scale in (128**-0.5, 0.1):
            check_layer(scale, **plain)
        for change, word in (({"alibi_slopes": [1.0]}, "ALiBi"), ({"sliding_window": 99}, "window"),
                             ({"logits_soft_cap": 50.0}, "soft cap"),
                             ({"kv_sharing_target_layer_name": "x"}, "KV sharing"),
                             ({"attn_type": "encoder"}, "encoder"),
                             ({"others": {"sinks": 1}}, "sinks")):
            with self.subTest(**change), self.assertRaisesRegex(UnsupportedError, word):
                check_layer(128**-0.5, **(plain | change))
        for scale in (0.0, -0.1, float("nan"), float("inf")):
            with self.assertRaisesRegex(UnsupportedError, "softmax scale"):
                check_layer(scale, **plain)

    def test_a_bundle_that_is_missing_or_of_another_model_is_an_error(self):
        from oscar_int2 import BundleError, BundleMismatchError

        self.refused(BundleError, "VLLM_OSCAR_BUNDLE is not set", bundle=None,
                     attention_backend="CUSTOM")
        self.refused(FileNotFoundError, "nowhere.h5", bundle="/nowhere.h5")
        with tempfile.NamedTemporaryFile(suffix=".h5") as file:
            file.write(b"no bundle")
            file.flush()
            self.refused(BundleError, file.name, bundle=file.name)
        self.refused(BundleMismatchError, "num_layers",
                     hf_overrides={"num_hidden_layers": 4})

    def test_a_variable_that_is_blank_is_an_error_and_not_bf16(self):
        from oscar_int2 import BundleError
        import oscar_int2_vllm

        for blank in ("", " ", "\t"):
            self.refused(BundleError, "VLLM_OSCAR_BUNDLE is set and names no file", bundle=blank)
            with case.bundle_variable(blank), self.assertRaisesRegex(BundleError, "names no file"):
                oscar_int2_vllm.register()  # by which vLLM begins in each of its processes

    def test_a_variable_that_does_not_exist_is_an_error_and_not_bf16(self):
        from oscar_int2 import BundleError
        import oscar_int2_vllm

        for name, words in (("VLLM_OSCAR_BUNDEL", "did you mean VLLM_OSCAR_BUNDLE"),
                            ("VLLM_OSCAR_SELFCHECK", "did you mean VLLM_OSCAR_SELF_CHECK"),
                            ("VLLM_OSCAR_X", "There are VLLM_OSCAR_BUNDLE")):
            with mock.patch.dict(os.environ, {name: "1"}):
                with self.assertRaisesRegex(BundleError, f"{name} is set.*{words}"):
                    oscar_int2_vllm.register()
                self.refused(BundleError, f"{name} is set", bundle=None)  # set behind it, for a further engine

    def test_a_start_that_was_refused_is_not_bf16_once_the_variable_is_corrected(self):
        from oscar_int2 import BundleError
        import oscar_int2_vllm
        from vllm import plugins

        asked = mock.Mock(side_effect=oscar_int2_vllm.register)
        with mock.patch.object(plugins, "load_plugins_by_group", lambda group: {"oscar_int2": asked}), \
                mock.patch.object(plugins, "plugins_loaded", False):
            for wrong in ({"VLLM_OSCAR_BUNDEL": str(case.BUNDLE)}, {"VLLM_OSCAR_BUNDLE": " "}):
                with mock.patch.dict(os.environ, wrong), self.assertRaises(BundleError):
                    self.config(bundle=wrong.get("VLLM_OSCAR_BUNDLE"))
            self.assertEqual(asked.call_count, 2)
            self.config()
            self.assertEqual(asked.call_count, 3)
            self.config()
            self.assertEqual(asked.call_count, 3)

    def test_a_variable_that_looks_like_ours_is_named_where_the_cache_is_bf16(self):
        for name in ("OSCAR_BUNDLE", "VLLM_OSKAR_BUNDLE", "vllm_oscar_bundle", "OSCAR_INT2_BUNDLE"):
            with mock.patch.dict(os.environ, {name: "x.h5"}), self.assertLogs("vllm.oscar_int2", "WARNING") as log:
                self.config(bundle=None)
            self.assertRegex(log.output[-1], f"is off: .* {name} is set, which nothing reads")
        with mock.patch.dict(os.environ, {"OSCAR_BIN": "x", "BUNDLE": "x"}), self.assertNoLogs("vllm.oscar_int2", "WARNING"):
            self.config(bundle=None)

    def test_a_check_before_the_start_says_what_a_start_would(self):
        from oscar_int2.commands import check

        def said(*words):
            out, err = io.StringIO(), io.StringIO()
            with mock.patch.dict(os.environ), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = check.main([*map(str, words), "--dtype", "bfloat16", "--enforce-eager"])
            return code, out.getvalue(), err.getvalue()

        code, out, _ = said(case.MODEL, case.BUNDLE, "--max-model-len", 1024)
        self.assertEqual(code, 0)
        self.assertRegex(out, "8 of 8 layers in 2 bits, 64 requests at a time of up to 1024 tokens; its files are those")
        code, _, err = said(case.MODEL, case.BUNDLE, "--load-format", "dummy")
        self.assertEqual((code, "random weights, which are not those of the bundle" in err), (1, True), err)
        with mock.patch.dict(os.environ, VLLM_OSCAR_WEIGHTS="any"):
            self.assertIn("tokens; its weights would be random ones", said(case.MODEL, case.BUNDLE, "--load-format", "dummy")[1])
        longer = '{"max_position_embeddings": 262144}'
        self.assertRegex(said(case.MODEL, case.BUNDLE, "--hf-overrides", longer)[1], "up to 262144 tokens; .*131072")
        self.assertIn("; weights in fp8 are compared by their files alone", said(case.MODEL, case.BUNDLE, "--quantization", "fp8")[1])
        for plugins, served in (("", False), ("lora_filesystem_resolver", False), ("other,oscar_int2", True)):
            with mock.patch.dict(os.environ, VLLM_PLUGINS=plugins):
                code, _, err = said(case.MODEL, case.BUNDLE, "--max-model-len", 1024)
            self.assertEqual((code, "its cache would be BF16" in err), (0, False) if served else (1, True), err)
        for words, text in (((case.BUNDLE, "--kv-cache-dtype", "fp8"), "would not serve .*: the INT2 cache does not serve --kv"),
                            (("nowhere.h5",), "no bundle there"), ((case.BUNDLE, "--config", "x.yaml"), "--config is not read here"),
                            ((case.BUNDLE, "--hf-overrides", '{"num_hidden_layers": 4}'), "num_layers")):
            code, _, err = said(case.MODEL, *words)
            self.assertEqual(code, 1)
            self.assertRegex(err, text)
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(case.MODEL, folder, dirs_exist_ok=True)
            shard = pathlib.Path(folder, "model-00002-of-00003.safetensors")
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content)
            with case.edited_bundle(case.without_samples) as bundle:  # by which a server could tell
                code, _, err = said(folder, bundle)
                with mock.patch.dict(os.environ, VLLM_OSCAR_WEIGHTS="any"):
                    self.assertEqual(said(folder, bundle, "--port", "8000")[0], 0)
            self.assertEqual(code, 1)
            self.assertIn("a fine-tune of the calibrated model", err)
            code, out, _ = said(folder, case.BUNDLE)
            self.assertRegex(out, "; q, k, v and o in its files are those of the calibration, but the files are not: .* written anew")
            shard, name = shard.with_name("model-00003-of-00003.safetensors"), "model.layers.1.self_attn.v_proj.weight"
            tensors = load_file(shard)
            save_file(tensors | {name: tensors[name] * 1.01}, shard)
            code, _, err = said(folder, case.BUNDLE)
            self.assertEqual(code, 1)
            self.assertRegex(err, "W_V of layer 1 differs, and 0 more.*a fine-tune.*VLLM_OSCAR_WEIGHTS=any")
            with mock.patch.dict(os.environ, VLLM_OSCAR_WEIGHTS="any"):
                self.assertEqual(said(folder, case.BUNDLE)[0], 0)

    def test_files_of_which_vllm_would_load_other_weights_or_none_are_refused(self):
        from oscar_int2 import UnsupportedError
        from vllm.config import ModelConfig

        unties = hasattr(ModelConfig, "maybe_untie_word_embeddings")  # where the files have a matrix: it serves that one

        def edited(text, **changes):
            return json.dumps(json.loads(text) | changes)

        def two_sets(folder):
            shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model.safetensors")

        def untied(folder):
            (folder / "config.json").write_text(edited((folder / "config.json").read_text(), tie_word_embeddings=False))

        def windows(folder):
            kinds = ["sliding_attention"] + ["full_attention"] * 7
            (folder / "config.json").write_text(edited((folder / "config.json").read_text(), layer_types=kinds,
                                                       sliding_window=64, use_sliding_window=True))

        def own_head(folder):
            embedding = load_file(folder / "model-00001-of-00003.safetensors")["model.embed_tokens.weight"]
            save_file({"lm_head.weight": embedding.flip(0).contiguous()},
                      folder / "head.safetensors")
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"]["lm_head.weight"] = "head.safetensors"
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))

        def cut(folder):
            os.truncate(folder / "model-00002-of-00003.safetensors", 100000)

        def pointer(folder):
            (folder / "model-00003-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")

        def gone(folder):
            (folder / "model-00003-of-00003.safetensors").unlink()

        for spoil, words in ((two_sets, "two sets of them.*, model-00001-of-00003.safetensors first"),
                             (untied, "no output matrix"), (own_head, "an output matrix .*that is not the embedding.*ties them"),
                             (windows, "layers with a window that have none in the bundle"),
                             (cut, "model-00002-of-00003.safetensors is cut short: 100000 bytes of"),
                             (pointer, "model-00003-of-00003.safetensors is no file of safetensors.*Git LFS"),
                             (gone, "No such file.*model-00003-of-00003.safetensors")):
            with self.subTest(spoil.__name__), tempfile.TemporaryDirectory() as name:
                shutil.copytree(case.MODEL, name, dirs_exist_ok=True)
                spoil(pathlib.Path(name))
                if unties and spoil is own_head:
                    self.assertFalse(self.config(model=name).model_config.hf_config.tie_word_embeddings)
                elif unties and spoil is pointer:  # vLLM takes its first bytes for a length
                    self.assertRaises(MemoryError, self.config, model=name)
                else:
                    with self.assertRaisesRegex(UnsupportedError, words):
                        self.config(model=name)

    def test_vllm_knows_the_variables(self):
        self.assertIsNotNone(self.config(fail_on_environ_validation=True))

    def test_variables_of_an_export_for_the_pull_request_stop_nothing(self):
        import re
        import oscar_int2_vllm
        from oscar_int2.vllm import settings

        written = (case.SOURCE / "lib/oscar/bundle/export.cpp").read_text()
        names = set(re.findall(r"(VLLM_OSCAR_\w+)=", written))
        self.assertEqual(names, set(settings.OF_PULL_REQUEST))
        with mock.patch.dict(os.environ, dict.fromkeys(names, "1")):
            with case.bundle_variable(None), self.assertNoLogs("vllm.oscar_int2", "WARNING"):
                oscar_int2_vllm.register()
            with self.assertLogs("vllm.oscar_int2", "WARNING") as said:
                oscar_int2_vllm.register()
        self.assertRegex(said.output[0], "VLLM_OSCAR_GROUP_SIZE.*for vLLM's pull request 46774")

    def test_arguments_that_are_read_again_without_a_bundle_mean_bf16(self):
        from vllm.engine.arg_utils import EngineArgs
        from oscar_int2.vllm import settings

        arguments = EngineArgs(str(case.MODEL), **case.OPTIONS | {"max_num_seqs": None})
        before = dict(vars(arguments))
        config = arguments.create_engine_config()
        self.assertTrue(settings.serves_int2(config))
        for name in ("additional_config", "attention_backend", "block_size", "max_num_seqs",
                     "enable_prefix_caching"):
            self.assertEqual(getattr(arguments, name), before[name])
        with case.bundle_variable(None):
            config = arguments.create_engine_config()
        self.assertFalse(settings.serves_int2(config))
        self.assertIsNone(config.attention_config.backend)

    def test_a_process_that_is_given_the_configuration_has_the_hooks(self):
        """Before it loads plugins, and whatever VLLM_PLUGINS says there."""
        config = self.config()
        script = ("import pickle, sys; pickle.load(sys.stdin.buffer)\n"
                  "from vllm.v1.engine.core import EngineCore\n"
                  "assert hasattr(EngineCore.__init__, '_oscar_int2')")
        done = subprocess.run(
            [sys.executable, "-c", script], input=pickle.dumps(config), capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_PLUGINS": ""})
        self.assertEqual(done.returncode, 0, done.stderr.decode()[-2000:])

    def test_a_bundle_that_was_replaced_since_the_configuration_is_an_error(self):
        from oscar_int2 import BundleError
        from oscar_int2.vllm import settings

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "bundle.h5"
            shutil.copy(case.BUNDLE, path)
            config = self.config(bundle=path)
            self.assertEqual(settings.bundle(config).path, str(path))
            path.unlink()
            shutil.copy(case.BUNDLE.with_name("tiny-gqa.serving.h5"), path)
            with self.assertRaisesRegex(BundleError, "has changed since this engine was configured"):
                settings.bundle(config)

    def test_a_vllm_that_has_all_hooks_is_taken_whatever_its_number(self):
        from oscar_int2.vllm import adapter, versions
        import oscar_int2_vllm

        self.addCleanup(adapter.cache_clear)
        with mock.patch.object(vllm, "__version__", "0.29.3"), self.assertLogs("vllm.oscar_int2", "WARNING") as said:
            adapter.cache_clear()
            oscar_int2_vllm.register()
        self.assertIn("has not run in vLLM 0.29.3", said.output[0])
        versions.require(versions.FIRST_RUNNER)

    def test_a_vllm_that_lacks_a_hook_is_refused_by_its_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm import adapter
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
        import oscar_int2_vllm

        self.addCleanup(adapter.cache_clear)

        def other(self, scheduler_output):
            """Of other parameters."""

        for owner, name, found in ((Scheduler, "update_from_output", other), (EngineArgs, "create_engine_config", None)):
            with mock.patch.object(owner, name, found):
                if found is None:
                    delattr(owner, name)
                words = f"{'calls' if found else 'has no'} {owner.__name__}.{name}"
                adapter.cache_clear()
                with self.assertRaisesRegex(UnsupportedError, f"vLLM {vllm.__version__}.* {words}.* in {owner.__module__}"):
                    oscar_int2_vllm.register()
                with mock.patch.dict(os.environ):
                    del os.environ["VLLM_OSCAR_BUNDLE"]
                    oscar_int2_vllm.register()  # without a bundle it leaves other versions alone

    def test_the_plugins_own_entry_is_not_the_users(self):
        from oscar_int2 import UnsupportedError
        from vllm.engine.arg_utils import EngineArgs

        with case.bundle_variable(None), self.assertRaisesRegex(UnsupportedError, "VLLM_OSCAR_BUNDLE"):
            EngineArgs(str(case.MODEL), additional_config={"oscar_int2": {}}).create_engine_config()

    def test_what_is_asked_for_without_a_bundle_is_said_of_every_engine(self):
        for name, value in (("WEIGHTS", "any"), ("SINK_BYTES", "1000000"), ("CANONICAL_CHUNKS", "512")):
            for _ in range(2):
                with mock.patch.dict(os.environ, {f"VLLM_OSCAR_{name}": value}), \
                        self.assertLogs("vllm.oscar_int2", "WARNING") as said:
                    self.config(bundle=None)
                self.assertRegex(said.output[-1], f"is off: .* VLLM_OSCAR_{name} is set and VLLM_OSCAR_BUNDLE is not")

    def test_registering_again_changes_nothing(self):
        from vllm.engine.arg_utils import EngineArgs
        import oscar_int2_vllm

        oscar_int2_vllm.register()
        method = EngineArgs.create_engine_config
        oscar_int2_vllm.register()
        self.assertIs(EngineArgs.create_engine_config, method)


@needs_vllm
class Chunks(unittest.TestCase):
    def test_rows_appended_in_chunks_are_those_of_one_append(self):
        """Pages byte for byte, and what a chunk reads back, over two segments of key centers."""
        from oscar_int2 import load, ops
        from oscar_int2.cache import PagedCache
        from oscar_int2.codec import LayerCodec, StepTables

        bundle = load(case.BUNDLE)
        codec = LayerCodec(bundle, 3, "cpu")
        self.assertIsNotNone(codec.key_centers)
        ends = [0, 1, 63, 64, 65, 319, 320, 335, 336, 337, 384, 400, 1087, 1089, 1500, 1502, 1600]
        torch.manual_seed(0)
        rows = codec.transform_kv(*torch.randn(2, ends[-1], 2, 128).bfloat16())

        def cache_of(tokens):
            cache = PagedCache.int2(bundle, 1, tokens, "cpu", codecs={3: codec})
            cache.admit(0, tokens)
            return cache

        def int32(*values):
            return torch.tensor(values, dtype=torch.int32)

        whole = cache_of(ends[-1])
        tables = whole.prompt_tables([0], [ends[-1]])
        codec.append(whole.layers[3], tables, *rows)
        history = int(tables.new_history)
        int2 = torch.zeros(2, 1, history, 2, 128, dtype=torch.bfloat16)
        ops.dequantize_history(codec.recipe, codec.numbers, whole.layers[3].pool, whole.block_table,
                               tables.new_history, *int2)
        pieces = cache_of(ends[-1])
        windows, pages = pieces.format, pieces.layers[3]
        for window in (pages.window_k, pages.window_v):
            window.fill_(torch.nan)
        for first, end in zip(ends, ends[1:]):
            before, after = windows.history_tokens(first), windows.history_tokens(end)
            tables = StepTables(
                block_table=pieces.block_table, query_start_loc=int32(0, end - first),
                old_len=int32(first), seq_lens=int32(end), old_history=int32(before),
                new_history=int32(after), status=pieces.status, max_new_rows=end - first,
                max_new_history=after - before)
            held = torch.full((2, first, 2, 128), torch.nan, dtype=torch.bfloat16)
            codec.read(pages, tables, 0, 0, before, *held)
            for read, given, quantized in zip(held, rows, int2):
                exact = [*range(min(64, first)), *range(64 + before, first)]
                self.assertTrue(torch.equal(read[exact], given[exact]), f"{first} tokens")
                self.assertTrue(torch.equal(read[64:64 + before], quantized[0, :before]))
            codec.append(pages, tables, *(x[first:end] for x in rows))
        self.assertTrue(torch.equal(whole.layers[3].pool, pages.pool))
        pieces.check_rows()


@needs_vllm
class Copies(unittest.TestCase):
    def test_each_steps_numbers_are_copied_from_pinned_memory_of_their_own(self):
        """The last step's copy may be under way while the host writes the next one's numbers."""
        from oscar_int2.vllm import steps

        pinned = []

        def pin_memory(tensor):
            pinned.append(tensor.clone())
            return pinned[-1]

        with mock.patch.object(steps, "takes_pinned", lambda _: True), \
                mock.patch.object(torch.Tensor, "pin_memory", pin_memory):
            sent = [steps.to_device([[1, 2, first], [], [4]], torch.device("cpu")) for first in (3, 5)]
        self.assertEqual([[part.tolist() for part in parts] for parts in sent],
                         [[[1, 2, first], [], [4]] for first in (3, 5)])
        self.assertEqual([parts[0].untyped_storage().data_ptr() for parts in sent],
                         [buffer.untyped_storage().data_ptr() for buffer in pinned], "pinned once a call")
        self.assertEqual(len({buffer.untyped_storage().data_ptr() for buffer in pinned}), 2)


@needs_vllm
class Slots(unittest.TestCase):
    def test_slots_are_kept_returned_and_used_again(self):
        from oscar_int2.vllm.windows import WindowSlots

        slots = WindowSlots(2)
        self.assertEqual(slots.hold(["a", "b"]), [0, 1])
        self.assertEqual(slots.hold(["b"]), [1])
        self.assertEqual(slots.release(["a", "unknown"]), [0])
        self.assertEqual(slots.hold(["c", "b"]), [0, 1])


if __name__ == "__main__":
    unittest.main(verbosity=2)
