"""Small functions and rules made at random, whose right results are known: what edits and long answers are about."""
import random

WORDS = ("harbour", "ledger", "turbine", "orchard", "lantern", "kettle", "meadow", "anvil", "compass", "barrel", "saddle", "chimney",
         "glacier", "thimble", "parcel", "quarry", "rudder", "spindle", "trellis", "violin", "walnut", "beacon", "cellar", "dune",
         "ember", "fjord", "gravel", "hinge", "inkwell", "jetty", "kiln", "lattice", "mortar", "needle", "outpost", "pulley")
VERBS = ("settle", "weigh", "fold", "gauge", "sift", "tally", "trim", "rate", "level", "sort")


def steps(generator: random.Random, count: int, operations=("add", "multiply", "subtract", "remainder", "cap")) -> list:
    """A rule of a number x: [(operation, operand)], no operation twice in a row."""
    rule = []
    while len(rule) < count:
        operation = generator.choice(operations)
        if not rule or rule[-1][0] != operation:
            operand = {"add": (2, 97), "multiply": (2, 9), "subtract": (2, 97), "remainder": (53, 997), "cap": (40, 400)}[operation]
            rule.append((operation, generator.randint(*operand)))
    return rule


WORDING = {"add": "add {0}", "multiply": "multiply by {0}", "subtract": "subtract {0}", 
           "remainder": "take the remainder after division by {0}", "cap": "replace it by {0} if it is larger than {0}"}
STATEMENT = {"add": "{1} += {0}", "multiply": "{1} *= {0}", "subtract": "{1} -= {0}", "remainder": "{1} %= {0}",
             "cap": "{1} = min({1}, {0})"}


def in_words(rule: list) -> str:
    return ", then ".join(WORDING[operation].format(operand) for operation, operand in rule)


def statements(rule: list, name: str) -> list:
    return [STATEMENT[operation].format(operand, name) for operation, operand in rule]


def apply(rule: list, x: int) -> int:
    for operation, operand in rule:
        if operation == "add":
            x += operand
        elif operation == "multiply":
            x *= operand
        elif operation == "subtract":
            x -= operand
        elif operation == "remainder":
            x %= operand
        else:
            x = min(x, operand)
    return x


class Function:
    """A function over a list of numbers, whose body is made of lines that an edit can change."""

    def __init__(self, name: str, generator: random.Random):
        self.name = name
        self.item, self.total = generator.sample(("row", "entry", "piece", "part", "mark", "sum_of_all", "weight", "score"), 2)
        self.rule = steps(generator, 3)
        self.skipped = generator.randint(3, 9)
        self.start = generator.randint(1, 50)
        self.extra = []        # lines after the rule, inside the loop
        self.before_end = []   # lines after the loop
        self.result = self.total
        self.parameters = "numbers"

    def source(self) -> str:
        loop = [f"if {self.item} % {self.skipped} == 0:", "    continue", *statements(self.rule, self.item), *self.extra,
                f"{self.total} += {self.item}"]
        lines = [f"def {self.name}({self.parameters}):",
                 f'    """Goes through the numbers that {self.skipped} does not divide."""', f"    {self.total} = {self.start}",
                 f"    for {self.item} in numbers:", *("        " + line for line in loop),
                 *("    " + line for line in self.before_end), f"    return {self.result}"]
        return "\n".join(lines) + "\n"

    def call(self, *arguments):
        """Of the function as it stands: ours, so it may run here."""
        names = {}
        exec(self.source(), names)
        return names[self.name](*arguments)


def edit(function: Function, generator: random.Random) -> tuple:
    """Changes a function; (what to do in words, arguments beyond the numbers that tests give)."""
    low, high, number = generator.randint(5, 60), generator.randint(150, 900), generator.randint(11, 99)
    choice = generator.randrange(7)
    if choice == 0:
        function.extra.append(f"{function.item} = max({function.item}, {low})")
        return f"after the other changes of `{function.item}` and before it is added, make it at least {low}", []
    if choice == 1:
        function.before_end.append(f"{function.total} = min({function.total}, {high})")
        return f"make it return at most {high}", []
    if choice == 2:
        function.skipped += 1
        return f"let it leave out the numbers that {function.skipped} divides, in place of those it leaves out now", []
    if choice == 3:
        function.result = f"({function.total}, len(numbers))"
        return "let it return a pair: what it returns now, and how many numbers it was given", []
    if choice == 4:
        function.start = number
        return f"let `{function.total}` begin at {number}", []
    if choice == 5:
        function.parameters = f"numbers, bonus={number}"
        function.before_end.append(f"{function.total} += bonus")
        return f"give it a second parameter `bonus`, {number} if left out, and add it to the result", [generator.randint(100, 200)]
    function.rule[1] = ("multiply", 10) if function.rule[1][0] == "add" else ("add", number)
    return f"replace the second of the three statements that change `{function.item}` in the loop: {in_words(function.rule[1:2])}", []
