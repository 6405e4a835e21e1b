"""What the page and the Markdown of a study say: its sections in order, the words around them, and how it was run."""
from . import layers, predictions, sections, texts
from .blocks import Code, Content, Section, Table
from .lookup import Study

WHOSE = ("Whose a method is: the paper's (OSCAR, arXiv 2605.17757: rotation, fixed clipping, windows, row format), this "
         "toolkit's (ours), or one that needs no data. OSCAR has one rotation per layer or one per KV head; “as released” is "
         "how its published v1 files are made. The portable variant and the default are searched on held-back text.")


def run_section(study: Study) -> Section:
    document = study.document
    rows = [[name, study.label(name), bundle["options"] or "(defaults)",
             "calibrate" if bundle["searched"] else "fit"] for name, bundle in document.get("bundles", {}).items()]
    return Section("How it was run", [
        f"On {document.get('device', 'an unknown device')} in {document.get('seconds', 0)} s, oscar "
        f"{document.get('tool', {}).get('version', '')}. Bundles marked `fit` come from `oscar-bundle fit` and the "
        "statistics of all calibration text; those marked `calibrate` from `oscar-calibrate`, with its search.",
        Code(command(document)),
        Table("Bundles", ["name", "what it is", "options", "made by"], rows),
        Code("\n".join(f"# {name}\n{run['command']}" for name, run in document.get("runs", {}).items()))])


def command(document: dict) -> str:
    return " ".join(filter(None, ["studies/study.py", document["model"], "OUT", document.get("arguments")]))


def content(document: dict) -> Content:
    """The whole study in words, tables and charts. Runs that are absent leave their section out."""
    study = Study(document)
    main = study.run("main") or next(iter(study.runs.values()))
    counted = [run.run["tokens"] for run in study.runs.values() if "tokens" in run.run]
    lead = [
        f"{study.plan.lead} {WHOSE}",
        f"Held-out text, up to {max(counted, default=0):,} counted tokens of a run from position "
        f"{main.run.get('first_position')} on. Intervals in brackets are 95%, by a bootstrap over sequences; ratios are "
        "paired: both methods on the same tokens. Bundles with fixed choices see all calibration text."]
    if "--quick" in document.get("arguments", ""):
        lead.append(f"**This is a short run for a CPU**: {document['calibration_tokens']:,} calibration tokens, few "
                    "counted ones, fewer points. Its figures are rough.")
    made = [*texts.text_section(study), *sections.main_section(study), *sections.separator_section(study),
            *texts.crossed_section(study), *predictions.section(study), *sections.part_sections(study),
            *sections.side_section(study), *layers.section(study), *sections.clip_section(study),
            *sections.window_section(study), *sections.offset_section(study), *texts.long_section(study),
            *sections.planting_section(study), *sections.bits_section(study), *sections.backend_section(study),
            *texts.amount_section(study), *texts.needle_section(study), run_section(study)]
    return Content(study.plan.title, [*sections.summary(study), *lead], made)
