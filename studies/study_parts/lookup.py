"""Runs, labels and rows of tables, out of the document that measure.py writes."""
from . import vocabulary
from .figures import RunFigures, increase_text, percent, ratio_text, with_interval
from .plans import PLANS


class Study:
    def __init__(self, document: dict):
        self.document = document
        self.plan = PLANS[document["model"]]
        self.labels = self.plan.labels()
        self.runs = {name: RunFigures(run) for name, run in document.get("runs", {}).items()}

    def run(self, name: str):
        return self.runs.get(name)

    def label(self, name: str) -> str:
        """Words for a method, with its variant."""
        base, *variants = name.split("@")
        return "@".join([self.labels[base][0], *variants])

    def origin(self, name: str) -> str:
        return self.labels[name][1]

    def published(self, run: RunFigures) -> str:
        return run.best(vocabulary.PUBLISHED)

    def needles(self, name: str) -> str:
        run = self.run("needles")
        if not run or "niah" not in run.methods.get(name, {}):
            return ""
        return percent([run.methods[name]["niah"][key] for key in ("rate", "low", "high")])

    def kl_rows(self, run: RunFigures, names, base: str, titles=None) -> list:
        titles = titles or {}
        return [[titles.get(name, self.label(name)), with_interval(run.kl(name)),
                 "1" if name == base else ratio_text(run.ratio(name, base)),
                 increase_text(run.perplexity_increase(name))]
                for name in names if run.has(name)]
