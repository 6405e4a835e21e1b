"""Sections on several texts: the headline, one text calibrated and another evaluated, long contexts, and needles."""
from . import real_models, vocabulary
from .blocks import Section, Table
from .figures import floor_text, increase_text, percent, ratio_text, with_interval
from .lookup import Study

SHOWN = ("hadamard", "hadamard-clip", *vocabulary.PUBLISHED[:2], "perhead+clip", "portable-perhead", "orthogonal", "no-weights",
         "unsearched", "default")


def _texts(study: Study) -> list:
    """(heading, run) of the headline's texts, in order."""
    names = [name for domain in study.plan.domains for name in (domain, f"{domain}, separators")] + [real_models.CHAT]
    return [(name, study.run(name)) for name in names if study.run(name)]


def text_section(study: Study) -> list:
    texts = _texts(study)
    if not texts:
        return []
    rows, increases = [], []
    for name in SHOWN:
        if not any(run.has(name) for _, run in texts):
            continue
        label = "rows alike, one key center" if name == "no-weights" else study.label(name)
        rows.append([label, *(with_interval(run.kl(name)) if run.has(name) else "" for _, run in texts)])
        increases.append([label, *(increase_text(run.perplexity_increase(name)) if run.has(name) else ""
                                   for _, run in texts)])
    searched, ratios = ["default × without search"], ["default × best published"]
    for _, run in texts:
        best = study.published(run)
        for row, base in ((searched, "unsearched"), (ratios, best)):
            row.append(ratio_text(run.ratio("default", base)) if base and run.has(base) and run.has("default") else "")
    rows += [searched, ratios]
    columns = ["cache", *(heading for heading, _ in texts)]
    counted = sum(run.run["tokens"] for heading, run in texts if "separators" not in heading)
    words = (f"{counted:,} held-out tokens as they are, and those of the three domains once more with a separator as every "
             f"64th. One bundle of each kind, calibrated once, {study.plan.calibrated}. The chats are the model's own, in its template.")
    floor = ", ".join(f"{heading} {floor_text(run)}" for heading, run in texts if run.has("exact"))
    return [Section("Text by text", [
        words, Table("KL by text", columns, rows, {len(rows) - 1}),
        f"The comparison itself, with the codec off, costs KL: {floor}." if floor else "",
        Table("Perplexity above BF16, by text", columns, increases)])]


def crossed_section(study: Study) -> list:
    """One domain calibrated, another evaluated."""
    rows = []
    runs = [(domain, study.run(domain)) for domain in study.plan.domains]
    for domain, name in study.plan.crossed.items():
        cells = [with_interval(run.kl(name)) if run and run.has(name) else "" for _, run in runs]
        if any(cells):
            rows.append([f"calibrated on {domain}", *cells])
    if not rows:
        return []
    rows.append(["most × calibrated on the text's own domain", *(_worst(study, run, domain) for domain, run in runs)])
    return [Section("One text calibrated, another evaluated", [
        "The default with the same number of calibration tokens of each domain (all where a domain has fewer).",
        Table("KL by evaluated domain", ["cache", *study.plan.domains], rows, {len(rows) - 1}), *_coverage(study)])]


def _coverage(study: Study) -> list:
    """What `oscar-bundle coverage` predicts of a foreign text, beside what it cost."""
    told = study.document.get("coverage")
    if not told:
        return []
    rows = []
    for fit, fitted in enumerate(told["texts"]):
        for scored, text in enumerate(told["texts"]):
            run = study.run(text)
            names = [study.plan.crossed[domain] for domain in (fitted, text)]
            if fit != scored and run and all(run.has(name) for name in names):
                errors = [run.methods[name].get("error") for name in names]
                rows.append([f"{fitted} for {text}", *(f"{told[side][fit][scored]:.2f}" for side in ("key", "value")),
                             f"{errors[0] / errors[1]:.2f}" if all(errors) else "", ratio_text(run.ratio(*names))])
    words = ("`oscar-bundle coverage` predicts from the statistics of both texts what a fit on one loses on the other, over "
             "that text's own fit. Beside it the same ratio as measured: of the errors of the attention outputs, and of KL.")
    return [words, Table("What another text costs, over the own one", ["calibrated for evaluated", "predicted: keys",
                                                                       "predicted: values", "measured: error", "measured: KL"],
                         rows)] if rows else []


def _worst(study: Study, run, domain: str) -> str:
    own = study.plan.crossed[domain]
    if not run or not run.has(own):
        return ""
    ratios = [run.ratio(name, own) for name in study.plan.crossed.values() if name != own and run.has(name)]
    return ratio_text(max((r for r in ratios if r), default=None))


def long_section(study: Study) -> list:
    run = study.run("long")
    short = study.run(study.plan.domains[0]) if run else None
    if not run or not short:
        return []
    rows = [[study.label(name), with_interval(short.kl(name)) if short.has(name) else "", with_interval(run.kl(name)),
             increase_text(run.perplexity_increase(name))] for name in vocabulary.LONG if run.has(name)]
    lengths = [short.run.get("longest_sequence"), run.run.get("longest_sequence")]
    return [Section("Long contexts", [
        f"{study.plan.domains[0].capitalize()} in sequences of {lengths[1]:,} tokens, all that the model serves, beside those of {lengths[0]:,}.",
        Table("KL by length of a sequence", ["cache", *(f"{length:,}" for length in lengths),
                                             f"perplexity above BF16 at {lengths[1]:,}"], rows)])]


def amount_section(study: Study) -> list:
    """How much text a calibration needs, and what the order of the text changes."""
    run = study.run("amounts")
    if not run or not run.has("default"):
        return []
    names = [name for name in ("default", *real_models.amount_bundles()) if run.has(name)]
    rows = [[f"{study.document['calibration_tokens']:,} tokens, order 0: the default" if name == "default" else study.label(name),
             with_interval(run.kl(name)), "1" if name == "default" else ratio_text(run.ratio(name, "default")),
             increase_text(run.perplexity_increase(name))] for name in names]
    return [Section("How much text, and in which order", [
        "The default calibrated on other numbers of tokens of the same text, and on the text in another order.",
        Table("KL by calibration", ["calibration", "KL", "× default", "perplexity above BF16"], rows, {0})])]


def needle_section(study: Study) -> list:
    """By kind and by length, where there are several."""
    run = study.run("needles")
    if not run or not run.methods["bf16"]["niah"].get("cells"):
        return []
    places = [(kind, lambda niah, k=kind: niah["kinds"][k]) for kind in run.methods["bf16"]["niah"].get("kinds", {})]
    lengths = sorted({cell["length"] for cell in run.methods["bf16"]["niah"]["cells"]})
    places += [(f"{length:,} tokens", lambda niah, n=length: _of_length(niah, n)) for length in lengths]
    if len(lengths) < 2:
        return []
    rows = [[study.label(name), *(_passed(pick(method["niah"])) for _, pick in places)]
            for name, method in run.methods.items() if "niah" in method]
    lost = [heading for heading, pick in places if _rate(pick(run.methods["bf16"]["niah"])) < 0.5]
    words = "Facts hidden in a prompt, the right answer fed in. Intervals of 95% (Wilson) over all prompts are in the first table."
    if lost:
        words += f" BF16 itself finds fewer than half of: {', '.join(lost)}. There a 2-bit cache can't show much."
    return [Section("Needles", [words, Table("Passed, of prompts", ["cache", *(p for p, _ in places)], rows)])]


def _of_length(niah: dict, length: int) -> dict:
    cells = [cell for cell in niah["cells"] if cell["length"] == length]
    return {key: sum(cell[key] for cell in cells) for key in ("passed", "prompts")}


def _rate(counted: dict) -> float:
    return counted["passed"] / counted["prompts"]


def _passed(counted: dict) -> str:
    return f"{percent((_rate(counted),) * 3).split()[0]} of {counted['prompts']}"
