"""oscar-calibrate --for BACKEND, and the lines that say what each backend runs of a bundle."""
import json
import unittest

import h5py
import numpy as np

from support.backends import HEAD_DIM, BackendCase
from support.checkpoints import QWEN3_MINI, qwen3_tensors, write_checkpoint


class ForBackend(BackendCase):
    """--for: what a backend serves is fitted, what it does not is refused by name."""

    def refuse_for(self, options, *words):
        self.refuse("oscar-calibrate", [self.model, self.corpus, self.folder / "out.h5",
                                        "--dry-run", *options], *words, code=2)

    def test_conflicting_options_are_refused_by_name(self):
        for option, value in (("--granularity", "per-head"), ("--method", "orthogonal"),
                              ("--center", "on"), ("--key-centers", "two"),
                              ("--rounding", "shaped"), ("--scale-correction", "unbiased"),
                              ("--quant-group-size", 32), ("--sink", 20)):
            with self.subTest(option):
                self.refuse_for(["--for", "sglang-v1", option, value], f"{option} {value}",
                                "sglang-v1")

    def test_backends_that_are_not_served_yet_say_why(self):
        for name in ("llama.cpp", "oscar2"):
            with self.subTest(name):
                self.refuse_for(["--for", name], f"--for {name}", "not served yet, because\n  it")
        self.refuse_for(["--for", "tgi"], "unknown backend", "sglang-v1")
        self.refuse_for(["--for", "vllm-pr46774", "--metadata-dtype", "bf16"], "no bf16 metadata")

    def test_names_of_servers_are_answered_with_both_backends_that_they_may_mean(self):
        both = "without --for (backend oscar_int2)", "vLLM's pull request 46774 is vllm-pr46774"
        for name in ("vllm", "transformers", "oscar"):
            with self.subTest(name):
                self.refuse_for(["--for", name], *both)
                for arguments in (["import", self.corpus, "--model", self.model, "--for", name, "-o",
                                   self.folder / "out.h5"],
                                  ["export", self.corpus, "--for", name, "-o", self.folder / "out"],
                                  ["verify", self.folder, "--for", name]):
                    self.refuse("oscar-bundle", arguments, *both, code=2)

    def test_a_search_of_nothing_is_a_usage_error(self):
        for options in (["--for", "sglang-v1", "--clip", ".96,.92"],
                        ["--for", "sglang-v2", "--method", "oscar", "--granularity", "shared",
                         "--clip", ".96,.92"]):
            with self.subTest(options):
                self.refuse_for([*options, "--search", "on"], "--search on",
                                "nothing is left to search")

    def test_the_bundle_runs_as_it_is_on_the_backend_it_was_made_for(self):
        for name, clip in (("sglang-v1", None), ("sglang-v2", (.9, .95))):
            with self.subTest(name):
                options = ["--clip", ".9,.95"] if clip else []
                path = self.calibrate("--for", name, *options)
                self.assertEqual(self.backend(path, name)["line"], "runs as is")
                self.assertNotEqual(self.backend(path, "vllm-pr46774")["verdict"], "as is")
                with h5py.File(path) as file:
                    self.assertEqual(file["quantizer"].attrs["metadata_dtype"], b"fp32")
                    if not clip:  # searched, then pooled over the model
                        (pooled,) = json.loads(file.attrs["search"])["pooled_clip"]
                        self.assertEqual(pooled["layers"], len(file["layers"]))
                        self.assertGreaterEqual(pooled["loss_factor"], .9)
                        clip = pooled["clip"]
                    for layer in file["layers"].values():
                        np.testing.assert_allclose(layer["k_clip_ratio"][()], clip[0], atol=1e-6)
                        np.testing.assert_allclose(layer["v_clip_ratio"][()], clip[1], atol=1e-6)
                        self.assertFalse(np.any(layer["k_mean"][()]))
                        self.assertNotIn("k_metric", layer)
                        if name == "sglang-v1":
                            for side in ("k_rotation", "q_rotation", "v_rotation"):
                                if side in layer:
                                    np.testing.assert_array_equal(layer[side][0], layer[side][1])

    def test_codecs_of_other_backends_are_written_searched_and_evaluated(self):
        rules = {"vllm-pr46774": ("head_row", "minimum", "up", "before_coding", []),
                 "onnxruntime": ("head_row", "minimum", "even", "before_coding", []),
                 "mlx": ("quant_group", "code_units", "up", "after_coding",
                         ["--quant-group-size", 32])}
        for name, (span, zero, ties, rounding, options) in rules.items():
            with self.subTest(name):
                path = self.calibrate("--for", name, *options)
                self.assertEqual(self.backend(path, name)["line"], "runs as is")
                self.assertNotEqual(self.backend(path, "oscar_int2")["verdict"], "as is")
                with h5py.File(path) as file:
                    found = file["quantizer"].attrs
                    self.assertEqual([found[key].decode() for key in
                                      ("clip_span", "zero", "ties", "metadata_rounding")],
                                     [span, zero, ties, rounding])
                    ratios = [set(layer["k_clip_ratio"][()]) for layer in file["layers"].values()]
                    self.assertTrue(all(len(of_layer) == 1 for of_layer in ratios))
                    if name != "onnxruntime":  # one pair for the model
                        self.assertEqual(len(set.union(*ratios)), 1)
                evaluate = ["oscar-eval", self.model, "--bundle", path, "--corpus", self.corpus,
                            "--sequence-length", 256, "--max-tokens", 2048, "--compare", "hadamard-clip,bundle",
                            "--quiet"]
                report = self.folder / "report.json"
                self.run_ok(*evaluate, "--json", report, "--force")
                report = json.loads(report.read_text())
                self.assertEqual(report["quantizer"]["zero"], zero)
                self.assertGreater(report["methods"]["bundle"]["kl"]["mean"], 0)
                self.refuse(evaluate[0], [*evaluate[1:], "--engine", "reference"],
                            "--engine", "another backend's")

    def test_mlx_takes_heads_smaller_than_its_usual_groups(self):
        path = self.calibrate("--for", "mlx")
        self.assertEqual(self.backend(path, "mlx")["line"], "runs as is")
        with h5py.File(path) as file:
            self.assertEqual(file["quantizer"].attrs["quant_group_size"], HEAD_DIM)

    def test_a_head_that_no_group_of_a_backend_divides_is_refused_with_these_groups(self):
        model = write_checkpoint(self.folder / "odd", {"head_dim": 80}, qwen3_tensors(QWEN3_MINI | {"head_dim": 80}))
        never, path, eye = self.folder / "never.h5", self.folder / "own.npz", np.eye(80, dtype=np.float32)[None].repeat(3, 0)
        self.refuse("oscar-calibrate", [model, self.corpus, never, "--for", "mlx"], "does not divide the head", "--for",
                    "a divisor of 80", "128, 64, 32: the groups that this backend takes")
        np.savez(path, k_rotation=eye, v_rotation=eye)
        self.refuse("oscar-bundle", ["import", path, "--model", model, "--for", "mlx", "-o", never], "--for mlx", "a divisor of 80",
                    "128, 64, 32", code=2)

    def test_the_run_ends_with_a_line_for_each_backend(self):
        out = self.folder / "said.h5"
        said = self.run_ok("oscar-calibrate", self.model, self.corpus, out, "--sequence-length", 256,
                           "--sink", 8, "--recent", 16, "--for", "sglang-v1").stdout
        self.assertIn("for        sglang-v1: ", said)
        lines = said[said.index("backends\n"):].splitlines()
        names = [backend["name"] for backend in
                 json.loads(self.run_ok("oscar-bundle", "backends", "--json", "-").stdout)]
        self.assertEqual([line.split()[0] for line in lines[1:1 + len(names)]], names)
        self.assertTrue(all(len(line) <= 80 for line in said.splitlines()))
        shown = self.run_ok("oscar-bundle", "inspect", out, "--all").stdout
        self.assertIn("\n".join(lines[:1 + len(names)]), shown)


if __name__ == "__main__":
    unittest.main()
