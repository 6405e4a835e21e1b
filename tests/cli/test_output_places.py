"""No program writes over what it reads or over another of its outputs, and none finds out late."""
import shutil
import unittest
import unittest.mock

from support import checkpoints, programs
from support.bundle_case import make_file
from support.programs import SOURCE, ProgramTest

INPUT, TWICE = "overwrite an input", "two outputs"
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"


class OutputPlaces(ProgramTest):
    def setUp(self):
        super().setUp()
        self.model = checkpoints.write_checkpoint(self.folder / "model")
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(checkpoints.sample_text()))
        self.ids = self.folder / "ids.h5"  # any file: it is refused before it is read
        self.ids.write_bytes(b"ids")
        self.texts = self.folder / "texts"
        self.texts.mkdir()
        self.page = shutil.copy(self.text, self.texts / "page.txt")
        self.link = self.folder / "link.txt"
        self.link.symlink_to(self.text)
        self.out = self.folder / "out.h5"
        self.json = self.folder / "out.json"

    def refuse_unchanged(self, program, arguments, *words):
        """Exit code 2, and every file as it was."""
        def contents():
            return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

        before = contents()
        self.refuse(program, arguments, *words, code=2)
        self.assertEqual(contents(), before)

    def test_calibrate(self):
        weights = self.model / "model.safetensors"
        here = self.folder / "texts" / ".." / "out.h5"  # OUT by another name, before it exists
        for corpus, out, options, words in (
                (self.ids, self.ids, [], (INPUT, "OUT, CORPUS")),
                (f"{self.text}:1,{self.ids}:2", self.ids, [], (INPUT, "OUT, CORPUS")),
                (self.texts, self.page, [], (INPUT, "OUT, CORPUS")),
                (self.text, weights, [], (INPUT, "OUT, MODEL")),
                (self.text, self.out, ["--json", self.text], (INPUT, "--json, CORPUS")),
                (self.text, self.out, ["--json", self.link], (INPUT, "--json, CORPUS")),
                (self.link, self.out, ["--tokens-out", self.text], (INPUT, "--tokens-out, CORPUS")),
                (self.text, self.out, ["--json", self.model / "config.json"],
                 (INPUT, "--json, MODEL")),
                (self.text, self.out, ["--json", self.out], (TWICE, "--json, OUT")),
                (self.text, self.out, ["--json", here], (TWICE, "--json, OUT")),
                (self.text, self.out, ["--tokens-out", here], (TWICE, "--tokens-out, OUT")),
                (self.text, self.out, ["--json", self.json, "--tokens-out", self.json],
                 (TWICE, "--json, --tokens-out")),
                (self.text, self.out, ["--json", f"{self.out}.checkpoint"],
                 (TWICE, "the checkpoint beside OUT"))):
            for more in ([], ["--dry-run"]):
                with self.subTest(corpus=corpus, out=out, options=options, more=more):
                    arguments = [self.model, corpus, out, "--force", *options, *more]
                    self.refuse_unchanged("oscar-calibrate", arguments, *words)

    def test_a_new_file_in_a_folder_of_texts_is_no_input(self):
        self.run_ok("oscar-calibrate", self.model, self.texts, self.out, "--device", "cpu",
                    "--dry-run", "--json", self.texts / "summary.json")

    def test_eval(self):
        bundle = make_file(self.folder / "bundle.h5")
        for options, words in (
                (["--bundle", bundle, "--json", bundle], (INPUT, "--json, --bundle")),
                (["--bundle", f"a={bundle}", "--html", bundle], (INPUT, "--html, --bundle")),
                (["--json", self.text], (INPUT, "--json, --corpus")),
                (["--html", self.link], (INPUT, "--html, --corpus")),
                (["--json", self.model / "tokenizer.json"], (INPUT, "--json, MODEL")),
                (["--json", self.json, "--html", self.folder / "texts/../out.json"],
                 (TWICE, "--json, --html"))):
            with self.subTest(options):
                self.refuse_unchanged("oscar-eval", [self.model, "--corpus", self.text, *options],
                                      *words)

    def test_a_model_by_its_name_or_through_a_link_is_an_input(self):
        template = self.model / "chat_template.json"
        template.write_text('{"chat_template": ""}')
        link = self.folder / "link"
        link.symlink_to(self.model)
        with unittest.mock.patch.dict(programs.ENVIRONMENT, OSCAR_DATASETS=str(self.folder)):
            for model in (self.model.name, link):
                for program, arguments in (("oscar-calibrate", [model, self.text, self.out]),
                                           ("oscar-eval", [model, "--corpus", self.text])):
                    with self.subTest(program, model=model):
                        self.refuse_unchanged(program, [*arguments, "--json", template], INPUT,
                                              "--json, MODEL")

    def test_eval_tries_the_place_of_the_bundle_before_the_work(self):
        # In /proc nothing can be made, not even by root; that no such bundle exists shows later.
        self.refuse("oscar-eval", ["none", "--bundle", "/proc/bundle.h5", "--write-back"],
                    "/proc/bundle.h5", "cannot write")
        self.refuse("oscar-eval", ["none", "--bundle", "/proc/bundle.h5"], "no such model")

    def test_bundle(self):
        a = make_file(self.folder / "a.h5")
        b = make_file(self.folder / "b.h5", seed=1)
        again = self.folder / "texts" / ".." / "a.h5"
        self.json.write_text("{}")
        for arguments in (["strip", a, again, "--force"], ["merge", a, b, "-o", b, "--force"],
                          ["merge", a, b, "-o", again, "--force"],
                          ["fit", a, "-o", again, "--force"],
                          ["report", self.json, "-o", self.json]):
            with self.subTest(arguments):
                self.refuse_unchanged("oscar-bundle", arguments, INPUT)

    def test_import_writes_over_nothing_that_it_reads_of_the_model(self):
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            with self.subTest(name):
                self.refuse_unchanged("oscar-bundle", ["import", self.ids, "--model", self.model, "-o",
                                                       self.model / name, "--force"], INPUT)

    def test_a_card_writes_over_nothing_that_it_reads_of_the_model_and_of_exports(self):
        (self.model / "README.md").write_text("---\nlicense: mit\n---\n")
        manifest = self.folder / "exports" / "a" / "oscar-export.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
        linked = self.folder / "linked.md"
        linked.symlink_to(self.model / "README.md")
        for option, place, output in (("--model", self.model, self.model / "config.json"),
                                      ("--model", self.model, self.model / "model.safetensors"),
                                      ("--model", self.model, self.model / "README.md"),
                                      ("--model", self.model, linked),
                                      ("--exports", manifest.parent.parent, manifest)):
            with self.subTest(output=output):
                self.refuse_unchanged("oscar-bundle", ["card", BUNDLE, option, place, "-o", output,
                                                       "--force"], INPUT)


if __name__ == "__main__":
    unittest.main()
