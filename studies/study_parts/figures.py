"""Arithmetic on the study's figures: intervals, paired ratios, and the words for numbers."""
import functools
import math
import random

REPLICATES = 2000
FLOOR_FACTOR = 5  # no ratio is quoted for a KL under this many times that of the exact path


@functools.lru_cache(maxsize=None)
def _draws(units: int) -> tuple:
    """Bootstrap samples of `units` units: how often each unit is in each sample."""
    generator = random.Random(units)
    samples = []
    for _ in range(REPLICATES):
        counts = [0] * units
        for _ in range(units):
            counts[generator.randrange(units)] += 1
        samples.append(tuple(counts))
    return tuple(samples)


def _between(values: list) -> tuple:
    """The middle 95% of a bootstrap's values."""
    values = sorted(values)
    return values[int(0.025 * len(values))], values[int(0.975 * len(values))]


def mean_with_interval(means: list, tokens: list) -> tuple:
    """(mean over tokens, low, high) from means over units; the interval is None with one unit."""
    total = sum(m * t for m, t in zip(means, tokens)) / sum(tokens)
    if len(means) < 2:
        return total, None, None
    return total, *_between([_ratio_of(counts, means, tokens, None) for counts in _draws(len(means))])


def ratio_with_interval(means: list, base: list, tokens: list) -> tuple:
    """(ratio of the means over tokens, low, high), both from the same drawn units; interval as above."""
    everything = (1,) * len(means)
    ratio = _ratio_of(everything, means, tokens, base)
    if len(means) < 2:
        return ratio, None, None
    return ratio, *_between([_ratio_of(counts, means, tokens, base) for counts in _draws(len(means))])


def _ratio_of(counts, means, tokens, base) -> float:
    """Of sums over drawn units: means over tokens, or means over those of `base`."""
    above = below = 0.0
    for i, count in enumerate(counts):
        if count:
            above += count * tokens[i] * means[i]
            below += count * tokens[i] * (base[i] if base else 1)
    return above / below if below else math.nan


class RunFigures:
    """One run of the study, by method."""

    def __init__(self, run: dict):
        self.run, self.methods = run, run["methods"]
        self._kl = {}

    def has(self, name: str) -> bool:
        return name in self.methods and "units" in self.methods[name]

    def kl(self, name: str) -> tuple:
        """(mean, low, high) in nats per token."""
        if name not in self._kl:
            self._kl[name] = mean_with_interval(self.methods[name]["units"]["kl"], self.run["unit_tokens"])
        return self._kl[name]

    def ratio(self, name: str, base: str) -> tuple:
        """KL of `name` over that of `base` with its paired interval; None where the floor forbids a ratio."""
        floor = self.run.get("kl_floor") or 0
        if min(self.kl(name)[0], self.kl(base)[0]) < FLOOR_FACTOR * floor:
            return None
        units = [self.methods[n]["units"]["kl"] for n in (name, base)]
        return ratio_with_interval(*units, self.run["unit_tokens"])

    def perplexity(self, name: str) -> float:
        """The exponential of the mean NLL."""
        return math.exp(min(self._increase(name, None)[0], 700))

    def perplexity_increase(self, name: str) -> tuple:
        """(mean, low, high) of perplexity over BF16's less one, paired."""
        return tuple(None if value is None else math.expm1(min(value, 700)) for value in self._increase(name, "bf16"))

    def _increase(self, name: str, base) -> tuple:
        """Mean NLL of `name`, less that of `base` when there is one, with its interval."""
        values = self.methods[name]["units"]["nll"]
        if base:
            values = [a - b for a, b in zip(values, self.methods[base]["units"]["nll"])]
        return mean_with_interval(values, self.run["unit_tokens"])

    def best(self, names) -> str:
        """The method of least KL among those of `names` that were measured; None without one."""
        return min((n for n in names if self.has(n)), key=lambda n: self.kl(n)[0], default=None)


def number(value, digits: int = 3) -> str:
    """`digits` significant digits, without an exponent and without more decimals than that needs."""
    if value is None or math.isnan(value):
        return ""
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if abs(float(f"{value:.{digits - 1}e}")) >= 10 ** (size + 1):
        size += 1
    return f"{value:.{max(0, digits - 1 - size)}f}"


def floor_text(run: RunFigures) -> str:
    """KL of the exact path, which is noise about 0."""
    floor = run.run.get("kl_floor") or 0
    return number(floor, 2) if floor >= 1e-6 else "less than 0.000001"


def with_interval(values, digits: int = 3) -> str:
    """`mean [low, high]` with as many decimals as the mean has."""
    if values is None:
        return "at the floor"
    mean, low, high = values
    text = number(mean, digits)
    if low is None:
        return text
    decimals = len(text.split(".")[1]) if "." in text else 0
    return f"{text} [{low:.{decimals}f}, {high:.{decimals}f}]"


def ratio_text(values) -> str:
    """A ratio `mean [low, high]`, with as many decimals as its size needs."""
    if values is None:
        return "at the floor"
    decimals = 3 if values[0] < 0.1 else 2 if values[0] < 10 else 0
    if 0 < values[0] < 0.01:  # two digits that say something
        decimals = 1 - math.floor(math.log10(values[0]))
    mean, low, high = (None if value is None else f"{value:.{decimals}f}" for value in values)
    return mean if low is None else f"{mean} [{low}, {high}]"


def increase_text(values) -> str:
    """`+mean% [low, high]` of an increase as a share."""
    mean, low, high = (None if value is None else 100 * value for value in values)
    decimals = 0 if abs(mean) >= 10 else 1 if abs(mean) >= 1 else 2
    text = f"{mean:+.{decimals}f}%"
    return text if low is None else f"{text} [{low:.{decimals}f}, {high:.{decimals}f}]"


def percent(values) -> str:
    """`rate [low, high]` of shares between 0 and 1."""
    rate, low, high = values
    return f"{100 * rate:.0f}% [{100 * low:.0f}, {100 * high:.0f}]"
