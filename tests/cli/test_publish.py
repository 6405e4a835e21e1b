#!/usr/bin/env python3
"""oscar-bundle card and python -m oscar_int2 publish: the folder that a receiving team gets, and what is refused."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import unittest

import h5py
import numpy as np
import torch
from huggingface_hub import ModelCard

from bundle.verify_bundle import content_sha256
from support.programs import BIN, ENVIRONMENT, SOURCE
from support.backends import BackendCase

BACKENDS = {"sglang-v1", "sglang-v2", "vllm-pr46774", "mlx"}
README = "---\nlicense: apache-2.0\n---\n# A model\n"


class Publish(BackendCase):
    def setUp(self):
        super().setUp()
        (self.model / "README.md").write_text(README)
        self.bundle = self.calibrate("--search", "off")
        self.report = self.folder / "report.json"
        self.run_ok("oscar-eval", self.model, "--bundle", self.bundle, "--corpus", self.corpus,
                    "--sequence-length", 256, "--max-tokens", 1024, "--json", self.report)

    def publish(self, *arguments, allowed=("shared-text", "little-text", "few-tokens", "predicts-nothing")):
        allow = [word for kind in allowed for word in ("--allow", kind)]
        return subprocess.run([sys.executable, "-S", "-m", "oscar_int2", "publish", *allow, *map(str, arguments)], text=True,
                              capture_output=True, env=ENVIRONMENT | {"OSCAR_BIN": str(BIN), "PYTHONPATH": str(SOURCE / "python")})

    def expect_refused(self, arguments, *words):
        before = set(os.listdir(self.folder))
        result = self.publish(*arguments)
        self.assertNotEqual(result.returncode, 0, result.stdout)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertEqual(set(os.listdir(self.folder)), before)

    def answers(self):
        """As if given over the serving profile."""
        serving, file = self.folder / "serving.h5", self.folder / "answers.json"
        self.run_ok("oscar-bundle", "strip", self.bundle, serving, "--profile", "serving")
        with h5py.File(serving) as bundle:
            content = bundle.attrs["content_sha256"].decode()
        turn = {"question": "What?", "tokens_before": 400, "bf16": "This.", "int2": "That.", "same": False}
        file.write_text(json.dumps({"schema": "oscar-answers-1", "bundle_serving_sha256": content, "device": "cpu",
                                    "most_tokens": 8, "exact_tokens": 320, "turns": [turn]}))
        return file

    def test_an_evaluation_of_copies_is_refused(self):
        ids, report = self.folder / "copies.npy", self.folder / "copies.json"
        np.save(ids, np.tile(np.random.default_rng(0).integers(0, 256, (1, 600)), (10, 1)).astype(np.int32))
        said = self.run_ok("oscar-eval", self.model, "--bundle", self.bundle, "--corpus", ids, "--sequence-length", 600,
                           "--compare", "bundle", "--separators", "off", "--json", report).stdout
        self.assertEqual(json.loads(report.read_text())["repeated_share"], 0.9)
        self.assertIsNone(json.loads(report.read_text())["methods"]["bundle"]["nll_increase"]["low"])
        for words in ("90% of the evaluation's text repeats itself", "too few for 95% intervals"):
            self.assertIn(words, " ".join(said.split()))
        self.expect_refused([self.model, self.bundle, "--eval", report, "-o", self.folder / "no"], "--allow repeated-text")

    def test_the_folder_is_whole_and_each_part_is_of_the_same_bundle(self):
        out = self.folder / "published"
        said = self.publish(self.model, self.bundle, "--eval", self.report, "--base-model", "org/m",
                            "--repo", "team/m-int2", "--answers", self.answers(), "-o", out)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn(f"hf upload team/m-int2 {out} .", said.stdout)
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=True)
        index = json.loads((out / "index.json").read_text())
        on_disk = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
        self.assertEqual({file["path"] for file in index["files"]} | {"index.json", "SHA256SUMS"},
                         set(on_disk))
        for file in index["files"]:
            content = on_disk[file["path"]].read_bytes()
            self.assertEqual((len(content), hashlib.sha256(content).hexdigest()),
                             (file["bytes"], file["sha256"]))

        with h5py.File(out / "out.h5") as whole, h5py.File(out / "out.serving.h5") as serving:
            content = whole.attrs["content_sha256"].decode()
            self.assertEqual(index["bundle"]["content_sha256"], content)
            self.assertEqual(index["bundle"]["serving_sha256"],
                             serving.attrs["content_sha256"].decode())
            self.assertNotIn("statistics", whole["layers/000"])
            self.assertNotIn("portable", serving)
        self.assertEqual(set(os.listdir(out / "exports")), BACKENDS)
        folders = {backend["name"]: backend["folder"] for backend in index["stacks"] if backend["folder"]}
        self.assertEqual(folders, {name: f"exports/{name}" for name in BACKENDS})
        for name in BACKENDS:
            self.run_ok("oscar-bundle", "verify", out / "exports" / name, "--for", name)
            manifest = json.loads((out / "exports" / name / "oscar-export.json").read_text())
            self.assertEqual(manifest["created_from"]["content_sha256"], content)
        torch.load(out / "exports/vllm-pr46774/k_rotation.pt", weights_only=True)

        report = json.loads(self.report.read_text())
        (figures,) = index["figures"]
        self.assertEqual(figures["methods"]["bundle"]["kl"]["mean"], report["methods"]["bundle"]["kl"]["mean"])
        self.assertEqual((out / "evaluation.json").read_text(), self.report.read_text())
        self.assertIn("</html>", (out / "evaluation.html").read_text())

        card = ModelCard.load(out / "README.md")
        self.assertEqual(card.data.license, "apache-2.0")
        self.assertEqual(card.data.base_model, "org/m")
        self.assertEqual(card.data.library_name, "oscar-toolkit")
        self.assertIn("kv-cache", card.data.tags)
        self.assertEqual(index["model"]["licence"], "apache-2.0")
        for link in re.findall(r"\]\(([^)]+)\)", card.text):
            self.assertTrue((out / link).exists(), link)
        said = dict(re.findall(r"^\| (\S+) \| ((?:runs|cannot).*) \|$", card.text.replace("\\_", "_"), re.MULTILINE))
        self.assertEqual(said, {backend["name"]: backend["line"] for backend in index["stacks"]})
        self.assertIn(index["bundle"]["serving_sha256"], card.text)
        self.assertIn(f"Measured on the content `{report['bundle']['content_sha256']}`", card.text)
        row = next(line for line in card.text.splitlines() if "**this bundle**" in line)
        self.assertIn(f"{100 * report['methods']['bundle']['top1']['mean']:.1f}%", row)
        self.assertIn(report["device"].replace("_", "\\_"), card.text)
        for text in (card.text, (out / "evaluation.html").read_text()):
            self.assertIn("Sample answers", text)
        for command in re.findall(r"VLLM_OSCAR_BUNDLE=(\S+)", card.text):
            self.assertTrue((out / command).exists())

    def test_shared_text_and_little_text_are_published_by_name_alone(self):
        """The report is of the calibration text itself."""
        out = self.folder / "published"
        before = set(os.listdir(self.folder))
        arguments = [self.model, self.bundle, "--eval", self.report, "--no-exports", "-o", out]
        refused = self.publish(*arguments, allowed=["little-text"])
        self.assertEqual(refused.returncode, 2, refused.stdout)
        self.assertIn("are in the calibration text of out.h5", refused.stderr)
        self.assertIn("hint: --allow shared-text publishes it", refused.stderr)
        self.assertEqual(set(os.listdir(self.folder)), before)
        stripped, report = self.folder / "stripped.h5", self.folder / "of-stripped.json"
        self.run_ok("oscar-bundle", "strip", self.bundle, stripped)
        self.run_ok("oscar-eval", self.model, "--bundle", stripped, "--corpus", self.corpus, "--sequence-length", 256,
                    "--max-tokens", 1024, "--json", report)
        refused = self.publish(self.model, stripped, "--eval", report, "--no-exports", "-o", out,
                               allowed=["little-text"])  # without the sample of its text, by the file
        self.assertIn("are in the calibration text of stripped.h5", refused.stderr)
        with h5py.File(self.bundle, "r+") as file:  # as of a run on less text
            record = json.loads(file.attrs["convergence"])
            record |= {"enough": False, "fall_per_doubling": .03}
            file.attrs["convergence"] = np.bytes_(json.dumps(record))
            file.attrs["content_sha256"] = np.bytes_(content_sha256(file))
        refused = self.publish(self.model, self.bundle, "--no-exports", "-o", out, allowed=[])
        self.assertIn("hint: --allow little-text", refused.stderr)
        self.assertNotIn("--allow shared-text", refused.stderr)
        said = self.publish(self.model, self.bundle, "--no-exports", "-o", out, allowed=["little-text"])
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("> **Caution** (`little-text`): ", (out / "README.md").read_text())
        self.expect_refused([self.model, self.bundle, "--allow", "x", "-o", out], "--allow takes")

    def test_what_does_not_fit_together_leaves_nothing_behind(self):
        out = self.folder / "published"
        self.expect_refused([self.model, self.bundle], "-o DIR")
        self.expect_refused([self.model, self.bundle, "-o"], "needs a value")
        self.expect_refused([self.model, self.bundle, "--evil", "-o", out], "no option --evil")
        self.expect_refused([self.model, self.bundle, "-o", self.model], "exists already")
        self.expect_refused([self.model, self.bundle, "--repo", "x", "-o", out], "ORG/NAME")
        self.expect_refused([self.model, self.bundle, "--base-model", "x", "-o", out], "ORG/NAME")
        self.expect_refused([self.model, self.model / "config.json", "-o", out], "FAILED")
        self.expect_refused([SOURCE / "datasets/tiny-gqa", self.bundle, "-o", out], "of another model")
        report = json.loads(self.report.read_text())
        stopped = self.folder / "stopped.json"
        stopped.write_text(json.dumps(report | {"partial": {"text": {"tokens": 512, "of": 1024}}}))
        self.expect_refused([self.model, self.bundle, "--eval", stopped, "-o", out], "stopped.json", "stopped: its", "--resume")
        report["bundle"] |= {"content_sha256": "0", "serving_sha256": "1"}
        other = self.folder / "other.json"
        other.write_text(json.dumps(report))
        self.expect_refused([self.model, self.bundle, "--eval", self.report, "--eval", other, "-o", out],
                            "of another bundle")
        for report in (other, self.corpus):  # as the user calls it, and not the copy of it
            said = self.publish(self.model, self.bundle, "--eval", report, "-o", out).stderr
            self.assertIn(str(report), said)
            self.assertNotIn(".publish.", said)

    def test_an_export_that_is_not_to_be_served_says_so_on_the_card(self):
        zoo, out = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5", self.folder / "published"
        said = self.publish(SOURCE / "datasets" / "tiny-gqa", zoo, "-o", out)
        self.assertEqual(said.returncode, 0, said.stderr)
        first = (out / "exports/gguf-rot/README.md").read_text().split("\n\n")[1]
        self.assertIn("DO NOT SERVE", first)
        card = (out / "README.md").read_text()
        self.assertEqual(card.count(f"\n> **exports/gguf-rot**: {first}\n\nFiles for other backends"), 1)
        self.assertEqual(card.count("> **exports/"), 1)
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=True)

    def test_a_card_gives_no_figure_that_was_not_measured(self):
        card = self.folder / "card.md"
        self.run_ok("oscar-bundle", "card", self.bundle, "-o", card)
        self.assertIn("Not measured", card.read_text())
        self.assertNotIn("license:", card.read_text())
        self.refuse("oscar-bundle", ["card", self.bundle, "-o", self.bundle], "overwrite an input", code=2)
        self.refuse("oscar-bundle", ["card", self.bundle, "-o", card], "exists", "--force")
        self.refuse("oscar-bundle", ["card", self.bundle, "--eval", self.corpus, "-o", card, "--force"],
                    "corpus.txt")
        shutil.copy(self.report, self.folder / "second.json")
        self.run_ok("oscar-bundle", "card", self.bundle, "--eval", self.report, "--eval",
                    self.folder / "second.json", "-o", card, "--force")
        self.assertIn("second.json", card.read_text())


if __name__ == "__main__":
    unittest.main()
