"""oscar-eval, stopped in the middle: its figures until then, exit code 130, and the bytes of an
uninterrupted run after --resume. OSCAR_KILLS=N: stopped at N random moments (support/stops.py)."""
import functools
import json
import re
import signal
import subprocess
import unittest

from support import checkpoints
from support.programs import BIN, ProgramTest, run
from support.stops import StoppedRuns, Watched

STAGES = {"opening": rb"", "measuring": rb"perplexity:", "writing": rb"perplexity: [\d,]+ token-layers in"}
MOMENTS = {"opening": (.5,), "measuring": (0, .3, .6, .9), "writing": (.3, .8)}


class EvalResume(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text(600)))

    def command(self, report, *options, tokens="32K"):
        return [BIN / "oscar-eval", self.model, "--device", "cpu", "--corpus", self.text, "--compare",
                "identity,hadamard-clip", "--sequence-length", "512", "--max-tokens", tokens, "--separators",
                "off", "--sink", "4", "--recent", "16", "--json", report, *options]

    def stop(self, command, when=rb"perplexity: +([2-9]\d)%"):
        """Exit code, stdout and stderr of a run that gets SIGTERM, behind its first block."""
        stopped = Watched(command, stdout=subprocess.PIPE)
        stopped.wait_for(when)
        stopped.process.send_signal(signal.SIGTERM)
        code = stopped.finish()
        with stopped.process.stdout as out:
            return code, out.read().decode(), stopped.said.decode()

    def test_a_stopped_run_shows_what_it_counted_and_continues_to_the_same_bytes(self):
        whole, report, page = (self.folder / name for name in ("whole.json", "a.json", "a.html"))
        checkpoint = self.folder / "a.json.checkpoint"
        self.assertEqual(run(*self.command(whole, "--quiet")).returncode, 0)
        code, out, said = self.stop(self.command(report, "--html", page))
        self.assertEqual(code, 130, said)
        self.assertIn("--resume", said)
        self.assertIn("PARTIAL", out)
        self.assertTrue(checkpoint.exists())
        part, complete = json.loads(report.read_text()), json.loads(whole.read_text())
        self.assertEqual(part["partial"]["text"], {"tokens": part["tokens"], "of": complete["tokens"]})
        self.assertLess(part["tokens"], complete["tokens"])
        self.assertIn("The run was stopped", page.read_text())
        report.rename(self.folder / "part.json")
        refused = run(*self.command(report, "--quiet"))
        self.assertEqual(refused.returncode, 1)
        self.assertIn("--resume continues that run, --force begins anew", refused.stderr)
        (self.folder / "part.json").rename(report)
        result = run(*self.command(report, "--html", page, "--resume", "--quiet"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(report.read_bytes(), whole.read_bytes())
        self.assertNotIn("The run was stopped", page.read_text())
        self.assertFalse(checkpoint.exists())

    def test_answers_that_were_generated_before_a_stop_are_kept(self):
        options = ["--tasks", "niah", "--needle-generate", "--needle-lengths", "400",
                   "--needle-prompts", "32"]
        whole, report = self.folder / "whole.json", self.folder / "a.json"
        self.assertEqual(run(*self.command(whole, *options, "--quiet")).returncode, 0)
        code, _, said = self.stop(self.command(report, *options), rb"generation: +[2-9]\d%")
        self.assertEqual(code, 130, said)
        partial = json.loads(report.read_text())["partial"]["generated"]
        self.assertGreater(partial["answers"], 0)
        self.assertLess(partial["answers"], partial["of"])
        result = run(*self.command(report, *options, "--resume", "--quiet"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(report.read_bytes(), whole.read_bytes())

    def test_stopped_at_seven_moments(self):
        runs = StoppedRuns(self, STAGES, functools.partial(self.command, tokens="8K"),
                           self.folder / "a.json")
        runs.expect_the_same_bytes(runs.moments(MOMENTS, signal.SIGKILL))

    def test_a_dry_run_says_what_it_would_cost_and_writes_nothing(self):
        before = set(self.folder.iterdir())
        result = run(*self.command(self.folder / "a.json", "--dry-run"))
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ("time ", "memory ", "checkpoint ", "tokens count"):
            self.assertIn(word, result.stdout)
        self.assertEqual(set(self.folder.iterdir()), before)

    def test_without_a_checkpoint_resume_replaces_nothing(self):
        report, page = self.folder / "a.json", self.folder / "a.html"
        for path, options in ((report, []), (page, ["--html", page])):
            path.write_text("precious")
            result = run(*self.command(report, *options, "--resume", tokens="1K"))
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn("exists already", result.stderr)
            self.assertEqual(path.read_text(), "precious")
            path.unlink()
        self.assertEqual(run(*self.command(report, "--resume", tokens="1K")).returncode, 0)

    def test_resume_of_a_finished_report_does_nothing(self):
        report = self.folder / "a.json"
        self.assertEqual(run(*self.command(report, tokens="1K")).returncode, 0)
        before = report.stat().st_mtime_ns
        again = run(*self.command(report, "--resume", tokens="1K"))
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("finished already", again.stdout)
        self.assertEqual(report.stat().st_mtime_ns, before)
        for options in (["--resume", "--seed", 1], ["--resume", "--keep-units"], []):
            other = run(*self.command(report, *options, tokens="1K"))
            self.assertEqual(other.returncode, 1, other.stderr)
            self.assertIn("exists already", other.stderr)
            self.assertIn("--force", other.stderr)
            self.assertEqual(report.stat().st_mtime_ns, before)

    def test_resume_of_a_finished_report_writes_the_page_that_it_lacks(self):
        report, page = self.folder / "a.json", self.folder / "a.html"
        first = run(*self.command(report, tokens="1K"))
        self.assertEqual(first.returncode, 0, first.stderr)
        before = report.stat().st_mtime_ns
        resumed = self.command(report, "--resume", "--html", page, tokens="1K")
        again = run(*resumed)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("<html", page.read_text())
        table = first.stdout[:first.stdout.index("verdict")]
        self.assertIn(table, again.stdout)
        self.assertIn(f"wrote {page}\n", again.stdout)
        self.assertEqual(report.stat().st_mtime_ns, before)
        there = page.stat().st_mtime_ns
        self.assertEqual(run(*resumed).returncode, 0)  # nothing is lacking
        self.assertEqual(page.stat().st_mtime_ns, there)
        page.write_text("precious")
        other = run(*resumed)
        self.assertEqual(other.returncode, 1)
        self.assertIn("exists already", other.stderr)
        self.assertEqual(page.read_text(), "precious")

    def test_resuming_needs_a_report_beside_which_a_checkpoint_can_be(self):
        result = run("oscar-eval", self.model, "--corpus", self.text, "--resume")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("--json", result.stderr)


if __name__ == "__main__":
    unittest.main()
