#!/usr/bin/env python3
"""The study of the embedded model without its runs: the plan, the arithmetic, and what is drawn."""
import json
import os
import pathlib
import re
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_SOURCE"]) / "scripts"))
import study_tiny_model
from tiny_study import charts, content, figures, markdown, measure, page, plan

TOKENS = [300, 300, 100, 300]


def made_up_run(run, scale):
    """A report of `run` as measure.py keeps it: every method has another KL."""
    methods = {}
    for index, name in enumerate(("bf16", *run.methods)):
        kl = [0.0 if name == "bf16" else 1e-5 if name == "exact" else 0.01 * index + 0.001 * u
              for u in range(len(TOKENS))]
        methods[name] = {"top1": {"mean": 0.9}, "bpe": {"32768": 2.384, "131072": 2.284},
                         "units": {"kl": kl, "nll": [2.2 + x for x in kl]}}
    kept = {"command": f"oscar-eval tiny-gqa <{run.name}>", "methods": methods,
            "tokens": sum(TOKENS), "first_position": 320, "kl_floor": 1e-5, "unit_tokens": TOKENS,
            "quantizer": {"quant_group_size": 128}}
    if run.name.startswith("group "):
        kept["quantizer"] = {"quant_group_size": int(run.name.split()[1])}
    if run.name == "needles":
        for method in methods.values():
            del method["units"]
            method["niah"] = {"rate": 0.9, "low": 0.6, "high": 0.98}
    return kept


def made_up_study(scale):
    runs = {run.name: made_up_run(run, scale) for run in plan.runs(scale)}
    bundles = {name: {"options": " ".join(b.options), "searched": b.searched}
               for name, b in plan.BUNDLES.items()}
    return {"schema": measure.SCHEMA, "calibration_tokens": scale.calibration_tokens, "seconds": 1,
            "device": "a device", "tool": {"version": "1"}, "bundles": bundles, "runs": runs}


class Plan(unittest.TestCase):
    def test_every_method_has_a_label_and_every_bundle_is_used(self):
        used = set()
        for run in plan.runs(plan.Scale()):
            self.assertEqual(len(run.methods), len(set(run.methods)), run.name)
            for method in run.methods:
                self.assertIn(method.split("@")[0], plan.LABELS)
            used.update(run.bundles())
        self.assertEqual(used, set(plan.BUNDLES))

    def test_bundles_are_made_only_where_a_run_needs_them(self):
        scale = plan.Scale(sections=("planting",))
        wanted = plan.wanted_bundles(plan.runs(scale))
        self.assertEqual(set(wanted), {"0", "1.0"})
        self.assertEqual(set(wanted["0"]), {*plan.PUBLISHED, "unsearched", "default"})

    def test_no_bundle_has_the_name_of_a_method(self):
        self.assertFalse(set(plan.BUNDLES) & {"bundle", "oscar", "portable", "hadamard", "identity"})


class Figures(unittest.TestCase):
    def test_means_weigh_units_by_their_tokens(self):
        mean, low, high = figures.mean_with_interval([1.0, 4.0], [300, 100])
        self.assertAlmostEqual(mean, 1.75)
        self.assertEqual((low, high), (1.0, 4.0))  # draws of one unit twice are over 2.5% of all
        self.assertEqual(figures.mean_with_interval([2.0], [10]), (2.0, None, None))

    def test_a_ratio_is_paired(self):
        base = [0.1, 0.5, 0.9, 0.2, 0.6, 0.3]
        half = [x / 2 for x in base]
        ratio, low, high = figures.ratio_with_interval(half, base, [10, 20, 30, 10, 20, 30])
        for value in (ratio, low, high):  # units differ, their ratio does not
            self.assertAlmostEqual(value, 0.5)
        ratio, low, high = figures.ratio_with_interval(base[::-1], base, [10] * 6)
        self.assertTrue(low < ratio < high)

    def test_the_interval_covers_the_mean_as_often_as_it_says(self):
        # 30 units of a normal distribution: the standard error of the mean is 1 / sqrt(30).
        import random
        generator = random.Random(1)
        covered = 0
        for _ in range(60):
            values = [generator.gauss(5, 1) for _ in range(30)]
            _, low, high = figures.mean_with_interval(values, [1] * 30)
            covered += low < 5 < high
            self.assertAlmostEqual(high - low, 2 * 1.96 / 30 ** 0.5, delta=0.35)
        self.assertGreaterEqual(covered, 51)  # of 60 at 93% or so, 51 or fewer is one in a hundred

    def test_perplexity_is_compared_with_bf16_token_by_token(self):
        run = figures.RunFigures(made_up_run(plan.Run("main", ("exact", "a")), plan.Scale()))
        run.methods["a"]["units"]["nll"] = [x + 0.01 for x in run.methods["bf16"]["units"]["nll"]]
        for value in run.perplexity_increase("a"):
            self.assertAlmostEqual(value, 0.0100502, places=6)
        self.assertAlmostEqual(run.perplexity("bf16"), 9.0250135, places=6)

    def test_no_ratio_is_quoted_at_the_floor(self):
        run = figures.RunFigures(made_up_run(plan.Run("main", ("exact", "a", "b")), plan.Scale()))
        self.assertIsNotNone(run.ratio("b", "a"))
        run.run["kl_floor"] = 0.02
        self.assertIsNone(run.ratio("b", "a"))
        self.assertEqual(figures.with_interval(None), "at the floor")

    def test_numbers_keep_three_significant_digits(self):
        for value, text in ((0.00801, "0.00801"), (0.0999, "0.0999"), (0.09996, "0.100"),
                            (8.9312, "8.93"), (6778.4, "6778"), (0, "0"), (1, "1.00"), (None, "")):
            self.assertEqual(figures.number(value), text)
        self.assertEqual(figures.ratio_text((0.0654, 0.058, 0.069)), "0.065 [0.058, 0.069]")
        self.assertEqual(figures.ratio_text((109.2, 77.1, 176)), "109 [77, 176]")
        self.assertEqual(figures.increase_text((0.0042, -0.001, 0.01)), "+0.42% [-0.10, 1.00]")
        self.assertEqual(figures.increase_text((1.5, None, None)), "+150%")
        self.assertEqual(figures.with_interval((0.00801, 0.0074, 0.00866)), "0.00801 [0.00740, 0.00866]")


class Drawing(unittest.TestCase):
    def setUp(self):
        self.document = made_up_study(plan.Scale())
        self.content = content.content(self.document)

    def test_every_section_is_there_with_its_figures(self):
        titles = [section.title for section in self.content.sections]
        self.assertEqual(titles, ["All methods", "Separators in the history", "Each refinement alone", "One after another",
                                  "The default without one part", "Keys alone, values alone",
                                  "Clipping", "Windows", "Positions", "Planted outliers",
                                  "Bits against KL", "Serving stacks", "How it was run"])
        table = self.content.sections[0].blocks[1]
        self.assertEqual([row[0] for row in table.rows],
                         ["BF16 cache", *(plan.LABELS[name][0] for name in plan.MAIN)])
        row = table.rows[-1]
        self.assertRegex(row[4], r"^0\.\d+ \[0\.\d+, 0\.\d+\]$")
        self.assertEqual(row[7], "90% [60, 98]")

    def test_every_stack_is_held_against_the_papers_recipe_there(self):
        (section,) = [s for s in self.content.sections if s.title == "Serving stacks"]
        rows = section.blocks[1].rows
        self.assertEqual([row[0] for row in rows], list(plan.STACKS))
        for stack, row in zip(plan.STACKS, rows):
            run = figures.RunFigures(self.document["runs"][f"stack {stack}"])
            self.assertEqual(row[1], figures.with_interval(run.kl(f"paper-{stack}")))
            self.assertEqual(row[2], figures.with_interval(run.kl(f"for-{stack}")))

    def test_a_part_that_was_not_measured_is_left_out(self):
        for name in list(self.document["runs"]):
            if name != "main":
                del self.document["runs"][name]
        titles = [section.title for section in content.content(self.document).sections]
        self.assertNotIn("Positions", titles)
        self.assertIn("All methods", titles)
        self.assertNotIn("short run", markdown.render(self.content, "p.html"))
        self.document["calibration_tokens"] = 16384
        self.assertIn("short run", " ".join(content.content(self.document).lead))

    def test_the_page_is_well_formed_and_needs_nothing_else(self):
        text = page.render(self.content)
        root = xml.etree.ElementTree.fromstring(text.split("\n", 1)[1])
        tags = {element.tag.split("}")[1] for element in root.iter()}
        self.assertTrue({"table", "svg", "caption"} <= tags)
        self.assertFalse({"script", "link", "img", "iframe"} & tags)
        self.assertNotRegex(text.replace("http://www.w3.org/1999/xhtml", ""), r"https?://|url\(")
        self.assertIn("prefers-color-scheme:dark", text)
        self.assertIn("@media print", text)
        self.assertNotRegex(text, r"\bnan\b|None|inf\b")

    def test_coordinates_stay_inside_their_charts(self):
        for section in self.content.sections:
            for block in section.blocks:
                if not isinstance(block, content.Chart):
                    continue
                root = xml.etree.ElementTree.fromstring(block.svg)
                width, height = map(float, root.get("viewBox").split()[2:])
                for element in root.iter():
                    for names, limit in ((("x", "x1", "x2", "cx"), width), (("y", "y1", "y2", "cy"), height)):
                        for name in names:
                            if element.get(name):
                                self.assertTrue(0 <= float(element.get(name)) <= limit, block.title)

    def test_greater_values_are_higher_on_the_axis(self):
        axis = charts.Scale([0.01, 0.1, 1.0], 200, 0)
        self.assertTrue(200 > axis.at(0.01) > axis.at(0.1) > axis.at(1.0) > 0)
        self.assertAlmostEqual(axis.at(0.01) - axis.at(0.1), axis.at(0.1) - axis.at(1.0))
        self.assertEqual(axis.ticks(), [0.01, 0.1, 1.0])

    def test_markdown_tables_have_as_many_cells_as_columns(self):
        text = markdown.render(self.content, "study.html")
        columns = 0
        for line in text.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            if set(line) <= {"|", "-"} and line:
                columns = cells
            elif line.startswith("|") and columns:
                self.assertEqual(cells, columns, line)
            elif not line:
                columns = 0
        self.assertIn("`study.html`", text)

    def test_render_only_draws_from_the_kept_figures(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            (out / "study.json").write_text(measure.dump(self.document))
            self.assertEqual(study_tiny_model.main(["--render-only", "--out", folder]), 0)
            first = [(out / name).read_bytes() for name in ("README.md", "study.html")]
            self.assertEqual(study_tiny_model.main(["--render-only", "--out", folder]), 0)
            self.assertEqual(first, [(out / name).read_bytes() for name in ("README.md", "study.html")])
            (out / "study.json").write_text('{"schema": "other"}')
            with self.assertRaisesRegex(SystemExit, "tiny-gqa-study-1"):
                study_tiny_model.main(["--render-only", "--out", folder])

    def test_kept_figures_read_back_with_six_digits(self):
        text = measure.dump({"a": {"b": {"c": {"d": {"e": [1 / 3, None, 1e-9], "f": 2}}}}, "g": 1 / 3})
        self.assertEqual(json.loads(text), {"a": {"b": {"c": {"d": {"e": [0.333333, None, 1e-09], "f": 2}}}},
                                            "g": 0.333333})


if __name__ == "__main__":
    unittest.main()
