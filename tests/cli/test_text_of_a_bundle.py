"""What a bundle says of its text: enough of it, standing for other texts, seen in an evaluation."""
import json
import unittest

import h5py
import numpy as np

from support import checkpoints
from support.programs import run
from test_oscar_calibrate import SEARCH, CalibrateTest

FIXED = ["--search", "off", "--sequence-length", 256, "--recent", 64]


def digits(path, tokens, seed):
    """Text unlike support.checkpoints.sample_text: no run of 13 bytes is in both."""
    rng = np.random.default_rng(seed)
    path.write_text("".join(map(str, rng.integers(0, 10, tokens))))
    return path


class TextOfABundle(CalibrateTest):
    def convergence(self, *options, corpus=None):
        """The summary of a run and what it printed; --force, so that tests can run several."""
        summary = self.folder / "summary.json"
        result = self.calibrate(corpus or self.corpus, self.out, *options, "--json", summary,
                                "--force")
        return json.loads(summary.read_text()), result


class EnoughText(TextOfABundle):
    def test_the_run_ends_with_a_verdict_that_the_file_keeps(self):
        text = self.long_text(100)
        for options in (["--statistics-only"], []):
            summary, result = self.convergence(*FIXED, *options, corpus=text)
            record = summary["convergence"]
            verdict = "enough: " if record["enough"] else "not enough: "
            self.assertIn(f"\ntext       {verdict}", result.stdout)
            self.assertEqual("not enough" in result.stderr, not record["enough"])
            said = result.stdout[result.stdout.index("\ntext  "):].splitlines()[1:3]
            self.assertIn("keys", said[1])
            self.assertLessEqual(max(map(len, said)), 80, said)
            with h5py.File(self.out) as file:
                self.assertEqual(json.loads(file.attrs["convergence"]), record)
                self.assertEqual(record["tokens"],
                                 int(file["layers/000/statistics/count_kv"][()]))
            inspection = json.loads(self.run_ok("oscar-bundle", "inspect", self.out,
                                                "--json", "-").stdout)
            self.assertEqual(inspection["convergence"], record)
            page = self.run_ok("oscar-bundle", "inspect", self.out, "--all").stdout
            self.assertIn(f"text        {verdict}", page)
            self.assertIn("degrees", page)
            self.assertLessEqual(max(map(len, page.splitlines())), 80)
            self.run_ok("oscar-bundle", "verify", self.out)

    def test_more_text_costs_less(self):
        text = self.long_text(400)
        few, many = (self.convergence(*FIXED, "--max-tokens", tokens, corpus=text)[0]["convergence"]
                     for tokens in (8192, 65536))
        for side in ("key", "value"):
            # 8 times the text: an eighth of the cost, give or take what a few halves tell.
            ratio = few[side]["cost"] / many[side]["cost"]
            self.assertGreater(ratio, 8 / 3)
            self.assertLess(ratio, 8 * 3)
            self.assertLess(many[side]["mean_angle"], few[side]["mean_angle"])

    def test_text_that_turns_into_another_kind_is_warned_of_where_the_fit_follows_it(self):
        rng = np.random.default_rng(4)
        ids = self.folder / "ids.npy"
        np.save(ids, np.concatenate([rng.integers(0, 40, 16384), rng.integers(60, 250, 16384)]))
        summary, result = self.convergence(*FIXED, corpus=ids)
        record = summary["convergence"]
        self.assertFalse(record["enough"])
        self.assertGreater(record["tokens_needed"], 32768)
        self.assertIn("warning: not enough: predicted loss still falls by", result.stderr)
        self.assertIn(f"use about {record['tokens_needed']:,} tokens", result.stderr)
        self.assertIn("text       not enough: ", result.stdout)
        page = self.run_ok("oscar-bundle", "inspect", self.out).stdout
        self.assertRegex(page, r"\ntext        not enough: .*;\n            use about " + f"{record['tokens_needed']:,} tokens ")
        self.assertNotIn("degrees", page)
        self.assertLessEqual(max(map(len, page.replace(str(self.folder), "").splitlines())), 80)
        summary, result = self.convergence(*FIXED, "--method", "hadamard", corpus=ids)
        self.assertEqual(summary["convergence"], record)
        self.assertNotIn("warning: not enough", result.stderr)

    def test_text_without_a_2_bit_row_or_of_copies_is_not_judged_but_warned_of(self):
        short = ["--sink", 192]  # and 64 recent ones: sequences of 256 tokens stay exact
        copies = self.folder / "copies.txt"
        copies.write_text("".join(checkpoints.sample_text(2)) * 40)
        loop = self.folder / "loop.txt"
        loop.write_text("The same sentence again. " * 2000)
        for corpus, options, problem, hint in (
                (self.corpus, short, "no sequence is longer than the exact windows (192 + 64 tokens)",
                 ": no row is in 2 bits, so rows are weighted evenly and keys have no centers; use longer sequences"),
                (copies, [], "% of the text repeats earlier text", ", in stretches of 64 tokens: "),
                (loop, [], "96% of the text repeats earlier text", ", in stretches of 64 tokens: ")):
            summary, result = self.convergence(*FIXED, *options, "--statistics-only", corpus=corpus)
            self.assertIn(problem, summary["convergence"]["problem"])
            self.assertIn(problem + hint, summary["warnings"][0])
            self.assertIn("warning: ", result.stderr)
            self.assertIn("\ntext       not judged: ", result.stdout)

    def test_one_batch_is_not_judged_and_the_run_says_why(self):
        summary, result = self.convergence(*FIXED, "--max-tokens", 1024)
        self.assertEqual(summary["convergence"], {
            "tokens": 1024, "problem": "the text is one batch, without two parts: use more"})
        self.assertIn("not judged: the text is one batch", result.stdout)
        self.assertNotIn("warning: not", result.stderr)
        self.assertIn("not judged", self.run_ok("oscar-bundle", "inspect", self.out).stdout)

    def test_text_held_back_for_a_search_is_not_judged(self):
        summary, _ = self.convergence(*SEARCH, corpus=self.long_text(400))
        with h5py.File(self.out) as file:
            held_back = json.loads(file.attrs["search"])["held_back_tokens"]
        self.assertEqual(summary["convergence"]["tokens"], 6144 - held_back)

    def test_a_dry_run_counts_the_copies_of_the_sums(self):
        def checkpoint_bytes(*options):
            return self.convergence(*FIXED, "--dry-run", *options)[0]["checkpoint_bytes"]

        # Of three batches the first one's end is nearest to a quarter and to half: one copy.
        moments_of_a_copy = 7 * 3 * 2 * 32 * 32 * 8  # seven, of 3 layers with 2 heads
        self.assertEqual(checkpoint_bytes("--max-tokens", 12288)
                         - checkpoint_bytes("--max-tokens", 1024), moments_of_a_copy)

    def test_fitting_again_keeps_the_verdict_and_merging_drops_it(self):
        summary, _ = self.convergence(*FIXED)
        again, total = self.folder / "again.h5", self.folder / "total.h5"
        self.run_ok("oscar-bundle", "fit", self.out, "-o", again)
        with h5py.File(again) as file:
            self.assertEqual(json.loads(file.attrs["convergence"]), summary["convergence"])
        self.run_ok("oscar-bundle", "merge", self.out, again, "-o", total, "--allow-repeats")
        with h5py.File(total) as file:
            self.assertNotIn("convergence", file.attrs)
            self.assertIn("ngram_hashes", file["corpus"])
        fitted = self.folder / "fitted.h5"
        self.run_ok("oscar-bundle", "fit", total, "-o", fitted)
        for path in (total, fitted):
            self.assertIn("\ntext        not judged: the file keeps no verdict on it\n",
                          self.run_ok("oscar-bundle", "inspect", path).stdout)


class NothingQuantized(TextOfABundle):
    def test_a_model_whose_windows_all_stay_in_bf16_is_told_so(self):
        self.model = checkpoints.write_checkpoint(self.folder / "local", {
            "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0})
        result = self.calibrate(self.corpus, self.out, "--sequence-length", 512, "--max-tokens", 1024)
        words = "no layer of this model is in 2 bits: every window stays in BF16"
        self.assertIn(f"warning: {words}, so the bundle changes nothing", result.stderr)
        self.assertIn(words, self.run_ok("oscar-bundle", "inspect", self.out).stdout)
        judged = self.run_ok("oscar-eval", self.model, "--device", "cpu", "--bundle", self.out, "--corpus", self.corpus,
                             "--sequence-length", 512, "--max-tokens", 1024, "--compare", "bundle", "--separators", "off")
        self.assertIn("verdict    No layer of this model is in 2 bits", judged.stdout)
        for said in (result.stdout, judged.stdout):
            self.assertNotIn("runs as is", said)
            self.assertNotIn("\nnext", said)


class Coverage(TextOfABundle):
    def statistics(self, name, corpus):
        path = self.folder / name
        self.calibrate(corpus, path, "--statistics-only", "--sequence-length", 256)
        return path

    def test_a_text_of_another_kind_is_covered_badly_and_joining_is_suggested(self):
        words = self.statistics("words.h5", self.long_text(100))
        numbers = self.statistics("numbers.h5", digits(self.folder / "n.txt", 30000, 1))
        result = self.run_ok("oscar-bundle", "coverage", words, numbers)
        self.assertLessEqual(max(map(len, result.stdout.splitlines())), 80)
        self.assertIn("joined", result.stdout)
        self.assertIn("alone raises the predicted loss on", result.stderr)
        self.assertIn("oscar-bundle merge", result.stderr)
        data = json.loads(self.run_ok("oscar-bundle", "coverage", words, numbers,
                                      "--json", "-").stdout)
        self.assertEqual([entry["name"] for entry in data["files"]], [str(words), str(numbers)])
        for side in ("key", "value"):
            ratio = np.array(data[side])
            self.assertEqual(ratio.shape, (3, 2))
            np.testing.assert_array_equal(ratio[[0, 1], [0, 1]], 1)
            self.assertGreater(ratio[0, 1], ratio[2, 1])
            self.assertGreater(ratio[1, 0], ratio[2, 0])

    def test_like_texts_cover_each_other(self):
        lines = self.long_text(400).read_text().splitlines(keepends=True)
        halves = [self.folder / "a.txt", self.folder / "b.txt"]
        for path, part in zip(halves, (lines[:200], lines[200:])):
            path.write_text("".join(part))
        files = [self.statistics(f"{path.stem}.h5", path) for path in halves]
        data = json.loads(self.run_ok("oscar-bundle", "coverage", *files, "--json", "-").stdout)
        self.assertEqual(data["warnings"], [])
        for side in ("key", "value"):  # found: 1.0001, 1.0005; warnings begin at 1.1
            self.assertLess(np.max(data[side]), 1.01)

    def test_files_that_cannot_be_compared_are_refused(self):
        one = self.statistics("one.h5", self.corpus)
        self.refuse("oscar-bundle", ["coverage", one], "At least 2 required", code=2)
        bare = self.folder / "bare.h5"
        self.calibrate(self.corpus, bare, "--no-statistics", "--search", "off")
        self.refuse("oscar-bundle", ["coverage", one, bare], "no statistics")
        with h5py.File(one) as file:
            self.assertIn("convergence", file.attrs)


class EvaluatedText(TextOfABundle):
    def overlap(self, corpus, bundle):
        report = self.folder / "report.json"
        result = self.run_ok("oscar-eval", self.model, "--device", "cpu", "--bundle", bundle,
                             "--corpus", corpus, "--sequence-length", 512, "--max-tokens", 2048,
                             "--compare", "exact,bundle", "--json", report, "--force")
        return json.loads(report.read_text())["bundle"]["overlap"], result.stdout

    def test_text_of_the_calibration_is_noticed_and_other_text_is_not(self):
        text = digits(self.folder / "text.txt", 9000, 2)
        self.calibrate(text, self.out, *FIXED)
        found, said = self.overlap(text, self.out)
        self.assertTrue(found["known"])
        self.assertEqual(found["ngram"], 13)
        # Sequences are cut elsewhere: n-grams across the cuts of 256 tokens are new.
        self.assertGreater(found["share"], 0.93)
        self.assertIn("of the evaluation's 13-grams are in the calibration text of out.h5",
                      " ".join(said[said.index("CAUTION: "):].split()))
        other, said = self.overlap(digits(self.folder / "other.txt", 3000, 3), self.out)
        self.assertTrue(other["known"])
        self.assertEqual(other["found"], 0)
        self.assertGreater(other["sampled"], 100)
        self.assertNotIn("13-grams", said)

    def test_of_a_stripped_bundle_it_is_known_by_files_alone(self):
        stripped = self.folder / "stripped.h5"
        self.calibrate(self.corpus, self.out, *FIXED)
        self.run_ok("oscar-bundle", "strip", self.out, stripped)
        with h5py.File(stripped) as file:
            self.assertNotIn("ngram_hashes", file["corpus"])
        found, said = self.overlap(self.corpus, stripped)
        self.assertEqual(found, {"known": True, "by_files": True, "share": 1, "low": 1, "high": 1})
        self.assertIn("100% of the evaluation's tokens, by their files,", " ".join(said.split()))
        found, said = self.overlap(digits(self.folder / "other.txt", 3000, 3), stripped)
        self.assertEqual(found, {"known": False})
        self.assertNotIn("13-grams", said)

    def test_the_hashes_are_those_of_the_tokens_that_were_used(self):
        ids = self.folder / "ids.npy"
        self.calibrate(self.corpus, self.out, *FIXED, "--max-tokens", 2048, "--tokens-out", ids)
        expected = set()
        for sequence in np.load(ids).tolist():
            for i in range(len(sequence) - 12):
                x = 0
                for token in sequence[i:i + 13]:
                    x = (x * 0x9E3779B97F4A7C15 + token + 1) % 2**64
                z = (x + 0x9E3779B97F4A7C15) % 2**64
                z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
                z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
                expected.add((z ^ z >> 31) >> 1)
        with h5py.File(self.out) as file:
            stored = file["corpus/ngram_hashes"]
            self.assertEqual(stored[()].tolist(), sorted(expected)[:8192])
            self.assertEqual(stored.dtype, np.int64)
            self.assertEqual(int(stored.attrs["ngram"]), 13)
        self.assertEqual(run("oscar-bundle", "verify", self.out).returncode, 0)


if __name__ == "__main__":
    unittest.main()
