"""Whichever system call fails, and wherever a program is killed, its folder then holds the old state
or the new one, and what a kill leaves behind is removed by the next run.

OSCAR_FAULTS=all tries every open, write, flush and rename, and as many allocations and threads as
otherwise; without it, a few of each kind."""
import pathlib
import shutil
import tempfile
import unittest

from support import checkpoints, faults
from support.bundle_case import make_file
from support.programs import BIN, ProgramTest, run


class Faults(ProgramTest):
    def setUp(self):
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)  # inputs, which no program writes
        self.out = self.folder / "out.h5"

    def sweep(self, name, command, *, old=None, **options):
        """`old`: what stands in the folder before; copied to out.h5."""
        def reset():
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if old:
                shutil.copy(old, self.out)

        sweep = faults.Sweep(name, command, self.folder, reset, **options)
        counts, tried = sweep.run(self, self.scratch)
        print(f"{self.id()}: {name}: calls {counts}, faults tried {tried}")

    def test_of_bundle_files(self):
        a = make_file(self.scratch / "a.h5")
        b = make_file(self.scratch / "b.h5", seed=1)
        report = self.scratch / "report.json"
        bundle = BIN / "oscar-bundle"
        self.sweep("strip", [bundle, "strip", a, self.out])
        self.sweep("strip over an old file", [bundle, "strip", a, self.out, "--force"], old=b)
        self.sweep("merge", [bundle, "merge", a, b, "-o", self.out])
        self.sweep("fit", [bundle, "fit", a, "-o", self.out])
        self.sweep("export", [bundle, "export", a, "--to", "npz", "-o", self.folder / "out"])

    def test_of_a_folded_model(self):
        model = checkpoints.write_checkpoint(self.scratch / "model")
        text = self.scratch / "text.txt"
        text.write_text("".join(checkpoints.sample_text()))
        bundle = self.scratch / "bundle.h5"
        self.run_ok("oscar-calibrate", model, text, bundle, "--max-tokens", 512, "--chunk-len", 256,
                    "--device", "cpu", "--search", "off")
        self.sweep("fold", [BIN / "oscar-bundle", "fold", bundle, model, self.folder / "out"], most=2)

    def test_of_runs_of_a_model(self):
        model = checkpoints.write_checkpoint(self.scratch / "model")
        text = self.scratch / "text.txt"
        text.write_text("".join(checkpoints.sample_text(400)))
        options = [text, "--max-tokens", 3072, "--chunk-len", 256, "--sink", 4, "--recent", 16,
                   "--device", "cpu", "--quiet"]
        calibrate = [BIN / "oscar-calibrate", model, *options[:1], self.out, *options[1:],
                     "--checkpoint-every", 1]
        # Allocations and threads of libtorch are not ours to survive.
        calls = ("open", "write", "sync", "rename")
        self.sweep("calibrate", calibrate, again=[*calibrate, "--resume"],
                   may_stay=("out.h5.checkpoint",), most=1, kinds=calls)
        evaluate = [BIN / "oscar-eval", model, "--corpus", *options, "--compare", "identity",
                    "--separators", "off", "--json", self.folder / "out.json"]
        self.sweep("eval", evaluate, again=[*evaluate, "--resume"],
                   may_stay=("out.json.checkpoint",), most=1, kinds=calls[1:])


if __name__ == "__main__":
    unittest.main()
