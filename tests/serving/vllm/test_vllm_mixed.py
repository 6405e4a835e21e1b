#!/usr/bin/env python3
"""Models of which some layers hold no 2-bit rows: windows in BF16 (Gemma 3), linear attention (Qwen3.5, Qwen3-Next);
attention sinks (gpt-oss).

Random models. What a layer holds and gives is held against float64, and answers against the definition of the
cache, which is worked out in float32 without the plugin."""
import contextlib
import dataclasses
import re
import types
import unittest
from unittest import mock

import vllm_case as case
import family_case as family
import torch
from chunk_reference import flash_attention
from overlapped import overlapped
from vllm_case import needs_vllm

SINK, RECENT = 64, 256
PLACES = 3  # of kept sinks


def blocks_of_layers(engine, layers):
    """uint8 [blocks, bytes of a block] of each memory that is these layers' cache. Layers of several groups share one."""
    from oscar_int2.vllm.specs import blocks_of

    config = engine.scheduler.kv_cache_config
    [size] = {group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups}
    tensors = [kv[0] if isinstance(kv, (list, tuple)) else kv for layer in layers
               if (kv := getattr(layer, "kv_cache", None)) is not None]
    return [blocks_of(kv, config.num_blocks, size) for kv in {kv.data_ptr(): kv for kv in tensors}.values()]


@contextlib.contextmanager
def poisoned(engine):
    """Before each step, blocks that nobody holds and nobody finds are NaN: as bytes of INT2 pages, as bf16 rows of a
    window, and as a state."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    caches = blocks_of_layers(engine, engine.core.vllm_config.compilation_config.static_forward_context.values())
    executor = engine.core.engine_core.engine_core.model_executor
    execute = executor.execute_model

    def execute_poisoned(*args, **options):
        free = [block.block_id for block in pool.blocks
                if block.ref_cnt == 0 and block.block_hash is None and not block.is_null]
        for cache in caches:
            cache[free] = 0xFF
        return execute(*args, **options)

    with mock.patch.object(executor, "execute_model", execute_poisoned):
        yield


class OneEngine:
    """For all cases of a model, which a TestCase names."""

    name, options, layers, kept, chunk = "", {}, (), (), 160

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        if "async_scheduling" in cls.options:
            cls.stack.enter_context(overlapped())
        cls.family, cls.engine = cls.stack.enter_context(family.serving(cls.name, places=PLACES, **cls.options))
        cls.stack.enter_context(poisoned(cls.engine))

    @classmethod
    def tearDownClass(cls):
        cls.stack.close()


class Mixed(OneEngine):
    def test_each_layer_holds_its_own_rows_and_attends_to_them(self):
        engine = self.engine
        for index, layer_id in enumerate(self.layers):
            self.assertEqual(engine.builder.layers[index].codec.layer_id, layer_id)
            family.check_attention(engine, self.family.bundle, index, layer_id, engine.prompt(index, 640), self.chunk)

    def test_another_layers_transforms_would_be_seen(self):
        with self.assertRaisesRegex(AssertionError, "bytes of pages differ"):
            family.check_attention(self.engine, self.family.bundle, 0, self.layers[1], self.engine.prompt(0, 640),
                                   self.chunk)

    def test_requests_that_come_and_go_follow_the_definition(self):
        engine, finished, requests = self.engine, {}, {}
        for number, length, tokens in ((0, 470, 16), (1, 400, 14), (2, 420, 14)):
            requests[engine.add(engine.prompt(number, length), tokens)] = engine.prompt(number, length)
            for _ in range(3):
                engine.step(finished)
        finished |= engine.run()
        apart, exact = zip(*(self.family.distances(prompt, finished[name]) for name, prompt in requests.items()))
        self.assertLess(sum(apart), family.SHARE * sum(exact), f"from the definition {apart}, from BF16 {exact}")

    def test_aborted_requests_give_back_what_they_held_and_the_others_follow_the_definition(self):
        """One is aborted while it answers, one behind its first chunk. Another takes a window and blocks of theirs."""
        engine, finished, pool = self.engine, {}, self.engine.scheduler.kv_cache_manager.block_pool
        free, prompts = pool.get_num_free_blocks(), [engine.prompt(*which) for which in ((0, 420), (1, 400), (2, 430))]
        stays, answers = engine.add(prompts[0], 14), engine.add(prompts[1], 40)
        for _ in range(3):
            engine.step(finished)
        reads = engine.add(prompts[2], 40)
        with engine.in_chunks(2 * self.chunk, of_one=self.chunk):
            engine.step(finished)
        self.assertEqual(engine.scheduler.running[-1].num_computed_tokens, self.chunk)
        engine.core.abort_request([answers, reads])
        late = engine.add(prompts[2], 10)
        finished |= engine.run()
        self.assertEqual(set(finished), {stays, late})
        engine.settle()
        self.assertEqual((pool.get_num_free_blocks(), engine.builder.slots.of), (free, {}))
        apart, exact = zip(*(self.family.distances(prompt, finished[name])
                             for name, prompt in ((stays, prompts[0]), (late, prompts[2]))))
        self.assertLess(sum(apart), family.SHARE * sum(exact), f"from the definition {apart}, from BF16 {exact}")

    @contextlib.contextmanager
    def preempted(self):
        """A dict that takes, of preempted requests by prompt, [tokens that they had generated, tokens that they began
        again with in shared blocks]."""
        engine, found, preempt = self.engine, {}, self.engine.scheduler._preempt_request
        prefixes = getattr(engine.scheduler, "oscar_prefixes", None) or types.SimpleNamespace(begin=None)
        begin = prefixes.begin

        def note(request, *args, **options):
            generated = request.num_tokens + request.num_output_placeholders - request.num_prompt_tokens
            found[tuple(request.prompt_token_ids)] = [generated, 0]  # one of them is under way where steps overlap
            return preempt(request, *args, **options)

        def note_begin(request, tokens):
            if tuple(request.prompt_token_ids) in found:
                found[tuple(request.prompt_token_ids)][1] = tokens
            return begin(request, tokens)

        with mock.patch.object(engine.scheduler, "_preempt_request", note), \
                mock.patch.object(prefixes, "begin", note_begin):
            yield found

    def same_as_alone(self, prompt, output, again, cut):
        """An answer is that of two requests alone: one until it was preempted behind `again` tokens, and one that
        reads these as a prompt, `cut` tokens of it as an earlier chunk.

        A GPU rounds the rows of a batch otherwise than those of one request, and codes turn on that: by .1 to .2 nats
        here. Where tokens part by more than a tie there, both answers have to follow the definition.
        """
        ids, logprobs = list(output.token_ids), output.logprobs
        for first, end, chunk in ((0, again, 0), (again, len(ids), cut)):
            if end > first:
                begun = prompt + ids[:first]
                part = types.SimpleNamespace(token_ids=ids[first:end], logprobs=logprobs[first:end])
                alone = self.alone(begun, end - first, chunk)
                _, drift, gap = case.first_difference(part, alone)
                if torch.cuda.is_available() and not chunk and drift < case.DRIFT and gap >= case.TIE:
                    for answer in (part, alone):
                        apart, exact = self.family.distances(begun, answer)
                        self.assertLess(apart, family.SHARE * exact, f"from token {first}")
                else:
                    self.same(part, alone, f"from token {first}")

    def alone(self, prompt, tokens, cut=0):
        """The answer of a request that shares nothing. `cut`: tokens of its first chunk, where the shared blocks of
        another ended. Behind it their rows are read in 2 bits, as the other did; 0: it has none."""
        engine, finished = self.engine, {}
        engine.forget()
        name = engine.add(prompt, tokens)
        if cut:
            with engine.in_chunks(cut):
                engine.step(finished)
            [slot] = engine.builder.slots.of.values()
            engine.builder.shared_history[slot] = cut - SINK
            engine.builder.tables.begin(slot, cut - SINK)
        finished |= engine.run()
        self.assertEqual(engine.cached[name], 0)
        return finished[name]

    def test_preempted_requests_begin_again_and_get_the_same_tokens(self):
        """A preempted request reads its prompt and its answer so far anew, as a prompt."""
        engine, finished = self.engine, {}
        prompts = [engine.prompt(i, 755) for i in range(3)]
        pool = engine.scheduler.kv_cache_manager.block_pool
        with self.preempted() as preempted:
            names = [engine.add(prompt, 20) for prompt in prompts]
            for _ in range(4):
                engine.step(finished)
            taken = pool.get_new_blocks(pool.get_num_free_blocks() - 1)  # then 769 tokens need one more each
            while engine.step(finished):
                if preempted and taken:
                    pool.free_blocks(taken)
                    taken = []
        self.assertTrue(preempted)
        for prompt, name in zip(prompts, names):
            again, cut = preempted.get(tuple(prompt), (len(finished[name].token_ids), 0))
            self.same_as_alone(prompt, finished[name], again, cut)

    def test_a_block_that_vllm_zeroes_is_that_block(self):
        """vLLM zeroes new blocks of models with states, and from 0.33 on of those with windows. Its CPU engine took
        the number of a block for that of a page."""
        engine = self.engine
        if torch.cuda.is_available() and not engine.scheduler.kv_cache_config.needs_kv_cache_zeroing:
            self.skipTest("this vLLM has nothing that zeroes blocks of such a model")
        layers = [layer for impl in engine.builder.layers for layer in impl.layers.values()
                  if getattr(layer, "impl", None) is impl]
        caches = blocks_of_layers(engine, layers)
        for cache in caches:
            cache.fill_(1)
        zeroer = getattr(engine.runner, "kv_block_zeroer", None)
        (zeroer.zero_block_ids if zeroer else engine.runner._zero_block_ids)([2, 5])
        for cache in caches:
            self.assertEqual((cache == 0).all(1).nonzero().flatten().tolist(), [2, 5])
            self.assertEqual(int((cache == 0).sum()), 2 * cache.shape[1])
            cache.zero_()

    def others(self):
        """The layers that hold no 2-bit rows: vLLM's own."""
        from oscar_int2.vllm.backend import OscarAttention

        layers = self.engine.core.vllm_config.compilation_config.static_forward_context
        others = {name: layer for name, layer in layers.items()
                  if not isinstance(getattr(layer, "impl", None), OscarAttention)
                  and getattr(layer, "kv_cache", None) is not None and re.search(r"layers\.\d+", name)}
        self.assertEqual(sorted(int(re.search(r"layers\.(\d+)", name)[1]) for name in others), sorted(self.kept))
        return others.values()

    def check_pool(self, page, least, window):
        """What the log says of the pool is what its bytes hold. `page`: bytes of a page of a layer; `least`: of a
        state, or of the smallest block of a window; `window`: a function of the groups of other layers, their
        blocks of a request of max_model_len tokens."""
        from oscar_int2.vllm import adapter

        engine = self.engine
        config = engine.scheduler.kv_cache_config
        pages = -(-least // page)
        groups = [group.kv_cache_spec for group in config.kv_cache_groups]
        self.assertEqual({spec.page_size_bytes for spec in groups}, {pages * page})
        int2 = [spec for spec in groups if hasattr(spec, "format")]
        self.assertEqual([(spec.block_size, spec.page_size_padded) for spec in int2], [(64 * pages, None)])
        blocks = engine.core.vllm_config.cache_config.kv_cache_memory_bytes // (pages * page * len(self.layers))
        self.assertEqual(config.num_blocks, blocks)
        longest = engine.core.vllm_config.model_config.max_model_len
        request = -(-longest // (64 * pages)) + sum(map(window, (s for s in groups if not hasattr(s, "format"))))
        held = int(engine.log.find(r"KV cache size: ([\d,]+) tokens")[1].replace(",", ""))
        self.assertEqual(held, int(blocks / request * longest))
        for layer in engine.builder.layers:
            name = next(n for n, module in layer.layers.items() if getattr(module, "impl", None) is layer)
            pool = adapter().pool(layer.layers[name].kv_cache)
            self.assertEqual(tuple(pool.shape), (blocks * pages, 2, page // 2))
            self.assertTrue(pool.is_contiguous())
        engine.log.find(rf"OSCAR INT2: blocks of 64 tokens take {page} bytes a layer")
        engine.log.find(rf"OSCAR INT2 is on: {len(self.layers)} layers hold 2-bit rows")


def page_of(heads, head_dim):
    """Bytes of 64 tokens of 2-bit keys and values, a group of head_dim each: codes, and fp16 scale and zero."""
    return 64 * heads * 2 * (head_dim // 4 + 4)


class MixedTraffic(Mixed):
    """And the cases of requests that meet, or are refused."""

    def test_chunks_beside_decodes_give_the_tokens_of_single_runs(self):
        """Chunks of several prompts beside decodes give what single runs in such chunks do."""
        engine, finished, requests = self.engine, {}, {}
        with engine.in_chunks(150, of_one=60), engine.chunks() as chunks:
            for number, length, tokens in ((0, 500, 14), (1, 420, 10), (2, 450, 6)):
                requests[engine.add(engine.prompt(number, length), tokens)] = number, length, tokens
                for _ in range(6):
                    engine.step(finished)
            finished |= engine.run()
        for name, (number, length, tokens) in requests.items():
            self.assertGreater(len(chunks[name]), tokens)
            engine.forget()
            alone = engine.add(engine.prompt(number, length), tokens)
            for chunk in chunks[name]:
                with engine.in_chunks(chunk):
                    engine.step(finished)
            self.same(finished[alone], finished[name], f"text {number}")

    def test_windows_and_states_are_kept_at_every_block(self):
        """Not before a prompt's last token alone, which is what vLLM 0.33 does where nothing is said."""
        from oscar_int2.vllm import settings
        from vllm.engine.arg_utils import EngineArgs

        with case.bundle_variable(self.family.path):
            args = EngineArgs(str(self.family.folder), **case.OPTIONS)
            in_0_33 = types.SimpleNamespace(**{**vars(args), settings.RETENTION: 0})
            self.assertIsNone(settings.defaults(in_0_33, settings.entry())[settings.RETENTION])

    def test_what_such_models_are_not_served_with_is_refused_by_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm import settings
        from vllm.engine.arg_utils import EngineArgs

        options = {**case.OPTIONS, **self.options, "skip_tokenizer_init": True,
                   "language_model_only": "whole" in self.name}

        def config(**changes):
            with case.bundle_variable(self.family.path):
                return EngineArgs(str(self.family.folder), **{**options, **changes}).create_engine_config()

        refused = [({"prefix_match_unit": 32}, "--prefix-match-unit with a model with windows or linear attention"),
                   ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager")]
        for changes, words in refused:
            with self.subTest(**changes), self.assertRaisesRegex(UnsupportedError, words):
                config(**changes)
        made = config()
        with case.bundle_variable(None):
            bf16 = EngineArgs(str(self.family.folder), **options).create_engine_config()
        self.assertEqual(made.cache_config.enable_prefix_caching, bf16.cache_config.enable_prefix_caching)
        if made.model_config.is_hybrid:
            for ranks in "tensor_parallel_size", "pipeline_parallel_size":
                with mock.patch.object(made.cache_config, "enable_prefix_caching", True), \
                        mock.patch.object(made.parallel_config, ranks, 2), self.assertRaisesRegex(
                            UnsupportedError, "prefix caching of linear attention on several ranks"):
                    settings.check(made)
        for owner, name, value, words in (
                (made.parallel_config, "enable_elastic_ep", True, "elastic expert parallelism"),
                (made, "speculative_config", types.SimpleNamespace(method="eagle"), "drafts for a model with linear attention"
                 if made.model_config.is_hybrid else "drafts by eagle for a model with windows in vLLM; ngram"),
                (made.cache_config, "mamba_cache_mode", "all", "--mamba-cache-mode all in vLLM; --mamba-cache-mode align"),
                (made.model_config, "multimodal_config", types.SimpleNamespace(language_model_only=False),
                 "other than text in vLLM; --language-model-only")):
            with self.subTest(name), mock.patch.object(owner, name, value), \
                    self.assertRaisesRegex(UnsupportedError, words):
                settings.check(made)
        settings.check(made)


class Sharing(Mixed):
    """And those of prefix caching. `block`: tokens by which all layers share."""

    block = 0

    def shared(self, common, length):
        """Tokens that a prompt takes, of those that an earlier request has computed too."""
        return min(common, length - 1 - RECENT) // self.block * self.block

    def run_one(self, prompt, tokens):
        """(its output, its tokens that came from shared blocks)"""
        name = self.engine.add(prompt, tokens)
        return self.engine.run()[name], self.engine.cached[name]

    def offer(self, prompt, tokens=1):
        """A request whose blocks others can take. Its prompt comes in the chunks of alone(): rows of products of other
        sizes would differ by a rounding."""
        with self.engine.in_chunks(self.shared(len(prompt), len(prompt)) or 1 << 12):
            self.run_one(prompt, tokens)

    def check(self, prompt, output, cached):
        self.same(output, self.alone(prompt, len(output.token_ids), cached), f"{cached} of {len(prompt)} tokens")

    def test_a_shared_beginning_is_taken_and_gives_the_same_answer(self):
        engine, first = self.engine, self.engine.prompt(0, 700)
        self.offer(first, 8)
        for prompt, common in ((first, 700), (first[:450] + engine.prompt(1, 300), 450),
                               (engine.prompt(2, 64) + first[64:], 0), (first[:64] + engine.prompt(3, 500), 0)):
            output, cached = self.run_one(prompt, 12)
            self.assertEqual(cached, self.shared(common, len(prompt)))
            self.check(prompt, output, cached)
            self.offer(first)

    def test_the_next_turn_of_a_chat_takes_what_was_answered(self):
        first = self.engine.prompt(1, 2 * self.block - 4)
        answer, _ = self.run_one(first, 40)
        chat = first + list(answer.token_ids) + self.engine.prompt(2, RECENT)
        output, cached = self.run_one(chat, 12)
        self.assertEqual(cached, 2 * self.block)
        self.check(chat, output, cached)

    def test_requests_of_one_step_share_nothing_and_a_later_one_does(self):
        engine, prompt, finished = self.engine, self.engine.prompt(3, 690), {}
        pair = [engine.add(prompt, 24) for _ in range(2)]
        for _ in range(4):
            engine.step(finished)
        late = engine.add(prompt, 6)
        finished |= engine.run()
        shared = self.shared(690, 690)
        self.assertEqual([engine.cached[name] for name in (*pair, late)], [0, 0, shared])
        for name, cached in zip((*pair, late), (0, 0, shared)):
            self.check(prompt, finished[name], cached)

    def test_a_preempted_request_takes_its_own_blocks_again(self):
        engine, manager, finished = self.engine, self.engine.scheduler.kv_cache_manager, {}
        prompts, allocate = [engine.prompt(i, 690) for i in range(2)], manager.allocate_slots
        with self.preempted() as preempted:
            names = [engine.add(prompt, 24) for prompt in prompts]
            for _ in range(6):
                engine.step(finished)
            with mock.patch.object(manager, "allocate_slots",  # a pool that has no block until one is preempted
                                   lambda *args, **options: allocate(*args, **options) if preempted else None):
                engine.step(finished)
            finished |= engine.run()
        [(again, cached)] = preempted.values()
        self.assertEqual(cached, self.shared(690, 690 + again))
        self.same_as_alone(prompts[1], finished[names[1]], again, cached)
        self.check(prompts[0], finished[names[0]], 0)

    def test_a_beginning_whose_sink_is_kept_no_more_is_counted_and_computed_anew(self):
        prefixes, prompts = self.engine.scheduler.oscar_prefixes, [self.engine.prompt(i, 700) for i in range(PLACES + 1)]
        for prompt in prompts[:PLACES]:
            self.offer(prompt)
        prefixes.take_counts()
        answers = [(prompts[0], *self.run_one(prompts[0], 8))]
        self.offer(prompts[PLACES])  # in the place of the second
        answers += [(prompts[1], *self.run_one(prompts[1], 8)) for _ in range(2)]
        for answer in answers:
            self.check(*answer)
        taken = self.shared(700, 700)
        self.assertEqual([cached for _, _, cached in answers], [taken, 0, taken])
        self.assertEqual(prefixes.take_counts(), (2, 1))
        self.assertEqual(len(prefixes.places), PLACES)


@needs_vllm
class LinearAttention(Sharing, case.EngineTest):
    """Qwen3.5: gated DeltaNet in two of three layers, an output gate and partial RoPE in the others."""

    name, layers, kept = "qwen3_5 whole", (2, 5), (0, 1, 3, 4)
    page = page_of(2, family.HEAD_DIM)
    state = 4 * 32 * 32 * 4 + 3 * (2 * 2 * 32 + 4 * 32) * 2  # DeltaNet's in float32, and three columns of bf16
    pages = -(-state // page)
    chunk = block = pages * 64  # steps of fewer tokens would never come to its end
    options = {**family.STATES, "kv_cache_memory_bytes": 60 * 2 * pages * page, "max_model_len": 1536,
               "enable_prefix_caching": True}

    def test_the_pool_holds_what_its_bytes_do(self):
        self.check_pool(self.page, self.state, lambda spec: 2)  # one is written while the last is read
        groups = self.engine.scheduler.kv_cache_config.kv_cache_groups
        self.assertEqual({group.kv_cache_spec.block_size for group in groups}, {self.block})

    def test_a_state_is_kept_where_requests_begin_alike(self):
        """A repeated prompt finds the state before its last 256 tokens. A beginning is found by the third request:
        the second keeps the state where it ends."""
        engine, block = self.engine, self.block
        prompt = engine.prompt(0, 2 * block + 10)
        self.run_one(prompt, 1)
        output, cached = self.run_one(prompt, 8)
        self.assertEqual(cached, self.shared(len(prompt), len(prompt)))
        self.check(prompt, output, cached)
        prompts = [engine.prompt(3, 450) + engine.prompt(i, 3 * block + 10 - 450) for i in range(3)]
        self.assertEqual([self.run_one(prompt, 1)[1] for prompt in prompts[:2]], [0, 0])
        output, cached = self.run_one(prompts[2], 8)
        self.assertEqual(cached, block)
        self.check(prompts[2], output, cached)

    def test_the_self_check_reads_its_text_at_once(self):
        from oscar_int2.vllm import self_check

        for at_once, steps in ((500, [500]), (490, [490] + [1] * 10)):
            with self.engine.metadata() as found:
                self_check._read(self.engine.core.engine_core.engine_core, self.engine.prompt(0, 500), at_once)
            self.assertEqual([metadata.num_tokens for metadata in found], steps)

    def test_other_layers_keep_their_state(self):
        for layer in self.others():
            self.assertEqual(layer.kv_cache[1].dtype, torch.float32)


@needs_vllm
class ManyExperts(MixedTraffic, case.EngineTest):
    """Qwen3-Next: the same layers with experts. Prefix caching is off, as vLLM has it."""

    name, layers = "qwen3_next", (2, 5)
    options = {**family.STATES, "kv_cache_memory_bytes": 1 << 21}


@needs_vllm
class Windows(MixedTraffic, Sharing, case.EngineTest):
    """Gemma 3: a window of 40 tokens in every other layer, and logits by query_pre_attn_scalar."""

    name, layers, kept = "gemma3", (1, 3), (0, 2)
    page = page_of(2, family.HEAD_DIM)
    rows = 32 * 2 * 2 * family.HEAD_DIM * 2  # of a window, in bf16: vLLM's smallest block of them
    pages = -(-rows // page)
    block = pages * 64
    options = {"kv_cache_memory_bytes": 200 * 2 * pages * page}

    def test_the_pool_holds_what_its_bytes_do(self):
        most = min(39 + 256 + self.engine.core.vllm_config.max_in_flight_tokens, case.MAX_MODEL_LEN)
        self.check_pool(self.page, self.rows, lambda spec: -(-most // 32) + 1)

    def test_a_hit_ends_where_the_window_before_it_is_there(self):
        engine, finished, most = self.engine, {}, 2 * self.block
        prompt = engine.prompt(0, most + RECENT + 60)
        pool = engine.scheduler.kv_cache_manager.block_pool
        [group] = [i for i, group in enumerate(engine.scheduler.kv_cache_config.kv_cache_groups)
                   if not hasattr(group.kv_cache_spec, "format")]
        # Blocks of 32 tokens: ten hold the window before a token and 256 rows before that.
        last = most // 32 - 1
        for gone, shared in ((last, self.block), (last - 9, 0), (last - 10, most)):
            engine.forget()
            engine.add(prompt, 4)
            engine.step(finished)
            [request] = engine.scheduler.requests.values()
            engine.run()
            [block] = pool.get_cached_block(request.block_hashes[gone], [group])
            pool.evict_blocks({block.block_id})
            output, cached = self.run_one(prompt, 8)
            self.assertEqual(cached, shared)
            self.check(prompt, output, cached)

    def test_blocks_of_a_tile_before_the_window_are_kept(self):
        """Attention kernels read whole tiles, of 256 tokens at most."""
        engine, finished = self.engine, {}
        [manager] = [manager for manager in engine.scheduler.kv_cache_manager.coordinator.single_type_managers
                     if not hasattr(manager.kv_cache_spec, "format")]
        name = engine.add(engine.prompt(0, 700), 40)
        for _ in range(30):
            engine.step(finished)
        [request] = engine.scheduler.requests.values()
        kept = [not block.is_null for block in manager.req_to_blocks[request.request_id]]
        first = (request.num_computed_tokens - 39 - 256) // 32
        self.assertEqual(kept[:first + 1], [False] * first + [True])
        self.assertTrue(all(kept[first:]))
        self.assertEqual(len(engine.run()[name].token_ids), 40)

    def test_other_layers_run_on_vllms_own_backend(self):
        from vllm.platforms import current_platform

        for layer in self.others():
            self.assertEqual(layer.sliding_window, 40)
            if current_platform.is_cpu():
                self.assertEqual(layer.attn_backend.get_name(), "CPU_ATTN")
        [builder] = [builder for groups in self.engine.runner.attn_groups for group in groups
                     for builder in group.metadata_builders if builder is not self.engine.builder]
        # FlashAttention attends by this, and not by what a layer says.
        self.assertEqual(builder.kv_cache_spec.sliding_window, 40)

    def test_logits_have_the_models_scale(self):
        self.assertEqual({layer.codec.sm_scale for layer in self.engine.builder.layers}, {20**-0.5})


@needs_vllm
class AttentionSinks(Sharing, case.EngineTest):
    """gpt-oss: scores without a value in every head, a window of 40 tokens in every other layer, experts."""

    name, layers, kept, page, block = "gpt_oss", Windows.layers, Windows.kept, Windows.page, Windows.block
    options = {"kv_cache_memory_bytes": 210 * 2 * Windows.pages * page}  # vLLM says once how many tokens pools of a size hold

    def test_sinks_that_are_left_out_would_be_seen(self):
        engine, impl = self.engine, self.engine.builder.layers[0]
        self.assertEqual(tuple(impl.sinks.shape), (impl.num_heads,))
        with mock.patch.object(impl, "_add_sinks", lambda *_: None), \
                self.assertRaisesRegex(AssertionError, "an output row is"):
            family.check_attention(engine, self.family.bundle, 0, 1, engine.prompt(0, 640), self.chunk)

    def test_flash_attention_would_be_asked_for_sums_too(self):
        """As on a GPU: it gives them as [heads, queries]."""
        engine, kinds = self.engine, set()

        def look(q, k, *_, sums, **__):
            self.assertTrue(sums)
            kinds.add(len(k) > len(q))

        with flash_attention(engine, look):
            family.check_attention(engine, self.family.bundle, 0, 1, engine.prompt(0, 640), self.chunk)
        self.assertEqual(kinds, {False, True})

    def test_sinks_count_against_keys_as_the_model_made_them(self):
        """A bundle centers keys, which lowers all logits of a query but that of a sink, each query's by its own number."""
        codec, heads = self.engine.builder.layers[0].codec, self.engine.builder.layers[0].num_heads
        torch.manual_seed(0)
        q = torch.randn(50, heads, codec.head_dim).bfloat16().to(codec.device)
        k = (0.1 * torch.randn(50, codec.num_kv_heads, codec.head_dim)).bfloat16().to(codec.device)

        def logits(q, k):
            k = k.double().repeat_interleave(heads // codec.num_kv_heads, 1)
            return torch.einsum("qhd,khd->qhk", q.double(), k) * codec.sm_scale

        lowered = codec.centered_logits(q)
        found = (logits(q, k) - logits(*codec.transform_qkv(q, k, k)[:2]) - lowered[..., None]).abs()
        self.assertGreater(lowered.abs().mean(), 0.1)
        self.assertLess(found.mean(), 0.01)


@needs_vllm
class ManyExpertsOverlapped(Mixed, case.EngineTest):
    """Steps are begun before the tokens of the last one are known, as they are on GPUs."""

    name, layers = ManyExperts.name, ManyExperts.layers
    options = {**ManyExperts.options, "async_scheduling": True}


@needs_vllm
class WindowsOverlapped(Mixed, case.EngineTest):
    name, layers, kept = Windows.name, Windows.layers, Windows.kept
    options = {**Windows.options, "async_scheduling": True}


@needs_vllm
class Blocks(unittest.TestCase):
    """Of all layers, without an engine."""

    def specs(self, int2, **others):
        from vllm.v1.kv_cache_interface import SlidingWindowSpec

        window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16,
                                   sliding_window=512)
        return {"model.layers.0": window, "model.layers.1": int2, **others}

    def int2(self, kind=None, heads=2):
        from oscar_int2.recipe import CacheFormat
        from oscar_int2.vllm.specs import Int2Spec, SizedSpec

        if kind is None and hasattr(Int2Spec, "state_content_bytes"):  # bytes of a token, in later ones than 0.26
            kind, size = Int2Spec, {"state_content_bytes": 4608 // 64}
        else:
            kind, size = kind or SizedSpec, {"page_bytes": 4608}
        return kind(block_size=64, num_kv_heads=heads, head_size=128, dtype=torch.uint8, format=CacheFormat(), **size)

    def check(self, specs):
        try:
            from vllm.v1.core.kv_cache_planning import unify_kv_cache_spec_page_size
        except ImportError:  # before 0.33
            from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
        from oscar_int2.vllm.specs import unified

        found = unified(specs)
        size = found["model.layers.1"].page_size_bytes
        self.assertEqual({spec.page_size_bytes for spec in found.values()}, {size})
        self.assertEqual(size, found["model.layers.1"].block_size // 64 * 2 * 4608, "bytes of a block's tokens")
        self.assertIsNone(found["model.layers.1"].page_size_padded)
        self.assertIs(unify_kv_cache_spec_page_size(found), found, "vLLM pads nothing more")
        return found

    def test_int2_pages_are_not_padded_to_those_of_a_window(self):
        found = self.check(self.specs(self.int2()))
        self.assertEqual((found["model.layers.1"].block_size, found["model.layers.0"].block_size), (256, 32))

    def test_blocks_that_come_larger_become_the_same(self):
        """vLLM 0.33 gives INT2 layers beside states blocks of several pages."""
        from oscar_int2.vllm.specs import unified

        larger = dataclasses.replace(self.int2(), block_size=192)
        self.assertEqual(unified(self.specs(larger)), unified(self.specs(self.int2())))

    def test_a_state_takes_as_many_pages_as_it_needs(self):
        from vllm.v1.kv_cache_interface import MambaSpec

        state = MambaSpec(block_size=4096, shapes=((32, 128, 128), (3, 8192)), dtypes=(torch.float32, torch.bfloat16),
                          page_size_padded=1 << 22)
        found = self.check(self.specs(self.int2(), state=state))
        pages = -(-(32 * 128 * 128 * 4 + 3 * 8192 * 2) // 9216)
        self.assertEqual(found["model.layers.1"].block_size, 64 * pages)
        self.assertEqual(found["model.layers.0"].block_size, pages * 9216 // 32768 * 32, "rows as fit")
        self.assertLess(found["state"].page_size_bytes, 1.01 * (32 * 128 * 128 * 4 + 3 * 8192 * 2))
        self.assertEqual(found["state"].block_size, 4096, "one a request")
        found = self.check(self.specs(self.int2(), state=dataclasses.replace(state, mamba_cache_mode="align")))
        self.assertEqual(found["state"].block_size, 64 * pages, "one at the end of each block")

    def test_bytes_that_do_not_grow_with_the_block_would_be_seen(self):
        from oscar_int2.vllm.specs import SizedSpec

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Fixed(SizedSpec):
            @property
            def real_page_size_bytes(self):
                return self.num_kv_heads * self.page_bytes

            unpadded_page_size_bytes = real_page_size_bytes

        with self.assertRaises(AssertionError):
            self.check(self.specs(self.int2(Fixed)))

    def test_other_kinds_of_caches_are_refused_by_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm.specs import unified
        from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

        shape = dict(block_size=64, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
        for other, word in ((ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64), "ChunkedLocal"),
                            (FullAttentionSpec(**shape), "FullAttentionSpec"), (self.int2(heads=1), type(self.int2()).__name__)):
            with self.assertRaisesRegex(UnsupportedError, f"model.layers.9 .*{word}"):
                unified(self.specs(self.int2(), **{"model.layers.9": other}))

    def test_full_attention_alone_stays_as_it_is(self):
        from oscar_int2.vllm.specs import unified
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        specs = {"model.layers.0": self.int2(), "draft": FullAttentionSpec(
            block_size=64, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)}
        self.assertIs(unified(specs), specs)


@needs_vllm
class Layers(unittest.TestCase):
    """What a bundle says of a layer, beside what vLLM makes of it."""

    def bundle(self, *changes):
        from oscar_int2 import load

        found = load(case.BUNDLE)
        return dataclasses.replace(found, layers={
            **found.layers, **{i: dataclasses.replace(found.layers[i], **change) for i, change in enumerate(changes)}})

    WINDOW = dict(attention="local", sliding_window=24, quantized=False)
    NOTHING = dict(attention="none", quantized=False)

    def test_each_layer_gets_what_the_bundle_says(self):
        from oscar_int2.vllm import layers

        bundle = self.bundle(self.WINDOW, self.NOTHING, dict(attention="sliding", sliding_window=200, quantized=False))
        layers.check_served(bundle)
        self.assertTrue(layers.has_others(bundle))
        self.assertFalse(layers.has_others(self.bundle()))
        self.assertFalse(layers.holds_int2(bundle, "model.layers.0.self_attn.attn", 24, None))
        self.assertFalse(layers.holds_int2(bundle, "model.layers.2.self_attn.attn", 200, None))
        self.assertTrue(layers.holds_int2(bundle, "language_model.model.layers.3.self_attn.attn", None, None))

    def test_a_model_with_other_layers_is_another_model(self):
        from oscar_int2 import BundleMismatchError, UnsupportedError
        from oscar_int2.vllm.layers import holds_int2

        bundle = self.bundle(self.WINDOW, self.NOTHING)
        for prefix, window, shared, error, words in (
                ("layers.0.attn", 25, None, BundleMismatchError, "layer 0 sees 25 tokens here and 24 in the bundle"),
                ("layers.0.attn", None, None, BundleMismatchError, "layer 0 sees all tokens"),
                ("layers.1.attn", None, None, BundleMismatchError, "layer 1 .* no rows of its own"),
                ("layers.8.attn", None, None, BundleMismatchError, "layer 8 .* there is none"),
                ("layers.0.attn", 24, "layers.2.attn", UnsupportedError, "KV sharing .* layers.2")):
            with self.subTest(prefix=prefix, window=window), self.assertRaisesRegex(error, words):
                holds_int2(bundle, prefix, window, shared)

    def test_bundles_that_vllm_cannot_serve_are_refused_by_name(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm.layers import check_served

        for changes, words in (
                ([dict(attention="sliding", sliding_window=1024)], "layer 0 .* sliding attention over 1024 tokens, in 2"),
                ([dict(quantized=False)], "layer 0 .* full attention and is not quantized"),
                ([dict(attention="local", quantized=False)], "layer 0 .* local attention"),
                ([self.NOTHING] * 8, "no layer .* holds 2-bit rows")):
            with self.subTest(words), self.assertRaisesRegex(UnsupportedError, words):
                check_served(self.bundle(*changes))


if __name__ == "__main__":
    unittest.main(verbosity=2)
