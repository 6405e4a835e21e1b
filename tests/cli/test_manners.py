"""What every program does with a command line: unknown words first, counts as people write them,
names in any case, plain messages, exit codes."""
import json
import os
import resource
import subprocess
import unittest

from support import checkpoints
from support.bundle_case import make_file
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest, run

USAGE = 2
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"


class Manners(ProgramTest):
    def model_and_text(self):
        text = self.folder / "text.txt"
        text.write_text("".join(checkpoints.sample_text(60)))
        return checkpoints.write_checkpoint(self.folder / "model"), text

    def test_unknown_words_are_said_first_with_the_nearest_known_one(self):
        for command, words in (
                (["oscar-calibrate", "--modle", "x"], ("unknown option --modle",)),
                (["oscar-calibrate", "tiny-gqa", "--max-token", 5], ("did you mean --max-tokens?",)),
                (["oscar-eval", "tiny-gqa", "--jsn=a"], ("unknown option --jsn;", "mean --json?")),
                (["oscar-bundle", "inspct", "a.h5"], ("unknown command inspct", "mean inspect?")),
                (["oscar-bundle", "inspect", "a.h5", "--jsno"], ("mean --json?",))):
            with self.subTest(command=command):
                result = run(*command)
                self.assertEqual(result.returncode, USAGE, result.stderr)
                for word in words:
                    self.assertIn(word, result.stderr)
                self.assertNotIn("required", result.stderr)

    def test_a_small_address_space_ends_a_run_and_never_keeps_it_waiting(self):
        """OpenBLAS tries for ever to map the buffer of a call."""
        sums, out = make_file(self.folder / "sums.h5", statistics_only=True), self.folder / "out.h5"
        said = []
        for mebibytes in range(60, 421, 30):
            limit = mebibytes << 20
            result = subprocess.run(
                [BIN / "oscar-bundle", "fit", sums, "-o", out, "--force"], env=ENVIRONMENT, text=True,
                capture_output=True, timeout=30,
                preexec_fn=lambda most=limit: resource.setrlimit(resource.RLIMIT_AS, (most, most)))
            self.assertIn(result.returncode, (0, 1), f"{mebibytes} MiB: {result.stderr}")
            self.assertEqual(out.exists(), result.returncode == 0)
            out.unlink(missing_ok=True)
            said.append(result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(any("no room in memory for the buffer of OpenBLAS" in text for text in said), said)

    def test_the_version_has_a_letter(self):
        self.assertEqual(run("oscar-bundle", "-V").stdout, run("oscar-bundle", "--version").stdout)
        self.assertTrue(run("oscar-bundle", "-V").stdout.startswith("oscar-bundle "))

    def test_a_command_that_writes_a_file_says_so_with_its_size(self):
        sums, other = (make_file(self.folder / f"{i}.h5", statistics_only=True, seed=i) for i in range(2))
        bundle, out = make_file(self.folder / "bundle.h5"), self.folder / "out.h5"
        for command in (["strip", bundle, out], ["rewrite", bundle, out], ["fit", sums, "-o", out],
                        ["merge", sums, other, "-o", out], ["card", bundle, "-o", out]):
            with self.subTest(command[0]):
                said = self.run_ok("oscar-bundle", *command, "--force").stdout
                self.assertEqual(said, f"wrote       {out} ({out.stat().st_size / 1024:.1f} KiB)\n")
        card = out.read_text()
        self.assertEqual(self.run_ok("oscar-bundle", "card", bundle, "-o", "-").stdout, card)
        self.assertEqual(self.run_ok("oscar-bundle", "card", bundle, "-o", "/dev/stdout", "--force").stdout, card)

    def test_quiet_runs_say_what_the_worth_of_their_figures_depends_on(self):
        for program in ("oscar-calibrate", "oscar-eval"):
            self.assertRegex(" ".join(run(program, "--help").stdout.split()), r"--quiet No progress and no \w+: warnings and errors only")
        model, text = self.model_and_text()
        bundle = self.folder / "out.h5"
        short = ["--device", "cpu", "--sequence-length", 512, "--max-tokens", 1024, "--quiet"]
        self.run_ok("oscar-calibrate", model, text, bundle, "--search", "off", *short)
        evaluate = ["oscar-eval", model, "--corpus", text, "--bundle", bundle, "--compare", "bundle", "--separators", "off", *short]
        words = "warning: " + str(bundle) + ": the model's configuration is not the one of the calibration"
        self.assertNotIn(words, self.run_ok(*evaluate).stderr)
        config = model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_version": "0"}))
        result = self.run_ok(*evaluate)
        self.assertEqual(result.stdout, "")
        self.assertIn(words, result.stderr)
        self.assertNotIn("note: ", result.stderr)

    def test_counts_and_names_are_taken_as_people_write_them(self):
        model, text = self.model_and_text()
        report = self.folder / "report.json"
        self.run_ok("oscar-calibrate", model, text, self.folder / "out.h5", "--dry-run", "--device",
                    "cpu", "--sequence-length", "0.25K", "--max-tokens", "2e3", "--preset", "PAPER",
                    "--dtype", "FP32", "--search", "Off", "--quiet", "--json", report)
        self.assertEqual(json.loads(report.read_text())["tokens"], 2000)
        for value in ("64Q", "1.5", "-1", "0", "1e19", "nan", "", "K", "1e", "9223372036854775808"):
            with self.subTest(value=value):
                self.refuse("oscar-calibrate", [model, text, "out.h5", f"--max-tokens={value}"],
                            "--max-tokens", code=USAGE)
        self.refuse("oscar-calibrate", [model, text, "out.h5", "--seed", "-1"], "--seed", code=USAGE)
        self.refuse("oscar-calibrate", [model, text, "out.h5", "--host-memory", "8Q"],
                    "malformed memory size", code=USAGE)

    def test_a_context_to_plan_for_is_a_count_like_any_other(self):
        for written, tokens in (("64K", 65536), ("1e4", 10000), ("1M", 1 << 20), ("8192", 8192)):
            plan = self.run_ok("oscar-bundle", "plan", "tiny-gqa", "--context", written, "--json", "-")
            plan = json.loads(plan.stdout)  # tiny-gqa serves 131,072
            self.assertIn(tokens, [plan.get("asked_context"), *(row["context"] for row in plan["contexts"])])
        for written in ("0", "-1", "2G", "64Q", "nan", ""):
            self.refuse("oscar-bundle", ["plan", "tiny-gqa", f"--context={written}"], "--context",
                        code=USAGE)

    def test_an_empty_word_is_never_an_option_left_out(self):
        model, text = self.model_and_text()
        out = self.folder / "out.h5"
        imports = ["import", BUNDLE, "--model", "tiny-gqa", "-o", out]
        card = ["card", BUNDLE, "-o", "-"]
        for command, options in (
                (["oscar-bundle", *imports], ("--for", "--name", "--clip", "--rope-scaling")),
                (["oscar-bundle", *card], ("--model", "--base-model", "--exports", "--answers", "--eval")),
                (["oscar-bundle", "plan", "tiny-gqa"], ("--gpu-memory", "--weights")),
                (["oscar-bundle", "verify", BUNDLE], ("--for",)),
                (["oscar-bundle", "export", BUNDLE, "--for", "npz"], ("--output",)),
                (["oscar-bundle", "fit", BUNDLE, "-o", out], ("--clip",)),
                (["oscar-calibrate", model, text, out, "--dry-run", "--device", "cpu"],
                 ("--host-memory", "--gpu-memory", "--for", "--clip", "--json", "--tokens-out")),
                (["oscar-eval", model, "--dry-run", "--device", "cpu"],
                 ("--corpus", "--compare", "--bundle", "--html", "--rope-scaling", "--mode")),
                (["oscar-eval", model, "--corpus", text, "--dry-run", "--device", "cpu"],
                 ("--host-memory", "--gpu-memory", "--json")),
                (["oscar-bench", "transform"], ("--rows", "--json", "--csv"))):
            for option in options:
                with self.subTest(command=command, option=option):
                    self.refuse(command[0], [*command[1:], option, ""], option, code=USAGE)
        self.refuse("oscar-bundle", ["inspect", ""], "FILE", code=USAGE)
        self.refuse("oscar-eval", [""], "MODEL", code=USAGE)
        self.refuse("oscar-calibrate", [model, "", out], "CORPUS", code=USAGE)

    def test_words_that_mean_nothing_whatever_the_files_hold_are_errors_of_usage(self):
        export = self.folder / "export"
        self.run_ok("oscar-bundle", "export", BUNDLE, "--for", "npz", "-o", export)
        imports = ["import", export, "--model", "tiny-gqa", "-o", self.folder / "out.h5"]
        for options, words in ((["--for", "foo"], ("unknown backend", "sglang-v1")),
                               (["--name", "a b"], ("--name", "can't have this name")),
                               *((["--rope-scaling", text], ("--rope-scaling", "not a JSON object"))
                                 for text in ("5", "null", "[]", '"yarn"')),
                               (["--rope-scaling", "{"], ("--rope-scaling",))):
            with self.subTest(options):
                self.refuse("oscar-bundle", [*imports, *options], *words, code=USAGE)
        self.refuse("oscar-bundle", ["card", BUNDLE, "-o", self.folder / "card.md", "--base-model", "x"],
                    "--base-model", "ORG/NAME", code=USAGE)

    def test_a_name_that_is_no_utf8_is_written_and_reported(self):
        model, text = self.model_and_text()
        out, report = os.fsencode(self.folder) + b"/out\xff.h5", self.folder / "report.json"
        result = subprocess.run(
            [BIN / "oscar-calibrate", model, text, out, "--device", "cpu", "--max-tokens", "1024",
             "--sequence-length", "256", "--statistics-only", "--json", report], env=ENVIRONMENT,
            capture_output=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(os.path.exists(out))
        self.assertIn("out\ufffd.h5", json.loads(report.read_text())["output"])

    def test_links_in_a_loop_are_named_in_plain_words(self):
        loop = self.folder / "loop"
        loop.symlink_to(loop)
        model, _ = self.model_and_text()
        for arguments in (["oscar-calibrate", model, loop, self.folder / "out.h5"],
                          ["oscar-bundle", "inspect", loop]):
            result = run(*arguments)
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn("loop", result.stderr)
            for word in ("filesystem error", "terminate", "what()"):
                self.assertNotIn(word, result.stderr)

    def test_a_terminal_does_not_obey_what_files_say(self):
        model, text = self.model_and_text()
        config = model / "config.json"
        settings = json.loads(config.read_text()) | {"model_type": "\x1b]0;title\x07" + "x" * 1000000}
        settings["architectures"] = [settings["model_type"]]
        config.write_text(json.dumps(settings))
        result = run("oscar-calibrate", model, text, self.folder / "out.h5")
        self.assertEqual(result.returncode, 1)
        self.assertNotIn("\x1b", result.stderr)
        self.assertLess(len(result.stderr), 8000)


if __name__ == "__main__":
    unittest.main()
