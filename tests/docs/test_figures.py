"""Figures and tables in the documentation are those of the study and of the programs."""
import csv
import json
import re
import sys
import unittest

from support.markdown_files import MarkdownFile, headed_tables, section, table_rows, tables
from support.programs import SOURCE, run

sys.path.insert(0, str(SOURCE / "studies"))
import draw_charts
from study_parts import blocks, content, figures, vocabulary
from task_parts import scores

STUDY = json.loads(draw_charts.TINY_STUDY.read_text())
REAL = json.loads(draw_charts.REAL_STUDY.read_text())
CODER = json.loads(draw_charts.CODER_STUDY.read_text())
TASKS = json.loads(draw_charts.CODER_TASKS.read_text())
# Rows of which the documentation has other words than the study.
PERPLEXITY = "its perplexity above BF16's"
ROWS = {PERPLEXITY: "default of this toolkit"}


def plain(cell):
    """A figure as both write it: ".0122" for "0.0122"."""
    return re.sub(r"(?<![\d.])0\.", ".", cell)


def rows_of(study):
    """{heading: cell} of each row of each table of a study, by the row's name."""
    rows = {}
    for part in content.content(study).sections:
        for table in part.blocks:
            if isinstance(table, blocks.Table):
                for row in table.rows:
                    rows.setdefault(row[0], []).append(dict(zip(table.columns[1:], map(plain, row[1:]))))
    return rows


def with_sign(difference):
    """Points of a difference of shares, with its interval."""
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in difference))


def kl(run_name, method):
    return figures.RunFigures(STUDY["runs"][run_name]).kl(method)[0]


def best_published(run_name):
    return min(kl(run_name, name) for name in vocabulary.PUBLISHED)


class Figures(unittest.TestCase):
    def assert_shown(self, shown, value):
        """`shown`, as ".0057", is `value` rounded to the digits that it has."""
        self.assertEqual(shown, f"{value:.{len(shown) - 1}f}".lstrip("0"))

    def test_the_picture_of_tasks_is_drawn_from_their_scores(self):
        self.assertEqual((SOURCE / "docs/tasks.svg").read_text(), draw_charts.draw_tasks(TASKS))

    def test_the_picture_of_the_real_model_is_drawn_from_its_study(self):
        self.assertEqual((SOURCE / "docs/quality.svg").read_text(), draw_charts.draw_quality(REAL))

    def assert_of_the_real_study(self, headings, rows, known):
        """Each row stands, with the same headings, in one table of the study."""
        for row in rows:
            shown = dict(zip(headings[1:], map(plain, row[1:])))
            self.assertTrue(any(shown.items() <= of.items() for of in known.get(ROWS.get(row[0], row[0]), ())),
                            f"no table of the study has {row[0]}: {shown}")

    def test_figures_of_the_real_model_are_those_of_its_study(self):
        found = list(headed_tables("docs/results.md", "SmolLM2-135M"))
        self.assertEqual(len(found), 3)
        coder = [next(headed_tables("README.md", "Results")), *list(headed_tables("docs/results.md", "Qwen2.5-Coder-1.5B"))[4:]]
        self.assertGreater(len(coder), 2)
        for study, shown in ((REAL, found), (CODER, coder)):
            known = rows_of(study)
            for headings, rows in shown:
                self.assertGreater(len(rows), 2)
                self.assert_of_the_real_study(headings, rows, known)

    def test_scores_of_tasks_are_those_that_were_counted(self):
        answered = {"greedy": lambda of: ([f"{of['bf16']['prompts']:,}"],
                                          [f"{100 * of['fp8']['score']:.1f} of {of['fp8']['prompts']:,}"]),
                    "sampled": lambda of: ([f"{of['int2']['pairs']:,}"], [])}
        for rows, (mode, around) in zip(tables("docs/results.md", "Qwen2.5-Coder-1.5B"), answered.items()):
            scored = TASKS["figures"][mode]
            self.assertGreater(len(rows), 6)
            for row in rows:
                of = scored[{"all tasks": "all", "HumanEval": "all humaneval"}.get(row[0], row[0])]
                difference = with_sign(of["int2"]["difference"])
                prompts, more = around(of)
                self.assertEqual(row[1:], [*prompts, *(f"{100 * of[cache]['score']:.1f}" for cache in ("bf16", "int2")),
                                           difference, *more])

    def test_scores_over_other_caches_are_those_that_were_counted(self):
        names = {"FP8, scale 1": "fp8", "FP8, calibrated scales of 65,536 tokens, read back from the server": "fp8-scaled",
                 "FP8, a scale for each token and head": "fp8-per-token-head", "INT4, a scale for each token and head": "int4-per-token-head",
                 "TurboQuant, 3 bits (first and last two layers exact)": "turboquant-3", "the published recipe (`--preset paper`)": "paper"}
        rows = tables("docs/results.md", "Qwen2.5-Coder-1.5B")[2]
        self.assertEqual([row[0] for row in rows], list(names))
        for row in rows:
            of = TASKS["figures"]["greedy"]["all"][names[row[0]]]
            self.assertEqual(row[1:], [f"{of['prompts']:,}", f"{100 * of['score']:.1f}%",
                                       with_sign(of["difference"])])

    def test_why_needles_lose_is_what_was_measured(self):
        texts = ("base4", "base16", "tails4", "chats4", "half16", "chats16")
        folder = draw_charts.CODER_TASKS.parent
        with open(folder / "recall.csv", encoding="utf-8") as file:
            known = {(row["text"], row["calibrated on"]): row for row in csv.DictReader(file)}
        scored = {text: json.loads((folder / name / "tasks.json").read_text())["figures"]["greedy"] for text, name in
                  (("base4", "second-runner"), ("tails4", "recall-tails4"), ("half16", "recall-half16"), ("chats16", "recall-chats16"))}
        rows, focused = tables("docs/results.md", "Why needles lose")
        printed = [line.split("  ") for line in (folder / "focused-attention.txt").read_text().splitlines()[1:-1]]
        measured = [[float(cell.strip("% ")) for cell in line[1:] if cell.strip()] for line in printed]
        self.assertEqual(len(focused), len(measured))
        for row, known_row in zip(focused, measured):
            for cell, value in zip(row[1:], known_row, strict=True):
                digits = len(cell.rstrip("%").partition(".")[2])
                self.assertEqual(cell, f"{value:.{digits}f}%".removeprefix("0"))
        self.assertEqual(len(rows), len(texts))
        for text, row in zip(texts, rows):
            chats, tails, plain_text = (known[of, text] for of in ("chats", "tails", "plain"))
            kls = [f"{float(of['KL']):.4f} ±{float(of['standard error']):.4f}".replace("0.", ".") for of in (chats, tails, plain_text)]
            self.assertEqual([row[1], *row[3:5]], kls)
            more = [float(chats[name]) for name in ("perplexity above BF16 %", "low", "high")]
            self.assertEqual(row[2], "{:+.1f}% [{:.1f}, {:.1f}]".format(*more))
            for cell, kind in zip(row[5:] if text in scored else (), ("all needles", "all quotes")):
                difference = scored[text][kind]["int2"]["difference"]
                self.assertIn(with_sign(difference), cell)
        with open(folder / "recall-stretches.csv", encoding="utf-8") as file:
            tried = {(row["text"], row["calibrated on"]): row for row in csv.DictReader(file)}
        for row in tried.keys() & known.keys():
            self.assertEqual(tried[row], known[row])
        self.assertEqual(len({text for _, text in tried} - {"exact", "chats16"}), 12)
        said = section("docs/results.md", "Why needles lose")
        for text, calibrated, perplexity in (("chats", "tails-50-6-24-second", True), ("pairs", "tails-50-6-24-second", False),
                                             ("pairs", "base4", False), ("plain", "tails-50-6-24-second", True)):
            of = tried[text, calibrated]
            self.assertIn(f"{float(of['KL']):.4f} ±{float(of['standard error']):.4f}".replace("0.", "."), said)
            if perplexity:
                self.assertIn("{:+.1f}% [{:.1f}, {:.1f}]".format(*(float(of[name]) for name in ("perplexity above BF16 %", "low", "high"))), said)
        off = json.loads((folder / "recall-off" / "tasks.json").read_text())["figures"]
        now, before = ({kind: with_sign(of["greedy"][kind]["int2"]["difference"])
                        for kind in ("all needles", "all quotes")} for of in (TASKS["figures"], off))
        self.assertIn(f"needles from {before['all needles'].partition(' ')[0]} points to [{now['all needles']}]", said)
        second = with_sign(scored["base4"]["all quotes"]["int2"]["difference"])
        self.assertIn(f"So the {now['all quotes']} of this run and the {before['all quotes']} and {second} of text as it came", said)
        with_recall, without = (json.loads((folder / "quotes" / name / "tasks.json").read_text())["scores"]["greedy/int2"]
                                for name in (".", "recall-off"))
        apart = scores.paired([with_recall[name] - without[name] for name in with_recall], list(with_recall))
        shares = [100 * sum(of.values()) / len(of) for of in (with_recall, without)]
        self.assertEqual(len(with_recall), 1000)
        self.assertIn("1,000 on text set apart {:.1f}% are without a fault, and {:.1f}% over text as it came ({}".format(
            *shares, with_sign(apart)), said)
        ours, usual = (json.loads((folder / name / "tasks.json").read_text())["scores"]["greedy/int2"]
                       for name in ("recall-chats16", "second-runner"))
        gained = [ours[prompt] - usual[prompt] for prompt in ours if not prompt.startswith("quote")]
        self.assertIn(f"Over the usual bundle that is {100 * sum(gained) / len(gained):+.1f} points of needles",
                      section("docs/results.md", "Why needles lose"))

    def test_codecs_beside_the_bundle_are_those_that_were_measured(self):
        names = {"q8_0 (llama.cpp)": "q8_0", "FP8, scale 1": "fp8", "FP8, calibrated scales": "fp8-scaled",
                 "FP8, a scale for each token and head": "fp8-per-token-head", "TurboQuant k8v4": "turboquant-k8v4",
                 "TurboQuant, 4 bits": "turboquant-4", "TurboQuant, 3 bits": "turboquant-3", "KIVI, 2 bits": "kivi-2",
                 "KVarN, keys 4 bits and values 2": "kvarn-k4v2", "KVarN, 2 bits": "kvarn-k2v2", "bundle": "bundle",
                 "bundle's rows, keys and values in 4 bits": "bundle@bits:4/4", "bundle's rows, 3 bits": "bundle@bits:3/3",
                 "bundle's rows, keys 3 bits and values 2": "bundle@bits:3/2", "Hadamard and clipping, 2 bits": "hadamard-clip"}
        reports = [json.loads((draw_charts.CODER_TASKS.parent.parent / "codecs" / f"{text}.json").read_text())
                   for text in ("code", "documentation")]
        rows = tables("docs/results.md", "Qwen2.5-Coder-1.5B")[3]
        several = [row for row in rows if row[0] not in names]
        self.assertEqual([row[0] for row in several], ["NVFP4, q4_0, INT4 for each token and head"])
        self.assertEqual(len(rows), len(names) + 1)
        for row in rows:
            for shown, report in zip(row[2:], reports):
                if row in several:
                    kls = [report["methods"][name]["kl"]["mean"] for name in ("nvfp4", "nvfp4-scaled", "q4_0", "int4-per-token-head")]
                    kls = [kls[0], *kls[2:]]
                    self.assertEqual(shown, f"{min(kls):.1f} to {max(kls):.1f}")
                    continue
                method = report["methods"][names[row[0]]]
                self.assertEqual(row[1], f"{method['bpe'][str(report['longest_sequence'])]:.2f}", row)
                self.assertEqual(shown, f"{method['kl']['mean']:.{len(shown.partition('.')[2])}f}".removeprefix("0") or "0", row)

    def test_words_on_the_real_model_are_those_of_its_study(self):
        results = section("docs/results.md", "SmolLM2-135M")
        study = "\n".join(block for part in content.content(REAL).sections for block in part.blocks
                          if isinstance(block, str))
        for told in (r"\d+ of \d+ points are within a factor of 2", r"Keys: the worst .* of the error\.(?= )",
                     r"Values: the worst .* of the error\.(?= )", r"correlate by [\d.]*\d"):
            self.assertIn(re.search(told, study)[0], results)
        needles = REAL["runs"]["needles"]["methods"]
        for method in ("bf16", "default", "perhead"):
            niah = needles[method]["niah"]
            self.assertIn(figures.percent((niah["rate"], niah["low"], niah["high"])), results)
        counted = [f"{REAL['runs'][name]['tokens']:,}" for name in ("documentation", "code", "prose", "chat")]
        for tokens in counted:
            self.assertIn(tokens, results)

    def test_what_the_search_is_worth_to_the_real_model_is_as_the_words_say(self):
        ratios = [figures.RunFigures(REAL["runs"][text]).ratio("default", "unsearched")
                  for text in ("documentation", "code", "prose", "chat")]
        self.assertLess(max(high for _, _, high in ratios), 1)
        least, most = (f"{which(ratio for ratio, _, _ in ratios):.2f}".lstrip("0") for which in (min, max))
        self.assertIn(f"KL is {least} to {most} times that of the preset's clipping",
                      section("docs/results.md", "SmolLM2-135M"))

    def test_the_picture_of_bits_is_drawn_from_the_study(self):
        self.assertEqual((SOURCE / "docs/bits.svg").read_text(), draw_charts.draw_bits(STUDY))

    def test_the_picture_of_steps_is_drawn_from_the_measurement(self):
        self.assertEqual((SOURCE / "docs/serving.svg").read_text(), draw_charts.draw_serving())

    def test_steps_and_ratios_are_those_of_the_measurement(self):
        ms = draw_charts.step_times()
        rows = table_rows("docs/serving.md", "In a loop of our own")
        self.assertEqual(len(rows), len(draw_charts.SERVING_POINTS) + 1)
        for row, (point, _) in zip(rows, draw_charts.SERVING_POINTS):
            int2 = ms[point, "int2"]
            self.assertEqual(row[1], f"{int2:.2f}")
            self.assertEqual(row[2], f"{ms[point, 'bf16']:.2f}")
            for shown, cache in zip(row[3:], ("bf16", "bf16-triton", "transformers")):
                digits = len(shown.partition(".")[2])
                self.assertEqual(shown, f"{ms[point, cache] / int2:.{digits}f}")

    def test_positions_and_outliers_are_those_of_the_study(self):
        rows = table_rows("docs/results.md", "Positions and outliers")
        runs = ("offset 32768", "offset 98304", "offset 126976", "sigma 0")
        self.assertEqual(len(rows), len(runs))
        for row, run_name in zip(rows, runs):
            self.assert_shown(row[1], kl(run_name, "default"))
            self.assert_shown(row[2], best_published(run_name))

    def test_the_default_beats_plain_hadamard_on_every_text_of_the_study(self):
        guarded = [name for name, run_of in STUDY["runs"].items()
                   if {"default", "hadamard-clip"} <= run_of["methods"].keys() and name != "needles"]
        self.assertLessEqual({"main", "separators", "sigma 0", "sigma 1.0"}, set(guarded))
        for name in guarded:
            run_of = figures.RunFigures(STUDY["runs"][name])
            ratio, low, high = run_of.ratio("default", "hadamard-clip")
            self.assertLess(high, 1, f"{name}: {ratio:.3f} of Hadamard + clip, to {high:.3f}")

    def test_needles_are_those_of_the_study(self):
        needles = STUDY["runs"]["needles"]["methods"]
        shown = {row[0]: row[4] for row in table_rows("docs/results.md", "Quality")}
        for label, name in (("BF16", "bf16"), ("INT2, no rotation", "identity"),
                            ("INT2, Hadamard + clip", "hadamard-clip"),
                            ("OSCAR, per KV head", "perhead"),
                            ("default, `--search off", "unsearched"),
                            ("default of this toolkit", "default")):
            niah = needles[name]["niah"]
            self.assertEqual(shown[label],
                             figures.percent((niah["rate"], niah["low"], niah["high"])), label)

    def test_the_readme_begins_with_figures_of_its_tables(self):
        lead = MarkdownFile("README.md").text.partition("\n![")[0]
        scored = {cache: of["score"] for cache, of in TASKS["figures"]["greedy"]["all"].items()}
        alone = json.loads((draw_charts.CODER_TASKS.parent / "recall-off" / "tasks.json").read_text())  # each on a whole GPU
        held = {run["cache"]: run["kv_tokens"] for run in (*TASKS["runs"], *alone["runs"]) if run["sampled"] is None}
        sampled = TASKS["figures"]["sampled"]["all"]["int2"]["difference"]
        vllm = {row[0]: row for row in table_rows("docs/vllm.md", "Figures")}
        ms = {cache.split()[0]: float(row[3].split()[0]) for cache, row in vllm.items() if " over " not in cache}
        for shown in (*(f"{100 * scored[cache]:.1f}%" for cache in ("bf16", "int2", "fp8", "fp8-scaled")), f"{TASKS['prompts']:,} tasks",
                      "{:.1f} [{:.1f}, {:.1f}] where answers are sampled".format(*(100 * value for value in sampled)),
                      *(f"{held[cache] / 1e6:.1f} million" for cache in ("bf16", "int2", "fp8")),
                      f"{ms['FP8'] / ms['INT2']:.1f} times as fast as FP8",
                      *(f"{ms[cache]:.2f} ms" for cache in ("INT2", "FP8", "BF16"))):
            self.assertIn(shown, lead)

    def test_what_tasks_lose_is_what_was_counted(self):
        """In the sentences beside the tables."""
        limits, page = section("README.md", "Limits"), section("docs/results.md", "Qwen2.5-Coder-1.5B")
        greedy, sampled = TASKS["figures"]["greedy"], TASKS["figures"]["sampled"]
        quotes = greedy["all quotes"]
        self.assertIn(f"{100 * quotes['int2']['score']:.1f}% of {quotes['int2']['pairs']} are without a fault, "
                      f"{100 * quotes['bf16']['score']:.1f}% over BF16: {with_sign(quotes['int2']['difference']).replace(' [', ' points [')}", limits)
        lost = ["{:.1f} {}[{:.1f}, {:.1f}]".format(-100 * mean, points, -100 * high, -100 * low) for points, (mean, low, high) in (
            ("points ", greedy["all needles"]["int2"]["difference"]), ("", sampled["all needles"]["int2"]["difference"]))]
        self.assertIn(f"Needles lose {lost[0]} greedily and {lost[1]} sampled", limits)
        more = json.loads((draw_charts.CODER_TASKS.parent / "quotes" / "tasks.json").read_text())["figures"]["greedy"]
        lost = {kind: [-100 * value for value in of["int2"]["difference"]] for kind, of in more.items()}
        mean, high, low = lost["all quotes"]
        self.assertIn(f"and {with_sign(more['all quotes']['int2']['difference'])} of 1,000 others", limits)
        self.assertIn(f"and {mean:.1f} [{low:.1f}, {high:.1f}] of [1,000 others]", page)
        self.assertIn("code {:.1f} in 4K tokens and {:.1f} in 16K, prose {:.1f} and {:.1f}".format(
            *(lost[f"quote of {text}, {length}K"][0] for text in ("code", "text") for length in (4, 16))), page)
        self.assertIn(f"({with_sign(greedy['four values, 30K']['int2']['difference'])}, 18 prompts)", page)

    def test_every_backend_is_described_as_the_program_does(self):
        ratios = {"a ratio for each layer, KV head and side": "one a layer, head and side",
                  "a ratio for each layer and side": "one a layer and side",
                  "one ratio for all keys, one for all values": "one for keys, one for values",
                  "one ratio": "one"}
        result = run("oscar-bundle", "backends", "--json", "-")
        self.assertEqual(result.returncode, 0, result.stderr)
        backends = {backend["name"]: backend for backend in json.loads(result.stdout)}
        rows = table_rows("docs/serving.md", "What each backend takes")
        self.assertEqual(sorted(row[0].split("`")[0] for row in rows), sorted(backends))
        for row in rows:
            backend = backends[row[0].split("`")[0]]
            any_rotation = backend["keys_not_orthogonal"] == backend["values_not_orthogonal"] == "yes"
            self.assertEqual(row[1], f"{backend['rotation']}, "
                             f"{'any invertible one' if any_rotation else 'orthogonal'}")
            self.assertEqual(row[2], ratios[backend["clip"]])
            self.assertEqual(row[3], "yes" if backend["served"] else "not yet")


if __name__ == "__main__":
    unittest.main()
