#!/usr/bin/env python3
"""The command line of oscar-eval: the table, the report, repeatability, and what it refuses."""
import json
import pathlib
import shutil
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

import h5py
import numpy as np
from safetensors.torch import load_file, save_file

from bundle.verify_bundle import content_sha256
from support import programs
from support.bundle_case import attributes, seal
from support.programs import SOURCE

MODEL = SOURCE / "datasets" / "tiny-gqa"
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"


def run(*arguments, program="oscar-eval"):
    return programs.run(program, *arguments)


class OscarEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.text = ["--max-tokens", 800, "--sequence-length", 400, "--device", "cpu"]
        cls.small = [*cls.text, "--separators", "off"]
        cls.one_sequence = ["--max-tokens", 500, "--sequence-length", 500, "--device", "cpu", "--separators", "off"]

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def refused(self, *arguments, code=1):
        report, page = self.folder / "refused.json", self.folder / "refused.html"
        result = run(*arguments, "--json", report, "--html", page)
        self.assertEqual(result.returncode, code, result.stderr + result.stdout)
        self.assertEqual(list(self.folder.glob("refused.*")), [], "no partial report")
        return result.stderr

    def test_text_is_measured_once_more_with_separators_inside(self):
        report, page = self.folder / "separated.json", self.folder / "separated.html"
        result = run(MODEL, *self.text, "--compare", "exact,hadamard-clip", "--separators", 32,
                     "--json", report, "--html", page)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("with a separator as every 32nd token\n", result.stdout)
        self.assertLessEqual(max(map(len, result.stdout.splitlines())), 80)
        data = json.loads(report.read_text())
        separated = data["separators"]
        self.assertEqual(separated["gap"], 32)
        self.assertEqual(separated["tokens"], data["tokens"])
        self.assertEqual(list(separated["methods"]), list(data["methods"]))
        plain, other = data["methods"]["hadamard-clip"], separated["methods"]["hadamard-clip"]
        self.assertNotEqual(plain["kl"]["mean"], other["kl"]["mean"])
        self.assertEqual(plain["bpe"]["400"], other["bpe"]["400"])
        self.assertLess(abs(separated["methods"]["exact"]["kl"]["mean"]), 1e-6)
        text = page.read_text()
        self.assertIn("as every 32nd token", text)
        self.assertIn("Perplexity, with separators", text)
        # What is measured on the text as it is does not change.
        again = self.folder / "plain.json"
        run(MODEL, *self.small, "--compare", "exact,hadamard-clip", "--json", again)
        without = json.loads(again.read_text())
        self.assertNotIn("separators", without)
        self.assertEqual(without["methods"], data["methods"])

    def test_only_text_and_needles_need_a_tokenizer(self):
        model, ids = self.folder / "unread", self.folder / "ids.npy"
        model.mkdir()
        for file in (MODEL / "config.json", *MODEL.glob("model*")):
            (model / file.name).symlink_to(file)
        (model / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
        np.save(ids, (np.arange(800, dtype=np.int32) * 7919 % 8000).reshape(2, 400))
        result = run(model, "--corpus", ids, *self.small, "--compare", "exact")
        self.assertEqual(result.returncode, 0, result.stderr)
        text = MODEL / "heldout.jsonl"
        self.assertIn("Unigram", self.refused(model, "--corpus", text, *self.small))
        self.assertIn("Unigram", self.refused(model, "--corpus", ids, *self.small,
                                              "--tasks", "ppl,niah"))

    def test_separators_are_off_or_a_whole_number(self):
        for wrong in ("0", "1.5", "-3", "often", "99999999"):
            self.assertIn("must be off or a whole number above 0",
                          self.refused(MODEL, *self.text, "--separators", wrong, code=2))

    def test_the_table_fits_eighty_columns_and_the_report_has_every_key(self):
        report = self.folder / "report.json"
        result = run(MODEL, *self.small, "--compare", "exact,identity,hadamard-clip", "--json",
                     report, "--tasks", "ppl,niah", "--needle-lengths", 400, "--needle-prompts", 6)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertLessEqual(max(map(len, result.stdout.splitlines())), 80)
        # The paired difference, which two columns with errors of their own can't show; too few tokens for intervals.
        self.assertIn("perplexity over bf16's  paired\n", result.stdout)
        self.assertRegex(result.stdout, r"\nidentity +[+-][\d.e+]+%\n")
        self.assertIn("CAUTION: the evaluation counts 160 tokens", result.stdout)
        data = json.loads(report.read_text())
        self.assertEqual(data["schema"], "oscar-eval-1")
        self.assertEqual(list(data["methods"]), ["bf16", "exact", "identity", "hadamard-clip"])
        self.assertEqual(data["tokens"], 2 * (400 - 320))
        for name, method in data["methods"].items():
            for key in ("bpe", "nll", "ppl", "nll_increase", "kl", "top1", "output_nmse", "niah"):
                self.assertIn(key, method, name)
        methods = data["methods"]
        self.assertEqual(methods["bf16"]["kl"]["mean"], 0)
        self.assertLess(abs(methods["exact"]["kl"]["mean"]), 1e-6)
        self.assertLess(methods["hadamard-clip"]["kl"]["mean"], methods["identity"]["kl"]["mean"])
        self.assertEqual(len(methods["identity"]["output_nmse"]), 8)
        self.assertEqual(methods["exact"]["bpe"]["32768"], 16)
        self.assertAlmostEqual(methods["identity"]["bpe"]["131072"], 2.284, places=3)

    def test_a_run_ends_with_its_verdict_its_files_and_a_command_that_runs(self):
        report, page = self.folder / "ends.json", self.folder / "ends.html"
        bundle = (*self.one_sequence, "--bundle", BUNDLE)
        said = run(MODEL, *bundle, "--compare", "bundle", "--json", report).stdout
        self.assertRegex(said, "\nverdict    With this bundle, a 2-bit cache ")
        self.assertIn(f"\nwrote {report}\n", said)
        command = said.partition("\nnext       ")[2].replace("\\\n", " ").split()
        self.assertEqual(command, ["oscar-bundle", "report", str(report), "-o", str(page)])
        self.assertEqual(run(*command[1:], program=command[0]).returncode, 0)
        self.assertTrue(page.is_file())
        said = run(MODEL, *bundle, "--compare", "bundle").stdout
        server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--dtype", "bfloat16"]
        self.assertEqual(said.replace("\\\n", " ").splitlines()[-1].split(), ["next", f"VLLM_OSCAR_BUNDLE={BUNDLE}", *server])
        said = run(MODEL, *bundle, "--compare", "identity").stdout  # nobody should serve that
        self.assertIn("verdict With the method “identity”, a 2-bit cache loses too much to be used. Perplexity", " ".join(said.split()))
        self.assertNotIn("\nnext ", said)

    def test_figures_of_another_cache_are_no_verdict_on_the_bundle(self):
        for given, gap in ((("--recent", 300), "recent 300, not recent 256"), (("--sink", 0), "sink 0, not sink 64"),
                           (("--first-position", 100), "first_position 100, not --first-position 320 or later"),
                           (("--position-offset", 64), "position_offset 64, not position_offset 0")):
            result = run(MODEL, *self.one_sequence, "--bundle", BUNDLE, "--compare", "bundle", *given)
            said = " ".join(result.stdout.split())
            self.assertIn("CAUTION: the figures are not those of tiny-gqa.h5 as it is served: the evaluation ", said)
            self.assertIn("verdict With this bundle, a 2-bit cache is usable with care.", said)
            self.assertIn(gap, said)
            self.assertNotIn("VLLM_OSCAR_BUNDLE", said)

    def test_rows_leave_the_window_by_blocks_before_tokens_count(self):
        out = self.folder / "blocks.json"
        bundle = ("--bundle", BUNDLE, "--compare", "bundle", "--demote-block", 64)
        run(MODEL, *self.one_sequence, *bundle, "--json", out)
        self.assertEqual(json.loads(out.read_text())["first_position"], 64 + 256 + 64 - 1)
        corpus = ("--corpus", MODEL / "heldout.jsonl", "--device", "cpu", "--separators", "off", "--max-tokens", 40960)
        for options, tokens in (((*bundle, "--sequence-length", 384), 383), (("--compare", "identity", "--sequence-length", 321), 320)):
            result = run(MODEL, *corpus, *options)
            self.assertEqual(result.returncode, 2, result.stdout)
            for words in ("no token that counts would read a coded row", f"more than {tokens} tokens", f"found:    {tokens} tokens"):
                self.assertIn(words, result.stderr)
        result = run(MODEL, "--tasks", "niah", "--needle-lengths", "500,320", "--compare", "identity", "--device", "cpu")
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("needle prompts, method identity\n  expected: more than 320 tokens", result.stderr)

    def test_only_what_was_judged_is_proposed_to_serve(self):
        other = self.folder / "other.h5"
        shutil.copy(BUNDLE, other)
        for compare in ("other", "portable", "bundle@k", "fp8", "bundle@bits:4/4"):
            said = run(MODEL, *self.one_sequence, "--bundle", BUNDLE, "--bundle", f"other={other}", "--compare", compare).stdout
            self.assertIn("verdict ", said)
            self.assertNotIn("VLLM_OSCAR_BUNDLE", said)
        for fields, served in (({}, True), ({"sink_tokens": 16}, False)):
            with h5py.File(other, "r+") as file:
                attributes(file["quantizer"], **fields)
                seal(file)
            said = " ".join(run(MODEL, *self.one_sequence, "--bundle", other, "--compare", "bundle").stdout.split())
            self.assertIn("verdict With this bundle, a 2-bit cache ", said)
            self.assertEqual(f"VLLM_OSCAR_BUNDLE={other}" in said, served, said)

    def test_a_quick_look_is_short_and_without_separators(self):
        cost = ("--compare", "exact", "--sequence-length", 512, "--device", "cpu", "--dry-run")
        said = run(MODEL, *cost, "--quick").stdout
        self.assertIn(f"text       {16384 // 512 * (512 - 320):,} tokens count, of 32 sequences", said)
        self.assertNotIn("in all", said)
        self.assertNotIn("with separators", said)
        said = run(MODEL, *cost, "--quick", "--max-tokens", 1024, "--separators", 64).stdout
        self.assertIn("tokens count, of 2 sequences", said)
        self.assertRegex(said, r"(?s)with separators\n +about \S+ s in all\n")

    def test_the_same_command_gives_the_same_bytes(self):
        texts = []
        for _ in range(2):
            out = self.folder / "again.json"
            with unittest.mock.patch.dict(programs.ENVIRONMENT, OMP_NUM_THREADS="2"):
                result = run(MODEL, *self.one_sequence, "--compare", "random-clip", "--tasks", "ppl,niah",
                             "--needle-lengths", 400, "--needle-prompts", 2, "--json", out, "--force",
                             "--quiet")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stdout, "")
            texts.append(out.read_bytes())
        self.assertEqual(texts[0], texts[1])

    def test_the_number_of_threads_moves_means_by_no_hundredth_of_their_error(self):
        """And no figure at all where MKL cuts products alike for both numbers, as it does here."""
        reports, pages = [], []
        for threads in (1, 3):
            out, page = self.folder / f"{threads}.json", self.folder / f"{threads}.html"
            with unittest.mock.patch.dict(programs.ENVIRONMENT, OMP_NUM_THREADS=str(threads),
                                          MKL_DYNAMIC="FALSE"):  # more than there are cores
                result = run(MODEL, "--max-tokens", 800, "--sequence-length", 400, "--device", "cpu",
                             "--separators", 32, "--compare", "exact,hadamard-clip", "--tasks",
                             "ppl,niah", "--needle-lengths", 400, "--needle-prompts", 2, "--json",
                             out, "--html", page, "--quiet")
            self.assertEqual(result.returncode, 0, result.stderr)
            reports.append(json.loads(out.read_text()))
            pages.append(page.read_text().replace(f"{threads} threads", ""))
            self.assertEqual(reports[-1].pop("threads"), threads)
        one, three = reports
        for part in (lambda report: report, lambda report: report["separators"]):
            for name, method in part(one)["methods"].items():
                for figure in ("nll", "ppl", "kl", "top1"):
                    a, b = method[figure], part(three)["methods"][name][figure]
                    # Below 1e-8 a difference of scores is the rounding of float32 logits.
                    self.assertAlmostEqual(a["mean"], b["mean"], delta=1e-8 + .01 * a["se"])
        for name, method in one["methods"].items():
            self.assertEqual(method["niah"]["passed"], three["methods"][name]["niah"]["passed"])
        print(f"{self.id()}: equal figures: {one == three}, equal pages: {pages[0] == pages[1]}")

    def test_the_page_is_well_formed_and_equal_to_that_of_the_saved_report(self):
        report, page, again = (self.folder / name for name in ("p.json", "p.html", "again.html"))
        bundle = self.folder / "tiny.h5"
        made = run(MODEL, MODEL / "calibration.jsonl", bundle, "--max-tokens", 2048, "--sequence-length", 512, "--search",
                   "off", "--device", "cpu", "--quiet", program="oscar-calibrate")
        self.assertEqual(made.returncode, 0, made.stderr)
        result = run(MODEL, *self.small, "--bundle", bundle, "--compare",
                     "exact,identity,oscar,bundle", "--json", report, "--html", page)
        self.assertEqual(result.returncode, 0, result.stderr)
        root = xml.etree.ElementTree.parse(page).getroot()
        titles = [e.text for e in root.iter("{http://www.w3.org/1999/xhtml}h2")]
        for title in ("Methods side by side", "Divergence from BF16", "Layer by layer",
                      "Inside the bundle", "Memory", "How it was run", "Left out"):
            self.assertIn(title, titles)
        text = page.read_text()
        self.assertNotIn(str(self.folder), text, "folders of this machine")
        self.assertIn("--tasks niah", text)
        self.assertLess(len(text), 300 << 10)
        data = json.loads(report.read_text())
        self.assertEqual(len(data["spectra"]["layers"]), 8)
        self.assertEqual(len(data["channels"]["profile"]["before"]), 128)
        made = run("report", report, "-o", again, program="oscar-bundle")
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertEqual(again.read_bytes(), page.read_bytes())

    def test_places_that_can_not_be_written_fail_before_the_work(self):
        for code, arguments in (
                (1, ["--html", self.folder / "missing" / "p.html"]),
                (1, ["--html", self.folder]),
                # Two outputs in one place contradict each other, whatever is on the disk: usage.
                (2, ["--json", self.folder / "same", "--html", self.folder / "same"])):
            result = run(MODEL, *self.small, "--compare", "identity", *arguments)
            self.assertEqual(result.returncode, code)
            self.assertNotIn("perplexity", result.stderr)
            self.assertFalse((self.folder / "same").exists())
        broken = self.folder / "broken.json"
        broken.write_text('{"schema": "oscar-eval-2"}')
        page = self.folder / "broken.html"
        result = run("report", broken, "-o", page, program="oscar-bundle")
        self.assertEqual(result.returncode, 1)
        self.assertIn("oscar-eval-1", result.stderr)
        self.assertEqual(list(self.folder.glob("broken.html*")), [])

    def test_bits_per_element_are_those_of_the_prompt_length(self):
        out = self.folder / "bits.json"
        result = run(MODEL, *self.small, "--compare", "identity", "--tasks", "niah",
                     "--needle-kinds", "single", "--needle-lengths", "400,640", "--needle-prompts", 4,
                     "--json", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        bits = json.loads(out.read_text())["methods"]["identity"]["bpe"]
        self.assertAlmostEqual(bits["640"], (16 * 320 + 2.25 * 320) / 640)
        self.assertIn("bits: per cached element, at 640 tokens", result.stdout)
        self.assertRegex(result.stdout, r"identity +9\.12")

    def test_a_verdict_says_why_needles_that_lose_nothing_keep_it_from_close(self):
        result = run(MODEL, "--bundle", BUNDLE, "--compare", "bundle", "--tasks", "niah", "--needle-kinds", "single",
                     "--needle-lengths", 512, "--needle-prompts", 6, "--device", "cpu")
        self.assertEqual(result.returncode, 0, result.stderr)
        said = " ".join(result.stdout.split())
        self.assertRegex(said, "usable with care. Needle tasks: 100%.*, BF16 100%.*, 6 prompts .limit: .*. Few prompts: a loss of several "
                               "points would not show. next")
        self.assertNotIn("CAUTION", result.stdout)

    def test_needles_are_asked_for_in_the_models_chat_template(self):
        model, report = self.folder / "chatting", self.folder / "chatting.json"
        model.mkdir()
        for file in MODEL.iterdir():
            (model / file.name).symlink_to(file)
        settings = json.loads((MODEL / "tokenizer_config.json").read_text())
        settings["chat_template"] = ("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
                                     "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}")
        (model / "tokenizer_config.json").unlink()
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        result = run(model, *self.small, "--compare", "exact", "--tasks", "niah", "--needle-lengths", 400, "--needle-prompts", 4,
                     "--json", report)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(report.read_text())["methods"]["exact"]["niah"]["prompts"], 4)

    def test_generated_answers_agree_with_teacher_forcing(self):
        out = self.folder / "needles.json"
        with unittest.mock.patch.dict(programs.ENVIRONMENT, OSCAR_PROGRESS="json"):
            result = run(MODEL, *self.small, "--compare", "hadamard", "--tasks", "niah",
                         "--needle-lengths", "400,600", "--needle-prompts", 6, "--needle-kinds",
                         "single,multikey", "--needle-generate", "--json", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        told = [json.loads(line) for line in result.stderr.splitlines() if '"ended":true' in line]
        self.assertEqual({line["stage"] for line in told if line["done"] == line["total"]} & {"needles", "generation"},
                         {"needles", "generation"}, told)
        methods = json.loads(out.read_text())["methods"]
        for method in methods.values():
            self.assertEqual(method["niah"]["generated"]["passed"], method["niah"]["passed"])
        counted = ", ".join(f"{name} {method['niah']['generated']['passed']} of 6" for name, method in methods.items())
        self.assertIn(f"generated: {counted}\n", result.stdout)
        page = self.folder / "needles.html"
        self.assertEqual(run("report", out, "--output", page, program="oscar-bundle").returncode, 0)
        self.assertTrue(">Generated</th>" in page.read_text())

    def test_a_stride_overlaps_windows_and_counts_their_last_tokens(self):
        report = self.folder / "stride.json"
        result = run(MODEL, "--max-tokens", 840, "--sequence-length", 480, "--stride", 120, "--device",
                     "cpu", "--separators", "off", "--quiet", "--compare", "identity", "--json", report)
        self.assertEqual(result.returncode, 0, result.stderr)
        data = json.loads(report.read_text())
        self.assertEqual((data["stride"], data["sequences"]), (120, (840 - 480) // 120 + 1))
        self.assertEqual(data["first_position"], 480 - 120)
        self.assertEqual(data["tokens"], 120 * data["sequences"])
        error = self.refused(MODEL, "--sequence-length", 600, "--stride", 170, "--compare", "identity",
                             "--device", "cpu")
        self.assertIn("--stride", error)

    def engine_reports(self, *options):
        """Reports of the same measurement by simulate and by reference, and the second's table."""
        reports = []
        for engine in ("simulate", "reference"):
            out = self.folder / f"{engine}.json"
            result = run(MODEL, "--max-tokens", 860, "--sequence-length", 430, "--device", "cpu",
                         "--separators", "off", *options, "--engine", engine, "--json", out, "--force")
            self.assertEqual(result.returncode, 0, result.stderr)
            reports.append(json.loads(out.read_text()))
            self.assertEqual(reports[-1]["engine"], engine)
        return *reports, result.stdout

    def test_the_paged_reference_gives_the_figures_of_the_simulation(self):
        simulated, paged, table = self.engine_reports("--compare", "exact,hadamard-clip")
        self.assertIn("engine reference", table)
        self.assertLessEqual(max(map(len, table.splitlines())), 80)
        for figure in ("kl", "nll", "top1"):  # without a codec nothing passes through pages
            self.assertEqual(simulated["methods"]["exact"][figure],
                             paged["methods"]["exact"][figure])
        a, b = (r["methods"]["hadamard-clip"]["kl"]["mean"] for r in (simulated, paged))
        self.assertNotEqual(a, b)
        self.assertLess(abs(a - b), 0.03 * a)

    def test_needles_through_the_paged_reference_pass_as_in_the_simulation(self):
        options = ["--compare", "hadamard-clip,hadamard-clip@layer:3", "--tasks", "niah", "--mode",
                   "prefill", "--needle-lengths", 400, "--needle-prompts", 4, "--needle-kinds",
                   "single,multikey", "--needle-generate"]
        simulated, paged, _ = self.engine_reports(*options)
        for name, method in paged["methods"].items():
            expected = simulated["methods"][name]["niah"]
            self.assertEqual(method["niah"]["passed"], expected["passed"], name)
            self.assertEqual(method["niah"]["generated"], expected["generated"], name)
            # Margins move as codes at a threshold fall either way, by less than their own error.
            self.assertAlmostEqual(method["niah"]["margin"]["mean"], expected["margin"]["mean"],
                                   delta=expected["margin"]["se"])

    def test_engines_refuse_what_they_can_not_run_with_the_way_out(self):
        paged = ["--engine", "reference"]
        self.refused(MODEL, *self.small, "--engine", "nosuch", code=2)
        self.assertIn("--engine reference", self.refused(MODEL, *self.small, "--engine", "kernel"))
        error = self.refused(MODEL, *self.small, *paged, "--compare", "hadamard@k")
        self.assertIn("method 'hadamard@k', layer 0", error)
        self.assertIn("--engine simulate", error)
        error = self.refused(MODEL, *self.small, *paged, "--mode", "chunked:64")
        self.assertIn("chunked:64", error)

    def test_a_corpus_shorter_than_the_windows_is_refused(self):
        error = self.refused(MODEL, "--max-tokens", 380, "--sequence-length", 380, "--device", "cpu",
                             "--compare", "identity")
        self.assertIn("too few tokens", error)

    def test_unknown_names_are_refused_with_the_known_ones(self):
        for wrong, known in (("hadamrad", "hadamard-clip"), ("hadamard@layer:8", "layer:N"),
                             ("hadamard@foo", "window:SINK/RECENT"),
                             ("identity@window:4294967360/256", "window:SINK/RECENT"),
                             ("identity@window:64/16777217", "window:SINK/RECENT")):
            self.assertIn(known, self.refused(MODEL, *self.small, "--compare", wrong, code=2))
        for wrong, hint in (("hadamrad", "did you mean hadamard?"), ("idenity", "did you mean identity?"),
                            ("q8_1", "did you mean q8_0?"), ("f16", "bf16 is the cache that all are compared with"),
                            ("fp16@k", "bf16 is the cache that all are compared with"),
                            ("q2_0", "of llama.cpp's types q8_0 and q4_0 are measured here")):
            self.assertIn(hint, self.refused(MODEL, *self.small, "--compare", wrong, code=2))
        self.assertNotIn("hint:", self.refused(MODEL, *self.small, "--compare", "something", code=2))
        self.refused(MODEL, "--tasks", "nosuch", code=2)
        for report in ("--json", "--html"):
            self.assertIn(report, self.refused(MODEL, *self.small, report, "", code=2))
        for depths in ("nan", "0,nan,1"):
            self.assertIn("from 0 to 1", self.refused(MODEL, "--needle-depths", depths, code=2))

    def test_variants_that_set_the_same_are_refused_by_name(self):
        for one, other in (("k", "v"), ("k", "k"), ("layer:0", "layer:1"), ("clip:.9/.9", "clip:.8/.8"),
                           ("window:64/256", "window:0/16")):
            for more in ([], ["--dry-run"]):
                self.assertIn(f"{one} and {other}", self.refused(
                    MODEL, *self.small, "--compare", f"hadamard@{one}@{other}", *more, code=2))
        self.assertIn("k and v", self.refused(
            MODEL, *self.small, "--compare", "hadamard@k@layer:0@v", code=2))

    def test_unknown_modes_and_kinds_of_needles_are_refused_before_the_work(self):
        for options, known in ((["--mode", "chunked:0"], "chunked:N"),
                               (["--tasks", "niah", "--needle-kinds", "multikey,haystack"],
                                "single, multikey, multivalue, multiquery, tracking, verbatim")):
            for more in ([], ["--dry-run"]):
                error = self.refused(MODEL, *self.small, *options, *more, code=2)
                self.assertIn(known, error)
                self.assertNotIn("prepare", error)

    def test_the_help_names_the_kinds_of_needles(self):
        said = " ".join(run("--help").stdout.split())
        book = json.loads((MODEL.parent / "needle" / "tasks.json").read_text())
        self.assertIn(f"{', '.join(book['kinds'])} (default: all)", said)

    def test_methods_that_need_a_bundle_say_so(self):
        self.assertIn("--bundle", self.refused(MODEL, *self.small, "--compare", "oscar"))
        self.assertIn("--bundle", self.refused(MODEL, *self.small, "--compare", "bundle"))
        self.assertIn("--bundle", self.refused(MODEL, *self.small, "--compare", "portable"))
        self.assertIn("--bundle", self.refused(MODEL, *self.small, "--write-back"))
        self.assertIn("this bundle was stripped", self.refused(MODEL, *self.small, "--bundle", BUNDLE,
                                                               "--compare", "oscar-released"))

    def test_positions_beyond_the_model_are_refused(self):
        # Neither an offset that overflows with a sequence added nor a length that is 400 in 32 bits.
        for offset in (131000, 2**63 - 1):
            self.assertIn("131072", self.refused(MODEL, *self.small, "--position-offset", offset))
        self.assertIn("131072", self.refused(MODEL, "--sequence-length", 2**32 + 400, "--device", "cpu",
                                             "--compare", "identity"))

    def test_needles_stand_at_the_positions_that_were_asked_for(self):
        needles = ["--device", "cpu", "--tasks", "niah", "--needle-prompts", 2, "--needle-lengths", 400, "--needle-kinds", "single",
                   "--needle-generate", "--compare", "hadamard-clip"]
        margins = []
        for offset in (0, 100_000):
            report = self.folder / f"offset_{offset}.json"
            result = run(MODEL, *needles, "--position-offset", offset, "--json", report)
            self.assertEqual(result.returncode, 0, result.stderr)
            margins.append({name: method["niah"]["margin"]["mean"]
                            for name, method in json.loads(report.read_text())["methods"].items()})
        for name in ("bf16", "hadamard-clip"):
            self.assertNotEqual(margins[0][name], margins[1][name])
        self.assertIn("131072", self.refused(MODEL, *needles, "--position-offset", 131072 - 500,
                                             "--needle-lengths", "500", "--sequence-length", 400))

    def test_a_bundle_of_another_model_or_rope_is_refused_by_field(self):
        other = self.folder / "other"
        shutil.copytree(MODEL, other, dirs_exist_ok=True)
        shard = sorted(other.glob("*.safetensors"))[0]
        data = bytearray(shard.read_bytes())
        data[-2] ^= 1  # same shapes, one weight differs, which no sample holds
        shard.chmod(0o644)
        shard.write_bytes(data)
        warned = run(other, *self.small, "--bundle", BUNDLE).stderr
        self.assertIn("not those of the calibration", " ".join(warned.split()))
        tensors = load_file(shard)
        tensors |= {name: x * 1.25 for name, x in tensors.items() if name.endswith("k_proj.weight")}
        save_file(tensors, shard)
        self.assertIn("weight_samples differ", self.refused(other, *self.small, "--bundle", BUNDLE))
        scaling = '{"rope_type":"yarn","factor":2.0,"original_max_position_embeddings":131072}'
        self.assertIn("rope", self.refused(MODEL, *self.small, "--bundle", BUNDLE,
                                           "--rope-scaling", scaling))

    def test_a_damaged_bundle_is_refused(self):
        data = bytearray(BUNDLE.read_bytes())
        data[len(data) // 2] ^= 0x40
        damaged = self.folder / "damaged.h5"
        damaged.write_bytes(data)
        self.assertIn("damaged.h5", self.refused(MODEL, *self.small, "--bundle", damaged))

    def test_a_run_that_is_not_what_is_served_is_not_written_back(self):
        target = self.folder / "kept.h5"
        shutil.copy(BUNDLE, target)
        store = [*self.one_sequence, "--bundle", target, "--compare", "bundle", "--write-back"]
        for options, *words in ((["--quant-group-size", 64], "another cache", "quant_group_size 64"),
                                (["--sink", 0, "--recent", 16], "another cache", "sink 0"),
                                (["--demote-block", 64], "another cache", "demote_block 64"),
                                (["--first-position", 1], "no INT2 row", "first_position 1"),
                                (["--mode", "prefill", "--first-position", 1], "no INT2 row"),
                                (["--mode", "chunked:400"], "no INT2 row", "--first-position 400"),
                                (["--position-offset", 64], "other positions", "position_offset 64")):
            error = self.refused(MODEL, *store, *options)
            for word in ("--write-back", *words):
                self.assertIn(word, error)
        self.assertIn("would not measure the bundle", self.refused(
            MODEL, *self.one_sequence, "--bundle", target, "--compare", "bundle@k,bundle@window:8/16", "--write-back", code=2))
        self.assertEqual(target.read_bytes(), BUNDLE.read_bytes())

    def changed_evaluation(self, source, **entries):
        """A copy whose stored report has other entries, as an earlier version or another text made it."""
        path = self.folder / "changed.h5"
        shutil.copy(source, path)
        with h5py.File(path, "r+") as file:
            report = file["evaluation"].attrs
            for name, values in entries.items():
                report[name] = np.bytes_(json.dumps(json.loads(report[name]) | values))
            file.attrs["content_sha256"] = np.bytes_(content_sha256(file))
        return path

    def test_inspect_and_card_say_the_same_of_a_stored_evaluation(self):
        target, out, read = self.folder / "whole.h5", self.folder / "whole.json", self.folder / "README.md"
        shutil.copy(BUNDLE, target)
        result = run(MODEL, *self.one_sequence, "--bundle", target, "--compare", "bundle,portable,portable-perhead",
                     "--write-back", "--json", out)
        self.assertEqual(result.returncode, 0, result.stderr)

        def said(path, *options):
            """Of inspect and card: the line of a server that takes the portable variant, and all."""
            shown = run("inspect", path, "--all", program="oscar-bundle").stdout
            done = run("card", path, "-o", read, "--force", *options, program="oscar-bundle")
            self.assertEqual(done.returncode, 0, done.stderr)
            (row,) = [line for line in read.read_text().splitlines() if line.startswith("| sglang-v1 ")]
            inspection = json.loads(run("inspect", path, "--json", "-", program="oscar-bundle").stdout)
            (stack,) = [s for s in inspection["stacks"] if s["name"] == "sglang-v1"]
            self.assertEqual(row, f"| sglang-v1 | {stack['line']} |")
            return stack["line"], " ".join(shown.split()), read.read_text()

        line, shown, card = said(target)
        self.assertIn("KL about", line)
        self.assertIn("| **this bundle** |", card)
        self.assertEqual(said(target, "--eval", out)[0], line)  # the report is of this file, before and after
        line, shown, card = said(self.changed_evaluation(target, quantizer={"quant_group_size": 64}))
        for text in (shown, card):
            self.assertNotIn("KL about", text)
            self.assertIn("the stored evaluation is left out", text)
            self.assertIn("quant_group_size 64, not quant_group_size 128", text)
        export = run("export", self.folder / "changed.h5", "--for", "sglang-v1", "--reduce", "-o", self.folder / "v1",
                     program="oscar-bundle")
        self.assertIn("the stored evaluation is left out", export.stderr)
        line, shown, card = said(self.changed_evaluation(target, position_offset=512))
        for text in (shown, card):
            self.assertNotIn("KL about", text)
            self.assertIn("position_offset 512, not position_offset 0", text)
        seen = {"known": True, "share": .5, "low": .4, "high": .6, "ngram": 13}
        line, shown, card = said(self.changed_evaluation(target, bundle={"overlap": seen}))
        self.assertRegex(line, "KL about .* times on calibration text")

    def test_the_report_can_be_stored_in_the_bundle(self):
        target = self.folder / "stored.h5"
        shutil.copy(BUNDLE, target)
        out = self.folder / "stored.json"
        result = run(MODEL, *self.one_sequence, "--bundle", target, "--compare", "bundle", "--write-back",
                     "--json", out)
        self.assertEqual(result.returncode, 0, result.stderr)
        with h5py.File(target) as file:
            self.assertIn("evaluation", file)
        again = run(MODEL, *self.one_sequence, "--bundle", target, "--compare", "bundle", "--tasks", "ppl,niah",
                    "--needle-lengths", 400, "--needle-prompts", 2)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertNotIn("nan", again.stdout)  # one sequence has no standard error
        table = again.stdout.partition("\nnext ")[0]  # the command has the model's whole path
        self.assertLessEqual(max(map(len, table.splitlines())), 80)


if __name__ == "__main__":
    unittest.main()
