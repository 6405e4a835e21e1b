"""What the page and the Markdown say: the sections, tables and charts of a study, without layout."""
from dataclasses import dataclass, field

from . import charts, plan
from .figures import RunFigures, increase_text, number, percent, ratio_text, with_interval

HEAD_DIM = 128


@dataclass
class Table:
    caption: str
    columns: list
    rows: list  # lists of text
    marked: set = field(default_factory=set)  # indices of rows that stand out


@dataclass
class Chart:
    title: str
    svg: str


@dataclass
class Code:
    text: str


@dataclass
class Section:
    title: str
    blocks: list  # str is a paragraph


@dataclass
class Content:
    title: str
    lead: list
    sections: list


def label(name: str) -> str:
    return plan.LABELS[name][0]


class Study:
    """Lookup in the document that measure.py writes."""

    def __init__(self, document: dict):
        self.document = document
        self.runs = {name: RunFigures(run) for name, run in document.get("runs", {}).items()}

    def run(self, name: str):
        return self.runs.get(name)

    def published(self, run: RunFigures) -> str:
        return run.best(plan.PUBLISHED)

    def needles(self, name: str) -> str:
        run = self.run("needles")
        if not run or "niah" not in run.methods.get(name, {}):
            return ""
        return percent([run.methods[name]["niah"][key] for key in ("rate", "low", "high")])


def summary(study: Study) -> list:
    run = study.run("main")
    if not run or not study.published(run) or not run.has("default"):
        return []
    best = study.published(run)
    ratio = run.ratio("default", best)
    text = (f"At the same bytes the default of this toolkit has KL {with_interval(run.kl('default'))} to BF16, the best "
            f"published recipe ({label(best)}) {with_interval(run.kl(best))}: {ratio_text(ratio)} of it. "
            f"Its perplexity is {number(run.perplexity('default'))}, BF16's {number(run.perplexity('bf16'))}: "
            f"{increase_text(run.perplexity_increase('default'))}.")
    return [text]


def kl_rows(run: RunFigures, names, base: str, titles=None) -> list:
    titles = titles or {}
    return [[titles.get(name, label(name)), with_interval(run.kl(name)),
             "1" if name == base else ratio_text(run.ratio(name, base)), increase_text(run.perplexity_increase(name))]
            for name in names if run.has(name)]


def main_section(study: Study) -> list:
    run = study.run("main")
    if not run:
        return []
    best, rows, dots = study.published(run), [], []
    styles = {plan.PAPER: 1, plan.OURS: 0, plan.DATA_FREE: 2}
    for name in ("bf16", *plan.MAIN):
        if not run.has(name):
            continue
        reference = name == "bf16"
        top1 = run.methods[name]["top1"]
        rows.append([label(name), plan.LABELS[name][1], number(run.perplexity(name)),
                     "" if reference else increase_text(run.perplexity_increase(name)),
                     "" if reference else with_interval(run.kl(name)),
                     "" if reference or not best else "1" if name == best else ratio_text(run.ratio(name, best)),
                     "" if reference else f"{100 * top1['mean']:.1f}%", study.needles(name),
                     number(run.methods[name]["bpe"]["131072"], 4)])
        if not reference:
            dots.append((label(name), styles[plan.LABELS[name][1]], run.kl(name)))
    floor = run.run.get("kl_floor")
    floor_text = number(floor, 2) if (floor or 0) >= 1e-6 else "less than 0.000001"
    words = (f"“× published” is the KL over that of the best published recipe here, {label(best) if best else 'not measured'}. "
             f"The comparison itself, with the codec off, costs KL {floor_text}; no ratio is quoted under five times that.")
    table = Table("KL(BF16 || INT2) in nats per token; bits per cached value at 128K tokens, windows included.",
                  ["cache", "whose", "perplexity", "above BF16", "KL", "× published", "top-1 agreement",
                   "3-key needles", "bits at 128K"], rows, {len(rows) - 1})
    chart = Chart("KL by method, with 95% intervals: no data (diamonds), the paper (squares), ours (circles)",
                  charts.bars("KL by method", dots))
    return [Section("All methods", [words, table, chart])]


def part_sections(study: Study) -> list:
    """Each refinement alone, one after another, and the default without each."""
    run = study.run("main")
    if not run or not run.has("perhead"):
        return []
    columns = ["", "KL", "× first row", "perplexity above BF16"]
    alone = kl_rows(run, ("perhead", *plan.ALONE), "perhead")
    steps = kl_rows(run, plan.STEPS, "perhead", {
        "perhead": label("perhead"), "perhead+center": "+ centring", "unsearched": "+ the default's clipping",
        "default": "+ search of all choices: the default"})
    without = kl_rows(run, ("unsearched", *plan.WITHOUT), "unsearched", {
        "unsearched": "default, without search", "step-centres": "the default's clipping (.96 / .92 instead)"})
    return [
        Section("Each refinement alone", [
            "Added to OSCAR's rotation per KV head, clipped at .96 / .92, with nothing else changed.",
            Table("First row: the paper's. All others are this toolkit's.", columns, alone, {0})]),
        Section("One after another", [
            "Each row has what those above it have.",
            Table("From the paper's rotation to the default.", columns, steps, {len(steps) - 1})]),
        Section("The default without one part", [
            "All fixed, so that a search does not make up for what is missing.",
            Table("First row: all parts; below it, the part that is missing.", columns, without, {0})])]


def side_section(study: Study) -> list:
    run = study.run("main")
    rows = []
    for name in plan.SIDES:
        if run and run.has(f"{name}@k") and run.has(f"{name}@v"):
            rows.append([label(name), *(with_interval(run.kl(f"{name}{side}")) for side in ("@k", "@v", ""))])
    if not rows:
        return []
    return [Section("Keys alone, values alone", [
        "The other side stays in BF16.", Table("KL", ["cache", "keys at INT2", "values at INT2", "both"], rows)])]


def separator_section(study: Study) -> list:
    run, plain = study.run("separators"), study.run("main")
    best = run and study.published(run)
    if not run or not best:
        return []
    rows = [[label(name), with_interval(run.kl(name)), "1" if name == best else ratio_text(run.ratio(name, best)),
             with_interval(plain.kl(name)) if plain and plain.has(name) else "",
             increase_text(run.perplexity_increase(name))]
            for name in plan.SEPARATED if run.has(name)]
    blocks = ["The same text, every 64th token replaced by one that ends documents or turns. Such tokens draw much of the "
              "attention and lie in the 2-bit history; calibration has them in every second sequence.",
              Table("KL with separators, and without", ["cache", "KL, with separators", "× published", "KL, without",
                                                        "perplexity above BF16, with"], rows)]
    shares = run.run.get("rows")
    if shares:
        classes = ("separators", "sinks", "others")
        lines = [[title, *(f"{100 * shares[key][c]:.1f}%" for c in classes)]
                 for title, key in (("2-bit rows", "rows"), ("attention to them", "attention"))]
        for name in ("hadamard-clip", best, "default"):
            for side in ("key", "value"):
                errors = shares["methods"].get(name, {}).get(f"{side}_error")
                if errors:
                    lines.append([f"{label(name)}: error of {side}s", *(f"{100 * errors[c]:.1f}%" for c in classes)])
        blocks.append(Table("Which rows the errors are of, weighted by attention. Sinks: other keys that receive ten "
                            "times the mean or more.", ["share of", *classes], lines))
    return [Section("Separators in the history", blocks)]


def clip_section(study: Study) -> list:
    run = study.run("clip")
    if not run:
        return []
    ratios = plan.unique(name.split("/")[-1] for name in run.methods if "@clip:" in name)
    shown = ["off" if float(ratio) == 0 else f"{float(ratio):.2f}" for ratio in ratios]
    blocks, columns, values = [], ["clipping ratio"], []
    for side, word in (("k", "keys"), ("v", "values")):
        series = []
        for method in plan.CURVES:
            names = [plan.clip_name(method, side, ratio) for ratio in ratios]
            series.append((label(method), [run.kl(name) if run.has(name) else None for name in names]))
        blocks.append(Chart(f"KL by clipping ratio of the {word}",
                            charts.lines(f"KL by clipping ratio of {word}", f"clipping ratio of {word}", shown, series)))
        columns += [f"{word}: {name}" for name, _ in series]
        values += [points for _, points in series]
    rows = [[place, *(with_interval(points[i]) if points[i] else "" for points in values)]
            for i, place in enumerate(shown)]
    return [Section("Clipping", ["One ratio for all layers and heads; the other side stays in BF16.", *blocks,
                                 Table("KL by clipping ratio", columns, rows)])]


def window_section(study: Study) -> list:
    run = study.run("windows")
    if not run:
        return []
    rows = []
    for window in plan.WINDOWS:
        names = [f"{method}@window:{window}" for method in plan.WINDOWED]
        if all(run.has(name) for name in names):
            bits = run.methods[names[0]]["bpe"]
            sink, recent = window.split("/")
            rows.append([f"{sink} + {recent}", *(with_interval(run.kl(name)) for name in names),
                         number(bits["32768"], 4), number(bits["131072"], 4)])
    series = [(label(method), [run.kl(f"{method}@window:{w}") if run.has(f"{method}@window:{w}") else None
                               for w in plan.WINDOWS]) for method in plan.WINDOWED]
    chart = charts.lines("KL by windows", "first + last tokens kept in BF16",
                         [w.replace("/", " + ") for w in plan.WINDOWS], series)
    return [Section("Windows", [
        f"First and last tokens that stay in BF16; counted from position {run.run['first_position']} on.",
        Chart("KL by windows", chart),
        Table("KL, and bits per cached value", ["first + last tokens", *map(label, plan.WINDOWED), "bits at 32K",
                                                "bits at 128K"], rows)])]


def sweep_section(study: Study, title: str, words: str, axis: str, places: list, names) -> list:
    """KL of `names` over `places`: (text, run name). The last column is the default over the best published recipe."""
    places = [(text, study.run(name)) for text, name in places if study.run(name)]
    if len(places) < 2:
        return []
    series, rows = [], []
    for name in names:
        points = [run.kl(name) if run.has(name) else None for _, run in places]
        if any(points):
            shown = "without averaging" if name == "no-positions" else label(name)
            series.append((shown, points))
            rows.append([shown, *(with_interval(p) if p else "" for p in points)])
    ratios = []
    for _, run in places:
        best = study.published(run)
        ratios.append(ratio_text(run.ratio("default", best)) if best and run.has("default") else "")
    if any(ratios):
        rows.append(["default × best published", *ratios])
    chart = charts.lines(title, axis, [text for text, _ in places], series)
    table = Table(f"KL by {axis}", ["cache", *(text for text, _ in places)], rows,
                  {len(rows) - 1} if any(ratios) else set())
    return [Section(title, [words, Chart(f"KL by {axis}", chart), table])]


def bits_section(study: Study) -> list:
    places = []
    for name, run in sorted(study.runs.items(), key=lambda item: -item[1].run["quantizer"]["quant_group_size"]):
        if name == "main" or name.startswith("group "):
            measured = next((m for m in plan.GROUPED if run.has(m)), None)
            if measured:
                bits = number(run.methods[measured]["bpe"]["131072"], 3)
                places.append((f"{run.run['quantizer']['quant_group_size']}: {bits} bits", name))
    words = (f"Values that share a scale and a zero: fewer of them cost bits. A whole head is {HEAD_DIM}. Bits per cached "
             "value at 128K tokens, fp16 scales and zeros, windows included.")
    return sweep_section(study, "Bits against KL", words, "group size and bits", places, plan.GROUPED)


def offset_section(study: Study) -> list:
    names = sorted((n for n in study.runs if n.startswith("offset ")), key=lambda n: int(n.split()[1]))
    places = [("0", "main"), *((f"{int(n.split()[1]) // 1024}K", n) for n in names)]
    words = "The same text, moved to later positions: means and spreads of keys after RoPE change with the position."
    measured = [study.run(name).kl("default")[0] for _, name in places if study.run(name) and study.run(name).has("default")]
    if len(measured) > 1:
        words += f" The default's KL varies by a factor of {max(measured) / min(measured):.2f}."
    return sweep_section(study, "Positions", words, "position offset", places, plan.AT_OFFSETS)


def planting_section(study: Study) -> list:
    places = [(sigma, "main" if sigma == plan.SHIPPED else f"sigma {sigma}") for sigma in plan.SIGMAS]
    words = ("Factors of the planted outliers are log-normal with this sigma, rounded to powers of two, which leaves the "
             "model's function as it is to the bit (`scripts/plant_outliers.py`). Each model has its own calibration.")
    return sweep_section(study, "Planted outliers", words, "sigma of the outliers", places, plan.PLANTED)


def stack_section(study: Study) -> list:
    rows = []
    for stack in plan.STACKS:
        run, ours, paper = study.run(f"stack {stack}"), f"for-{stack}", f"paper-{stack}"
        if run and run.has(ours) and run.has(paper):
            rows.append([stack, with_interval(run.kl(paper)), with_interval(run.kl(ours)),
                         ratio_text(run.ratio(ours, paper)), increase_text(run.perplexity_increase(ours)),
                         number(run.methods[ours]["bpe"]["131072"], 4)])
    if not rows:
        return []
    words = ("Both in the codec of the stack, as read in its public sources; nothing was run in a server. The paper's recipe "
             "is OSCAR per layer with its fixed clipping; `--for` searches what the stack has places for.")
    return [Section("Serving stacks", [words, Table("KL, and bits per cached value", [
        "stack", "the paper's recipe", "--for", "× the paper's", "perplexity above BF16", "bits at 128K"], rows)])]


def run_section(study: Study) -> Section:
    document = study.document
    rows = [[name, label(name), bundle["options"] or "(defaults)", "calibrate" if bundle["searched"] else "fit"]
            for name, bundle in document.get("bundles", {}).items()]
    return Section("How it was run", [
        f"On {document.get('device', 'an unknown device')} in {document.get('seconds', 0)} s, oscar "
        f"{document.get('tool', {}).get('version', '')}. Bundles marked `fit` come from `oscar-bundle fit` and the "
        "statistics of all calibration text; those marked `calibrate` from `oscar-calibrate`, whose fit does not see the "
        "text that its search holds back.",
        Code(command(document)),
        Table("Bundles", ["name", "what it is", "options", "made by"], rows),
        Code("\n".join(f"# {name}\n{run['command']}" for name, run in document.get("runs", {}).items()))])


def command(document: dict) -> str:
    words = "scripts/study_tiny_model.py"
    return f"{words} {document['arguments']}" if document.get("arguments") else words


def content(document: dict) -> Content:
    """The whole study in words, tables and charts. Runs that are absent leave their section out."""
    study = Study(document)
    main = study.run("main") or next(iter(study.runs.values()))
    counted = [run.run["tokens"] for run in study.runs.values() if "tokens" in run.run]
    lead = [
        "What each part of a 2-bit KV cache is worth on `datasets/tiny-gqa`, a synthetic model of 21.6M parameters that "
        "this project trained, with planted channel outliers. No real checkpoint was measured. Whose a method is: the "
        "paper's (OSCAR, arXiv 2605.17757: rotation, fixed clipping, windows, row format), this toolkit's (ours), or one "
        "that needs no data. OSCAR has one rotation per layer or one per KV head; “as released” is how its published v1 "
        "files are made. The portable variant and the default are searched on held-back text.",
        f"Held-out text, {max(counted, default=0):,} counted tokens from position {main.run.get('first_position')} on, "
        "unless a section says otherwise. Intervals in brackets are 95%, by a bootstrap over sequences; ratios are "
        "paired: both methods on the same tokens. Bundles with fixed choices see all calibration text."]
    if document.get("calibration_tokens"):
        lead.append(f"**This is a short run for a CPU**: {document['calibration_tokens']:,} calibration tokens, few "
                    "counted ones, fewer points. Its figures are rough.")
    sections = [*main_section(study), *separator_section(study), *part_sections(study), *side_section(study), *clip_section(study),
                *window_section(study), *offset_section(study), *planting_section(study), *bits_section(study),
                *stack_section(study), run_section(study)]
    return Content("The 2-bit cache, part by part", [*summary(study), *lead], sections)
