"""Long answers that can be checked line by line: tables and lists by rule, programs of many functions."""
import random
import re

from . import rules, sandbox
from .texts import code_blocks, user

ANSWER_LIMIT = 16384  # tokens


def table_prompt(tokens, length: int, generator: random.Random) -> dict:
    """Rows n, three columns by rule. `length` tokens are those of the right answer."""
    first = generator.randint(100, 900)
    factor, shift, divisor, other = generator.randint(3, 19), generator.randint(10, 99), generator.randint(7, 23), generator.randint(31, 89)

    def row(n):
        return f"{n} | {factor * n + shift} | {n % divisor} | {n + other}"

    count = max(1, length // tokens.count(row(first + 500) + "\n"))
    rows = [row(first + i) for i in range(count)]
    return {"messages": user(
        f"Write a table of {count} rows, for n = {first} to n = {first + count - 1}. A row has four columns, separated by ' | ': n; "
        f"{factor} times n plus {shift}; the remainder of n divided by {divisor}; n plus {other}. "
        f"The first two rows are:\n{rows[0]}\n{rows[1 % count]}\n"
        "Write all rows, one a line, from the first to the last. Leave none out, shorten nothing, and write nothing else. No code."),
        "max_tokens": ANSWER_LIMIT, "expected": rows}


def list_prompt(tokens, length: int, generator: random.Random) -> dict:
    """Each line follows from the one before: one error makes all that follows wrong, unless the model reads on from the right rule."""
    word = generator.choice(rules.WORDS)
    step, modulus, x = generator.randint(11, 89), generator.randint(501, 997), generator.randint(1, 400)
    others = generator.sample(rules.WORDS, 5)
    count = max(2, length // tokens.count(f"500. {word} 512 {others[0]}\n"))
    lines = []
    for i in range(count):
        lines.append(f"{i + 1}. {word} {x} {others[i % 5]}")
        x = (x + step) % modulus
    return {"messages": user(
        f"Write a list of {count} lines. Each line has its number with a dot, the word {word}, a value, and one of the words "
        f"{', '.join(others)}, which take turns in this order. The value of a line is the value of the line before "
        f"plus {step}; when that is {modulus} or more, subtract {modulus}. The list begins:\n" + "\n".join(lines[:3])
        + f"\nWrite all {count} lines from the first to the last. Leave none out, shorten nothing, and write nothing else. No code."),
        "max_tokens": ANSWER_LIMIT, "expected": lines}


def program_prompt(tokens, length: int, generator: random.Random) -> dict:
    """Many small functions, each by a rule in words."""
    made, specification, used = [], [], 0
    while used < length:
        inputs = [generator.randint(1, 60) for _ in range(4)]
        while True:
            rule = rules.steps(generator, 4, ("add", "multiply", "remainder", "cap"))
            if len({rules.apply(rule, x) for x in inputs}) > 1:  # no rule that ends in the same number always
                break
        name = f"f{len(made) + 1:03}_{generator.choice(rules.WORDS)}"
        made.append({"name": name, "cases": [[x, rules.apply(rule, x)] for x in inputs]})
        specification.append(f"{name}(x): {rules.in_words(rule)}.")
        used += tokens.count("\n".join([f"def {name}(x):", *("    " + line for line in rules.statements(rule, "x")), "    return x\n\n"]))
    return {"messages": user(
        f"Write a Python module with the following {len(made)} functions. Each takes a whole number x, changes it step by step, and "
        "returns it. Write each function out with one statement a step, in this order, without comments, helpers, loops or exec. "
        "Leave none out.\n\n"
        + "\n".join(specification) + "\n\nAnswer with one Python code block and nothing else."),
        "max_tokens": ANSWER_LIMIT, "expected": made}


def _bare(line: str) -> str:
    """Without the marks of a Markdown table around it, and with one space where there may be several."""
    return " ".join(re.sub(r"\s*\|\s*", " | ", line.strip().strip("|")).split())


def score_lines(answer: str, expected: list) -> float:
    """Share of the expected lines that are there, and right. A line is told by its first word; the first of each counts."""
    given = {}
    for line in answer.split("\n"):
        line = _bare(line)
        if line:
            given.setdefault(line.split()[0], line)
    return sum(given.get(line.split()[0]) == _bare(line) for line in expected) / len(expected)


def score_program(answer: str, expected: list) -> float:
    """Share of the functions that give the right results. Each is run alone, so that one that is cut off spoils no other."""
    text = "\n".join(code_blocks(answer) or [answer])
    pieces = {}
    for piece in re.split(r"(?m)^(?=def )", text):
        match = re.match(r"def (\w+)\(", piece)
        if match:
            pieces.setdefault(match[1], piece)
    parts = [(pieces.get(function["name"], ""), function["name"], function["cases"]) for function in expected]
    # One process for all: what each gives is counted there, and the process is asked only whether the count is right.
    program = f"""
def right(source, name, cases):
    names = {{}}
    try:
        exec(source, names)
        return all(type(names[name](x)) is int and names[name](x) == result for x, result in cases)
    except Exception:
        return False

RESULT = sum(right(*part) for part in {parts!r})
"""
    return sandbox.counted(program) / len(expected)
