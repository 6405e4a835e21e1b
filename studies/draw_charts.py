#!/usr/bin/env python3
"""Draws the pictures of the documentation, docs/NAME.svg. Their figures are kept ones; nothing is measured here.

  draw_charts.py tasks      tasks answered in a server over three KV caches, from studies/tasks.py (README.md)
  draw_charts.py bits       KL of the embedded model to a BF16 cache against bits per cached value, from its study
  draw_charts.py quality    KL of the real model to its BF16 cache, text by text, from its study
  draw_charts.py serving    ms of a decode step over the 2-bit cache and over BF16, benchmarks/results/h200_serving.csv
"""
import argparse
import csv
import json
import pathlib
import sys
from html import escape

from study_parts import charts, figures, vocabulary

TOP = pathlib.Path(__file__).resolve().parent.parent
TINY_STUDY = TOP / "rotation_zoo" / "tiny-gqa" / "study" / "study.json"
REAL_STUDY = TOP / "rotation_zoo" / "smollm2-135m-instruct" / "study" / "study.json"
CODER = TOP / "rotation_zoo" / "qwen2.5-coder-1.5b-instruct"
CODER_STUDY, CODER_TASKS = CODER / "study" / "study.json", CODER / "tasks" / "tasks.json"
STEPS = TOP / "benchmarks" / "results" / "h200_serving.csv"
WIDTH = 760  # of every picture

# An opaque card: it reads the same whichever theme the page around it has.
STYLE = """
text { font: 14px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
text.title { font-size: 17px; font-weight: 600; } text.strong { font-weight: 600; }
text.small { font-size: 12.5px; fill: #59636e; } text.mid { text-anchor: middle; } text.end { text-anchor: end; }
.card { fill: #ffffff; stroke: #d1d9e0; } .grid { stroke: #e4e8ec; } .axis { stroke: #818b98; }
.floor { stroke: #818b98; stroke-dasharray: 2 4; } .mark { stroke: #ffffff; stroke-width: 1.5; }
.line { stroke-width: 2; fill: none; } .bf16 { fill: #1f2328; }
text.plain, .mark.plain { fill: #6e7781; } .line.plain { stroke: #6e7781; }
text.theirs, .mark.theirs { fill: #bc4c00; } .line.theirs { stroke: #bc4c00; }
text.ours, .mark.ours { fill: #1a7f37; } .line.ours { stroke: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } text.small { fill: #9198a1; } .card { fill: #0d1117; stroke: #3d444d; }
  .grid { stroke: #21262d; } .axis, .floor { stroke: #656c76; } .mark { stroke: #0d1117; } .bf16 { fill: #f0f6fc; }
  text.plain, .mark.plain { fill: #9198a1; } .line.plain { stroke: #9198a1; }
  text.theirs, .mark.theirs { fill: #f0883e; } .line.theirs { stroke: #f0883e; }
  text.ours, .mark.ours { fill: #3fb950; } .line.ours { stroke: #3fb950; }
}
"""


def text(x, y, words, *classes):
    return f'<text class="{" ".join(classes)}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(style, x1, y1, x2, y2):
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def card(title, height, body, style=""):
    """The picture as text."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n"
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
            + "\n".join(body) + "\n</svg>\n")


# tasks.svg

TASKS_LEFT, TASKS_RIGHT, TASKS_TOP, TASKS_BAR, TASKS_GAP = 236, 700, 104, 15, 17
# Rows of the tasks; words in two lines.
TASKS = {"all humaneval": ("HumanEval", "task up to 24K tokens back"), "tool calls, 20 turns": ("tool calls", "sessions of 20 turns"),
         "all needles": ("needles", "five kinds, 4K to 30K tokens"), "edit of a file of 8K": ("edits of code", "a file of 8K tokens"),
         "all quotes": ("quotes", "code and text, 4K and 16K tokens"),
         "call of a function out of 24K of code": ("calls of functions", "found in 24K tokens of code")}
TASKS_SERIES = (("bf16", "BF16, 16 bits", "plain"), ("int2", "this toolkit, 2 bits", "ours"), ("fp8", "FP8, 8 bits, as shipped", "theirs"))


def draw_tasks(document):
    """The picture as text."""
    scored = document["figures"]["greedy"]
    title = "Tasks that a model solves in vLLM over three KV caches"
    style = "".join(f" rect.{name} {{ fill: {light}; }}" for name, light in
                    (("plain", "#818b98"), ("ours", "#1a7f37"), ("theirs", "#bc4c00")))
    body = [text(24, 33, title, "title"),
            text(24, 55, f"Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, vLLM 0.26, H200, greedy: percent of {document['prompts']:,} prompts "
                 f"(FP8: of the first {scored['all']['fp8']['prompts']:,})", "small")]
    x = 24
    for _, words, name in TASKS_SERIES:
        body += [f'<rect class="{name}" x="{x}" y="72" width="12" height="12"/>',
                 text(x + 18, 83, words, name, *(("strong",) if name == "ours" else ()))]
        x += 52 + 7 * len(words)
    y = TASKS_TOP
    for task, (words, more) in TASKS.items():
        body += [text(TASKS_LEFT - 14, y + 18, words, "end"), text(TASKS_LEFT - 14, y + 35, more, "small", "end")]
        for cache, _, name in TASKS_SERIES:
            score = scored[task][cache]["score"]
            width = score * (TASKS_RIGHT - TASKS_LEFT)
            body += [f'<rect class="{name}" x="{TASKS_LEFT}" y="{y}" width="{width:.1f}" height="{TASKS_BAR - 2}"/>',
                     text(TASKS_LEFT + width + 6, y + 11, f"{100 * score:.1f}", name, *(("strong",) if name == "ours" else ()))]
            y += TASKS_BAR
        y += TASKS_GAP
    body.append(line("axis", TASKS_LEFT, TASKS_TOP - 4, TASKS_LEFT, y - TASKS_GAP + 2))
    return card(title, y + 6, body, style)


# quality.svg

QUALITY_LEFT, QUALITY_RIGHT, QUALITY_TOP, QUALITY_ROW = 176, 724, 118, 42
# Runs of the study; words for each in two lines.
QUALITY_TEXTS = {"documentation": ("documentation", ""), "documentation, separators": ("documentation", "with separators"),
         "code": ("code", ""), "code, separators": ("code", "with separators"),
         "prose": ("prose", ""), "prose, separators": ("prose", "with separators"),
         "chat": ("chats of many turns", "")}
# Methods, of which each text shows the one that is closest to BF16; words; style.
QUALITY_SERIES = ((("hadamard-clip",), "Hadamard rotation + clipping", "plain"),
          (vocabulary.PUBLISHED, "OSCAR as published, the better of its two", "theirs"),
          (("default",), "this toolkit", "ours"))


def shown(value):
    """With three digits that count, ".0122"."""
    return figures.number(value).removeprefix("0")


def fewer_times(run, best):
    """How far below `best` the default is, where the floor allows a ratio."""
    ratio = run.ratio("default", best)
    return f", {1 / ratio[0]:.0f} times less than {shown(run.kl(best)[0])}" if ratio else ""


def draw_quality(study):
    """The picture as text."""
    runs = {name: figures.RunFigures(study["runs"][name]) for name in QUALITY_TEXTS}
    closest = {style: {name: run.best(methods) for name, run in runs.items()} for methods, _, style in QUALITY_SERIES}
    kl = {style: {name: run.kl(closest[style][name])[0] for name, run in runs.items()} for style in closest}
    scale = charts.Scale((0.004, 0.25), QUALITY_LEFT, QUALITY_RIGHT)
    bottom = QUALITY_TOP + QUALITY_ROW * len(QUALITY_TEXTS)
    title = "How far a 2-bit KV cache moves a real model from its BF16 cache"
    body = [text(24, 33, title, "title"),
            text(24, 55, "SmolLM2-135M-Instruct in Q4_1, one H200: KL in nats per token, logarithmic; calibrated on "
                 "documentation", "small")]
    x = 24
    for _, words, style in QUALITY_SERIES:
        body += [f'<circle class="mark {style}" cx="{x + 6}" cy="80" r="5.5"/>',
                 text(x + 18, 85, words, style, *(("strong",) if style == "ours" else ()))]
        x += 44 + 7 * len(words)
    for tick in (.005, .01, .02, .05, .1, .2):
        at = scale.at(tick)
        body += [line("grid", at, QUALITY_TOP - 8, at, bottom), text(at, bottom + 20, f"{tick:g}", "small", "mid")]
    body.append(line("axis", QUALITY_LEFT, bottom, QUALITY_RIGHT, bottom))
    for number, (column, (words, more)) in enumerate(QUALITY_TEXTS.items()):
        y = QUALITY_TOP + QUALITY_ROW * (number + .5) - 4
        body.append(text(QUALITY_LEFT - 14, y + (-3 if more else 5), words, "end"))
        if more:
            body.append(text(QUALITY_LEFT - 14, y + 13, more, "small", "end"))
        ours, best = kl["ours"][column], min(("plain", "theirs"), key=lambda style: kl[style][column])
        body += [line("floor", scale.at(ours), y, scale.at(kl[best][column]), y),
                 *(f'<circle class="mark {style}" cx="{scale.at(kl[style][column]):.1f}" cy="{y:.1f}" r="5.5"/>'
                   for _, _, style in QUALITY_SERIES),
                 text(scale.at(ours) + 12, y - 7, shown(ours) + fewer_times(runs[column], closest[best][column]), "ours",
                      "strong")]
    height = bottom + 34
    return card(title, height, body)


# bits.svg

BITS_CONTEXT = "131072"  # tokens of which bits per value are an average, windows included
BITS_HEIGHT = 440
BITS_LEFT, BITS_RIGHT, BITS_TOP, BITS_BOTTOM = 76, WIDTH - 28, 84, BITS_HEIGHT - 58
BITS_LABEL_X = 264  # where the words of a series begin
# Runs by quantization group, from the fewest bits on.
BITS_GROUPS = ("main", "group 64", "group 32")
# Name in the study, words, style, and where the words are over the last point, in pixels.
BITS_SERIES = (("identity", "plain INT2, no rotation", "plain", 4),
          ("hadamard-clip", "Hadamard rotation + clipping", "plain", -8),
          ("perhead", "OSCAR as published", "theirs", 14),
          ("default", "this toolkit", "ours", 5))


def bits_points(study, name):
    """(bits per value, KL) by quantization group."""
    points = []
    for group in BITS_GROUPS:
        run = figures.RunFigures(study["runs"][group])
        if run.has(name):
            points.append((run.methods[name]["bpe"][BITS_CONTEXT], run.kl(name)[0]))
    return points


def bits_axes(bits, kl):
    body = []
    for tick in kl.ticks():
        y = kl.at(tick)
        body += [line("grid", BITS_LEFT, y, BITS_RIGHT, y), text(BITS_LEFT - 10, y + 4.5, f"{tick:g}", "small", "end")]
    for tick in (2, 3, 4, 6, 8, 16):
        x = bits.at(tick)
        body += [line("axis", x, BITS_BOTTOM, x, BITS_BOTTOM + 5), text(x, BITS_BOTTOM + 20, f"{tick}", "small", "mid")]
    body += [line("axis", BITS_LEFT, BITS_BOTTOM, BITS_RIGHT, BITS_BOTTOM),
             text((BITS_LEFT + BITS_RIGHT) / 2, BITS_HEIGHT - 16, "bits per cached value at 128K tokens; "
                  "the three points of a line: groups of 128, 64 and 32 values", "small", "mid")]
    return body


def bits_series(study, bits, kl):
    body = []
    for name, words, style, shift in BITS_SERIES:
        points = [(bits.at(b), kl.at(value)) for b, value in bits_points(study, name)]
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            body.append(f'<polyline class="line {style}" points="{path}"/>')
        body += [f'<circle class="mark {style}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>' for x, y in points]
        first = figures.number(bits_points(study, name)[0][1], 2)
        label = f"{words}: {first}"
        if name == "default":
            published = bits_points(study, "perhead")[0][1]
            label += f", {published / bits_points(study, name)[0][1]:.0f} times less KL at the same bits"
        body.append(text(BITS_LABEL_X if len(points) > 1 else points[0][0] + 14, points[-1][1] + shift, label,
                         style, "strong" if name == "default" else ""))
    return body


def bits_reference(study, bits, kl):
    """BF16, the noise of comparing with it, and what the fewest bits save."""
    floor = kl.at(study["runs"]["main"]["kl_floor"])
    fewest = bits_points(study, "default")[0]
    x, y = bits.at(fewest[0]), kl.at(fewest[1] / 2.2)
    end = bits.at(16)
    return [line("floor", BITS_LEFT, floor, BITS_RIGHT, floor),
            text(end - 16, floor - 10, "BF16 cache: 0 by definition", "end"),
            text(BITS_LEFT + 8, floor - 8, "noise of BF16 arithmetic", "small"),
            f'<circle class="mark bf16" cx="{end:.1f}" cy="{floor:.1f}" r="5.5"/>',
            f'<path class="line ours" d="M{end:.1f},{y:.1f} H{x + 1:.1f} m8,-5 l-8,5 l8,5"/>',
            text((x + end) / 2, y + 16, f"{16 / fewest[0]:.1f} times less cache memory", "mid", "ours")]


def draw_bits(study):
    bits = charts.Scale((2, 16), BITS_LEFT, BITS_RIGHT)
    kl = charts.Scale((0.0002, 12), BITS_BOTTOM, BITS_TOP)
    tokens = study["runs"]["main"]["tokens"]
    title = "How far a 2-bit KV cache moves the model from its BF16 cache"
    subtitle = (f"KL in nats per token, logarithmic, lower is closer; tiny-gqa, a synthetic model; "
                f"{tokens:,} held-out tokens, one H200")
    body = [text(24, 33, title, "title"), text(24, 55, subtitle, "small"),
            *bits_axes(bits, kl), *bits_reference(study, bits, kl), *bits_series(study, bits, kl)]
    return card(title, BITS_HEIGHT, body)


# serving.svg

SERVING_SHAPE = "qwen3-8b"
SERVING_POINTS = (("1x32K", "1 request of 32K"), ("1x128K", "1 of 128K"), ("8x32K", "8 of 32K"),
          ("8x100K", "8 of 100K"))
# Cache, words, style.
SERVING_BARS = (("int2", "this toolkit, 2 bits", "ours"), ("bf16", "BF16, cuDNN", "plain"),
        ("bf16-triton", "BF16, Triton", "theirs"))
SERVING_LEFT, SERVING_RIGHT, SERVING_TOP, BAR, GAP = 150, 690, 92, 17, 18


def step_times():
    """{(point, cache): ms}"""
    with open(STEPS, encoding="utf-8") as file:
        return {(row["point"], row["cache"]): float(row["ms"]) for row in csv.DictReader(file)
                if row["shape"] == SERVING_SHAPE}


def draw_serving():
    """The picture as text."""
    ms = step_times()
    most = max(ms[point, cache] for point, _ in SERVING_POINTS for cache, _, _ in SERVING_BARS)
    height = SERVING_TOP + len(SERVING_POINTS) * (len(SERVING_BARS) * BAR + GAP) + 6
    scale = (SERVING_RIGHT - SERVING_LEFT) / most
    style = "".join(f".bar.{name} {{ fill: {light}; }} " for name, light in
                    (("ours", "#1a7f37"), ("plain", "#818b98"), ("theirs", "#d97b45")))
    body = [text(24, 34, "A decode step of a whole model, in ms", "title"),
            text(24, 56, "Qwen3-8B's shape, one NVIDIA H200; the same loop, nothing differs but the cache", "small")]
    x = SERVING_LEFT
    for _, words, name in SERVING_BARS:
        body += [f'<rect class="bar {name}" x="{x}" y="68" width="11" height="11"/>', text(x + 17, 78, words, "small")]
        x += 40 + 6 * len(words)
    y = SERVING_TOP
    for point, words in SERVING_POINTS:
        body.append(text(SERVING_LEFT - 12, y + len(SERVING_BARS) * BAR / 2 + 5, words, "end"))
        for cache, _, name in SERVING_BARS:
            value = ms[point, cache]
            label = f"{value:.1f}"
            if cache == "bf16":
                label += f"  ({value / ms[point, 'int2']:.1f} times)"
            body += [f'<rect class="bar {name}" x="{SERVING_LEFT}" y="{y + 2}" width="{value * scale:.1f}" '
                     f'height="{BAR - 3}"/>',
                     text(SERVING_LEFT + value * scale + 6, y + BAR - 3, label, "small",
                          *(("strong",) if cache == "int2" else ()))]
            y += BAR
        y += GAP
    body.append(line("axis", SERVING_LEFT, SERVING_TOP - 4, SERVING_LEFT, y - GAP + 4))
    title = "Milliseconds of a decode step over the 2-bit cache and over BF16"
    return card(title, height, body, style)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


CHARTS = {"tasks": lambda: draw_tasks(read(CODER_TASKS)), "bits": lambda: draw_bits(read(TINY_STUDY)), "quality": lambda: draw_quality(read(REAL_STUDY)),
          "serving": draw_serving}


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CHARTS)
    parser.add_argument("--out", type=pathlib.Path, help="file to write (default: docs/NAME.svg)")
    options = parser.parse_args(words)
    out = options.out or TOP / "docs" / f"{options.name}.svg"
    out.write_text(CHARTS[options.name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
