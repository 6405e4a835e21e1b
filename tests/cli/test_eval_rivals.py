#!/usr/bin/env python3
"""oscar-eval beside other projects' codecs and other widths, by name, and oscar-bundle plan of the same."""
import json
import subprocess
import sys
import unittest

from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest, run

MODEL = SOURCE / "datasets" / "tiny-gqa"
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"
RIVALS = ("q8_0", "fp8-per-token-head", "fp8", "fp8-scaled", "turboquant-k8v4", "nvfp4", "nvfp4-scaled", "q4_0",
          "int4-per-token-head", "turboquant-4", "kvarn-k4v2", "turboquant-3", "kivi-2", "kvarn-k2v2")
SMALL = ("--max-tokens", 560, "--sequence-length", 560, "--device", "cpu", "--separators", "off")


class Rivals(ProgramTest):
    def report(self, *arguments):
        out = self.folder / "report.json"
        result = self.run_ok("oscar-eval", MODEL, "--json", out, "--force", *arguments)
        return json.loads(out.read_text()), result.stdout

    def test_every_name_is_measured_with_its_bits_and_source(self):
        page = self.folder / "page.html"
        names = [*RIVALS, "kvarn-k4v2@common", "bundle@bits:4/2", "bundle@bits:4/4", "bundle"]
        report, table = self.report(*SMALL, "--bundle", BUNDLE, "--compare", ",".join(names), "--html", page,
                                    "--layer-errors")
        methods = report["methods"]
        self.assertEqual(list(methods), ["bf16", *names])
        # Queries before read no row of kvarn-k4v2@common: its first tile is not full.
        self.assertEqual(report["first_position"], 64 + 256 + 127)
        for name in names:
            self.assertGreater(methods[name]["kl"]["mean"], 0, name)
            self.assertEqual("source" in methods[name], name.split("@")[0] in RIVALS, name)
            self.assertEqual(len(methods[name]["layer_errors"]["both"]), 8, name)
            self.assertIn(f"\n{name:<19} ", table)
        self.assertEqual(methods["fp8"]["bpe"]["32768"], 8)
        self.assertEqual(methods["fp8"]["codec"], {"key_bits": 8, "value_bits": 8, "sink": 0, "recent": 0,
                                                   "tile": 1, "layers": 8})
        # Half of the layers exact, keys 4.125 and values 4.25 bits in the others.
        self.assertEqual(methods["turboquant-4"]["bpe"]["32768"], (16 + (4.125 + 4.25) / 2) / 2)
        windows = 128 + 1 + 127 // 2  # the sink, a query's own token, half of a tile
        self.assertAlmostEqual(methods["kvarn-k4v2"]["bpe"]["8192"],
                               (16 * windows + 3.375 * (8192 - windows)) / 8192)
        self.assertAlmostEqual(methods["bundle@bits:4/2"]["bpe"]["8192"], (16 * 320 + 3.25 * 7872) / 8192)
        kl = {name: methods[name]["kl"]["mean"] for name in names}
        self.assertLess(kl["q8_0"], kl["q4_0"])
        self.assertLess(kl["fp8"], kl["nvfp4"])
        self.assertLess(kl["bundle@bits:4/4"], kl["bundle@bits:4/2"])
        self.assertLess(kl["bundle@bits:4/2"], kl["bundle"])
        self.assertLess(kl["turboquant-4"], kl["turboquant-3"])
        text = page.read_text()
        self.assertIn("an FP8 cache without scales has", text)
        self.assertIn("With this bundle, a 2-bit cache", text)

    def test_fp8_is_compared_by_default_and_every_engine_has_it(self):
        report, table = self.report("--max-tokens", 430, "--sequence-length", 430, "--device", "cpu",
                                    "--separators", "off", "--bundle", BUNDLE)
        self.assertEqual(list(report["methods"])[-2:], ["fp8", "bundle"])
        self.assertIn("\nfp8 ", table)
        self.assertIn("key_row", report["methods"]["bundle"])
        self.assertNotIn("key_row", report["methods"]["fp8"])
        small = ("--max-tokens", 330, "--sequence-length", 330, "--device", "cpu", "--separators", "off",
                 "--compare", "fp8,identity", "--first-position", 200)
        paged, _ = self.report(*small, "--engine", "reference")
        simulated, _ = self.report(*small)
        self.assertEqual(paged["methods"]["fp8"]["kl"], simulated["methods"]["fp8"]["kl"])

    def test_without_rows_of_its_own_the_report_names_no_classes(self):
        report, _ = self.report("--max-tokens", 430, "--sequence-length", 430, "--device", "cpu", "--compare",
                                "fp8,q4_0")
        self.assertNotIn("rows", report["separators"])
        self.assertNotIn("key_row", report)
        self.assertEqual(report["first_position"], 320)  # of the run's windows, to compare with other runs

    def test_needles_are_generated_over_tiles(self):
        report, _ = self.report(*SMALL, "--tasks", "niah", "--needle-lengths", 400, "--needle-prompts", 4,
                                "--needle-kinds", "single", "--needle-generate", "--compare", "q8_0,kivi-2")
        for name in ("q8_0", "kivi-2"):
            self.assertEqual(report["methods"][name]["niah"]["generated"]["prompts"], 4)
        bf16, q8_0 = (report["methods"][name]["niah"]["generated"]["passed"] for name in ("bf16", "q8_0"))
        self.assertEqual(bf16, q8_0)

    def test_variants_that_a_codec_does_not_have_are_refused(self):
        for wrong in ("fp8@clip:.9/.9", "fp8@bits:4/4", "identity@common", "bundle@bits:0/2", "bundle@bits:4/9",
                      "fp8@common:1", "fp8@common@window:8/16", "identity@bits:4"):
            self.refuse("oscar-eval", [MODEL, *SMALL, "--compare", wrong], "--compare " + wrong, code=2)
        self.refuse("oscar-eval", [MODEL, *SMALL, "--compare", "fp9"], "fp8-per-token-head", code=2)
        self.refuse("oscar-eval", [MODEL, *SMALL, "--bundle", f"fp8={BUNDLE}"], "--bundle fp8=FILE")

    def test_the_study_of_codecs_draws_all_of_them_and_measures_a_text_once(self):
        out, text = self.folder / "out", MODEL / "heldout.jsonl"
        command = [sys.executable, SOURCE / "studies" / "codecs.py", MODEL, BUNDLE, out, f"held={text}", "--bin", BIN,
                   "--tokens", "560", "--sequence-length", "560", "--device", "cpu"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        page, report = (out / "README.md").read_text(), (out / "held.json").read_bytes()
        self.assertIn("113 tokens from position 447 on", page)
        for name in RIVALS:
            self.assertRegex(page, rf"\n\| {name} \| [\d.]+ \| [\d.]+ ±[\d.]+ \| [+-][\d.]+% \| [\d.]+ \| [\d.]+ ±")
        shipped, common = (json.loads(report)["methods"][name] for name in ("turboquant-4", "turboquant-4@common"))
        self.assertIn(f"| {shipped['bpe']['560']:.2f} |", page)
        self.assertEqual(common["codec"]["layers"], 2 * shipped["codec"]["layers"])
        self.assertIn("\n| **bundle** |", page)
        page = (out / "held.html").stat().st_mtime_ns
        subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True)
        self.assertEqual((out / "held.html").stat().st_mtime_ns, page)
        self.assertEqual((out / "held.json").read_bytes(), report)

    def test_help_and_plan_name_every_codec(self):
        said = run("oscar-eval", "--help").stdout
        plan = self.run_ok("oscar-bundle", "plan", BUNDLE, "--context", 8192, "--gpu-memory", "2G", "--weights",
                           "1G", "--utilization", 1, "--json", "-").stdout
        rows = {row["name"]: row for row in json.loads(plan)["codecs"]}
        text = self.run_ok("oscar-bundle", "plan", BUNDLE, "--context", 8192).stdout
        for name in RIVALS:
            self.assertRegex(said, rf"\n  {name} +[\d.]+ / [\d.]+ +\w")
            self.assertRegex(text, rf"\n  {name} +[\d.]+ +[\d.]+\n")
        self.assertEqual(set(RIVALS), {name for name in rows if not name.startswith("bundle")})
        self.assertEqual(rows["fp8"]["request_bytes"], 8192 * 4096)
        self.assertEqual(rows["fp8"]["requests"], 2**30 // (8192 * 4096))
        self.assertAlmostEqual(rows["bundle@bits:4/2"]["bits_per_value"], (16 * 320 + 3.25 * 7872) / 8192)
        self.assertEqual(rows["turboquant-4"]["bits_per_value"], (16 + (4.125 + 4.25) / 2) / 2)
        (row,) = [row for row in json.loads(plan)["contexts"] if row["context"] == 8192]
        self.assertEqual(rows["bundle"]["request_bytes"], row["request_bytes"]["int2"])


if __name__ == "__main__":
    unittest.main()
