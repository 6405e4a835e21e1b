#!/usr/bin/env python3
"""Steps that are begun before the tokens of the last one are known (async scheduling), which is vLLM's default on
GPUs. What such a step has computed for a request that has ended meanwhile, vLLM drops."""
import random
import unittest
from types import SimpleNamespace

import vllm_case as case
import random_traffic
import torch
from chunk_reference import Recorder
from overlapped import overlapped
from vllm_case import DRIFT, needs_vllm, vllm

PAGE = 64
SERVED = False  # input in parts, in this vLLM
if vllm:
    from oscar_int2.vllm import versions

    SERVED = versions.streams()


def int2_rows(recorder, tokens):
    """Keys and values [2, tokens, Hkv, d] of so many tokens behind the sink, from pages of a recorded layer."""
    from oscar_int2 import ops

    codec, device = recorder.codec, recorder.pool.device
    rows = torch.zeros(2, 1, tokens, *recorder.steps[0][1].shape[1:], dtype=torch.bfloat16, device=device)
    ops.dequantize_history(codec.recipe, codec.numbers, recorder.pool, recorder.block_table,
                           torch.tensor([tokens], dtype=torch.int32, device=device), *rows)
    return rows[:, 0].float()


def most_apart(one, other):
    """Of rows [2, tokens, Hkv, d] of a first layer: another token's row is about 1.4 apart, and one that comes from a
    product of other sizes differs in a few of its codes."""
    return ((one - other).norm(dim=-1) / other.norm(dim=-1)).amax().item()


def ends_with_a_new_token(engine, length, tokens):
    """(text, the answer to its first `length` tokens), of which the last token comes once alone: it can be a stop."""
    for text in range(len(engine.texts)):
        answer = list(engine.alone(engine.prompt(text, length), tokens).token_ids)
        if answer[-1] not in answer[:-1]:
            return text, answer
    raise AssertionError(f"no text ends an answer of {tokens} tokens with a new one")


class Overlap(case.EngineTest):
    @classmethod
    def setUpClass(cls):
        cls.enterClassContext(overlapped())
        cls.engine = cls.make_engine()
        core = cls.engine.core.engine_core.engine_core
        assert core.async_scheduling and core.batch_queue_size == 2, "steps do not overlap"

    @classmethod
    def make_engine(cls):
        return case.Engine(async_scheduling=True)

    def check(self, prompt, output, bound=DRIFT / 4):
        """An answer's log probabilities are those of transformers' model over the package's cache."""
        ours = case.log_probabilities_in_transformers(prompt, output.token_ids)
        theirs = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        self.assertLess((torch.tensor(ours) - torch.tensor(theirs)).abs().mean(), bound)


@needs_vllm
class Overlapped(Overlap):
    def test_requests_that_stop_while_their_next_step_runs_leave_the_others_as_they_are(self):
        """They stop by a token, which only the worker knows as the next step begins, or are aborted; others take
        their windows and blocks in the step behind that."""
        engine, source, finished, plan, aborted = self.engine, random.Random(3), {}, {}, set()
        with engine.in_chunks(300, of_one=200):
            for number in range(12):
                prompt = (engine.prompt(source.randrange(2), source.randrange(100, 500))
                          + engine.prompt(source.randrange(2, 5), source.randrange(1, 60)))
                # Any of these tokens ends an answer, most of them soon.
                stops = source.sample(range(engine.core.model_config.get_vocab_size()), 1500)
                name = engine.add(prompt, 40, stop_token_ids=stops if number % 3 else [])
                plan[name] = prompt
                for _ in range(source.randrange(6)):
                    engine.step(finished)
                if number % 4 == 3 and name not in finished:
                    engine.core.abort_request([name])
                    aborted.add(name)
            finished |= engine.run()
        self.assertEqual(set(plan) - aborted, set(finished) - aborted)
        ended = [output.finish_reason for output in finished.values()]
        self.assertGreaterEqual(ended.count("stop"), 3, ended)
        self.assertGreaterEqual(len(aborted - set(finished)), 2)
        self.assertGreater(sum(engine.cached[name] > 0 for name in finished), 1)
        for name, output in finished.items():
            self.check(plan[name], output, DRIFT / 2)

    def test_a_page_that_a_dropped_step_has_filled_is_shared_with_the_stop_token_in_it(self):
        engine = self.engine
        text, answer = ends_with_a_new_token(engine, 7 * PAGE - 10, 10)
        prompt = engine.prompt(text, 7 * PAGE - 10)
        engine.forget()
        name = engine.add(prompt, 30, stop_token_ids=answer[-1:])
        self.assertEqual(list(engine.run()[name].token_ids), answer)
        longer = prompt + answer + engine.prompt((text + 1) % 5, 300)
        with Recorder(engine, 0) as recorder:
            name = engine.add(longer, 12)
            output = engine.run()[name]
        self.assertEqual(engine.cached[name], 7 * PAGE)
        self.check(longer, output)
        shared = int2_rows(recorder, 6 * PAGE)
        with Recorder(engine, 0) as recorder:
            engine.alone(longer, 12)
        self.assertLess(most_apart(shared, int2_rows(recorder, 6 * PAGE)), 0.5)

    def test_preempted_requests_begin_again_and_get_the_same_tokens(self):
        engine = self.engine
        with engine.preemptions() as preempted:  # 3 x 11 blocks of 35 at first; 3 x 12 do not fit
            plan = {engine.add(engine.prompt(i, 690), 24): i for i in range(3)}
            finished = engine.run()
        self.assertGreaterEqual(len(preempted), 1)
        for name, i in plan.items():
            self.assertEqual(len(finished[name].token_ids), 24)
            self.check(engine.prompt(i, 690), finished[name])

    def test_running_requests_that_lose_their_cache_begin_again(self):
        """As after a change of weights: all are preempted and resume in the step behind that."""
        engine, finished = self.engine, {}
        plan = {engine.add(engine.prompt(i, 400), 30): i for i in range(3)}
        for _ in range(12):
            engine.step(finished)
        self.assertTrue(engine.core.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True))
        finished |= engine.run()
        for name, i in plan.items():
            self.assertEqual(len(finished[name].token_ids), 30)
            self.check(engine.prompt(i, 400), finished[name])


class Session:
    """A request of an engine whose input comes in parts."""

    def __init__(self, engine, name):
        self.core, self.name = engine.core.engine_core.engine_core, name

    def send(self, ids, tokens=1, stops=(), more=True):
        """The next part, to which `tokens` tokens at most are answered. The last one (more=False) says nothing."""
        from vllm.v1.request import Request

        parameters = vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, stop_token_ids=list(stops))
        parameters.update_from_generation_config({}, None)
        self.core.add_request(Request(self.name, list(ids), parameters, None, resumable=more,
                                      block_hasher=self.core.request_block_hasher))

    def answer(self):
        """Tokens up to the end of an answer."""
        tokens, ended = [], False
        while not ended:
            outputs, _ = self.core.step_fn()
            for output in (o for sent in (outputs or {}).values() for o in sent.outputs if o.request_id == self.name):
                tokens += output.new_token_ids
                ended |= output.finish_reason is not None
        return tokens


@needs_vllm
class Streamed(Overlap):
    """Input in parts. Behind an answer vLLM drops its last token; here a step has filled a page with it before."""

    def setUp(self):
        super().setUp()
        engine = self.engine
        self.text, self.first = ends_with_a_new_token(engine, 7 * PAGE - 10, 10)
        self.prompt = engine.prompt(self.text, 7 * PAGE - 10)
        self.kept, self.stop = self.prompt + self.first[:-1], self.first[-1]
        self.more = engine.prompt((self.text + 1) % 5, 330)
        self.assertNotEqual(self.more[0], self.stop)
        engine.forget()
        self.session = Session(engine, f"session-{self.id()}")

    def end(self):
        self.session.send([0], more=False)
        self.engine.settle()

    def two_turns(self, at_once):
        """The second part is there while the first one is answered, or comes later."""
        self.session.send(self.prompt, 30, [self.stop])
        if at_once:
            self.session.send(self.more, 40)
        self.assertEqual(self.session.answer(), self.first)
        if not at_once:
            self.session.core.step_fn()
            self.session.send(self.more, 40)
        return self.session.answer()

    def test_a_page_with_a_dropped_row_is_written_again(self):
        self.check_turns(at_once=False)

    def test_the_same_where_the_next_part_waits_already(self):
        self.check_turns(at_once=True)

    def check_turns(self, at_once):
        with Recorder(self.engine, 0) as recorder:
            answer = self.two_turns(at_once)
        rows, prompt = int2_rows(recorder, 6 * PAGE), self.kept + self.more
        self.end()
        with Recorder(self.engine, 0) as recorder:
            alone = self.engine.alone(prompt, 40)
        self.assertLess(most_apart(rows, int2_rows(recorder, 6 * PAGE)), 0.5)
        ours, best = (sum(case.log_probabilities_in_transformers(prompt, ids)) / 40
                      for ids in (answer, alone.token_ids))
        self.assertLess(abs(ours - best), DRIFT)

    def test_others_share_such_a_page_with_the_token_that_has_come_and_not_with_the_dropped_one(self):
        engine = self.engine
        self.two_turns(at_once=False)
        for token, tokens in ((self.stop, 6 * PAGE), (self.more[0], 7 * PAGE)):
            prompt = self.kept + [token] + engine.prompt((self.text + 2) % 5, 300)
            name = engine.add(prompt, 12)
            output = engine.run()[name]
            self.assertEqual(engine.cached[name], tokens)
            self.check(prompt, output)
        self.end()


if not SERVED:
    del Streamed  # Refused says that it is not


@needs_vllm
class Refused(unittest.TestCase):
    def test_input_in_parts_is_refused_by_name_where_it_is_not_served(self):
        from oscar_int2 import UnsupportedError
        from oscar_int2.vllm import settings
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.input_processor import InputProcessor

        config = EngineArgs(str(case.MODEL), **case.OPTIONS).create_engine_config()
        processor = object.__new__(InputProcessor)
        processor.vllm_config = config
        if SERVED:
            settings.check_streamed(config)
            config = SimpleNamespace(**{**vars(config), "speculative_config": SimpleNamespace(method="ngram")})
            with self.assertRaisesRegex(UnsupportedError, "streamed input beside drafts"):
                settings.check_streamed(config)
            return
        with self.assertRaisesRegex(UnsupportedError, "streamed input in this version.*0.33"):
            processor.process_inputs("request", {"prompt_token_ids": [1]}, vllm.SamplingParams(), ("generate",),
                                     resumable=True)


@needs_vllm
@unittest.skipIf(case.INTERPRETED, "Triton's interpreter draws no tokens")
class Traffic(unittest.TestCase):
    def test_random_requests_get_their_own_answers_and_leave_nothing_behind(self):
        with overlapped():
            engine = random_traffic.engine_for_traffic(async_scheduling=True)
            # Chance preempts: a round on a GPU, which takes three seconds, once had none.
            found = random_traffic.run(engine, 1, rounds=6 if torch.cuda.is_available() else 1, requests=7)
        self.assertEqual(found["wrong"], [])
        for what in ("preemptions", "aborts", "reloads", *["bad rows"][:case.RUNNER == 1]):
            self.assertGreater(found[what], 0, what)


if __name__ == "__main__":
    unittest.main(verbosity=2)
