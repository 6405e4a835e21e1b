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

    def next_command(self, printed):
        """The words of the last lines, which are the next command."""
        lines = printed.partition("\nnext       ")[2].replace("\\\n", " ").splitlines()
        return shlex.split(lines[0]), lines[1:]

    def test_the_next_command_is_printed_whole_and_runs(self):
        printed = self.summary("--search", "off")
        self.assertNotIn("servers  ", printed)  # a line for GGUF files
        command, rest = self.next_command(printed)
        self.assertEqual(command, ["oscar-eval", str(self.model), "--bundle", str(self.out), "--corpus", "HELDOUT"])
        self.assertEqual(rest, ["           HELDOUT: text as you serve it, and none of the corpus"])
        short = ("--device", "cpu", "--sequence-length", 512, "--max-tokens", 1024)
        self.run_ok(*command[:-1], self.corpus, *short)
        (self.model / "heldout.jsonl").write_text(json.dumps({"text": self.corpus.read_text()}) + "\n")
        scaling = '{"rope_type": "linear", "factor": 2.0}'
        command, rest = self.next_command(self.summary("--search", "off", "--rope-scaling", scaling))
        self.assertEqual(command[:-1], ["oscar-eval", str(self.model), "--bundle", str(self.out), "--rope-scaling"])
        self.assertEqual((json.loads(command[-1]), rest), (json.loads(scaling), []))
        self.run_ok(*command, *short)
        sums = self.folder / "sums.h5"
        printed = self.run_ok("oscar-calibrate", self.model, self.corpus, sums, "--statistics-only", "--device", "cpu",
                              "--sequence-length", 512).stdout
        command, rest = self.next_command(printed)
        self.assertEqual((command, rest), (["oscar-bundle", "fit", str(sums), "-o", str(self.folder / "sums-fitted.h5")], []))
        self.run_ok(*command)
        self.assertTrue((self.folder / "sums-fitted.h5").is_file())


if __name__ == "__main__":
    unittest.main()
