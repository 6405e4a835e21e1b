"""The sections that every model's study has."""
from . import charts, tiny_gqa, vocabulary
from .blocks import Chart, Section, Table
from .figures import floor_text, increase_text, number, ratio_text, with_interval
from .lookup import Study


def summary(study: Study) -> list:
    run = study.run(study.plan.separated[1])  # the text that bundles are for, as it is
    if not run or not study.published(run) or not run.has("default"):
        return []
    best = study.published(run)
    ratio = run.ratio("default", best)
    text = (f"At the same bytes the default of this toolkit has KL {with_interval(run.kl('default'))} to BF16, the best "
            f"published recipe ({study.label(best)}) {with_interval(run.kl(best))}: {ratio_text(ratio)} of it. "
            f"Its perplexity is {number(run.perplexity('default'))}, BF16's {number(run.perplexity('bf16'))}: "
            f"{increase_text(run.perplexity_increase('default'))}.")
    return [text]


def main_section(study: Study) -> list:
    run = study.run("main")
    if not run:
        return []
    best, rows, dots = study.published(run), [], []
    styles = {vocabulary.PAPER: 1, vocabulary.OURS: 0, vocabulary.DATA_FREE: 2}
    for name in ("bf16", *vocabulary.MAIN):
        if not run.has(name):
            continue
        reference = name == "bf16"
        top1 = run.methods[name]["top1"]
        rows.append([study.label(name), study.origin(name), number(run.perplexity(name)),
                     "" if reference else increase_text(run.perplexity_increase(name)),
                     "" if reference else with_interval(run.kl(name)),
                     "" if reference or not best else "1" if name == best else ratio_text(run.ratio(name, best)),
                     "" if reference else f"{100 * top1['mean']:.1f}%", study.needles(name),
                     number(run.methods[name]["bpe"]["131072"], 4)])
        if not reference:
            dots.append((study.label(name), styles[study.origin(name)], run.kl(name)))
    words = (f"“× published” is the KL over that of the best published recipe here, {study.label(best) if best else 'not measured'}. "
             f"The comparison itself, with the codec off, costs KL {floor_text(run)}; no ratio is quoted under five times that.")
    table = Table("KL(BF16 || INT2) in nats per token; bits per cached value at 128K tokens, windows included.",
                  ["cache", "whose", "perplexity", "above BF16", "KL", "× published", "top-1 agreement",
                   study.plan.needles, "bits at 128K"], rows, {len(rows) - 1})
    chart = Chart("KL by method, with 95% intervals: no data (diamonds), the paper (squares), ours (circles)",
                  charts.bars("KL by method", dots))
    return [Section("All methods", [words, table, chart])]


def part_sections(study: Study) -> list:
    """Each refinement alone, one after another, and the default without each."""
    run = study.run("main")
    if not run or not run.has("perhead"):
        return []
    columns = ["", "KL", "× first row", "perplexity above BF16"]
    alone = study.kl_rows(run, ("perhead", *vocabulary.ALONE), "perhead")
    steps = study.kl_rows(run, vocabulary.STEPS, "perhead", {
        "perhead": study.label("perhead"), "perhead+center": "+ centering", "unsearched": "+ the default's clipping",
        "default": "+ search of clipping: the default"})
    without = study.kl_rows(run, ("unsearched", *vocabulary.WITHOUT), "unsearched", {
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
    for name in vocabulary.SIDES:
        if run and run.has(f"{name}@k") and run.has(f"{name}@v"):
            rows.append([study.label(name), *(with_interval(run.kl(f"{name}{side}")) for side in ("@k", "@v", ""))])
    if not rows:
        return []
    return [Section("Keys alone, values alone", [
        "The other side stays in BF16.", Table("KL", ["cache", "keys at INT2", "values at INT2", "both"], rows)])]


def separator_section(study: Study) -> list:
    run, plain = (study.run(name) for name in study.plan.separated)
    best = run and study.published(run)
    if not run or not best:
        return []
    rows = [[study.label(name), with_interval(run.kl(name)), "1" if name == best else ratio_text(run.ratio(name, best)),
             with_interval(plain.kl(name)) if plain and plain.has(name) else "",
             increase_text(run.perplexity_increase(name))]
            for name in vocabulary.SEPARATED if run.has(name)]
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
                    lines.append([f"{study.label(name)}: error of {side}s", *(f"{100 * errors[c]:.1f}%" for c in classes)])
        blocks.append(Table("Which rows the errors are of, weighted by attention. Sinks: other keys that receive ten "
                            "times the mean or more.", ["share of", *classes], lines))
    return [Section("Separators in the history", blocks)]


def clip_section(study: Study) -> list:
    run = study.run("clip")
    if not run:
        return []
    ratios = vocabulary.unique(name.split("/")[-1] for name in run.methods if "@clip:" in name)
    shown = ["off" if float(ratio) == 0 else f"{float(ratio):.2f}" for ratio in ratios]
    blocks, columns, values = [], ["clipping ratio"], []
    for side, word in (("k", "keys"), ("v", "values")):
        series = []
        for method in vocabulary.CURVES:
            names = [vocabulary.clip_name(method, side, ratio) for ratio in ratios]
            series.append((study.label(method), [run.kl(name) if run.has(name) else None for name in names]))
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
    for window in vocabulary.WINDOWS:
        names = [f"{method}@window:{window}" for method in vocabulary.WINDOWED]
        if all(run.has(name) for name in names):
            bits = run.methods[names[0]]["bpe"]
            sink, recent = window.split("/")
            rows.append([f"{sink} + {recent}", *(with_interval(run.kl(name)) for name in names),
                         number(bits["32768"], 4), number(bits["131072"], 4)])
    series = [(study.label(method), [run.kl(f"{method}@window:{w}") if run.has(f"{method}@window:{w}") else None
                               for w in vocabulary.WINDOWS]) for method in vocabulary.WINDOWED]
    chart = charts.lines("KL by windows", "first + last tokens kept in BF16",
                         [w.replace("/", " + ") for w in vocabulary.WINDOWS], series)
    return [Section("Windows", [
        f"First and last tokens that stay in BF16; counted from position {run.run['first_position']} on.",
        Chart("KL by windows", chart),
        Table("KL, and bits per cached value", ["first + last tokens", *map(study.label, vocabulary.WINDOWED), "bits at 32K",
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
            shown = "without averaging" if name == "no-positions" else study.label(name)
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
            measured = next((m for m in vocabulary.GROUPED if run.has(m)), None)
            if measured:
                bits = number(run.methods[measured]["bpe"]["131072"], 3)
                places.append((f"{run.run['quantizer']['quant_group_size']}: {bits} bits", name))
    words = (f"Values that share a scale and a zero: fewer of them cost bits. A whole head is {study.plan.head_dim}. Bits per cached "
             "value at 128K tokens, fp16 scales and zeros, windows included.")
    return sweep_section(study, "Bits against KL", words, "group size and bits", places, vocabulary.GROUPED)


def offset_section(study: Study) -> list:
    names = sorted((n for n in study.runs if n.startswith("offset ")), key=lambda n: int(n.split()[1]))
    places = [("0", "main"), *((f"{int(n.split()[1]) // 1024}K", n) for n in names)]
    words = "The same text, moved to later positions: means and spreads of keys after RoPE change with the position."
    measured = [study.run(name).kl("default")[0] for _, name in places if study.run(name) and study.run(name).has("default")]
    if len(measured) > 1:
        words += f" The default's KL varies by a factor of {max(measured) / min(measured):.2f}."
    return sweep_section(study, "Positions", words, "position offset", places, vocabulary.AT_OFFSETS)


def planting_section(study: Study) -> list:
    places = [(sigma, "main" if sigma == tiny_gqa.SHIPPED else f"sigma {sigma}") for sigma in tiny_gqa.SIGMAS]
    words = ("Factors of the planted outliers are log-normal with this sigma, rounded to powers of two, which leaves the "
             "model's function as it is to the bit (`datasets/tiny-gqa/make/plant_outliers.py`). Each model has its own calibration.")
    return sweep_section(study, "Planted outliers", words, "sigma of the outliers", places, tiny_gqa.PLANTED)


def backend_section(study: Study) -> list:
    rows = []
    for backend in vocabulary.BACKENDS:
        run, ours, paper = study.run(f"stack {backend}"), f"for-{backend}", f"paper-{backend}"
        if run and run.has(ours) and run.has(paper):
            rows.append([backend, with_interval(run.kl(paper)), with_interval(run.kl(ours)),
                         ratio_text(run.ratio(ours, paper)), increase_text(run.perplexity_increase(ours)),
                         number(run.methods[ours]["bpe"]["131072"], 4)])
    if not rows:
        return []
    words = ("Both in the codec of the backend, as read in its public sources; nothing was run in a server. The paper's recipe "
             "is OSCAR per layer with its fixed clipping; `--for` searches what the backend has places for.")
    return [Section("Backends", [words, Table("KL, and bits per cached value", [
        "backend", "the paper's recipe", "--for", "× the paper's", "perplexity above BF16", "bits at 128K"], rows)])]
