"""Whichever system call fails, and wherever a program is killed, its folder then holds the old state
or the new one, and what a kill leaves behind is removed by the next run.

OSCAR_FAULTS=all tries every open, write, flush and rename, and as many allocations and threads as
otherwise; without it, a few of each kind. OSCAR_KILLS=N stops programs N times (support/stops.py)."""
import pathlib
import shutil
import tempfile
import unittest

from support import checkpoints, faults, stops
from support.bundle_case import make_file
from support.programs import BIN, ProgramTest, run

RUN = ["--max-tokens", 3072, "--sequence-length", 256, "--sink", 4, "--recent", 16, "--device", "cpu",
       "--quiet"]


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

        return faults.Sweep(name, command, self.folder, reset, **options)

    def try_all(self, sweep):
        counts, tried = sweep.run(self, self.scratch)
        print(f"{self.id()}: {sweep.name}: calls {counts}, faults tried {tried}")

    def bundle_sweeps(self):
        a = make_file(self.scratch / "a.h5")
        b = make_file(self.scratch / "b.h5", seed=1)
        bundle = BIN / "oscar-bundle"
        return (self.sweep("strip", [bundle, "strip", a, self.out]),
                self.sweep("strip over an old file", [bundle, "strip", a, self.out, "--force"], old=b),
                self.sweep("merge", [bundle, "merge", a, b, "-o", self.out]),
                self.sweep("fit", [bundle, "fit", a, "-o", self.out]),
                self.sweep("export", [bundle, "export", a, "--for", "npz", "-o", self.folder / "out"]))

    def fold_sweep(self):
        model = checkpoints.write_checkpoint(self.scratch / "model")
        text = self.scratch / "text.txt"
        text.write_text("".join(checkpoints.sample_text()))
        bundle = self.scratch / "bundle.h5"
        self.run_ok("oscar-calibrate", model, text, bundle, "--max-tokens", 512, "--sequence-length", 256,
                    "--device", "cpu", "--search", "off")
        return self.sweep("fold", [BIN / "oscar-bundle", "fold", bundle, model, self.folder / "out"],
                          most=2)

    def test_of_bundle_files(self):
        for sweep in self.bundle_sweeps():
            self.try_all(sweep)

    def test_of_a_folded_model(self):
        self.try_all(self.fold_sweep())

    def test_of_bundle_programs_that_are_stopped(self):
        for sweep in (*self.bundle_sweeps(), self.fold_sweep()):
            stops.stop_at_random(self, sweep)

    def run_sweep(self, name, command, checkpoint):
        """Allocations and threads of libtorch are not ours to survive."""
        self.try_all(self.sweep(name, command, again=[*command, "--resume"], may_stay=(checkpoint,),
                                most=1, kinds=("open", "write", "sync", "rename")))

    def model_and_text(self):
        text = self.scratch / "text.txt"
        text.write_text("".join(checkpoints.sample_text(400)))
        return checkpoints.write_checkpoint(self.scratch / "model"), text

    def test_of_a_calibration(self):
        model, text = self.model_and_text()
        self.run_sweep("calibrate", [BIN / "oscar-calibrate", model, text, self.out, *RUN,
                                     "--checkpoint-every", 1], "out.h5.checkpoint")

    def test_of_memory_that_libhdf5_does_not_find(self):
        """It then fails, or calls exit() in the middle: an error all the same, and nothing is left,
        neither of the file that it writes nor of another output."""
        bundle = make_file(self.scratch / "a.h5")
        model, text = self.model_and_text()
        for sweep in (
                self.sweep("strip", [BIN / "oscar-bundle", "strip", bundle, self.out],
                           kinds=("hdf5",), most=100),
                self.sweep("calibrate", [BIN / "oscar-calibrate", model, text, self.out, *RUN,
                                         "--checkpoint-every", 1, "--statistics-only"],
                           may_stay=("out.h5.checkpoint",), kinds=("hdf5",), most=20)):
            sweep.again = [*sweep.command, "--resume"] if sweep.may_stay else None
            self.try_all(sweep)
            self.assertIn("libhdf5 ended the program", sweep.said)

    def test_of_an_evaluation(self):
        model, text = self.model_and_text()
        self.run_sweep("eval", [BIN / "oscar-eval", model, "--corpus", text, *RUN, "--compare",
                                "identity", "--separators", "off", "--json",
                                self.folder / "out.json"], "out.json.checkpoint")


if __name__ == "__main__":
    unittest.main()
