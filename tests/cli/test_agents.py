#!/usr/bin/env python3
"""The benchmark of agents' traffic: sessions grow by what was answered, wait for their turn, and are counted right."""
import os
import pathlib
import random
import sys
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_SOURCE"]) / "benchmarks"))

import bench_agents


class MadeUpEngine:
    """Two requests at a time; a step is a second and a token for each. Knows the prompts that it has read, in blocks of 8."""

    def __init__(self):
        self.clock, self.waiting, self.prompts, self.known, self.most = 0.0, [], {}, set(), 0

    def add_request(self, name, prompt, parameters):
        self.prompts[name] = prompt["prompt_token_ids"]
        self.waiting.append([name, [], parameters])

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def hit(self, ids):
        length = 0
        while length + 8 <= len(ids) and tuple(ids[:length + 8]) in self.known:
            length += 8
        return length

    def step(self):
        self.clock += 1
        self.most = max(self.most, len(self.waiting))
        out = []
        for entry in self.waiting[:2]:
            name, tokens, most = entry[:3]
            if not tokens:
                entry.append(self.hit(self.prompts[name]))
                self.known |= {tuple(self.prompts[name][:end]) for end in range(8, len(self.prompts[name]) + 1, 8)}
            tokens.append(7)
            finished = len(tokens) == most
            given = types.SimpleNamespace(token_ids=list(tokens), finish_reason="length" if finished else None)
            out.append(types.SimpleNamespace(request_id=name, outputs=[given], finished=finished, num_cached_tokens=entry[3]))
        self.waiting = [entry for entry in self.waiting if len(entry[1]) < entry[2]]
        return out


class Agents(unittest.TestCase):
    def setUp(self):
        self.arguments = bench_agents.arguments_of(["--kv", "bf16", "--system", "16", "--first", "32", "--message", "16", "--answer", "3"])
        self.engine = MadeUpEngine()

    def run_sessions(self, count, turns, think=0, **more):
        shared = list(range(2, 18))
        sessions = [bench_agents.Session(f"s{i}", shared, random.Random(i), self.arguments, 1000) for i in range(count)]
        return bench_agents.run(self.engine, sessions, turns, think, 3, now=lambda: self.engine.clock, **more)

    def test_a_prompt_is_all_before_it_with_the_answers(self):
        done = self.run_sessions(3, 3)
        self.assertEqual(sorted(turn.number for turn in done), [1, 1, 1, 2, 2, 2, 3, 3, 3])
        for session in range(3):
            one, two, three = (self.engine.prompts[f"s{session}-{turn}"] for turn in (1, 2, 3))
            self.assertEqual(one[:16], list(range(2, 18)))
            self.assertEqual(two[:len(one) + 3], one + [7] * 3)
            self.assertEqual(three[:len(two) + 3], two + [7] * 3)
            self.assertTrue(16 + 16 <= len(one) <= 16 + 48 and 8 <= len(two) - len(one) - 3 <= 24)

    def test_moments_are_counted_from_when_a_turn_is_sent(self):
        done = self.run_sessions(3, 1)
        # Two run at once for three steps; the third waits for them.
        self.assertEqual([(turn.first - turn.sent, turn.done - turn.sent) for turn in done], [(1, 3), (1, 3), (4, 6)])
        self.assertEqual(self.engine.most, 3)

    def test_hits_are_what_the_engine_says_and_the_summary_adds_them_up(self):
        done = self.run_sessions(2, 2)
        prompts, cached = sum(turn.prompt for turn in done), sum(turn.cached for turn in done)
        self.assertEqual([turn.cached for turn in done if turn.number == 1], [0, 16])
        words = bench_agents.summary(done, 3).split(",")
        self.assertEqual(len(bench_agents.COLUMNS.split(",")) - 4, len(words))
        self.assertEqual(words[:2], [str(prompts), f"{cached / prompts:.3f}"])
        self.assertEqual(float(words[-1]), 3 * 4 / 6)

    def test_what_came_from_host_memory_is_a_share_of_what_was_found(self):
        processor = types.SimpleNamespace(process_outputs=lambda outputs: len(outputs))
        noted = bench_agents.note_host_tokens(types.SimpleNamespace(output_processor=processor))
        outputs = [types.SimpleNamespace(request_id=f"{name}-7f3a", prefill_stats=stats) for name, stats in (
            ("s1-1", types.SimpleNamespace(num_external_cached_tokens=8)), ("s0-1", None))]
        self.assertEqual(processor.process_outputs(outputs), 2)
        self.assertEqual(noted, {"s1-1": 8})
        done = self.run_sessions(2, 1, host_tokens=noted)
        self.assertEqual([(turn.cached, turn.host) for turn in done], [(0, 0), (16, 8)])
        words = dict(zip(bench_agents.COLUMNS.split(",")[4:], bench_agents.summary(done, 3).split(",")))
        self.assertEqual(words["from host memory"], "0.500")
        arguments = bench_agents.arguments_of(["--kv", "bf16", "--offload", "2.5"])
        self.assertEqual(arguments.offload, 2.5)

    def test_an_answer_that_ends_early_ends_the_run(self):
        self.engine.step, step = lambda: [self.stopped(output) for output in step()], self.engine.step
        with self.assertRaisesRegex(RuntimeError, "s0-1 ended by 'error'"):
            self.run_sessions(1, 1)

    @staticmethod
    def stopped(output):
        output.outputs[0].finish_reason, output.finished = "error", True
        return output

    def test_bad_arguments_are_said(self):
        for words in ([], ["--kv", "int3"], ["--kv", "bf16", "--turns", "0"], ["--kv", "bf16", "--offload", "0"]):
            with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
                bench_agents.arguments_of(words)


if __name__ == "__main__":
    unittest.main()
