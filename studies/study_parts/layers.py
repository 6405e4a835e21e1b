"""The map of layers and heads: which keys and values cost most, and what is particular about them."""
from .blocks import Section, Table
from .figures import number, with_interval
from .lookup import Study

METHOD = "default"
WORST = 12  # heads in the table of heads


def _errors(study: Study) -> tuple:
    """`layer_errors` of the default, on the first text that has them, and its run's name."""
    for name, run in study.runs.items():
        errors = run.methods.get(METHOD, {}).get("layer_errors")
        if errors and not run.run.get("variant") and "separators" not in name:
            return errors, name
    return None, ""


def heads(study: Study, side: str) -> list:
    """(layer, head, measured error, facts) of one side, the worst first."""
    errors, _ = _errors(study)
    found = []
    for layer, facts in zip(errors[side], study.document["map"]):
        for head, error in enumerate(layer):
            if error:
                found.append((facts["layer"], head, error, facts[side]))
    return sorted(found, key=lambda entry: -entry[2])


def ranks(values: list) -> list:
    order = sorted(range(len(values)), key=values.__getitem__)
    placed = [0.0] * len(values)
    for place, index in enumerate(order):
        placed[index] = place
    return placed


def rank_correlation(xs: list, ys: list) -> float:
    """Spearman's, for values without ties to speak of."""
    n = len(xs)
    squares = sum((a - b) ** 2 for a, b in zip(ranks(xs), ranks(ys)))
    return 1 - 6 * squares / (n * (n * n - 1))


def _head_rows(found: list) -> list:
    return [[f"{layer}, {head}", number(error, 2),
             number(facts["predicted"][head], 2) if head < len(facts["predicted"]) else "",
             number(facts["condition"][head], 2), f"{100 * facts['largest_share'][head]:.0f}%",
             "off" if not facts["clip"][head] else f"{facts['clip'][head]:.2f}",
             number(facts["peak"][head], 2) if head < len(facts.get("peak", [])) else ""]
            for layer, head, error, facts in found]


def _why(side: str, found: list) -> str:
    if len(found) < 8:
        return ""
    total = sum(error for *_, error, _ in found)
    few = max(1, len(found) // 10)
    share = sum(error for *_, error, _ in found[:few]) / total
    errors = [error for *_, error, _ in found]
    told = [("the condition of the transform", [f["condition"][h] for _, h, _, f in found]),
            ("the share of the largest eigenvalue", [f["largest_share"][h] for _, h, _, f in found])]
    if all("peak" in f for *_, f in found):
        told.append(("the peak of channels", [f["peak"][h] for _, h, _, f in found]))
    words = ", ".join(f"{what} {rank_correlation(errors, values):+.2f}" for what, values in told)
    return (f"{side}: the worst {few} of {len(found)} heads hold {100 * share:.0f}% of the error. Rank correlation of the "
            f"error with {words}.")


def section(study: Study) -> list:
    errors, name = _errors(study)
    if not errors or not study.document.get("map"):
        return []
    keys, values = heads(study, "key"), heads(study, "value")
    columns = ["layer, KV head", "error", "predicted", "condition", "largest eigenvalue", "clipping", "channel peak"]
    blocks = [f"Errors of the default's attention outputs behind W_O on {name}, one side at 2 bits, everything that enters the "
              "layer being exact, as shares of the output. Condition: of the transform. Largest eigenvalue: its share of the "
              "spectrum that the transform was fitted to. Channel peak: the largest channel over the median one, before the "
              "transform.",
              _why("Keys", keys), _why("Values", values),
              Table(f"Keys of the {min(WORST, len(keys))} heads that err most", columns, _head_rows(keys[:WORST])),
              Table(f"Values of the {min(WORST, len(values))} heads that err most", columns, _head_rows(values[:WORST]))]
    run = study.run("layers")
    by_layer, costs = [], {}
    for index, facts in enumerate(study.document["map"]):
        layer = facts["layer"]
        alone = [f"{METHOD}@{side}@layer:{layer}" for side in "kv"]
        shown = ["", ""]
        if run and all(run.has(method) for method in alone):
            shown = [with_interval(run.kl(method)) for method in alone]
            costs[len(by_layer)] = run.kl(alone[0])[0]
        by_layer.append([str(layer), *shown, *(" ".join(number(error, 2) for error in errors[side][index])
                                               for side in ("key", "value"))])
    most = set(sorted(costs, key=costs.get)[-5:])
    blocks.append(Table("Layer by layer: KL with that layer's keys or values alone at 2 bits, and errors of its KV heads; the "
                        "five layers whose keys cost most stand out",
                        ["layer", "KL, keys alone", "KL, values alone", "errors of keys", "errors of values"], by_layer, most))
    return [Section("Layers and heads", [block for block in blocks if block])]
