"""Calibrating a small model for backends, and what a bundle says of them."""
import json

from support.checkpoints import QWEN3_MINI, qwen3_tensors, sample_text, write_checkpoint
from support.programs import ProgramTest

HEAD_DIM = 64


class BackendCase(ProgramTest):
    """A small model and corpus, and bundles of them."""

    def setUp(self):
        super().setUp()
        config = {"head_dim": HEAD_DIM}
        self.model = write_checkpoint(self.folder / "model", config,
                                      qwen3_tensors(QWEN3_MINI | config))
        self.corpus = self.folder / "corpus.txt"
        self.corpus.write_text("".join(sample_text(documents=40)))

    def calibrate(self, *options):
        out = self.folder / "out.h5"
        self.run_ok("oscar-calibrate", self.model, self.corpus, out, "--sequence-length", 256,
                    "--sink", 8, "--recent", 16, "--quiet", "--force", *options)
        return out

    def backend(self, path, name):
        inspection = json.loads(self.run_ok("oscar-bundle", "inspect", path, "--json", "-").stdout)
        return {backend["name"]: backend for backend in inspection["stacks"]}[name]
