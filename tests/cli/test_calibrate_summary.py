"""What oscar-calibrate prints of the layers: errors only after a search, and why heads fell back."""
import json
import shlex
import unittest

from support import checkpoints
from support.programs import ProgramTest


class Summary(ProgramTest):
    def setUp(self):
        super().setUp()
        tensors = checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI)
        dim = checkpoints.QWEN3_MINI["head_dim"]
        tensors["model.layers.1.self_attn.v_proj.weight"][dim:] = 0  # head 1 has no values
        self.model = checkpoints.write_checkpoint(self.folder / "model", tensors=tensors)
        self.corpus = self.folder / "corpus.txt"
        self.corpus.write_text("".join(checkpoints.sample_text()))
        self.out = self.folder / "out.h5"

    def summary(self, *options):
        return self.run_ok("oscar-calibrate", self.model, self.corpus, self.out, "--force",
                           "--device", "cpu", "--sequence-length", 512, *options).stdout

    def test_there_is_no_error_without_a_search(self):
        text = self.summary("--search", "off")
        self.assertRegex(text, r"keys +values\n")
        self.assertNotIn("error: predicted", text)
        text = self.summary("--max-tokens", 4096)
        self.assertIn("values   error\n", text)
        self.assertIn("error: predicted", text)

    def test_a_head_that_fell_back_is_named_with_the_reason_that_inspect_gives(self):
        printed = self.summary("--search", "off").splitlines()
        inspected = self.run_ok("oscar-bundle", "inspect", self.out).stdout.splitlines()
        reasons = [line for line in inspected if line.startswith("layer 1") and "head 1: " in line]
        self.assertIn("value head 1: ", reasons[0])  # the portable variants come behind
        self.assertIn(reasons[0], printed)
        self.assertEqual([line for line in printed if "head 0: " in line], [])

    def test_the_next_command_is_printed_whole_and_runs(self):
        printed = self.summary("--search", "off")
        self.assertNotIn("servers  ", printed)  # a line for GGUF files
        command = printed.partition("\nnext       ")[2].replace("\\\n", " ").replace("HELDOUT.jsonl", str(self.corpus)).split()
        self.assertEqual(command[:4], ["oscar-eval", str(self.model), "--bundle", str(self.out)])
        self.run_ok(*command, "--device", "cpu", "--sequence-length", 512, "--max-tokens", 1024)
        scaling = '{"rope_type": "linear", "factor": 2.0}'
        printed = self.summary("--search", "off", "--rope-scaling", scaling)
        command = shlex.split(printed.partition("\nnext       ")[2].replace("\\\n", " ").replace("HELDOUT.jsonl", str(self.corpus)))
        self.assertEqual(json.loads(command[command.index("--rope-scaling") + 1]), json.loads(scaling))
        self.run_ok(*command, "--device", "cpu", "--sequence-length", 512, "--max-tokens", 1024)
        sums = self.folder / "sums.h5"
        printed = self.run_ok("oscar-calibrate", self.model, self.corpus, sums, "--statistics-only", "--device", "cpu",
                              "--sequence-length", 512).stdout
        command = printed.partition("\nnext       ")[2].replace("\\\n", " ").replace("BUNDLE.h5", str(self.folder / "fit.h5")).split()
        self.assertEqual(command[:3], ["oscar-bundle", "fit", str(sums)])
        self.run_ok(*command)
        self.assertTrue((self.folder / "fit.h5").is_file())


if __name__ == "__main__":
    unittest.main()
