"""Which prompts there are, how they are made and who scores their answers."""
import functools
import random
from typing import Callable, NamedTuple

from . import coding, long_answers, retrieval, sessions

# The longest prompt and answer that fit into the model's 32,768 positions.
POSITIONS = 32768


class Kind(NamedTuple):
    """Prompts of one row of the tables."""

    task: str         # for --only
    name: str         # in tables
    count: int        # units: prompts, or sessions of sessions.TURNS prompts
    length: int       # tokens of a prompt; 0: as long as it is. Of long answers: their mean length
    score: str        # in SCORERS
    make: Callable    # (tokens, texts, generator, index, length) -> prompt or list of prompts


SCORERS = {
    "human_eval": coding.score_human_eval,
    "call": coding.score_call,
    "edit": coding.score_edit,
    "listed": retrieval.score_listed,
    "code_quote": retrieval.score_code_quote,
    "text_quote": retrieval.score_text_quote,
    "session": sessions.score_session,
    "lines": long_answers.score_lines,
    "program": long_answers.score_program,
}


class Texts(NamedTuple):
    """What prompts are made from: the problems of HumanEval, and haystacks of held-out code and text."""

    problems: list
    code: object
    text: object


def _human_eval(tokens, texts, generator, index, back):
    return coding.human_eval_prompt(tokens, texts.problems[index], back, texts.code, generator) | {"unit": texts.problems[index]["task_id"]}


def _of_code(make):
    return lambda tokens, texts, generator, index, length: make(tokens, length, texts.code, generator)


def _of_text(make):
    return lambda tokens, texts, generator, index, length: make(tokens, length, texts.text, generator)


def _without_haystack(make):
    return lambda tokens, texts, generator, index, length: make(tokens, length, generator)


def _long(make):
    """The right answer has .4 to 1.6 times the mean length: 3,600 to 14,400 tokens with the default plan."""
    return lambda tokens, texts, generator, index, length: make(tokens, round(length * (0.4 + 1.2 * (index % 7) / 6)), generator)


def _session(tokens, texts, generator, index, length):
    return sessions.session_prompts(generator)


def default_plan(problems: int = 164) -> list:
    """Some 3,160 prompts."""
    thousand = 1000
    plan = [Kind("humaneval", f"HumanEval, {back}K tokens back" if back else "HumanEval", problems, back * thousand, "human_eval",
                 _human_eval) for back in (0, 2, 8, 24)]
    plan += [Kind("calls", "call of a function out of 24K of code", 120, 24 * thousand, "call", _of_code(coding.call_prompt)),
             Kind("edits", "edit of a file of 8K", 160, 8 * thousand, "edit", _of_code(coding.edit_prompt))]
    needles = {"one of 8 keys": _of_text(functools.partial(retrieval.keys_prompt, keys=8)),
               "one of 32 keys": _of_text(functools.partial(retrieval.keys_prompt, keys=32)),
               "four values": _of_text(retrieval.values_prompt), "word frequency": _without_haystack(retrieval.words_prompt),
               "variables": _of_text(retrieval.variables_prompt)}
    plan += [Kind("needles", f"{name}, {length}K", count, length * thousand, "listed", make) for name, make in needles.items()
             for length, count in {4: 110, 8: 60, 16: 32, 30: 18}.items()]
    for length, count in {4: 60, 16: 40}.items():
        plan += [Kind("quotes", f"quote of code, {length}K", count, length * thousand, "code_quote", _of_code(retrieval.code_quote_prompt)),
                 Kind("quotes", f"quote of text, {length}K", count, length * thousand, "text_quote", _of_text(retrieval.text_quote_prompt))]
    plan += [Kind("agents", f"tool calls, {sessions.TURNS} turns", 44, 0, "session", _session)]
    plan += [Kind("long", f"long {name}", count, 9 * thousand, score, _long(make)) for name, count, score, make in (
        ("table", 14, "lines", long_answers.table_prompt), ("list", 14, "lines", long_answers.list_prompt),
        ("program", 14, "program", long_answers.program_prompt))]
    return plan


def scaled(kind: Kind, scale: float, problems: int) -> int:
    """Prompts of a kind, one at least; HumanEval has so many problems and no more."""
    count = max(1, round(scale * kind.count))
    return min(count, problems) if kind.task == "humaneval" else count


def make_prompts(plan: list, tokens, texts: Texts, said=lambda words: None) -> list:
    """All prompts; any beginning of the list has about the same share of each kind."""
    placed = []
    for number, kind in enumerate(plan):
        order = list(range(kind.count))
        random.Random(f"order of {kind.task}").shuffle(order)  # the same problems come first at every distance
        for place, index in enumerate(order):
            generator = random.Random(f"{kind.name} {index}")
            made = kind.make(tokens, texts, generator, index, kind.length)
            made = made if isinstance(made, list) else [made]
            for turn, prompt in enumerate(made):
                name = f"{kind.name}/{index}" + (f"/{turn + 1}" if len(made) > 1 else "")
                prompt = {"id": name, "task": kind.task, "kind": kind.name, "unit": f"{kind.name}/{index}", "score": kind.score,
                          "seed": generator.randrange(1 << 30),
                          "tokens": len(tokens.chat(prompt["messages"], prompt.get("tools")))} | prompt
                if prompt["tokens"] + prompt["max_tokens"] > POSITIONS:
                    raise ValueError(f"{name}: {prompt['tokens']} + {prompt['max_tokens']} tokens, more than {POSITIONS}")
                placed.append(((place + (turn + 0.5) / len(made)) / kind.count, number, prompt))
        said(f"{kind.name}: {kind.count}")
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]
