#!/usr/bin/env python3
"""oscar_int2.transformers on small random models: against the definition of the cache, in batches,
compiled, with everything that it refuses. Runs with every transformers from 4.57 on."""
import concurrent.futures
import contextlib
import copy
import dataclasses
import inspect
import threading
import unittest
from unittest import mock

import torch
import transformers
from transformers import CompileConfig, DynamicCache, GenerationConfig

from serving_case import BUNDLE, held_out_ids, kl_divergence, tiny_model
import oscar_int2
import oscar_int2.transformers
import random_models as small
from oscar_int2 import transformers_version
from oscar_int2.transformers import OscarCache, apply, remove

U = 2.0**-8  # half a unit in the last place of bf16, relative
REFUSED = oscar_int2.UnsupportedError


@contextlib.contextmanager
def applied(model=None, bundle=None, **options):
    model = model or small.random_model()
    try:
        bundle = bundle or small.random_bundle()
        options.setdefault("demote_block", bundle.quantizer.demote_block)
        yield apply(model, bundle, **options)
    finally:
        remove(model)


@torch.no_grad()
def forced_logits(model, cache, rows, prompt):
    """[rows, len - prompt, vocab]: predictions of the ids behind a prompt, fed one by one."""
    ids = torch.tensor(rows, device=model.device)
    logits = [model(ids[:, :prompt], past_key_values=cache).logits[:, -1]]
    for i in range(prompt, ids.shape[1] - 1):
        logits.append(model(ids[:, i:i + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(logits, 1)


def generated(model, rows, count=12, **options):
    """Tokens [rows, count] and logits [rows, count, vocab] of greedy generation."""
    inputs = {"input_ids": torch.tensor(rows)} if isinstance(rows, list) else rows
    output = model.generate(**inputs, **{"max_new_tokens": count, "do_sample": False,
                                         "output_logits": True, "return_dict_in_generate": True,
                                         **options})
    return output.sequences[:, inputs["input_ids"].shape[1]:], torch.stack(output.logits, 1)


class Definition(unittest.TestCase):
    def test_logits_of_every_family_are_those_of_the_definition(self):
        ids, u = small.prompts(60)[0], 2 * small.LAYERS * U  # rows are rounded before and behind turning
        for family, recipe in zip(small.FAMILIES, ("plain", "shaped") * 3, strict=True):
            for prompt in (5, 40):
                model, bundle = small.random_model(family), small.random_bundle(family, recipe)
                expected, exact = small.reference_log_probabilities(model, bundle, ids, prompt)
                with self.subTest(family=family, prompt=prompt), applied(model, bundle):
                    ours = forced_logits(model, OscarCache(model, 1, 60), [ids], prompt)[0]
                    ours = ours.double().log_softmax(-1)
                    windows = max(0, small.SINK + small.RECENT + 1 - prompt)
                    if windows:
                        error = (ours - expected)[:windows].std(-1) / expected[:windows].std(-1)
                        self.assertLess(error.mean().item(), u)
                    # Behind the windows a rounding may carry values over the threshold between codes.
                    distance, cost = (kl_divergence(x, y)[windows:].mean().item()
                                      for x, y in ((expected, ours), (exact, expected)))
                    self.assertGreater(cost, 0.02, "this case would show nothing")
                    self.assertLess(distance, 0.2 * cost)

    def test_demotion_in_blocks_follows_the_definition(self):
        ids, model = small.prompts(50)[0], small.random_model()
        expected, exact = small.reference_log_probabilities(
            model, small.random_bundle(demote_block=8), ids, 20)
        with applied(demote_block=8):
            ours = forced_logits(model, OscarCache(model, 1, 50), [ids], 20)[0].double()
        cost = kl_divergence(exact, expected).mean().item()
        self.assertLess(kl_divergence(expected, ours).mean().item(), 0.2 * cost)

    def test_second_prompts_read_what_the_cache_holds(self):
        first, end = 40, 47  # no row leaves a window in between: by steps and at once are the same
        ids, u = small.prompts(end + 1)[0], 2 * small.LAYERS * U
        for family, recipe in (("Qwen3", "shaped"), ("Llama", "plain")):
            bundle = dataclasses.replace(
                small.random_bundle(family, recipe),
                quantizer=small.random_bundle(demote_block=8).quantizer)
            with self.subTest(family), applied(small.random_model(family), bundle) as model:
                steps = forced_logits(model, OscarCache(model, 1, 60), [ids], first)[0]
                cache = OscarCache(model, 1, 60)
                with torch.no_grad():
                    model(torch.tensor([ids[:first]]), past_key_values=cache)
                    at_once = model(torch.tensor([ids[first:end]]), past_key_values=cache).logits[0]
                    behind = model(torch.tensor([ids[end:]]), past_key_values=cache).logits[0]
                error = (at_once - steps[1:]).std(-1) / steps[1:].std(-1)
                self.assertLess(error.mean().item(), u)
                steps = forced_logits(model, OscarCache(model, 1, 60), [ids + [0]], first)[0]
                self.assertLess((behind[0] - steps[-1]).std() / steps[-1].std(), u)

    def test_every_dtype_computes_the_same_to_the_precision_of_bf16(self):
        ids = small.prompts(30)[0]
        with applied(small.random_model("Qwen2"), small.random_bundle("Qwen2")) as model:
            exact = forced_logits(model, OscarCache(model, 1, 30), [ids], 28)[0]
        for dtype in (torch.bfloat16, torch.float16):
            model = small.random_model("Qwen2", torch.float32)
            with applied(copy.deepcopy(model).to(dtype), small.random_bundle("Qwen2")) as model:
                logits = forced_logits(model, OscarCache(model, 1, 30), [ids], 28)[0]
            self.assertEqual(logits.dtype, dtype)
            self.assertLess(kl_divergence(exact, logits).mean().item(), 0.02)

    def test_forward_passes_without_a_cache_are_plain_attention(self):
        batch = small.left_padded(small.prompts(30, 19))
        plain = small.random_model()
        expected = [plain(**inputs, use_cache=False).logits for inputs in
                    (batch, {"input_ids": batch["input_ids"][1:]})]
        trained = copy.deepcopy(plain).train()
        trained(**batch, labels=batch["input_ids"]).loss.backward()
        with applied(copy.deepcopy(plain)) as model:
            self.assertTrue(torch.equal(model(**batch).logits, expected[0]))
            self.assertTrue(torch.equal(model(batch["input_ids"][1:]).logits, expected[1]))
            model.train()(**batch, labels=batch["input_ids"]).loss.backward()
            for ours, theirs in zip(model.parameters(), trained.parameters()):
                self.assertTrue(torch.equal(ours.grad, theirs.grad))


class Generation(unittest.TestCase):
    def test_a_padded_batch_gives_what_its_rows_give_alone(self):
        rows = small.prompts(50, 9, 33)
        with applied() as model:
            tokens, logits = generated(model, small.left_padded(rows))
            for row, ours, theirs in zip(rows, tokens, logits):
                alone, expected = generated(model, [row])
                self.assertEqual(ours.tolist(), alone[0].tolist())
                # Products over three rows round otherwise than over one.
                self.assertLess(kl_divergence(expected[0], theirs).max().item(), 1e-3)
            ignored, _ = generated(model, small.left_padded(rows) | {
                "attention_mask": torch.ones(3, 50, dtype=torch.long)})
            self.assertFalse(torch.equal(ignored[1:], tokens[1:]), "padding does not matter here")

    def test_columns_that_a_mask_leaves_out_do_not_matter(self):
        prompt, steps = small.prompts(30)[0], 4
        ids, mask = torch.tensor([prompt]), torch.ones(1, 30, dtype=torch.long)
        mask[0, [3, 17, 18]] = 0
        with applied() as model:
            tokens, logits = generated(model, {"input_ids": ids, "attention_mask": mask}, steps)
            alone, expected = generated(model, [ids[mask.bool()].tolist()], steps)
        self.assertEqual(tokens.tolist(), alone.tolist())
        self.assertLess(kl_divergence(expected[0], logits[0]).max().item(), 1e-4)

    def test_a_loop_of_ones_own_finds_positions_behind_padding(self):
        rows, steps = small.prompts(40, 17), 6
        with applied() as model, torch.no_grad():
            tokens, logits = generated(model, small.left_padded(rows), steps)
            cache = OscarCache(model, 2, 46)
            step = model(**small.left_padded(rows), past_key_values=cache).logits[:, -1:]
            for i in range(steps):
                self.assertLess(kl_divergence(logits[:, i], step[:, 0]).max().item(), 1e-4)
                step = model(tokens[:, i:i + 1], past_key_values=cache).logits
            cache.check_rows()

    def test_chats_continue_in_the_cache_of_the_turn_before(self):
        first, second = small.prompts(45, 18), small.prompts(11, 30, seed=8)
        with applied() as model:
            cache, chat = OscarCache(model, 2, 120), small.left_padded(first)
            for turn in (None, small.left_padded(second)):
                if turn:
                    chat = {name: torch.cat((chat[name], turn[name]), 1) for name in chat}
                tokens, logits = generated(model, chat, past_key_values=cache)
                chat = {"input_ids": torch.cat((chat["input_ids"], tokens), 1),
                        "attention_mask": torch.cat((chat["attention_mask"], torch.ones_like(tokens)), 1)}
            self.assertEqual(cache.paged.step.seq_lens.tolist(), [45 + 12 + 11 + 11, 18 + 12 + 30 + 11])
            for row in range(2):
                alone = OscarCache(model, 1, 120)
                begun, _ = generated(model, [first[row]], past_key_values=alone)
                again, expected = generated(  # with a mask: without one 0 would be padding
                    model, small.left_padded([first[row] + begun[0].tolist() + second[row]]),
                    past_key_values=alone)
                self.assertEqual(tokens[row].tolist(), again[0].tolist())
                self.assertLess(kl_divergence(expected[0], logits[row]).max().item(), 1e-3)
            # Over a fresh cache the whole chat is a prompt, which is attended exactly.
            _, exact = generated(model, {name: x[:, :-12] for name, x in chat.items()}, 1)
            apart = kl_divergence(exact[:, 0], logits[:, 0])
            self.assertGreater(apart.min().item(), 1e-4)
            self.assertLess(apart.max().item(), 1)

    def test_prompts_come_in_chunks_if_they_are_asked_for(self):
        prompt = small.prompts(50)
        with applied() as model:
            _, expected = generated(model, prompt)
            for size in (64, 13):  # transformers 4 takes the last token of a prompt by itself
                cache = OscarCache(model, 1, 64)
                _, logits = generated(model, prompt, prefill_chunk_size=size, past_key_values=cache)
                self.assertEqual(cache.paged.step.seq_lens.tolist(), [61])
                self.assertLess(kl_divergence(expected[:, 0], logits[:, 0]).max().item(), 1)

    def test_the_cache_is_kept_reset_and_replaced_when_it_is_too_small(self):
        first, second = small.prompts(45, 20)
        with applied() as model:
            state = model.oscar_int2
            tokens, _ = generated(model, [first])
            kept = state.kept
            generated(model, [second])
            self.assertIs(state.kept, kept)
            self.assertEqual(generated(model, [first])[0].tolist(), tokens.tolist())
            generated(model, [first], 30)
            self.assertIsNot(state.kept, kept)
            cache = OscarCache(model, 1, 64)
            for _ in range(2):
                again, _ = generated(model, [first], past_key_values=cache)
                self.assertEqual(again.tolist(), tokens.tolist())
                cache.reset()
            self.assertGreater(min(cache.memory_bytes()), 0)
        with applied(max_tokens=100) as model:
            generated(model, [first])
            kept = model.oscar_int2.kept
            generated(model, [first], 50)
            self.assertIs(model.oscar_int2.kept, kept)

    def test_two_threads_get_what_each_gets_alone(self):
        prompts = small.prompts(45, 20)
        started, go_on = threading.Event(), threading.Event()

        class Waits(transformers.StoppingCriteria):
            """Stops the first caller between two tokens until the second has come."""

            def __call__(self, ids, scores, **_):
                started.set()
                go_on.wait(10)
                return torch.zeros(len(ids), dtype=torch.bool)

        with applied(max_tokens=100) as model:
            expected = [generated(model, [prompt])[0].tolist() for prompt in prompts]
            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                first = threads.submit(generated, model, [prompts[0]],
                                       stopping_criteria=transformers.StoppingCriteriaList([Waits()]))
                started.wait(10)
                second = threads.submit(generated, model, [prompts[1]])
                concurrent.futures.wait([second], timeout=1)
                go_on.set()
                found = [caller.result()[0].tolist() for caller in (first, second)]
        self.assertEqual(found, expected)

    def test_sampling_follows_its_seed(self):
        prompt = small.prompts(30)
        with applied() as model:
            drawn = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                drawn.append(generated(model, prompt, do_sample=True, num_return_sequences=2)[0])
        self.assertTrue(torch.equal(drawn[0], drawn[1]))
        self.assertFalse(torch.equal(drawn[0], drawn[2]))
        self.assertFalse(torch.equal(drawn[0][0], drawn[0][1]))

    def test_compiled_steps_are_one_graph_for_all_prompts_and_equal_eager_ones(self):
        compiled = CompileConfig(backend="eager", fullgraph=True)
        compiled._compile_all_devices = True
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with applied(max_tokens=64) as model:
            for prompt in small.prompts(45, 20, 7):
                expected, _ = generated(model, [prompt])
                ours, _ = generated(model, [prompt], compile_config=compiled)
                self.assertEqual(ours.tolist(), expected.tolist())
        counters = torch._dynamo.utils.counters
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertEqual(sum(counters["graph_break"].values()), 0)

    def test_rows_that_could_not_be_written_are_reported(self):
        model = copy.deepcopy(small.random_model("Qwen2"))
        with applied(model, small.random_bundle("Qwen2")), torch.no_grad():
            generated(model, small.prompts(30))
            bias = model.model.layers[1].self_attn.v_proj.bias
            bias[0] += 1e6  # a range of three times fp16's largest scale
            with self.assertRaisesRegex(oscar_int2.CacheRowError, "metadata"):
                generated(model, small.prompts(30))
            bias[0] -= 1e6
            generated(model, small.prompts(30))

    def test_remove_leaves_the_model_as_it_was(self):
        model, prompt = small.random_model(), small.prompts(30)
        implementation, attributes = model.config._attn_implementation, set(vars(model))
        expected, _ = generated(model, prompt)
        with applied(model):
            self.assertNotEqual(generated(model, prompt)[0].tolist(), expected.tolist())
            apply(model, small.random_bundle())  # once more
            self.assertEqual(len(model.model._forward_hooks), 1)
        self.assertEqual(model.config._attn_implementation, implementation)
        self.assertEqual(set(vars(model)), attributes)
        self.assertEqual(len(model.model._forward_hooks) + len(model.model._forward_pre_hooks), 0)
        self.assertEqual(generated(model, prompt)[0].tolist(), expected.tolist())


class Refusals(unittest.TestCase):
    def test_a_transformers_in_which_the_package_has_not_run(self):
        for version in ("5.25.0", "5.30.1.dev0", "6.0.0"):
            with mock.patch.object(transformers, "__version__", version):
                with self.assertRaisesRegex(oscar_int2.UnsupportedError, rf"transformers {version}; install"):
                    apply(tiny_model(), BUNDLE)

    def test_a_cache_goes_by_the_name_that_this_transformers_has(self):
        self.assertIn(transformers_version.CACHE, inspect.signature(type(tiny_model()).forward).parameters)
        for name, given, expected in (("cache", {"past_key_values": 1, "x": 2}, {"cache": 1, "x": 2}),
                                      ("cache", {"cache": 1}, {"cache": 1}), ("past_key_values", {"past_key_values": 1}, None)):
            with mock.patch.object(transformers_version, "CACHE", name):
                self.assertEqual(transformers_version.renamed(given), expected or given)

    def test_ways_to_generate_that_are_not_served(self):
        prompt, model = small.prompts(20), small.random_model()
        other = OscarCache(apply(copy.deepcopy(model), small.random_bundle()), 1, 64)
        with applied(model):
            for text, options in (
                    ("beam_search", {"num_beams": 2}),
                    ("assisted_generation", {"prompt_lookup_num_tokens": 3}),
                    ("assisted_generation", {"assistant_model": small.random_model()}),
                    ("cache_implementation='static'", {"cache_implementation": "static"}),
                    ("output_attentions", {"output_attentions": True}),
                    ("DynamicCache", {"past_key_values": DynamicCache()}),
                    ("made for another model", {"past_key_values": other})):
                with self.subTest(text), self.assertRaisesRegex(REFUSED, text):
                    generated(model, prompt, **options)
            with self.assertRaisesRegex(oscar_int2.CacheFullError, "32 tokens a row.*for 31"):
                generated(model, prompt, past_key_values=OscarCache(model, 1, 31))
            with self.assertRaisesRegex(REFUSED, "batch of 2"):
                generated(model, small.prompts(20, 20), past_key_values=OscarCache(model, 1, 64))
            with self.assertRaisesRegex(REFUSED, "continuous batching"):
                model.generate_batch(inputs=prompt, generation_config=GenerationConfig())
            generated(model, prompt, 2)  # nothing of all this has stayed

    def test_forward_passes_that_are_not_served(self):
        ids = torch.tensor(small.prompts(20))
        ones = torch.ones_like(ids)
        with applied() as model, torch.no_grad():
            cache = OscarCache(model, 1, 22)
            with self.assertRaisesRegex(REFUSED, "not prepare"):
                copy.deepcopy(small.random_model("Llama"))(ids, past_key_values=cache)
            for text, options in (
                    ("DynamicCache", {"past_key_values": DynamicCache()}),
                    ("output_attentions", {"output_attentions": True}),
                    ("that has no tokens", {"past_key_values": cache, "attention_mask": 0 * ones}),
                    (r"shape \[1, 1, 20, 20\]", {"past_key_values": cache, "attention_mask":
                                                 torch.ones(1, 1, 20, 20, dtype=torch.bool)}),
                    ("count each row's tokens", {"past_key_values": cache,
                                    "position_ids": torch.arange(5, 25)[None]})):
                with self.subTest(text), self.assertRaisesRegex(REFUSED, text):
                    model(ids, **options)
            with self.assertRaisesRegex(REFUSED, "name them"):
                model.model(ids, ones)
            with torch.enable_grad(), self.assertRaisesRegex(REFUSED, "no_grad"):
                model(ids, past_key_values=cache)
            with self.assertRaisesRegex(oscar_int2.CacheFullError, "made for 22"):
                model(torch.tensor(small.prompts(23)), past_key_values=cache)
            model(ids, past_key_values=cache)
            for text, options in (
                    (r"shape \[1, 2\] for \[1, 22\]", {"attention_mask": ones[:, :2]}),
                    ("leaves out tokens", {"attention_mask": torch.tensor([[0] * 5 + [1] * 17])}),
                    ("cache holds: 0 in row 0, column 0, expected 20", {"position_ids": torch.arange(2)[None]})):
                with self.subTest(text), self.assertRaisesRegex(REFUSED, text):
                    model(ids[:, :2], past_key_values=cache, **options)
            for _ in range(2):
                model(ids[:, :1], past_key_values=cache)
            with self.assertRaisesRegex(oscar_int2.CacheFullError, "23 tokens"):
                model(ids[:, :1], past_key_values=cache)
            cache.reset()
            with mock.patch.object(model.lm_head, "forward", side_effect=KeyboardInterrupt), \
                    mock.patch.object(model.model.norm, "forward", side_effect=KeyboardInterrupt), \
                    self.assertRaises(KeyboardInterrupt):
                model(ids, past_key_values=cache)
            with self.assertRaisesRegex(REFUSED, "last forward pass failed"):
                model(ids[:, :1], past_key_values=cache)

    def test_what_the_cache_cannot_do(self):
        with applied() as model:
            cache = OscarCache(model, 1, 64)
            for call in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([0])),
                         lambda: cache.batch_repeat_interleave(2),
                         lambda: cache.batch_select_indices(torch.tensor([0])),
                         lambda: cache.update(torch.zeros(1), torch.zeros(1), 0)):
                with self.assertRaises(REFUSED):
                    call()
        with self.assertRaisesRegex(REFUSED, "apply"):
            OscarCache(small.random_model(), 1, 64)

    def test_models_that_are_not_served(self):
        bundle, model = small.random_bundle(), small.random_model()
        mismatch = oscar_int2.BundleMismatchError

        def changed(name, value):
            other = copy.deepcopy(model)
            setattr(other.config, name, value)
            return other

        def rescaled():
            other = copy.deepcopy(model)
            other.model.layers[1].self_attn.scaling *= 2
            return other

        for error, text, other in (
                (mismatch, "is a LlamaForCausalLM", small.random_model("Llama")),
                (mismatch, "num_kv_heads is 4", changed("num_key_value_heads", 4)),
                (REFUSED, "sliding", changed("layer_types", ["full_attention", "sliding_attention"])),
                (REFUSED, "attn_logit_softcapping", changed("attn_logit_softcapping", 30.0)),
                (REFUSED, "several devices", copy.deepcopy(model)),
                (REFUSED, "logits times", rescaled())):
            if "devices" in text:
                other.lm_head.to("meta")
            with self.subTest(text), self.assertRaisesRegex(error, text):
                apply(other, bundle)
            self.assertFalse(hasattr(other, "oscar_int2"))
        with self.assertRaisesRegex(mismatch, "num_layers"):
            apply(model, BUNDLE)
        layers = {i: dataclasses.replace(layer, quantized=False) for i, layer in bundle.layers.items()}
        with self.assertRaisesRegex(REFUSED, "not quantized"):
            apply(model, dataclasses.replace(bundle, layers=layers))
        self.assertFalse(hasattr(model, "oscar_int2"))

    def test_the_attention_by_name_alone_and_its_foreign_arguments(self):
        model = copy.deepcopy(small.random_model())
        model.set_attn_implementation("oscar_int2")
        with self.assertRaisesRegex(REFUSED, "apply"):
            model(torch.tensor(small.prompts(5)))
        with applied() as model:
            module = model.model.layers[0].self_attn
            rows = [torch.zeros(1, heads, 3, 32) for heads in (4, 2, 2)]
            for name in ("sliding_window", "softcap", "s_aux"):
                with self.assertRaisesRegex(REFUSED, name):
                    transformers.AttentionInterface()["oscar_int2"](module, *rows, None, **{name: 1.0})


@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class OnCuda(unittest.TestCase):
    """The embedded model, since the kernels for CUDA have no heads of 32."""

    @classmethod
    def setUpClass(cls):
        cls.model = copy.deepcopy(tiny_model()).to("cuda")

    def test_the_device_computes_what_the_cpu_computes(self):
        ids, prompt = held_out_ids(440), 400
        models = [copy.deepcopy(tiny_model()).float().to(device) for device in ("cpu", "cuda")]
        plain = models[0](torch.tensor([ids])).logits[0, prompt - 1:-1].detach()
        logits = []
        for model in models:  # in float32: in bf16 sums in another order change the rows before they are coded
            with applied(model, oscar_int2.load(BUNDLE), demote_block=1):
                cache = OscarCache(model, 1, len(ids))
                logits.append(forced_logits(model, cache, [ids], prompt)[0].cpu())
                cache.check_rows()
        cost, distance = (kl_divergence(x, y).mean().item() for x, y in ((plain, logits[0]), logits))
        self.assertGreater(cost, 5e-4, "this case would show nothing")
        # Queries and rows are rounded to bf16, which carries some values over the threshold between codes.
        self.assertLess(distance, 0.5 * cost)

    def test_generation_chooses_what_the_steps_predict(self):
        rows = [held_out_ids(400)[:n] for n in (400, 370)]
        with applied(self.model, oscar_int2.load(BUNDLE)) as model:
            inputs = {name: x.to("cuda") for name, x in small.left_padded(rows).items()}
            tokens, logits = generated(model, inputs, 20)
            self.assertTrue(torch.equal(logits.argmax(-1), tokens))
            for row, ours, predicted in zip(rows, tokens, logits):
                forced = forced_logits(model, OscarCache(model, 1, 420), [row + ours.tolist()], len(row))
                self.assertLess(kl_divergence(forced[0], predicted).mean().item(), 0.01)


if __name__ == "__main__":
    unittest.main()
