#!/usr/bin/env python3
"""oscar_int2.transformers under programs that call a model in other ways than generate() once: loops of
their own, threads, kept caches, edited chats, copies and wrappers. Runs with every transformers from 4.57."""
import concurrent.futures
import copy
import dataclasses
import gc
import io
import threading
import unittest
import weakref
from unittest import mock

import torch
from transformers import DynamicCache, GenerationMixin

import serving_case
import oscar_int2
import oscar_int2.transformers
import random_models as small
from oscar_int2.transformers import OscarCache, apply, remove
from oscar_int2.transformers_version import CACHE

REFUSED = oscar_int2.UnsupportedError
IDS = torch.tensor(small.prompts(40))


def model_with(bundle=None, **options):
    """A copy of the random model, with apply()."""
    return apply(copy.deepcopy(small.random_model()), bundle or small.random_bundle(), **options)


def answer(model, ids=IDS, count=8, **options):
    """Token ids of a greedy answer."""
    output = model.generate(ids, **{"max_new_tokens": count, "do_sample": False} | options)
    return output[0, ids.shape[1]:].tolist()


def returned(model, ids=IDS, count=8, **options):
    """The whole chat, and the cache that generate() gives back."""
    output = model.generate(ids, **{"max_new_tokens": count, "do_sample": False,
                                    "return_dict_in_generate": True} | options)
    return output.sequences, output.past_key_values


@torch.no_grad()
def looped(model, ids=IDS, count=8, keep_first=False, **options):
    """The same as answer() by a loop over model(...) that was given no cache."""
    output, tokens = model(ids, **options), []
    cache = output.past_key_values
    for _ in range(count):
        tokens.append(output.logits[:, -1:].argmax(-1))
        output = model(tokens[-1], past_key_values=cache, **options)
        cache = cache if keep_first else output.past_key_values
    return torch.cat(tokens, 1)[0].tolist()


class Loops(unittest.TestCase):
    def test_a_pass_without_a_cache_is_gone_on_from_over_int2(self):
        bf16 = looped(small.random_model())
        model = model_with()
        expected = answer(model)
        self.assertNotEqual(expected, bf16, "this case would show nothing")
        with mock.patch.object(oscar_int2.transformers.cache, "GROWTH", 2):  # it grows on the way
            self.assertEqual(looped(model), expected)
        self.assertEqual(looped(model, keep_first=True), expected)
        self.assertEqual(looped(model, use_cache=True), expected)
        with torch.no_grad():
            rows = model(IDS).past_key_values
            self.assertEqual(rows.get_seq_length(), 40)
            self.assertIsNone(model(IDS, use_cache=False).past_key_values)
            more = torch.cat((IDS, IDS[:, :5]), 1)
            own = OscarCache(model, 1, 64)
            model(IDS, past_key_values=own)
            self.assertEqual(answer(model, more, past_key_values=rows),
                             answer(model, more, past_key_values=own))
        self.assertEqual(looped(model_with(prompts="int2"), count=3),
                         answer(model_with(prompts="int2"), count=3))

    def test_padding_is_known_to_the_steps_behind_or_refused(self):
        batch, model = small.left_padded(small.prompts(40, 23)), model_with()
        with torch.no_grad():
            own = OscarCache(model, 2, 64)
            expected = model(**batch, past_key_values=own).logits[:, -1:]
            token = expected.argmax(-1)
            expected = model(token, past_key_values=own).logits
            plain = model(**batch).past_key_values  # its positions count padding
            with self.assertRaisesRegex(REFUSED, "left padding needs such"):
                model(token, past_key_values=plain)
            positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
            found = model(**batch, position_ids=positions)
            found = model(token, past_key_values=found.past_key_values).logits
        self.assertLess((found - expected).abs().max().item(), 1e-3)

    def test_steps_with_gradients_or_in_training_are_refused(self):
        model = model_with()
        rows = model(IDS).past_key_values
        with self.assertRaisesRegex(REFUSED, "no_grad"):
            model(IDS[:, :1], past_key_values=rows)
        with torch.no_grad(), self.assertRaisesRegex(REFUSED, r"model.eval\(\)"):
            model.train()(IDS[:, :1], past_key_values=rows)

    def test_a_config_without_cache_is_served_over_int2(self):
        model = model_with()
        expected = answer(model)
        model.config.use_cache = model.generation_config.use_cache = False  # as trainers leave it
        self.assertEqual(answer(model), expected)
        with torch.no_grad():
            cache = OscarCache(model, 1, 64)
            self.assertIs(model(IDS, past_key_values=cache).past_key_values, cache)
        without = copy.deepcopy(model.generation_config)
        for given in ({"use_cache": False}, {"generation_config": without}):
            with self.assertRaisesRegex(REFUSED, "use_cache=False"):
                answer(model, **given)
        without.use_cache = True
        self.assertEqual(answer(model, generation_config=without), expected)

    def test_a_chat_that_began_as_embeddings_is_no_other_chat(self):
        model = model_with()
        cache = OscarCache(model, 1, 128)
        with torch.no_grad():
            rows = model.get_input_embeddings()(IDS)
        model.generate(inputs_embeds=rows, past_key_values=cache, max_new_tokens=1, do_sample=False)
        other = torch.cat([IDS.flip(1), IDS], 1)
        with self.assertRaisesRegex(REFUSED, "row 0, column 0 of 40 .* an embedding is held"):
            model.generate(input_ids=other, past_key_values=cache, max_new_tokens=1)

    def test_padding_behind_a_prompt_is_refused_where_an_answer_would_follow(self):
        model, mask = model_with(), torch.ones_like(IDS)
        mask[:, -3:] = 0
        with self.assertRaisesRegex(REFUSED, 'padding_side="left"'):
            model.generate(IDS, attention_mask=mask, max_new_tokens=2)

    def test_padding_between_tokens_wants_positions(self):
        model, mask = model_with(prompts="int2"), torch.ones_like(IDS)
        mask[:, 3] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            with self.assertRaisesRegex(REFUSED, "padding between tokens and no position_ids"):
                model(IDS, attention_mask=mask)
            model(IDS, attention_mask=mask, position_ids=positions)
            for side in (slice(None, 3), slice(-3, None)):
                padded = torch.ones_like(IDS)
                padded[:, side] = 0
                model(IDS, attention_mask=padded)

    def test_rows_that_could_not_be_written_end_a_loop(self):
        model = model_with(prompts="exact")
        with torch.no_grad():
            cache = model(IDS).past_key_values
            cache = model(IDS[:, :1], past_key_values=cache).past_key_values
            model.model.layers[1].self_attn.v_proj.weight[0] = torch.inf
            with self.assertRaises(oscar_int2.CacheRowError):
                for _ in range(oscar_int2.transformers.cache.CHECK_EVERY + 1):
                    model(IDS[:, :1], past_key_values=cache)

    def test_guidance_runs_over_a_cache_of_its_own(self):
        bundle = small.random_bundle()  # with windows that hold all
        bundle = dataclasses.replace(bundle, quantizer=dataclasses.replace(bundle.quantizer, recent_tokens=90))
        options = {"guidance_scale": 1.5, "negative_prompt_ids": IDS[:, :7], "count": 6}
        expected = answer(small.random_model(), **options)
        self.assertNotEqual(answer(small.random_model(), count=6), expected)
        self.assertEqual(answer(model_with(bundle), **options), expected)


class KeptCaches(unittest.TestCase):
    def test_a_cache_that_was_given_back_refuses_once_another_call_took_its_memory(self):
        model = model_with()
        chat, cache = returned(model)
        chat, again = returned(model, torch.cat((chat, IDS[:, :9]), 1), 30, past_key_values=cache)
        self.assertIs(again, cache)  # it has grown
        other = torch.tensor(small.prompts(20, seed=9))
        expected = answer(model, other)
        self.assertEqual(len(answer(model, torch.cat((chat, IDS[:, :9]), 1), past_key_values=cache)), 8)
        first, second = (returned(model, ids)[1] for ids in (IDS, other))
        for call in (lambda: model(IDS[:, :1], past_key_values=first), first.reset,
                     lambda: answer(model, chat, past_key_values=first)):
            with torch.no_grad(), self.assertRaisesRegex(REFUSED, "took its memory.*of your own"):
                call()
        self.assertEqual(second.get_seq_length().item(), 27)
        self.assertEqual(answer(model, other), expected)
        # One that was replaced by a larger one is its owner's.
        kept = returned(model, other)[1]
        returned(model, count=60)
        with torch.no_grad():
            model(IDS[:, :1], past_key_values=kept)

    def test_a_copy_of_a_cache_goes_on_by_itself(self):
        model = model_with()
        with torch.no_grad():
            cache = OscarCache(model, 1, 60)
            model(IDS, past_key_values=cache)
            copied = copy.deepcopy(cache)
            model(torch.tensor(small.prompts(7)), past_key_values=cache)
            steps = [model(IDS[:, :1], past_key_values=copied).logits for _ in range(3)]
            fresh = OscarCache(model, 1, 60)
            model(IDS, past_key_values=fresh)
            for found in steps:
                self.assertTrue(torch.equal(model(IDS[:, :1], past_key_values=fresh).logits, found))
        self.assertEqual((cache.get_seq_length().item(), copied.get_seq_length().item()), (47, 43))

    def test_an_edited_chat_is_refused_and_read_anew_behind_reset(self):
        model = model_with()
        cache = OscarCache(model, 1, 120)
        chat, _ = returned(model, past_key_values=cache)
        edited = torch.cat((chat, IDS[:, :9]), 1)
        edited[0, 3] += 1
        for text, ids in (("column 3 of 47 is", edited), ("40 columns over an OscarCache that holds 47", IDS),
                          ("9 columns", IDS[:, :9])):
            with self.assertRaisesRegex(REFUSED, f"{text}.*reset"):
                answer(model, ids, past_key_values=cache)
        with self.assertRaisesRegex(REFUSED, "inputs_embeds"):
            model.generate(inputs_embeds=model.get_input_embeddings()(edited), past_key_values=cache)
        cache.reset()
        self.assertEqual(answer(model, edited, past_key_values=cache), answer(model, edited))
        batch = OscarCache(model, 2, 120)  # padding may have any id
        rows = small.left_padded(small.prompts(30, 20))
        chat = model.generate(**rows, past_key_values=batch, max_new_tokens=4, do_sample=False)
        chat[1, :10] = 7
        mask = torch.cat((rows["attention_mask"], torch.ones(2, 4, dtype=torch.long)), 1)
        model.generate(chat, attention_mask=mask, past_key_values=batch, max_new_tokens=4)

    def test_a_mask_that_hides_tokens_from_a_step_is_refused(self):
        model = model_with()
        with torch.no_grad():
            out = model(IDS, use_cache=True)
            held, token = IDS.shape[1], IDS[:, -1:]
            hidden = torch.ones(1, held + 1, dtype=torch.long)
            hidden[0, 5:20] = 0
            with self.assertRaisesRegex(REFUSED, "leaves out tokens that the cache holds; generate.. makes one"):
                model(token, past_key_values=out.past_key_values, attention_mask=hidden)
            with self.assertRaisesRegex(REFUSED, r"attention_mask of shape \[1, 1, 1, 41\]"):
                model(token, past_key_values=out.past_key_values, attention_mask=torch.zeros(1, 1, 1, held + 1))
            model(token, past_key_values=out.past_key_values, attention_mask=torch.ones_like(hidden))
            with self.assertRaisesRegex(REFUSED, "or of its cache; .* save the token ids"):
                torch.save(out.past_key_values, io.BytesIO())

    def test_positions_of_a_step_that_do_not_go_on_are_refused(self):
        """Left padding that is counted, say: keys would turn by other angles than the cache's columns."""
        batch, model = small.left_padded(small.prompts(40, 23)), model_with()
        token = batch["input_ids"][:, -1:]
        with torch.no_grad():
            cache = OscarCache(model, 2, 64)
            model(**batch, past_key_values=cache)
            for wrong in ([[40], [40]], [[41], [23]]):
                with self.assertRaisesRegex(REFUSED, "position_ids that do not count each row's tokens.*expected"):
                    model(token, past_key_values=cache, position_ids=torch.tensor(wrong))
            given = model(token, past_key_values=copy.deepcopy(cache), position_ids=torch.tensor([[40], [23]])).logits
            self.assertTrue(torch.equal(model(token, past_key_values=cache).logits, given))

    def test_positions_beyond_the_bundles_are_warned_of_once(self):
        for recipe in ("plain", "shaped"):
            model = model_with(small.random_bundle(recipe=recipe))
            with self.assertLogs("oscar_int2", "WARNING") as logs:
                for _ in range(2):
                    OscarCache(model, 1, small.POSITIONS + 1)
            self.assertEqual(len(logs.output), 1)
            self.assertRegex(logs.output[0], "4097 tokens.*the 4096 positions.*--position-span 4097")
            model = model_with()
            with self.assertNoLogs("oscar_int2", "WARNING"):
                OscarCache(model, 1, small.POSITIONS)


class Threads(unittest.TestCase):
    def test_passes_in_two_threads_know_nothing_of_each_other(self):
        """Another thread scores in the midst of each forward pass, between two layers."""
        model, text = model_with(), torch.tensor(small.prompts(33, seed=9))
        with torch.no_grad():
            logits, own = model(text).logits, OscarCache(model, 1, 64)
        expected, here, found = answer(model), threading.get_ident(), []

        @torch.no_grad()
        def score():
            found.append(model(text, use_cache=len(found) % 2 == 0).logits)
            if own.tokens < 60:
                model(text[:, :1] if own.filled else text, past_key_values=own)

        def between(*_):
            if threading.get_ident() == here:
                thread = threading.Thread(target=score)
                thread.start()
                thread.join()

        with model.model.layers[1].register_forward_pre_hook(between):
            self.assertEqual(answer(model), expected)
        self.assertEqual(len(found), 8)
        for scored in found:
            self.assertTrue(torch.equal(scored, logits))
        self.assertEqual(own.paged.step.seq_lens.tolist(), [33 + 7])

    def test_one_cache_in_two_threads_at_once_is_refused(self):
        model, here = model_with(), threading.get_ident()
        cache = OscarCache(model, 1, 64)
        with concurrent.futures.ThreadPoolExecutor(1) as other, torch.no_grad():
            refused = []

            @torch.no_grad()
            def step():
                model(IDS[:, :1], past_key_values=cache)

            def between(*_):
                if threading.get_ident() == here:
                    refused.append(other.submit(step).exception())

            with model.model.layers[1].register_forward_pre_hook(between):
                model(IDS, past_key_values=cache)
            self.assertRegex(str(refused[0]), "in another thread.*one for each thread")
            step()


class WrappedModule(torch.nn.Module):
    """As peft wraps a model."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    device = property(lambda self: self.inner.device)

    def get_base_model(self):
        return self.inner


class Models(unittest.TestCase):
    def test_a_model_is_freed_with_its_last_reference(self):
        gc.collect()
        gc.disable()
        try:
            model = model_with()
            _, cache = returned(model)
            with torch.no_grad():
                output = model(IDS)
                model(IDS[:, :1], past_key_values=output.past_key_values)
            alive = [weakref.ref(x) for x in (model, model.oscar_int2, cache, cache.paged,
                                              output.past_key_values)]
            del model, cache, output
            self.assertEqual([ref() for ref in alive], [None] * 5)
        finally:
            gc.enable()

    def test_generate_called_on_the_class_is_the_same(self):
        model = model_with()
        expected = answer(model)
        for _ in range(2):
            output = GenerationMixin.generate(model, IDS, max_new_tokens=8, do_sample=False)
            self.assertEqual(output[0, 40:].tolist(), expected)
            self.assertEqual(answer(model), expected)
        self.assertNotIn("generate", vars(model))
        self.assertNotEqual(answer(small.random_model()), expected)  # others are left alone

    def test_a_copied_model_serves_for_itself(self):
        model = model_with()
        expected = answer(model)
        copied = copy.deepcopy(model)
        self.assertIsNot(copied.oscar_int2, model.oscar_int2)
        with torch.no_grad():
            copied.lm_head.weight.neg_()
        self.assertNotEqual(answer(copied), expected)
        self.assertEqual(answer(model), expected)
        remove(model)
        self.assertEqual(len(copied.model._forward_pre_hooks), 1)
        with self.assertRaisesRegex(REFUSED, "before the last apply"), torch.no_grad():
            copied(IDS, past_key_values=OscarCache(apply(model, small.random_bundle()), 1, 64))
        remove(copied)
        self.assertEqual(len(copied.model._forward_pre_hooks), 0)
        with self.assertRaisesRegex(REFUSED, "pickling.*state_dict"):
            torch.save(model, io.BytesIO())

    def test_wrapped_models_are_served_inside(self):
        expected = answer(model_with())
        inner = copy.deepcopy(small.random_model())
        wrapper = WrappedModule(inner)
        self.assertIs(apply(wrapper, small.random_bundle()), wrapper)
        self.assertEqual(answer(inner), expected)
        self.assertEqual(answer(inner, past_key_values=OscarCache(wrapper, 1, 64)), expected)
        remove(wrapper)
        self.assertFalse(hasattr(inner, "oscar_int2"))
        compiled = torch.compile(model_with(), backend="eager")
        self.assertEqual(looped(compiled), expected)
        with self.assertRaisesRegex(REFUSED, "apply.. first"):
            apply(compiled, small.random_bundle())

    def test_generate_within_generate_has_a_cache_of_its_own(self):
        model, inner = model_with(), []
        expected, other = answer(model), answer(model, IDS[:, :20])

        def draw(_, scores):
            inner.append(answer(model, IDS[:, :20]))
            return scores

        self.assertEqual(answer(model, logits_processor=[draw]), expected)
        self.assertEqual(inner, [other] * 8)

    def test_a_call_in_inference_mode_leaves_memory_for_others(self):
        model = model_with()
        with torch.inference_mode():
            expected = answer(model)
        self.assertEqual(answer(model), expected)

    def test_layers_that_keep_options_from_attention_are_refused_at_once(self):
        """As those of StableLM: a pass's cache would never come there."""
        model = model_with()
        remove(model)
        attention = model.model.layers[0].self_attn
        forward = attention.forward
        attention.forward = lambda *args, oscar_int2=None, **options: forward(*args, **options)
        with self.assertRaisesRegex(REFUSED, "layers that keep a pass's options from attention, as those of Qwen3ForCausalLM"):
            apply(model, small.random_bundle())
        self.assertFalse(hasattr(model, "oscar_int2"))
        attention.forward = forward
        apply(model, small.random_bundle())

    def test_what_leads_past_the_cache_is_refused(self):
        model = model_with()
        with torch.no_grad():
            rows, cache = model(IDS).past_key_values, OscarCache(model, 1, 64)
            with self.assertRaisesRegex(REFUSED, "past the hooks"):
                model.model.forward(IDS)
            with self.assertRaisesRegex(REFUSED, "prefix tuning"):
                answer(model, past_key_values=DynamicCache())
            model.set_attn_implementation("sdpa")
            with self.assertRaisesRegex(REFUSED, "'sdpa', set behind apply.*again"):
                model(IDS)
            remove(model)
            for foreign in (rows, cache):
                with self.assertRaisesRegex(REFUSED, "apply"):
                    model(IDS[:, :1], past_key_values=foreign)

    def test_layers_with_a_config_of_their_own_are_served(self):
        expected = answer(model_with())
        model = copy.deepcopy(small.random_model())
        model.model.layers[1] = copy.deepcopy(model.model.layers[1])
        model.model.config = copy.deepcopy(model.config)
        apply(model, small.random_bundle())
        self.assertEqual(answer(model), expected)
        self.assertEqual({m.config._attn_implementation for m in remove(model).modules() if hasattr(m, "config")},
                         {"sdpa"})

    def test_attention_that_does_not_reach_the_cache_is_refused(self):
        class Own(type(small.random_model().model.layers[0].self_attn)):
            """Calls SDPA itself, as attention written for one model does."""

            def forward(self, hidden_states, *args, **kwargs):
                q, k, v = (project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                           for project in (self.q_proj, self.k_proj, self.v_proj))
                k, v = kwargs[CACHE].update(k, v, self.layer_idx)
                o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                return self.o_proj(o.transpose(1, 2).flatten(2)), None

        def own(model):
            model.model.layers[1].self_attn.__class__ = Own

        def replaced(model):
            model.model.layers[1] = copy.deepcopy(small.random_model().model.layers[1])

        def twice(model):
            model.model.layers[1] = model.model.layers[0]

        for change in (own, replaced, twice):
            for prompts in ("exact", "int2"):
                model = model_with(prompts=prompts)
                change(model)
                with self.subTest(change.__name__, prompts=prompts), self.assertRaisesRegex(
                        REFUSED, "attention of layer [01] came here [02] times"):
                    answer(model)
        with torch.no_grad(), self.assertRaisesRegex(REFUSED, "attention of layer 0 came here 2 times"):
            model(IDS)

    def test_another_scale_of_logits_behind_apply_is_refused(self):
        for prompts in ("exact", "int2"):
            model = model_with()
            model.model.layers[1].self_attn.scaling *= 1.5
            with self.assertRaisesRegex(REFUSED, "logits times 0.265165 in place of 1 / sqrt"), torch.no_grad():
                model(IDS)
            with self.assertRaisesRegex(REFUSED, "set behind apply"):
                answer(model)

    def test_layers_of_two_models_are_refused(self):
        one, other = model_with(), copy.deepcopy(small.random_model())
        other.model = one.model
        with self.assertRaisesRegex(REFUSED, "layers that another model behind apply"):
            apply(other, small.random_bundle())

    def test_wrong_kinds_of_arguments_are_named(self):
        model, bundle = model_with(), small.random_bundle()
        for error, text, call in (
                (TypeError, "found a str.*from_pretrained", lambda: apply("folder", bundle)),
                (oscar_int2.BundleMismatchError, "with its head", lambda: apply(model.model, bundle)),
                (ValueError, "max_tokens of apply.* is '100'", lambda: apply(model, bundle, max_tokens="100")),
                (ValueError, "demote_block of apply.* is 0", lambda: apply(model, bundle, demote_block=0)),
                (TypeError, "takes a model first, found 1", lambda: OscarCache(1, model, 100)),
                (ValueError, "max_tokens of an OscarCache is 0", lambda: OscarCache(model, 1, 0)),
                (REFUSED, "remove.model. first for others", lambda: answer(model, num_beams=2))):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                call()
        offloaded = copy.deepcopy(small.random_model()).to("meta")
        with self.assertRaisesRegex(REFUSED, "offloaded"):
            apply(offloaded, bundle)
        with self.assertRaisesRegex(REFUSED, "offloaded behind"):
            answer(apply(copy.deepcopy(small.random_model()), bundle).to("meta"))


if __name__ == "__main__":
    unittest.main()
