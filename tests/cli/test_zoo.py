#!/usr/bin/env python3
"""rotation_zoo/: every file is the indexed one, every figure is of an evaluation of that bundle."""
import json
import os
import re
import shutil
import subprocess
import sys
import unittest

import h5py

from bundle.verify_bundle import content_sha256
from support.programs import SOURCE, ProgramTest

ZOO = SOURCE / "rotation_zoo"


def check(zoo):
    return subprocess.run([sys.executable, "-S", "-m", "oscar_int2", "zoo", zoo, "--check"],
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(SOURCE / "python")})


def without_licence(card):
    card, found = re.subn(r"(?<=\n## Licence\n).*?(?=\n## |\Z)", "", card, flags=re.DOTALL)
    assert found == 1, card
    return re.sub(r"^license: .*\n", "", card, flags=re.MULTILINE)


class Zoo(ProgramTest):
    def entries(self):
        index = json.loads((ZOO / "index.json").read_text())
        self.assertGreater(len(index["entries"]), 0)
        for entry in index["entries"]:
            yield entry, ZOO / entry["folder"]

    def test_files_are_as_indexed(self):
        result = check(ZOO)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        for path in ZOO.glob("*/*.h5"):
            self.assertIn(path.parent.name, {entry["folder"] for entry, _ in self.entries()})

    def test_a_changed_file_is_found(self):
        copy = self.folder / "zoo"
        for entry, folder in self.entries():
            shutil.copytree(folder, copy / entry["folder"], ignore=shutil.ignore_patterns("study"))
        shutil.copy(ZOO / "index.json", copy)
        self.assertEqual(check(copy).returncode, 0)
        card = next(copy.glob("*/README.md"))
        card.write_text(card.read_text().replace("KL", "LK"))
        result = check(copy)
        self.assertEqual(result.returncode, 1)
        self.assertIn("README.md is not the file of index.json", result.stdout)

    def test_bundles_are_of_a_clean_commit_and_hold_what_their_hash_says(self):
        for entry, folder in self.entries():
            about = entry["bundle"]
            self.assertRegex(about["tool_commit"], r"^[0-9a-f]{7,40}$")
            for name, key in ((about["file"], "content_sha256"), (about["serving_file"], "serving_sha256")):
                with h5py.File(folder / name) as file:
                    self.assertEqual(file.attrs["content_sha256"].decode(), about[key])
                    self.assertEqual(content_sha256(file), about[key])

    def test_cards_are_those_of_their_evaluations(self):
        """Made again: the evaluation belongs to the bundle, or `card` refuses it."""
        for entry, folder in self.entries():
            self.assertGreater(len(entry["figures"]), 0)
            options = []
            for figures in entry["figures"]:
                options += ["--eval", folder / figures["file"]]
            if entry["model"]["base_model"]:
                options += ["--base-model", entry["model"]["base_model"]]
            model = SOURCE / "datasets" / entry["folder"]
            if model.is_dir():
                options += ["--model", model]
            card = self.folder / f"{entry['folder']}.md"
            self.run_ok("oscar-bundle", "card", folder / entry["bundle"]["file"], *options, "-o", card)
            made, stored = card.read_text(), (folder / "README.md").read_text()
            if not model.is_dir():  # its files, which state the licence, are not here
                self.assertIn(f"\nlicense: {entry['model']['licence']}\n", stored)
                made, stored = map(without_licence, (made, stored))
            self.assertEqual(made, stored)
            index = json.loads((folder / "index.json").read_text())
            lines = dict(re.findall(r"^\| (\S+) \| ((?:runs|cannot).*) \|$", stored.replace("\\_", "_"), re.MULTILINE))
            self.assertEqual(lines, {backend["name"]: backend["line"] for backend in index["stacks"]})

    def test_a_report_says_what_a_variant_costs(self):
        folder, other = ZOO / "qwen2.5-coder-1.5b-instruct", ZOO / "tiny-gqa"
        bundle, report = folder / f"{folder.name}.h5", folder / "evaluation.json"
        export = ["oscar-bundle", "export", bundle, "--for", "sglang-v1", "--reduce"]
        for options, said, warned in (([], "measure first", False), (["--eval", report], "do not serve", True)):
            out = self.folder / said.replace(" ", "-")
            result = self.run_ok(*export, *options, "-o", out)
            self.assertIn(f", {said}", result.stdout)
            self.assertEqual("do not serve this export" in result.stderr, warned)
            self.assertEqual("DO NOT SERVE" in (out / "README.md").read_text(), warned)
        self.refuse("oscar-bundle", ["inspect", other / "tiny-gqa.h5", "--eval", report], "another bundle")


if __name__ == "__main__":
    unittest.main()
