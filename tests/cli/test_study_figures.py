#!/usr/bin/env python3
"""The studies of both models without their runs: the plan, the arithmetic, and what is drawn."""
import contextlib
import io
import json
import os
import pathlib
import re
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_SOURCE"]) / "studies"))
import study
from study_parts import blocks, charts, content, figures, layers, lookup, markdown, measure, page, predictions, vocabulary
from study_parts.plans import PLANS

TOKENS = [300, 300, 100, 300]


TINY, REAL, QWEN = (PLANS[name] for name in ("tiny-gqa", "smollm2", "qwen2.5-coder-1.5b"))
LAYERS, HEADS = 4, 3


def made_up_errors(index):
    """`layer_errors` of a method: every layer and head has another one."""
    def side(factor):
        return [[factor * 0.001 * (1 + index + layer + head) for head in range(HEADS)] for layer in range(LAYERS)]
    return {"both": side(1.0), "key": side(0.75), "value": side(0.25)}


def made_up_run(run):
    """A report of `run` as measure.py keeps it: every method has another KL."""
    methods = {}
    for index, name in enumerate(("bf16", *run.methods)):
        kl = [0.0 if name == "bf16" else 1e-5 if name == "exact" else 0.01 * index + 0.001 * u
              for u in range(len(TOKENS))]
        methods[name] = {"top1": {"mean": 0.9}, "bpe": {"8192": 2.7, "32768": 2.384, "131072": 2.284},
                         "units": {"kl": kl, "nll": [2.2 + x for x in kl]}}
        if vocabulary.LAYER_ERRORS[0] in run.options and name not in ("bf16", "exact"):
            methods[name]["error"] = predictions.mean(made_up_errors(index)["both"])
            if name == layers.METHOD:
                methods[name]["layer_errors"] = made_up_errors(index)
    kept = {"command": f"oscar-eval <{run.key()}>", "methods": methods, "text": run.text, "variant": run.variant,
            "tokens": sum(TOKENS), "first_position": 320, "longest_sequence": run.sequence_length or 4096, "kl_floor": 1e-5,
            "unit_tokens": TOKENS, "quantizer": {"quant_group_size": 128}}
    if run.name.startswith("group "):
        kept["quantizer"] = {"quant_group_size": int(run.name.split()[1])}
    if run.name == "needles":
        lengths = run.options[run.options.index("--needle-lengths") + 1].split(",")
        for method in methods.values():
            del method["units"]
            method["niah"] = {"rate": 0.9, "low": 0.6, "high": 0.98,
                              "kinds": {"single": {"passed": 9, "prompts": 10}, "multikey": {"passed": 1, "prompts": 10}},
                              "cells": [{"length": int(n), "depth": depth, "passed": 3, "prompts": 5}
                                        for n in lengths for depth in (0.0, 0.5)]}
    return kept


def made_up_study(plan, size=None):
    runs = {}
    for run in plan.runs(size or plan.size):
        runs |= {name: made_up_run(run) for name in (run.name, run.separated) if name}
    bundles = {name: {"options": " ".join(b.options), "searched": b.searched, "text": b.text}
               for name, b in plan.bundles.items()}
    facts = {"condition": [2.0, 30.0, 9.0], "largest_share": [0.1, 0.3, 0.2], "clip": [0.96, 0.92, 0.0],
             "predicted": [0.001, 0.002, 0.003], "peak": [1.5, 8.0, 3.0]}
    texts = list(plan.crossed)
    told = {"texts": texts, "key": [[1.25] * len(texts)] * len(texts), "value": [[1.5] * len(texts)] * len(texts)}
    return {"schema": measure.SCHEMA, "model": plan.name, "coverage": told if texts else None, "arguments": "", "calibration_tokens": 0, "seconds": 1,
            "device": "a device", "tool": {"version": "1"}, "bundles": bundles, "runs": runs,
            "predicted": {predictions.SHIPPED: {name: 0.02 for name in (*vocabulary.PREDICTED, "for-vllm-pr46774")}},
            "map": [{"layer": layer, "key": facts, "value": facts} for layer in range(LAYERS)]}


class Plan(unittest.TestCase):
    def test_every_method_has_a_label_and_every_bundle_is_used(self):
        for plan in PLANS.values():
            used = set()
            for run in plan.runs(plan.size):
                self.assertEqual(len(run.methods), len(set(run.methods)), run.key())
                for method in run.methods:
                    self.assertIn(method.split("@")[0], plan.labels())
                self.assertIn(run.text, plan.texts)
                used.update(run.bundles(plan.bundles))
            self.assertEqual(used, set(plan.bundles), plan.name)

    def test_every_result_has_a_name_of_its_own(self):
        for plan in PLANS.values():
            for size in (plan.size, plan.quick):
                names = [name for run in plan.runs(size) for name in (run.name, run.separated) if name]
                self.assertEqual(len(names), len(set(names)), plan.name)

    def test_the_steps_of_a_short_study_are_those_of_the_long_one(self):
        for plan in PLANS.values():
            made = {step for step, make in plan.steps.items() if make(plan.size)}
            self.assertEqual(made, set(plan.steps))

    def test_sequences_reach_beyond_the_largest_windows(self):
        largest = max(sum(map(int, window.split("/"))) for window in vocabulary.WINDOWS)
        for plan in PLANS.values():
            for size in (plan.size, plan.quick):
                self.assertGreaterEqual(min(size.sequence_length, size.tokens or size.sequence_length), largest + 100)

    def test_the_real_models_headline_comes_first_and_reads_enough(self):
        for plan in (REAL, QWEN):
            first = next(iter(plan.steps))
            self.assertEqual(first, "texts")
            asked = [run.tokens or plan.size.tokens for run in plan.runs(plan.size, [first])]
            self.assertGreaterEqual(sum(asked), 200000)
            self.assertTrue(all("heldout" in text.corpus or text.corpus == "self" for text in plan.texts.values()))
            self.assertTrue(all("calibration" in part for text in plan.calibration.values()
                                for part in text.corpus.split(",")))

    def test_bundles_are_made_only_where_a_run_needs_them(self):
        for run in TINY.runs(TINY.size, ["planting"]):
            self.assertIn(run.variant, ("0", "1.0"))
            self.assertEqual(set(run.bundles(TINY.bundles)), {*vocabulary.PUBLISHED, "unsearched", "default"})

    def test_no_bundle_has_the_name_of_a_method(self):
        for plan in PLANS.values():
            self.assertFalse(set(plan.bundles) & {"bundle", "oscar", "portable", "hadamard", "identity"})


class Making(unittest.TestCase):
    """What is made, in which order, and how often: with programs that only write down their command."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in measure.PROGRAMS:
            (self.folder / name).write_text("")

    def bench(self, **given):
        return measure.Bench(self.folder, pathlib.Path(os.environ["OSCAR_SOURCE"]), self.folder, "cpu", 1, **given)

    def append(self, out, *words):
        return ["sh", "-c", f"echo {' '.join(words)} >> {out}"]

    def test_what_was_made_is_made_again_only_by_another_command_or_from_other_inputs(self):
        first, second = self.folder / "first", self.folder / "second"
        with contextlib.redirect_stdout(io.StringIO()):
            for _ in range(2):
                self.bench().make("first", first, self.append(first, "a"))
                self.bench().make("second", second, self.append(second, "b"), [first])
            self.assertEqual((first.read_text(), second.read_text()), ("a\n", "b\n"))
            self.bench().make("first", first, self.append(first, "c"))
            self.bench().make("second", second, self.append(second, "b"), [first])
            self.assertEqual((first.read_text(), second.read_text()), ("a\nc\n", "b\nb\n"))

    def test_another_build_of_a_program_makes_its_results_again(self):
        out = self.folder / "out"
        program = self.folder / "oscar-eval"
        with contextlib.redirect_stdout(io.StringIO()):
            for words in ("one", "one", "two"):
                program.write_text(f"#!/bin/sh\necho {words} >> $1\n")
                program.chmod(0o755)
                self.bench().make("out", out, [program, out])
        self.assertEqual(out.read_text(), "one\ntwo\n")

    def test_nothing_begins_when_the_time_is_over(self):
        bench = self.bench(within=10)
        bench.started -= 11
        with self.assertRaises(measure.Later):
            bench.make("late", self.folder / "late", self.append(self.folder / "late", "a"))
        self.assertFalse((self.folder / "late").exists())


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
        run = figures.RunFigures(made_up_run(vocabulary.Run("main", ("exact", "a"))))
        run.methods["a"]["units"]["nll"] = [x + 0.01 for x in run.methods["bf16"]["units"]["nll"]]
        for value in run.perplexity_increase("a"):
            self.assertAlmostEqual(value, 0.0100502, places=6)
        self.assertAlmostEqual(run.perplexity("bf16"), 9.0250135, places=6)

    def test_no_ratio_is_quoted_at_the_floor(self):
        run = figures.RunFigures(made_up_run(vocabulary.Run("main", ("exact", "a", "b"))))
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
        self.assertEqual(figures.ratio_text((0.000903, 0.0008, 0.00101)), "0.00090 [0.00080, 0.00101]")
        self.assertEqual(figures.increase_text((0.0042, -0.001, 0.01)), "+0.42% [-0.10, 1.00]")
        self.assertEqual(figures.increase_text((1.5, None, None)), "+150%")
        self.assertEqual(figures.with_interval((0.00801, 0.0074, 0.00866)), "0.00801 [0.00740, 0.00866]")


class Predictions(unittest.TestCase):
    def test_a_bundle_predicts_for_itself_its_start_and_its_portable_variants(self):
        layer = {"quantized": True, "predicted_output_nmse": [1.0, 3.0],
                 "search": {"pair": [{"default_nmse": 4.0}, {"default_nmse": 6.0}]}}
        exact = {"quantized": False, "predicted_output_nmse": [None, None]}
        portable = {"shared": [{"predicted_output_nmse": [7.0, 9.0]}], "per_head": [{"predicted_output_nmse": [7.0, None]}]}
        inspected = {"layers": [layer, exact], "portable": portable}
        self.assertEqual(predictions.predicted("default", inspected),
                         {"default": 2.0, "unsearched": 5.0, "portable": 8.0})
        self.assertEqual(predictions.predicted("orthogonal", inspected), {"orthogonal": 2.0})

    def test_every_text_of_a_method_with_a_prediction_is_a_point(self):
        for plan in PLANS.values():
            document = made_up_study(plan)
            found = predictions.points(lookup.Study(document))
            self.assertIn(("for-vllm-pr46774", "stack vllm-pr46774", 0.02), [point[:3] for point in found])
            asked = {(method, name) for run in plan.runs(plan.size) for name in (run.name, run.separated) if name
                     for method in run.methods if vocabulary.LAYER_ERRORS[0] in run.options and not run.variant
                     and method in document["predicted"][predictions.SHIPPED]}
            self.assertEqual({point[:2] for point in found}, asked)
            self.assertGreaterEqual(len({name for _, name in asked}), 4)

    def test_the_measured_error_is_the_mean_over_layers_and_heads(self):
        errors = {"both": [[1.0, 2.0], [3.0, 6.0]], "key": [[1.0, 1.0], [1.0, 1.0]], "value": [[0.0, 0.0], [0.0, 0.0]]}
        report = {"device": "a device", "tool": {}, "methods": {"bf16": {}, "orthogonal": {"layer_errors": errors},
                                                                "default": {"layer_errors": errors}}}
        methods = measure.shortened(report)["methods"]
        self.assertEqual(methods["bf16"], {})
        self.assertEqual(methods["orthogonal"], {"error": 3.0})
        self.assertEqual(methods["default"], {"error": 3.0, "layer_errors": errors})

    def test_how_many_are_within_the_factor_is_counted(self):
        document = made_up_study(TINY)
        values = {"portable": 0.5, "default": 1.0, "orthogonal": 2.1}
        document["predicted"] = {predictions.SHIPPED: dict.fromkeys(values, 1.0)}
        for run in document["runs"].values():
            for method in run["methods"].values():
                method.pop("error", None)
        for name, value in values.items():
            document["runs"]["main"]["methods"][name]["error"] = value
        (section,) = predictions.section(lookup.Study(document))
        self.assertIn("2 of 3 points are within a factor of 2; 1 measured higher (all text as it is).", section.blocks)
        self.assertAlmostEqual(predictions.correlation([(1, 2), (2, 4), (4, 8)]), 1.0)

    def test_ranks_say_which_fact_goes_with_the_error(self):
        self.assertEqual(layers.rank_correlation([1.0, 5.0, 9.0], [2.0, 3.0, 70.0]), 1.0)
        self.assertEqual(layers.rank_correlation([1.0, 5.0, 9.0], [7.0, 3.0, 2.0]), -1.0)


class Drawing(unittest.TestCase):
    def setUp(self):
        self.document = made_up_study(TINY)
        self.content = content.content(self.document)
        self.real = content.content(made_up_study(REAL))

    def test_every_section_is_there_with_its_figures(self):
        parts = ["Each refinement alone", "One after another", "The default without one part", "Keys alone, values alone",
                 "Layers and heads", "Clipping", "Windows", "Positions"]
        titles = [section.title for section in self.content.sections]
        self.assertEqual(titles, ["All methods", "Separators in the history", "Predicted and measured", *parts,
                                  "Planted outliers", "Bits against KL", "Backends", "How it was run"])
        self.assertEqual([section.title for section in self.real.sections],
                         ["Text by text", "All methods", "Separators in the history",
                          "One text calibrated, another evaluated", "Predicted and measured", *parts, "Long contexts",
                          "Bits against KL", "Backends", "Needles", "How it was run"])
        table = self.content.sections[0].blocks[1]
        self.assertEqual([row[0] for row in table.rows],
                         ["BF16 cache", *(TINY.labels()[name][0] for name in vocabulary.MAIN)])
        row = table.rows[-1]
        self.assertRegex(row[4], r"^0\.\d+ \[0\.\d+, 0\.\d+\]$")
        self.assertEqual(row[7], "90% [60, 98]")

    def test_each_text_of_the_real_model_has_its_column_with_and_without_separators(self):
        table = self.real.sections[0].blocks[1]
        self.assertEqual(table.columns, ["cache", "documentation", "documentation, separators", "code", "code, separators",
                                         "prose", "prose, separators", "chat"])
        self.assertTrue(all(all(row) for row in table.rows))
        crossed = next(s for s in self.real.sections if s.title.startswith("One text")).blocks[1]
        self.assertEqual([row[0] for row in crossed.rows[:3]],
                         ["calibrated on documentation", "calibrated on code", "calibrated on prose"])
        told = next(s for s in self.real.sections if s.title.startswith("One text")).blocks[3]
        self.assertEqual([row[:3] for row in told.rows[:2]], [["documentation for code", "1.25", "1.50"],
                                                              ["documentation for prose", "1.25", "1.50"]])
        self.assertEqual(len(told.rows), 6)

    def test_needles_that_bf16_misses_are_named(self):
        words, table = next(s for s in self.real.sections if s.title == "Needles").blocks
        self.assertIn("fewer than half of: multikey.", words)
        self.assertEqual(table.rows[0][1:3], ["90% of 10", "10% of 10"])

    def test_every_backend_is_held_against_the_papers_recipe_there(self):
        (section,) = [s for s in self.content.sections if s.title == "Backends"]
        rows = section.blocks[1].rows
        self.assertEqual([row[0] for row in rows], list(vocabulary.BACKENDS))
        for backend, row in zip(vocabulary.BACKENDS, rows):
            run = figures.RunFigures(self.document["runs"][f"stack {backend}"])
            self.assertEqual(row[1], figures.with_interval(run.kl(f"paper-{backend}")))
            self.assertEqual(row[2], figures.with_interval(run.kl(f"for-{backend}")))

    def test_a_part_that_was_not_measured_is_left_out(self):
        for name in list(self.document["runs"]):
            if name != "main":
                del self.document["runs"][name]
        titles = [section.title for section in content.content(self.document).sections]
        self.assertNotIn("Positions", titles)
        self.assertIn("All methods", titles)
        self.assertNotIn("short run", markdown.render(self.content, "p.html"))
        self.document["arguments"] = "--quick"
        self.assertIn("short run", " ".join(content.content(self.document).lead))

    def test_the_page_is_well_formed_and_needs_nothing_else(self):
        for shown in (self.content, self.real):
            text = page.render(shown)
            root = xml.etree.ElementTree.fromstring(text.split("\n", 1)[1])
            tags = {element.tag.split("}")[1] for element in root.iter()}
            self.assertTrue({"table", "svg", "caption"} <= tags)
            self.assertFalse({"script", "link", "img", "iframe"} & tags)
            self.assertNotRegex(text.replace("http://www.w3.org/1999/xhtml", ""), r"https?://|url\(")
            self.assertIn("prefers-color-scheme:dark", text)
            self.assertIn("@media print", text)
            self.assertNotRegex(text, r"\bnan\b|None|inf\b")

    def test_coordinates_stay_inside_their_charts(self):
        for section in self.content.sections + self.real.sections:
            for block in section.blocks:
                if not isinstance(block, blocks.Chart):
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
        self.assertEqual(charts.Scale([0.0033, 8.0], 200, 0).ticks(), [0.002, 0.01, 0.1, 1.0])

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
            self.assertEqual(study.main(["tiny-gqa", folder, "--render-only"]), 0)
            first = [(out / name).read_bytes() for name in ("README.md", "study.html")]
            self.assertEqual(study.main(["tiny-gqa", folder, "--render-only"]), 0)
            self.assertEqual(first, [(out / name).read_bytes() for name in ("README.md", "study.html")])
            (out / "study.json").write_text('{"schema": "other"}')
            with self.assertRaisesRegex(SystemExit, "oscar-study-1"):
                study.main(["tiny-gqa", folder, "--render-only"])

    def test_kept_figures_read_back_with_six_digits(self):
        text = measure.dump({"a": {"b": {"c": {"d": {"e": [1 / 3, None, 1e-9], "f": 2}}}}, "g": 1 / 3})
        self.assertEqual(json.loads(text), {"a": {"b": {"c": {"d": {"e": [0.333333, None, 1e-09], "f": 2}}}},
                                            "g": 0.333333})


if __name__ == "__main__":
    unittest.main()
