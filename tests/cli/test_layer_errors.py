"""oscar-eval --layer-errors: what each layer and KV head errs by itself."""
import json
import unittest

import numpy as np

from support import checkpoints
from support.programs import ProgramTest

WINDOWS = ["--sink", 4, "--recent", 8]
LENGTH = 128  # of the one sequence: every query behind the windows is looked at
METHODS = "hadamard,hadamard@k,hadamard@v,hadamard@layer:0"


class LayerErrors(ProgramTest):
    def setUp(self):
        super().setUp()
        config = checkpoints.QWEN3_MINI
        tensors = checkpoints.qwen3_tensors(config)
        # W_O of each query head keeps lengths, so that an error is as long behind it as before it.
        rng, d = np.random.default_rng(1), config["head_dim"]
        for layer in range(config["num_hidden_layers"]):
            heads = [np.linalg.qr(rng.standard_normal((config["hidden_size"], d)))[0]
                     for _ in range(config["num_attention_heads"])]
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] = np.hstack(heads).astype(np.float32)
        self.model = checkpoints.write_checkpoint(self.folder / "model", {}, tensors)
        self.corpus = self.folder / "text.txt"
        self.corpus.write_text("".join(checkpoints.sample_text(3)))

    def evaluate(self, *options):
        out = self.folder / "report.json"
        self.run_ok("oscar-eval", self.model, "--corpus", self.corpus, "--device", "cpu", "--sequence-length", LENGTH,
                    "--max-tokens", LENGTH, *WINDOWS, "--compare", f"exact,{METHODS}", "--json", out, "--force", *options)
        return json.loads(out.read_text())

    def test_the_first_layers_error_is_that_of_its_output(self):
        methods = self.evaluate("--layer-errors", "--separators", "off")["methods"]
        self.assertNotIn("layer_errors", methods["bf16"])
        self.assertNotIn("layer_errors", methods["exact"])
        # Nothing errs before the first layer. The counted queries are the sampled ones but for one at each end.
        alone, whole = (np.array(methods["hadamard"][key]) for key in ("layer_errors", "output_nmse_heads"))
        both = np.array(alone.item()["both"])
        self.assertEqual(both.shape, (3, 2))
        np.testing.assert_allclose(both[0], whole[0], rtol=0.05)
        # Later layers have the errors of those before them in their outputs, but not in what they err by themselves.
        self.assertTrue((whole[1:] > 1.1 * both[1:]).all(), (whole, both))

    def test_sides_and_layers_that_stay_exact_err_nothing(self):
        methods = self.evaluate("--layer-errors", "--separators", "off")["methods"]
        errors = {name: {side: np.array(of) for side, of in methods[name]["layer_errors"].items()}
                  for name in METHODS.split(",")}
        whole = errors["hadamard"]
        self.assertTrue(all((of > 0).all() for of in whole.values()))
        for name, side, other in (("hadamard@k", "key", "value"), ("hadamard@v", "value", "key")):
            np.testing.assert_array_equal(errors[name][side], whole[side])
            np.testing.assert_allclose(errors[name]["both"], whole[side], rtol=1e-4)
            self.assertFalse(errors[name][other].any())
        np.testing.assert_array_equal(errors["hadamard@layer:0"]["both"][0], whole["both"][0])
        self.assertFalse(errors["hadamard@layer:0"]["both"][1:].any())

    def test_text_with_separators_has_errors_of_its_own(self):
        report = self.evaluate("--layer-errors", "--separators", 16)
        plain, separated = (of["methods"]["hadamard"]["layer_errors"]["both"] for of in (report, report["separators"]))
        self.assertEqual(np.shape(plain), np.shape(separated))
        self.assertNotEqual(plain, separated)
        self.assertNotIn("layer_errors", json.dumps(self.evaluate()))


if __name__ == "__main__":
    unittest.main()
