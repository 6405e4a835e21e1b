"""What a calibration's search predicted of each layer and KV head, beside what was measured on every text."""
import math

from . import charts, vocabulary
from .blocks import Chart, Section, Table
from .figures import number
from .lookup import Study

FACTOR = 2  # as far as a prediction may be off
SHIPPED = "published"  # the checkpoint as it is


def mean(heads) -> float:
    """Over layers and KV heads, of [layers][heads]; None where a value is missing."""
    values = [value for layer in heads for value in layer]
    return None if not values or any(value is None for value in values) else sum(values) / len(values)


def predicted(name: str, inspected: dict) -> dict:
    """Method -> mean predicted error of its attention outputs, from what `oscar-bundle inspect --json -` says of the
    searched bundle `name`."""
    layers = [layer for layer in inspected["layers"] if layer["quantized"]]
    found = {name: mean([layer["predicted_output_nmse"] for layer in layers])}
    if name == "default":
        pairs = [layer.get("search", {}).get("pair", []) for layer in layers]
        found["unsearched"] = mean([[head["default_nmse"] for head in pair] for pair in pairs])
        for key, method in (("shared", "portable"), ("per_head", "portable-perhead")):
            found[method] = mean([layer["predicted_output_nmse"] for layer in inspected["portable"][key]])
    return {method: value for method, value in found.items() if value is not None}


def map_of(inspected: dict) -> list:
    """Of each layer what a map of layers and heads shows of a bundle."""
    layers = []
    for layer in inspected["layers"]:
        sides = {}
        for side in ("key", "value"):
            searched = layer.get("search", {}).get(side, {}).get("heads", [])
            sides[side] = {"condition": layer[side]["condition_number"],
                           "largest_share": layer[side]["largest_eigenvalue_share"],
                           "clip": layer[side]["clip_ratio"],
                           "predicted": [head["nmse"] for head in searched]}
        layers.append({"layer": layer["layer_id"], **sides})
    return layers


def measured(run, method: str):
    """Mean measured error over layers and heads; None where it was not measured."""
    return run.methods.get(method, {}).get("error")


def points(study: Study) -> list:
    """(method, run name, predicted, measured) of every method with a prediction and every text that it was measured on."""
    found = []
    for run_name, run in study.runs.items():
        known = study.document.get("predicted", {}).get(run.run.get("variant") or SHIPPED, {})
        for method, value in known.items():
            error = measured(run, method)
            if error and value:
                found.append((method, run_name, value, error))
    return found


def kind_of(run_name: str, method: str) -> str:
    if run_name.startswith("offset "):
        return "later positions"
    if run_name.startswith("sigma "):
        return "other planted outliers"
    if "separators" in run_name:
        return "with separators"
    if method.startswith("for-"):
        return "in a backend's codec"
    return "text as it is"


KINDS = ("text as it is", "with separators", "later positions", "other planted outliers", "in a backend's codec")


def section(study: Study) -> list:
    found = points(study)
    if not found:
        return []
    within = sum(1 for *_, x, y in found if 1 / FACTOR <= y / x <= FACTOR)
    by_kind = [(kind, [(x, y) for method, run, x, y in found if kind_of(run, method) == kind]) for kind in KINDS]
    chart = charts.scatter("Predicted and measured error", "predicted by the search", "measured",
                           [(kind, of) for kind, of in by_kind if of], FACTOR)
    runs = [name for name in study.runs if any(run == name for _, run, _, _ in found)]
    plain = [name for name in runs if not name.startswith("stack ")]
    rows = []
    for method in vocabulary.unique(method for method, *_ in found if not method.startswith("for-")):
        values = {run: y for m, run, _, y in found if m == method}
        x = next(x for m, _, x, _ in found if m == method)
        rows.append([study.label(method), number(x, 2), *(number(values[run] / _predicted(study, run, method), 2)
                                                          if run in values else "" for run in plain)])
    blocks = [
        "A search ends with an error that it predicts for each layer and KV head: that of the attention output behind W_O, "
        "keys and values at 2 bits, on held-back text of the calibration corpus. Measured is the same on the evaluated text, "
        "everything that enters the layer being exact (`oscar-eval --layer-errors`); both are means over layers and heads. "
        "Every point is a method on a text. Methods without a search predict nothing and are not here.",
        f"{within} of {len(found)} points are within a factor of {FACTOR}{_others(found)}.",
        Chart(f"Predicted and measured error of the attention output; line: equal, band: a factor of {FACTOR}", chart)]
    if rows:
        blocks.append(Table("Measured over predicted", ["cache", "predicted", *plain], rows))
    backends = [[method.removeprefix("for-"), number(x, 2), number(y / x, 2)] for method, run, x, y in found
              if method.startswith("for-")]
    if backends:
        blocks.append(Table("The same of backends, in their codecs", ["backend", "predicted", "measured over it"], backends))
    pairs = [(measured(study.run(run), method), study.run(run).kl(method)[0]) for method, run, _, _ in found
             if study.run(run).has(method)]
    if len(pairs) > 2:
        blocks.append(f"The measured error goes with KL: their logarithms correlate by {correlation(pairs):.2f} over all "
                      "points.")
    return [Section("Predicted and measured", blocks)]


def _others(found: list) -> str:
    """Which points lie further off than FACTOR, and on which side."""
    sides = []
    for word, beyond in (("lower", lambda y, x: y * FACTOR < x), ("higher", lambda y, x: y > x * FACTOR)):
        kinds = [kind_of(run, method) for method, run, x, y in found if beyond(y, x)]
        if kinds:
            named = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
            sides.append(f"{len(kinds)} measured {word} ({named if len(set(kinds)) > 1 else f'all {kinds[0]}'})")
    return f"; {', '.join(sides)}" if sides else ""


def _predicted(study: Study, run_name: str, method: str) -> float:
    return study.document["predicted"][study.run(run_name).run.get("variant") or SHIPPED][method]


def correlation(pairs: list) -> float:
    """Of the logarithms."""
    xs, ys = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    both = sum((a - x) * (b - y) for a, b in zip(xs, ys))
    whole = math.sqrt(sum((a - x) ** 2 for a in xs) * sum((b - y) ** 2 for b in ys))
    return both / whole if whole else math.nan
