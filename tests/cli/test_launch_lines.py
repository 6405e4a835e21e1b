"""READMEs of exports: every variable and flag is one that the server's source reads, and the study runs them as they are.

The tables are facts read in the servers' sources, by commit.
"""
import json
import os
import re
import subprocess
import sys
import unittest

import numpy as np
import torch

from support.programs import SOURCE
from support.backends import HEAD_DIM, BackendCase

# FutureMLS-Lab/OSCAR, commit 473ff3f9, sglang-research/python/sglang: srt/environ.py, and the decode kernel's
# os.environ in srt/layers/attention/triton_ops/decode_attention.py.
SGLANG_VARIABLES = {
    "SGLANG_ENABLE_MIXED_KV_WINDOWS", "SGLANG_MIXED_KV_PREFIX_TOKENS", "SGLANG_MIXED_KV_RECENT_TOKENS",
    "SGLANG_MIXED_KV_HP_DTYPE", "SGLANG_MIXED_KV_SCALE_DTYPE", "SGLANG_MIXED_KV_HP_PREFIX_POOL_TOKENS",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS", "SGLANG_OSCAR_K_ROTATION_PATH", "SGLANG_OSCAR_V_ROTATION_PATH",
    "SGLANG_OSCAR_K_CLIP_RATIO", "SGLANG_OSCAR_V_CLIP_RATIO", "SGLANG_OSCAR_ABSORB_V_ROTATION",
    "SGLANG_OSCAR_FUSED_ROTATE_CLIP_QUANT", "SGLANG_LLOYD_MAX", "HADAMARD_ORDER",
    "SGL_INT2_BLOCK_N", "SGL_INT2_BLOCK_H", "SGL_INT2_NUM_WARPS", "SGL_INT2_NUM_STAGES"}
SGLANG_NEEDED = {  # without any of these it serves something else, or another export
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1", "SGLANG_OSCAR_K_ROTATION_PATH": None, "SGLANG_OSCAR_V_ROTATION_PATH": None,
    "SGLANG_OSCAR_K_CLIP_RATIO": None, "SGLANG_OSCAR_V_CLIP_RATIO": None, "SGLANG_MIXED_KV_PREFIX_TOKENS": None,
    "SGLANG_MIXED_KV_RECENT_TOKENS": None, "SGLANG_MIXED_KV_SCALE_DTYPE": None, "SGLANG_LLOYD_MAX": "0"}
SGLANG_FLAGS = {  # of srt/server_args.py
    "--model-path", "--kv-cache-dtype", "--kv-cache-quant-group-size", "--prefill-attention-backend",
    "--decode-attention-backend"}
SGLANG_LOG = ("Enable unified mixed KV (int2)", "Loaded Oscar rotation from", "Oscar rotation enabled")
# vllm-project/vllm, pull request 46774: quantization/oscar/config.py, and its tests for the windows.
VLLM_VARIABLES = {
    "VLLM_OSCAR_K_ROTATION_PATH", "VLLM_OSCAR_V_ROTATION_PATH", "VLLM_OSCAR_K_CLIP_RATIO", "VLLM_OSCAR_V_CLIP_RATIO",
    "VLLM_OSCAR_GROUP_SIZE", "VLLM_OSCAR_SINK_TOKENS", "VLLM_OSCAR_RECENT_TOKENS", "VLLM_OSCAR_STAGING_TOKENS"}
# zhongzhu/llamacpp, commit 4570ea60: src/llama-kv-cache.cpp, ggml/src/ggml-quants.c.
PROVEN = {"sglang-v1": True, "sglang-v2": False, "sglang-0c88a": False, "vllm-pr46774": False, "mlx": False}

STUB = {  # of a server: writes down how it was started, and says what the real one logs
    "srt/server_args.py": "def prepare_server_args(argv): return argv\n",
    "srt/entrypoints/engine.py": """\
import json, os, torch
class Engine:
    def __init__(self, server_args):
        files = [os.environ[f"SGLANG_OSCAR_{side}_ROTATION_PATH"] for side in "KV"]
        assert os.environ["SGLANG_ENABLE_MIXED_KV_WINDOWS"] == "1"
        print("Enable unified mixed KV (int2): prefix")
        for file in files:
            for layer in torch.load(file, weights_only=True)["layers"].values():
                assert layer["rotation"].dim() == 2
            print("Loaded Oscar rotation from", file)
        print("UnifiedInt2HPKVPool: Oscar rotation enabled", server_args)
    def generate(self, input_ids, sampling_params, custom_logit_processor):
        for prompt, params in zip(input_ids, sampling_params):
            wanted = params["custom_params"]
            with open(wanted["out"], "w") as file:
                json.dump({"logprobs": [-1.0] * len(wanted["targets"])}, file)
    def shutdown(self): pass
"""}


class LaunchLines(BackendCase):
    def readme(self, backend, *options):
        bundle = self.calibrate("--for", backend, "--search", "off", *options)
        self.run_ok("oscar-bundle", "export", bundle, "--for", backend, "-o", self.folder / backend)
        return (self.folder / backend / "README.md").read_text()

    def exported(self, readme):
        block = re.search(r"^```\n(.*?)^```$", readme, re.S | re.M).group(1)
        lines = [line for line in block.splitlines() if line.startswith("export ")]
        return dict(word.split("=", 1) for line in lines for word in line.split()[1:]), block

    def test_every_variable_and_flag_is_read_by_the_server(self):
        for backend in ("sglang-v1", "sglang-v2", "sglang-0c88a"):
            with self.subTest(backend):
                readme = self.readme(backend)
                variables, block = self.exported(readme)
                self.assertLessEqual(set(variables), SGLANG_VARIABLES)
                for name, value in SGLANG_NEEDED.items():
                    self.assertIn(name, variables)
                    self.assertIn(value, (None, variables[name]), name)
                self.assertEqual(set(re.findall(r"--[a-z0-9-]+", block)), SGLANG_FLAGS)
                self.assertIn("--kv-cache-dtype int2", block)
                for line in SGLANG_LOG:
                    self.assertIn(f"`{line}`", readme)
        variables, block = self.exported(self.readme("vllm-pr46774"))
        self.assertLessEqual(set(variables), VLLM_VARIABLES)
        self.assertIn("--kv-cache-dtype oscar_int2", block)

    def test_the_first_words_say_what_runs_it_and_whether_that_is_proven(self):
        for backend, proven in PROVEN.items():
            with self.subTest(backend):
                words = self.readme(backend, *(("--quant-group-size", 32) if backend == "mlx" else ())).split("\n\n")[1]
                self.assertEqual(words.startswith("UNPROVEN"), not proven, words)

    def test_no_file_of_a_newer_server_loads_in_an_older_one(self):
        readme = self.readme("sglang-0c88a")
        self.assertIn("import load_oscar_rotation_field", readme)
        for side in "kv":
            state = torch.load(self.folder / "sglang-0c88a" / f"{side}_transform.pt", weights_only=True)
            self.assertFalse([layer for layer in state["layers"].values() if "rotation" in layer])

    def test_the_study_starts_the_server_with_these_lines(self):
        self.readme("sglang-v1")
        out, server = self.folder / "study", self.folder / "server"
        (out / "exports").mkdir(parents=True)
        (self.folder / "sglang-v1").rename(out / "exports" / "for")
        for name, text in STUB.items():
            path = server / "sglang" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (server / "oscar_force.py").write_text("class Force:\n    @staticmethod\n    def to_str(): return ''\n")
        (server / "env.sh").write_text("export PYTHONPATH=\n")
        np.save(self.folder / "ids.npy", np.zeros((2, 520), np.int32))
        python = os.path.dirname(sys.executable)
        command = [sys.executable, SOURCE / "studies/oscar_server.py", out, "--model", self.model, "--ids",
                   self.folder / "ids.npy", "--server", server, "--steps", "serve", "--runs", "for"]
        environment = dict(os.environ, PATH=f"{python}:{os.environ['PATH']}", SGLANG_LLOYD_MAX="1")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(json.loads((out / "for.json").read_text()), {"nll": [1.0, 1.0], "tokens": 16})
        log = (out / "for.log").read_text()
        self.assertIn(f"'--kv-cache-quant-group-size', '{HEAD_DIM}'", log)
        # A README without the line that turns INT2 on is not measured.
        (out / "for.json").unlink()
        path = out / "exports" / "for" / "README.md"
        path.write_text(path.read_text().replace("export SGLANG_ENABLE_MIXED_KV_WINDOWS=1\n", ""))
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 1)
        self.assertIn("the server ended with 1", done.stderr)


if __name__ == "__main__":
    unittest.main()
