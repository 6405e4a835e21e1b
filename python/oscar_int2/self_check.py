"""A self-check at start-up: a passage is quoted word for word over the 2-bit cache, beside BF16.

Servers run it, in three steps: probe() gives token ids, the server gives log probabilities of the
quote's tokens over its 2-bit cache and over BF16 rows, check() compares them. A passage that comes
back from rows that are all 2 bits shows what a needle or an ordinary answer does not: each token of it
has one place in the prompt, and a wrong transform reads the wrong one.
"""
import random
from dataclasses import dataclass

from .errors import SelfCheckError

TOKENS = 2048         # of a probe's prompt, if the windows need no more
QUOTE = 48            # tokens that are compared
# Mean |log p - log p of BF16| over them that is accepted, in nats: of text, and of drawn ids. Measured with
# good bundles, tiny-gqa .08 to .13 (.29 where steps allow 900 tokens) and .64, SmolLM2-135M-Instruct .10 of
# text, random models .2 to 1.0 of drawn ids; with the transforms of the KV heads exchanged tiny-gqa 1.4 and
# 5.9; with those of the next layer tiny-gqa 8.9 of text. Not found: SmolLM2 with exchanged KV heads, .33.
FURTHEST, FURTHEST_DRAWN = 0.5, 2.0
# Mean log probability over BF16 below which a model is not quoting: tiny-gqa has -.3 to -.5 of text, and
# -7.5 with random weights in its place.
UNQUOTED = -3.0
_NAMES = "Alder Birch Cedar Dogwood Elm Fir Ginkgo Hazel Ivy Juniper Larch Maple Oak Pine Rowan Willow"
_GOODS = "copper wire|dried figs|lamp oil|roof slate|sail cloth|oat flour|window glass|garden seed"
_TOWNS = "Aarhus Bergen Cork Dover Esbjerg Ghent Haifa Izmir Kotor Lagos Malmo Narvik Porto Riga Split Turku"
_NOTES = ("paid on the day|one box was wet|to be called for|weighed twice at the gate|sent on by rail|"
          "the seal was broken|kept dry under the stairs|signed for by the night watch")


@dataclass(frozen=True)
class Probe:
    prompt: list     # token ids: lines, and at the end one of them once more
    quote: list      # token ids that follow: what stands behind that line, word for word
    furthest: float  # mean |log p - log p of BF16| of the quote that is accepted, in nats


@dataclass(frozen=True)
class Result:
    exact: float     # mean log probability of the quote's tokens over BF16 rows
    served: float    # the same over the 2-bit cache
    distance: float  # mean |difference| of a token's, nats
    furthest: float  # that is accepted
    tokens: int

    def __str__(self):
        return (f"{self.tokens} quoted tokens: mean log probability {self.served:.3f} over the 2-bit "
                f"cache, {self.exact:.3f} over BF16, {self.distance:.3f} nat a token apart "
                f"(accepted: {self.furthest:g})"
                + ("; this model does not quote, so that passing says little" if self.exact < UNQUOTED else ""))


def probe_tokens(format):
    """Tokens of a prompt whose quoted passage has long left the windows of this recipe.CacheFormat."""
    return max(TOKENS, 4 * (format.sink_tokens + format.recent_tokens + format.demote_block))


def probe(tokens, vocab_size, encode=None):
    """A Probe of `tokens` tokens in the prompt, always the same.

    `encode`: text to a list of token ids, without special tokens; None: ids are drawn from the middle
    of the vocabulary, where no tokenizer has its special tokens. Then only models that repeat what
    they don't understand will quote, and the log probabilities of others decide."""
    draw = random.Random(1)
    lines, low, high = [], vocab_size // 4, max(vocab_size // 2, vocab_size // 4 + 1)
    while sum(map(len, lines)) < tokens:
        lines.append([draw.randrange(low, high) for _ in range(24)] if encode is None
                     else encode(_line(draw, len(lines) + 1)))
    first = len(lines) // 3
    passage, begun = sum(lines[first:], []), len(lines[first])
    return Probe(sum(lines, []) + passage[:begun], passage[begun:begun + QUOTE],
                 FURTHEST_DRAWN if encode is None else FURTHEST)


def _line(draw, number):
    one, two = draw.sample(_NAMES.split(), 2)
    return (f"Entry {number}: {one} & {two} sent {draw.randrange(12, 980)} crates of "
            f"{draw.choice(_GOODS.split('|'))} to {draw.choice(_TOWNS.split())}, "
            f"{draw.choice(_NOTES.split('|'))}.\n")


def check(bundle, probe, exact, served):
    """Compares log probabilities of the quote's tokens, or of those that were generated in its place:
    two lists of floats. Returns the Result.

    Raises SelfCheckError if they are further apart than good bundles leave them. `bundle`: what was
    served, for the message."""
    gaps = [abs(x - y) for x, y in zip(exact, served, strict=True)]
    result = Result(sum(exact) / len(gaps), sum(served) / len(gaps), sum(gaps) / len(gaps),
                    probe.furthest, len(gaps))
    if not result.distance <= probe.furthest:  # not a number either
        raise SelfCheckError(
            f"the self-check failed with {bundle.path} (of {bundle.model.name!r}): {result}. The bundle "
            "is of another checkpoint, or damaged, or far too coarse for this model: calibrate this very "
            "checkpoint with oscar-calibrate, and measure the bundle with oscar-eval")
    return result
