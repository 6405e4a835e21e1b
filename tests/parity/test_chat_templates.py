#!/usr/bin/env python3
"""Chats rendered by `python -m oscar_int2 render` are what transformers' apply_chat_template makes of them.

The published templates are those that the package trl carries to recognise models by; two are our own wording.
"""
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

from jinja2.exceptions import TemplateError, UndefinedError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
PUBLISHED = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
OWN = SOURCE / "tests/golden/chat_templates"
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{SOURCE / 'python'}:{os.environ.get('PYTHONPATH', '')}"}
PIECES = ["Hello", " ", "\n", "\n\n", "<think>", "</think>", "thought", "<tool_response>", "</tool_response>", "é 你好",
          "\u00a0", "\u3000", "\x1c", "\u2028", "{{ x }}", "{% if %}", "'", '"', "\\n", "\t", "\r\n", "<|im_end|>", "😀",
          "\u200b", "\x85"]
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Says what the weather is <now>.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Où?"},
                                                    "days": {"type": "integer"}}, "required": ["city"]}}}]
CALL = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": "", "reasoning_content": "I need the tool.", "tool_calls": [
            {"id": "call00001", "type": "function",
             "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}]},
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "{\"sky\": \"grey\"}"},
        {"role": "assistant", "content": "Grey.", "reasoning_content": "The tool says so."}]
SAY = {"role": "assistant", "content": "r"}
THOUGHT = [{"role": "user", "content": "1 + 1?"},
           {"role": "assistant", "content": "2", "reasoning_content": "Count."},
           {"role": "user", "content": "And 2 + 2?"},
           {"role": "assistant", "content": "<think>\nTwice that.\n</think>\n\n4"}]


def render(template, rows, name="chats.jsonl", packed=None, environment=ENVIRONMENT):
    """The answers to rows of a file, in order."""
    texts = {"default": template} if isinstance(template, str) else template
    content = packed if packed is not None else "".join(json.dumps(row) + "\n" for row in rows).encode()
    request = json.dumps({"file": name, "templates": texts, "special_tokens": TOKENS}).encode() + b"\n"
    result = subprocess.run([sys.executable, "-m", "oscar_int2", "render"], input=request + content, capture_output=True,
                            env=environment, check=False)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert answers and answers[-1] == {"end": len(answers) - 1}, (answers[-1:], result.stderr.decode())
    return answers[:-1]


def with_arguments_as_text(messages):
    return [m | {"tool_calls": [c | {"function": c["function"] | {
        "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}} for c in m["tool_calls"]]}
            if "tool_calls" in m else m for m in messages]


def conversations(seed, count):
    """Random turns of text in many orders."""
    rng = random.Random(seed)

    def content(role):
        kind = rng.randrange(5)
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 6)))
        if role == "assistant" and kind < 2:
            return f"<think>{text}</think>\n\n" + "".join(rng.choice(PIECES) for _ in range(3))
        return f"<tool_response>{text}</tool_response>" if role == "user" and kind == 0 else text
    for _ in range(count):
        roles = ["system"] if rng.random() < 0.4 else []
        for _ in range(rng.randint(0 if roles else 1, 3)):
            roles += rng.choice([["user", "assistant"], ["user", "assistant", "user", "assistant"], ["user"], ["system"]])
        yield [{"role": role, "content": content(role)} for role in roles]


class Published(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
        cls.templates = {path.stem: path.read_text() for path in sorted(PUBLISHED.glob("*.jinja"))}
        cls.templates |= {f"own {path.stem}": path.read_text() for path in sorted(OWN.glob("*.jinja"))}

    def expected(self, template, messages, **more):
        """transformers' text; None where the template refuses the conversation."""
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **more)
        except (TemplateError, UndefinedError, TypeError, KeyError, ValueError):
            return None

    def takes_parts_only(self, template):
        text = self.expected(template, [{"role": "user", "content": "a probing word"}])
        parts = self.expected(template, [{"role": "user", "content": [{"type": "text", "text": "a probing word"}]}])
        return "a probing word" not in (text or "") and "a probing word" in (parts or "")

    def compare(self, name, rows):
        """Counts rows that both render, all of them equally."""
        template, rendered = self.templates[name], 0
        parts_only = self.takes_parts_only(template)
        for row, answer in zip(rows, render(template, rows), strict=True):
            messages, settings = row["messages"], row.get("chat_template_kwargs", {})
            answered = any(m["role"] == "assistant" and (m["content"].strip() or "tool_calls" in m) for m in messages)
            if not answered and not settings.get("add_generation_prompt"):
                self.assertIn("error", answer, f"{name}: {row}")
                continue
            if parts_only:
                messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            more = {"tools": row.get("tools"), **settings}
            expected = self.expected(template, messages, **more)
            if expected is None and row.get("tools"):  # a template that puts arguments together as text
                expected = self.expected(template, with_arguments_as_text(messages), **more)
            self.assertEqual(answer.get("text"), expected, f"{name}: {row}: {answer.get('error')}")
            rendered += expected is not None
        return rendered

    def test_every_published_template_writes_random_conversations_alike(self):
        self.assertGreaterEqual(len(self.templates), 12)
        for name in self.templates:
            with self.subTest(name):
                rows = [{"messages": messages} for messages in conversations(name, 60)]
                rows += [{"messages": row["messages"], "chat_template_kwargs": {"add_generation_prompt": True}}
                         for row in rows[:10]]
                self.assertGreater(self.compare(name, rows), 5)

    def test_tools_and_thinking_are_written_alike(self):
        with_tools = 0
        for name in self.templates:
            with self.subTest(name):
                rows = [{"messages": THOUGHT}, {"messages": THOUGHT, "chat_template_kwargs": {"enable_thinking": False}}]
                if not self.takes_parts_only(self.templates[name]):
                    rows += [{"messages": CALL, "tools": TOOLS}, {"messages": CALL[:3], "tools": TOOLS}]
                self.compare(name, rows)
                text = self.expected(self.templates[name], CALL, tools=TOOLS)
                with_tools += text is not None and "Köln" in text and "get_weather" in text
        self.assertGreaterEqual(with_tools, 12)


class Forms(unittest.TestCase):
    """What people's files hold, by templates that use one feature each."""
    PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    STRING_ONLY = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    PARTS_ONLY = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    CALLS = ("{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
             "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}"
             "{% endfor %}")
    CALLS_AS_TEXT = ("{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}"
                     "{{ c.function.name + ': ' + c.function.arguments }}{% endfor %}{% endfor %}")

    def text(self, template, row, **more):
        answer, = render(template, [row], **more)
        self.assertNotIn("error", answer)
        return answer["text"]

    def error(self, template, row):
        answer, = render(template, [row])
        self.assertIn("error", answer)
        return answer["error"]

    def test_parts_of_text_are_joined_where_the_template_takes_text(self):
        row = {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
        self.assertEqual(self.text(self.PLAIN, row), "[assistant]a\nb")
        self.assertEqual(self.text(self.STRING_ONLY, row), "[assistant]a\nb")
        self.assertEqual(self.text(self.PARTS_ONLY, row), "[assistant]ab")
        text = {"messages": [{"role": "assistant", "content": "ab"}]}
        self.assertEqual(self.text(self.PARTS_ONLY, text), "[assistant]ab")
        image = {"messages": [{"role": "user", "content": [{"type": "image", "image": None}]}, SAY]}
        self.assertIn("a part that is no text (image)", self.error(self.PARTS_ONLY, image))

    def test_arguments_as_json_text_become_objects(self):
        for arguments in ({"city": "Köln"}, '{"city": "Köln"}'):
            call = {"function": {"name": "get", "arguments": arguments}, "id": None}
            row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
            self.assertEqual(self.text(self.CALLS, row), "[assistant]get<city>Köln")
            self.assertEqual(self.text(self.CALLS_AS_TEXT, row), '[assistant]get: {"city": "Köln"}')
        for call in ({"function": {"name": "get", "parameters": {"city": "Köln"}}}, {"name": "get", "parameters": '{"city": "Köln"}'},
                     {"name": "get", "parameters": {"city": "Köln"}, "arguments": {"city": "Köln"}}):
            said = {"from": "function_call", "value": json.dumps(call)}
            for form in ({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}, {"conversations": [said]}):
                template = self.CALLS if "function" in call else self.CALLS.replace("c.function", "(c.function or c)")
                self.assertEqual(self.text(template, form), "[assistant]get<city>Köln")
        self.assertEqual(self.text(self.CALLS, {"conversations": [{"from": "function_call", "value": '{"name": "now"}'}]}), "[assistant]now")
        for call, words in (({"action": "search", "action_input": "weather"}, "no 'name'; it has 'action', 'action_input'"),
                            ({"function": {"name": "", "arguments": {}}}, "no 'name'"), ({"tool": "add", "args": {"a": 1}}, "no 'name'"),
                            ({"name": "add", "args": {"a": 1}}, "no 'arguments'; it has 'name', 'args'"),
                            ({"name": "add", "arguments": {"a": 1}, "parameters": {"a": 2}}, "other 'parameters' than 'arguments'")):
            self.assertIn(words, self.error(self.CALLS, {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}))
        row["messages"][0]["tool_calls"][0]["function"]["arguments"] = "{city"
        self.assertIn("the arguments of a tool call are no JSON", self.error(self.CALLS, row))

    def test_null_columns_count_as_absent(self):
        messages = [{"role": "assistant", "content": "q", "tool_calls": None, "name": None}]
        strict = "{% for m in messages %}{% if m.tool_calls is defined %}calls{% endif %}{{ m.content }}{% endfor %}"
        self.assertEqual(self.text(strict, {"text": None, "messages": messages, "tools": None}), "q")
        self.assertEqual(render("", [{"text": "t", "messages": None, "prompt": None}])[0]["text"], "t")

    def test_sharegpt_alpaca_and_prompts(self):
        turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]
        for row in ({"id": "0", "conversations": turns}, {"conversations": json.dumps(turns)},
                    {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
                    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "r"}]},
                    {"instruction": "q", "input": "", "output": "r"}, {"messages": turns}):
            self.assertEqual(self.text(self.PLAIN, row), "[user]q[assistant]r", row)
        self.assertEqual(self.text(self.PLAIN, {"conversations": turns, "system": "s"}), "[system]s[user]q[assistant]r")
        self.assertEqual(self.text(self.PLAIN, {"instruction": "i", "input": "j", "output": "o", "system": "s",
                                                "history": [["a", "b"]]}),
                         "[system]s[user]a[assistant]b[user]i\nj[assistant]o")
        call = {"conversations": [{"from": "function_call", "value": '{"name": "get", "arguments": {"a": 1}}'},
                                  {"from": "observation", "value": "seen"}]}
        self.assertEqual(self.text(self.CALLS, call), "[assistant]get<a>1[tool]seen")
        answer, = render({}, [{"instruction": "i", "output": "o"}])
        self.assertEqual((answer["text"], answer["chat"]), ("i\no", False))
        answer, = render({}, [{"prompt": "p", "completion": "c"}])
        self.assertEqual((answer["text"], answer["chat"]), ("pc", False))

    def test_other_columns_of_questions_and_answers_are_read(self):
        ask, say = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}
        shared, bad = {"from": "gpt", "value": "r"}, {"from": "gpt", "value": "bad"}
        for row in ({"instruction": "q", "context": "", "response": "r", "category": "open"},  # Dolly
                    {"instruction": "q", "chosen": "r", "rejected": "bad"}, {"question": "q", "answer": "r"},
                    {"query": "q", "response": "r"}, {"problem": "q", "solution": "r", "answer": "r"}, {"input": "q", "output": "r"},
                    {"prompt": "q", "response": "r"}, {"prompt": [ask], "completion": "r"}, {"prompt": "q", "completion": [say]},
                    {"prompt": [ask], "chosen": [say], "rejected": [ask]}, {"prompt": "q", "chosen": [ask, say], "rejected": [ask]},
                    {"prompt": [ask], "chosen": [ask, say]}, {"chosen": [ask, say], "rejected": [ask]},
                    {"conversations": [{"from": "human", "value": "q"}], "chosen": shared, "rejected": bad},
                    {"messages": [ask], "response": "r"}, {"input": [ask], "output": "r"},
                    {"prompt": "Below is q. Answer: r", "instruction": "q", "output": "r"},
                    {"text": "Below is q. Answer: r", "instruction": "q", "output": "r"}):
            self.assertEqual(self.text(self.PLAIN, row), "[user]q[assistant]r", row)
        self.assertEqual(self.text(self.PLAIN, {"instruction": "i", "context": "j", "response": "o"}), "[user]i\nj[assistant]o")
        for row in ({"system": "s", "messages": [ask, say]}, {"system": "s", "prompt": [ask], "completion": [say]},
                    {"system_prompt": "s", "question": "q", "response": "r"}, {"system": "s", "prompt": "q", "completion": "r"}):
            self.assertEqual(self.text(self.PLAIN, row), "[system]s[user]q[assistant]r", row)
        for row in ({"prompt": "p", "chosen": "c", "rejected": "bad"}, {"prompt": "p", "chosen": "pc", "rejected": "bad"},
                    {"chosen": "pc", "rejected": "bad"}, {"text": "pc", "question": "p", "answer": "c"}, {"text": "pc", "question": "other"}):
            self.assertEqual(self.text(self.PLAIN, row), "pc", row)
        self.assertEqual(render({}, [{"question": "q", "answer": "r"}])[0]["text"], "q\nr")

    def test_content_alone_is_a_text(self):
        for row in ({"content": "t"}, {"content": "t", "url": "u", "title": "a title"}, {"content": "t", "text": None}):
            self.assertEqual(self.text(self.PLAIN, row), "t", row)
        self.assertEqual(self.text(self.PLAIN, {"content": "the text", "text": "the text\n"}), "the text\n")
        self.assertIn("'text' and 'content' say different things", self.error(self.PLAIN, {"content": "other", "text": "t"}))
        for row, word in (({"content": "t", "role": "user"}, "no 'messages'"), ({"content": "t", "answer": "r"}, "no 'messages'"),
                          ({"content": 5}, "'content' is not text")):
            self.assertIn(word, self.error(self.PLAIN, row), row)

    def test_messages_may_say_value_and_call_as_openai_once_did(self):
        turns = [{"role": "human", "value": "q"}, {"from": "gpt", "content": "r"}]
        self.assertEqual(self.text(self.PLAIN, {"messages": turns}), "[user]q[assistant]r")
        call = {"name": "get", "arguments": '{"a": 1}'}
        messages = [{"role": "assistant", "content": None, "function_call": call}, {"role": "function", "name": "get", "content": "seen"}]
        self.assertEqual(self.text(self.CALLS, {"messages": messages}), "[assistant]get<a>1[tool]seen")

    def test_no_half_of_a_row_is_a_document(self):
        ask, say = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}
        for row, word in (
                ({"instruction": "q", "input": ""}, "no answer"), ({"instruction": "q", "output": ""}, "no answer"),
                ({"question": "q", "answers": {"text": ["r"]}}, "no answer"), ({"question": "q", "answer": 5}, "'answer' is not text"),
                ({"question": "q", "choices": ["a", "b"], "answer": "b"}, "'choices' beside a question"),
                ({"prompt": [ask]}, "'prompt' needs 'completion'"), ({"prompt": "q", "rejected": "r"}, "'prompt' needs 'completion'"),
                ({"prompt": [ask], "chosen": [{"role": "user", "content": "another"}, say]}, "begins otherwise"),
                ({"prompt": [ask], "completion": [ask]}, "'completion' holds no answer"),
                ({"prompt": [ask], "completion": [{"role": "assistant", "content": " "}]}, "'completion' holds no answer"),
                ({"messages": [ask]}, "'messages' holds no answer"),
                ({"messages": [ask, {"role": "assistant", "content": ""}]}, "'messages' holds no answer"),
                ({"messages": [{"role": "system", "content": "s"}, ask, {"role": "tool", "content": "r"}]}, "holds no answer"),
                ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "\n"}]}, "'conversations' holds no answer"),
                ({"chosen": [say]}, "no question"),
                ({"title": "t", "chosen": "r"}, "'text' or 'content'; the row has 'title', 'chosen'"),
                ({"input": "t", "target": "r"}, "no answer: none of 'output', 'response', 'completion', 'chosen', 'solution', 'answer'; "
                                                "the row has 'input', 'target'"),
                ({"instruction": "q", "output": "r", "question": "another"}, "'instruction' and 'question' say different things"),
                ({"question": "q", "answer": "r", "response": "s"}, "say different things"),
                ({"prompt": "another", "instruction": "q", "output": "r"}, "say different things"),
                ({"text": "a passage", "question": "q", "answer": "r"}, "'text' does not hold"),
                ({"system": "s", "messages": [{"role": "system", "content": "t"}, ask, say]}, "say different things"),
                ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt"}]}, "message 2 has no content"),
                ({"messages": [ask, {"role": "assistant", "content": None}]}, "message 2 has no content"),
                ({"messages": [ask, {"role": "assistant", "text": "r"}]}, "message 2 has no content"),
                ({"messages": [ask, {"role": "assistant", "content": "r", "value": "s"}]}, "'content' and 'value' differ"),
                ({"messages": [ask, {"role": "assistant", "content": None, "function_call": "get"}]}, "no JSON")):
            self.assertIn(word, self.error(self.PLAIN, row), row)
        passed_by = "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
        self.assertEqual(self.text(passed_by, {"messages": [ask, say]}), "qr")
        self.assertIn("leaves out message 2, of role 'expert'",
                      self.error(passed_by, {"messages": [ask, {"role": "expert", "content": "what it says"}, say]}))
        for said in ("q", "r", "x", [{"type": "text", "text": "q"}]):  # what stands in the text by chance
            self.assertIn("leaves out message 2, of role 'expert'",
                          self.error("x" + passed_by, {"messages": [ask, {"role": "expert", "content": said}, say]}))
            self.assertEqual(self.text(self.PLAIN, {"messages": [ask, {"role": "expert", "content": said}, say]}),
                             f"[user]q[expert]{said if isinstance(said, str) else 'q'}[assistant]r")
        picky = "{% for m in messages %}{% if m.content|length > 9 %}{{ raise_exception('long') }}{% endif %}{{ m.content }}{% endfor %}"
        self.assertEqual(self.text(picky, {"messages": [ask, {"role": "expert", "content": "ok"}, say]}), "qokr")

    def test_tools_name_their_template_and_may_be_text(self):
        texts = {"default": "no tools", "tool_use": "{{ tools | map(attribute='function.name') | join(' ') }}"}
        messages = [SAY]
        for column in ({"tools": TOOLS}, {"tools": json.dumps(TOOLS)}, {"functions": [TOOLS[0]["function"]]}):
            self.assertEqual(self.text(texts, {"messages": messages, **column}), "get_weather")
        self.assertEqual(self.text(texts, {"messages": messages, "tools": []}), "no tools")

    def test_what_templates_may_call(self):
        template = ("{% generation %}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
                    "{% endgeneration %}\n{% if true %}\n  {{ {'b': 'é<', 'a': 1} | tojson }}\n{% endif %}"
                    "{{ strftime_now('%d %b %Y') }}{{ bos_token }}{{ nothing }}")
        day = ENVIRONMENT | {"SOURCE_DATE_EPOCH": "1700000000"}
        self.assertEqual(self.text(template, {"messages": [SAY]}, environment=day),
                         '01  {"b": "é<", "a": 1}\n14 Nov 2023<bos>')

    def test_templates_are_kept_in_their_sandbox(self):
        for template in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
                         "{{ cycler.__init__.__globals__.os.getcwd() }}", "{% for a in range(10 ** 9) %}{% endfor %}",
                         "{{ 'a' * 10 ** 12 }}", "{% include '/etc/passwd' %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):
            self.assertIn("chat template", self.error(template, {"messages": [SAY]}))

    def test_bad_rows_are_named_and_the_others_are_read(self):
        lines = [b"\xef\xbb\xbf" + b'{"text": "first"}', b"", b"{", b"[1]", b'{"title": 1}', b'{"prompt": "a"}',
                 b'{"text": 5}', b'{"messages": 5}', b'{"messages": [{"content": "x"}]}', b'{"text": "\xff"}',
                 b'{"messages": [{"role": "user", "content": 5}]}', b'{"text": "\\ud800"}', b'{"text": "last"}']
        answers = render(self.PLAIN, [], packed=b"\n".join(lines))
        self.assertEqual([a["at"] for a in answers], [1, *range(3, 14)])
        self.assertEqual([a["at"] for a in answers if "text" in a], [1, 13])
        for answer, word in zip(answers[1:], ("no valid JSON", "no JSON object", "no 'messages'", "needs 'completion'",
                                              "'text' is not text", "'messages' is no list", "message 1 has no role",
                                              "no valid JSON", "neither text nor parts", "surrogates")):
            self.assertIn(word, answer["error"])

    def test_lists_and_packed_files(self):
        import gzip
        rows = [{"text": "a"}, {"text": "b"}]
        whole = json.dumps(rows).encode()
        for name, content in (("a.json", whole), ("a.json", b"\xef\xbb\xbf" + whole), ("a.json", json.dumps({"data": rows}).encode()),
                              ("a.json", b'{"text": "a"}\n{"text": "b"}'), ("a.JSONL.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"}')),
                              ("a.json.gz", gzip.compress(whole))):
            self.assertEqual([a["text"] for a in render({}, [], name, packed=content)], ["a", "b"], name)
        self.assertEqual(render({}, [], "a.txt.gz", packed=gzip.compress(b"a text"))[0]["text"], "a text")

    def fatal(self, name, content, environment=None, templates=()):
        request = json.dumps({"file": name, "templates": dict(templates), "special_tokens": {}}).encode() + b"\n"
        result = subprocess.run([sys.executable, "-m", "oscar_int2", "render"], input=request + content, check=False,
                                capture_output=True, env=environment or ENVIRONMENT)
        self.assertEqual(result.returncode, 1, result.stderr)
        return json.loads(result.stdout.splitlines()[-1])

    def test_files_that_cannot_be_read_are_named(self):
        import gzip
        utf16 = '{"text": "a"}'.encode("utf-16")
        for name, content, word in (("a.jsonl", utf16, "the text is UTF-16, expected UTF-8; write it anew: iconv -f UTF-16 -t UTF-8 a.jsonl"),
                                    ("a.txt", utf16, "> a-utf8.txt"), ("a.json", utf16[2:], "the text is UTF-16LE"),
                                    ("a.json", b"[1, ", "no valid JSON"), ("a.json", b'[{"text": "\xe9"}]', "iconv -f LATIN1 -t UTF-8 a.json > a-utf8.json"),
                                    ("b.txt", b"\xe9", "iconv -f LATIN1"), ("a.jsonl", b"\x1f\x8b\x08", "mv a.jsonl a.jsonl.gz"),
                                    ("a.jsonl", b'[{"messages": []},\n{}]\n', "mv a.jsonl a.json"),
                                    ("a.jsonl.gz", gzip.compress(b' [{"text": "a"}]'), "mv a.jsonl.gz a.json.gz"), ("a.json", b"5", "neither a list"),
                                    ("a.jsonl.gz", b"no gzip", "not a sound .gz file"), ("a.csv", b"", "expected .jsonl")):
            self.assertIn(word, self.fatal(name, content)["fatal"])

    def test_a_cut_packed_file_is_no_corpus_and_one_of_several_parts_is_whole(self):
        try:
            import zstandard
        except ImportError as error:
            self.skipTest(f"{error.name} is not installed")
        import gzip
        text = "".join(f"line {i} {i * i % 977}\n" for i in range(200000))
        halves = text[:1000].encode(), text[1000:].encode()
        skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"  # a frame that holds nothing to read
        checked = zstandard.ZstdCompressor(write_checksum=True)
        for suffix, pack, between in ((".gz", gzip.compress, b""), (".zst", checked.compress, skipped)):
            parts = pack(halves[0]), pack(halves[1])
            whole = parts[0] + between + parts[1]
            self.assertEqual(render({}, [], "a.txt" + suffix, packed=whole)[0]["text"], text)
            for cut in (0, 5, len(parts[0]) // 2, len(parts[0]) - 1, len(parts[0]) + len(between) + 3, len(whole) // 2, len(whole) - 1):
                self.assertIn(f"not a sound {suffix} file", self.fatal("a.txt" + suffix, whole[:cut])["fatal"], cut)
            self.assertIn(f"not a sound {suffix} file", self.fatal("a.txt" + suffix, whole + b"more")["fatal"])
            broken = bytearray(parts[1])
            broken[len(broken) // 2] ^= 255
            self.assertIn(f"not a sound {suffix} file", self.fatal("a.txt" + suffix, bytes(broken))["fatal"])

    def test_a_missing_package_is_named_with_what_installs_it(self):
        with tempfile.TemporaryDirectory() as folder:
            for package in ("pyarrow", "zstandard", "jinja2"):
                pathlib.Path(folder, f"{package}.py").write_text("raise ImportError")
            blocked = ENVIRONMENT | {"PYTHONPATH": f"{folder}:{ENVIRONMENT['PYTHONPATH']}"}
            chat = b'{"messages": [{"role": "assistant", "content": "r"}]}'
            said = [(package, self.fatal(name, chat, blocked, {"default": "x"})) for name, package in (
                ("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard"), ("a.jsonl", "jinja2"))]
            self.assertEqual(render("x", [{"text": "a"}], environment=blocked)[0]["text"], "a")
        for package, said in said:
            self.assertIn(f"the Python package {package} is missing", said["fatal"])
            self.assertIn(f"-m pip install {package}", said["hint"])

    def test_parquet_and_zstandard(self):
        try:
            import pyarrow
            import pyarrow.parquet
            import zstandard
        except ImportError as error:
            self.skipTest(f"{error.name} is not installed")
        import io
        rows = [{"messages": [SAY], "text": None}, {"messages": None, "text": "t"}]
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        self.assertEqual([a["text"] for a in render(self.PLAIN, [], "a.parquet", packed=file.getvalue())], ["[assistant]r", "t"])
        lines = zstandard.compress(b'{"text": "a"}\n{"text": "b"}')
        self.assertEqual([a["text"] for a in render({}, [], "a.jsonl.zst", packed=lines)], ["a", "b"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
