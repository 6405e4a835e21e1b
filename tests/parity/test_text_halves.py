#!/usr/bin/env python3
"""Models of images and text, of which the text half runs: logits and moments as transformers' whole models.

Folders are as transformers 5.17 saves them, and as earlier versions and publishers name and order their tensors.
Logits are held to 2e-5 of max |logit|, every moment and sum of every layer and head to 1e-6 relative (Frobenius).
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import fp8_layouts
from forward_runs import PROGRAM, compare, ours, reference
from tiny_transformers import (BY_POSITION, DELTA, EIGHT, FAMILIES, PATCHES, TOWER, random_ids,
                               tiny_model)

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

AXES = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
DEEP = dict(TOWER, deepstack_visual_indexes=[0])
PIXTRAL = dict(PATCHES, model_type="pixtral", head_dim=16)
MODELS = {
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", dict(rope_parameters=AXES, attention_bias=True), DEEP),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoe",
                     dict(EIGHT, rope_parameters=AXES, mlp_only_layers=[1]), DEEP),
    "qwen3_5": ("qwen3_5", "Qwen3_5", DELTA, TOWER),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5Moe",
                    dict(DELTA, shared_expert_intermediate_size=24, **EIGHT), TOWER),
    "mistral": ("mistral3", "Mistral3", dict(model_type="mistral", sliding_window=None), PIXTRAL),
    "ministral3": ("mistral3", "Mistral3", dict(BY_POSITION, model_type="ministral3"), PIXTRAL),
    "gemma3": FAMILIES["gemma3 whole"],
}
# What names begin with in the files of versions and publishers: the text, its head, towers.
QWEN = {"model.language_model.": "model.language_model.", "lm_head.": "lm_head.",
        "model.visual.": "model.visual."}
LLAVA = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
         "vision_tower.": "model.vision_tower.",
         "multi_modal_projector.": "model.multi_modal_projector."}
BOUNDS = dict(logits=2e-5, moments=1e-6)
# Behind linear layers rounding in float32 has moved sums of rows by 8e-6 in transformers and in ours, measured against
# float64, and by 3e-6 between the two.
LINEAR_SUMS = 5e-6
IDS = random_ids(2, 150, seed=11)
TEXT = re.compile(r"^(model\.language_model|language_model|lm_head)\.")


def renamed(state, names):
    """Tensors under other names: each beginning for another."""
    found = {}
    for name, tensor in state.items():
        for old, new in names.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        found[name] = tensor
    return found


class TextHalves(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(2)
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.saved, cls.runs = {}, {}

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def whole(self, name, **more):
        """A model's config.json and tensors as transformers saves them."""
        key = name, *more.items()
        if key not in self.saved:
            folder = self.folder / f"saved {len(self.saved)}"
            tiny_model(name, MODELS, **more).save_pretrained(folder)
            self.saved[key] = (json.loads((folder / "config.json").read_text()),
                               load_file(folder / "model.safetensors"))
        config, state = self.saved[key]
        return json.loads(json.dumps(config)), dict(state)

    def write(self, config, state):
        folder = self.folder / f"model {len(list(self.folder.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        return folder

    def run_of(self, config, state):
        return ours(self.write(config, state), IDS)

    def run_of_whole(self, name, **more):
        """Of a model as transformers saves it: once."""
        key = name, *more.items()
        if key not in self.runs:
            self.runs[key] = self.run_of(*self.whole(name, **more))
        return self.runs[key]

    def assert_same(self, a, b):
        """Two runs of ours compute the same to the bit."""
        self.assertTrue(torch.equal(a[0], b[0]))
        for x, y in zip(a[1], b[1], strict=True):
            self.assertTrue(torch.equal(x["sums"]["k"][0], y["sums"]["k"][0]))

    def refusal(self, config, state=None):
        if state is None:
            path = self.folder / "config.json"
            path.write_text(json.dumps(config))
            command = [PROGRAM, "config", path]
        else:
            folder, ids = self.write(config, state), self.folder / "ids"
            IDS.numpy().astype(np.int64).tofile(ids)
            command = [PROGRAM, "run", folder, ids, str(IDS.shape[1]), self.folder, "fp32"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 1, result.stdout)
        return result.stderr

    def notes(self, folder):
        with tempfile.TemporaryDirectory() as out:
            IDS.numpy().astype(np.int64).tofile(f"{out}/ids")
            subprocess.run([PROGRAM, "run", folder, f"{out}/ids", str(IDS.shape[1]), out, "fp32"],
                           check=True)
            return json.loads(pathlib.Path(out, "config.json").read_text())["notes"]

    def test_each_agrees_with_transformers(self):
        worst = 0
        for name in MODELS:
            with self.subTest(model=name):
                folder, run = self.write(*self.whole(name)), self.run_of_whole(name)
                sums = LINEAR_SUMS if name.startswith("qwen3_5") else None
                bad, figures = compare(run, reference(folder, IDS), IDS, sums=sums, **BOUNDS)
                self.assertEqual(bad, [])
                worst = max(worst, *figures.values())
        print(f"worst figure: {worst:.2f} of its bound", file=sys.stderr)

    def test_linear_layers_agree_at_every_length(self):
        # One token, a chunk but one, a chunk, one more, and several with a part.
        for name in ("qwen3_5", "qwen3_5_moe"):
            folder = self.write(*self.whole(name))
            for tokens in (1, 63, 64, 65, 200):
                with self.subTest(model=name, tokens=tokens):
                    ids = random_ids(2, tokens, seed=tokens)
                    run, expected = ours(folder, ids), reference(folder, ids)
                    error = (run[0] - expected[0]).abs().max() / expected[0].abs().max()
                    self.assertLess(error.item(), BOUNDS["logits"])
                    self.assertEqual(len(run[1]), 1)

    def test_tensors_that_guess_further_tokens_are_left_out_and_counted(self):
        config, state = self.whole("qwen3_5_moe")
        run = self.run_of_whole("qwen3_5_moe")
        own = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64)} | {
            "mtp.layers.0." + name.partition(".layers.3.")[2]: torch.randn_like(tensor)
            for name, tensor in state.items() if ".layers.3." in name}
        config["text_config"]["mtp_num_hidden_layers"] = 1
        self.assert_same(self.run_of(config, state | own), run)
        notes = " ".join(self.notes(self.write(config, state | own)))
        self.assertIn(f"left out the tensors ({len(own)}) of layers that guess", notes)

    def test_decays_may_be_stored_in_either_precision(self):
        config, state = self.whole("qwen3_5")
        rounded = {name: tensor.bfloat16().float() if name.endswith("A_log") else tensor
                   for name, tensor in state.items()}
        stored = {name: tensor.bfloat16() if name.endswith("A_log") else tensor
                  for name, tensor in rounded.items()}
        self.assert_same(self.run_of(config, stored), self.run_of(config, rounded))

    def test_the_comparison_sees_a_gate_that_is_lost(self):
        folder = self.write(*self.whole("qwen3_5"))

        def open_gates(model):
            for layer in model.model.language_model.layers:
                if hasattr(layer, "self_attn"):
                    rows = layer.self_attn.q_proj.weight.data.unflatten(0, (-1, 2, 16))
                    rows[:, 1] = 0
        bad, _ = compare(self.run_of_whole("qwen3_5"), reference(folder, IDS, dict(model=open_gates)), IDS,
                         **BOUNDS)
        self.assertNotEqual(bad, [])

    def test_the_comparison_sees_queries_that_do_not_grow(self):
        folder = self.write(*self.whole("ministral3"))

        def unscaled(config):
            config.text_config.rope_parameters["llama_4_scaling_beta"] = 0.0
        bad, _ = compare(self.run_of_whole("ministral3"), reference(folder, IDS, dict(config=unscaled)), IDS,
                         **BOUNDS)
        self.assertNotEqual(bad, [])

    def test_names_of_earlier_versions_and_publishers_mean_the_same(self):
        for name, names in (("qwen3_vl", {"model.visual.": "visual."}), ("mistral", LLAVA),
                            ("gemma3", LLAVA)):
            with self.subTest(model=name):
                config, state = self.whole(name)
                other = renamed(state, names)
                self.assertNotEqual(set(other), set(state))
                self.assert_same(self.run_of(config, other), self.run_of_whole(name))

    def test_parts_that_read_images_do_not_matter_and_are_counted(self):
        for name in ("qwen3_vl", "qwen3_5", "gemma3"):
            with self.subTest(model=name):
                config, state = self.whole(name)
                text = {k: v for k, v in state.items() if TEXT.match(k)}
                self.assertLess(len(text), len(state))
                run = self.run_of_whole(name)
                self.assert_same(self.run_of(config, text), run)
                other = state | {k: torch.randn_like(v) for k, v in state.items() if k not in text}
                self.assert_same(self.run_of(config, other), run)
                notes = " ".join(self.notes(self.write(config, state)))
                self.assertIn(f"left out the tensors ({len(state) - len(text)}) that no text", notes)
                self.assertNotIn("left out", " ".join(self.notes(self.write(config, text))))

    def test_a_part_of_no_known_name_is_refused(self):
        config, state = self.whole("qwen3_vl")
        state["model.audio_tower.weight"] = torch.zeros(4)
        self.assertIn("model.audio_tower.weight", self.refusal(config, state))

    def test_the_head_that_is_stored_counts_whatever_is_tied(self):
        config, state = self.whole("gemma3")
        run = self.run_of_whole("gemma3")
        for above, inside in ((True, True), (True, False), (False, True), (None, None)):
            with self.subTest(above=above, inside=inside):
                config["tie_word_embeddings"] = above
                config["text_config"]["tie_word_embeddings"] = inside
                self.assert_same(self.run_of(config, state), run)
                notes = " ".join(self.notes(self.write(config, state)))
                self.assertEqual("config.json ties" in notes, above is True and inside is True)

    def test_without_a_stored_head_either_config_ties_it(self):
        config, state = self.whole("mistral")
        embedding = state["language_model.model.embed_tokens.weight"]
        tied = self.run_of(config, state | {"language_model.lm_head.weight": embedding.clone()})
        headless = {k: v for k, v in state.items() if "lm_head" not in k}
        for above, inside in ((True, False), (False, True), (None, None)):
            with self.subTest(above=above, inside=inside):
                config["tie_word_embeddings"] = above
                config["text_config"]["tie_word_embeddings"] = inside
                self.assert_same(self.run_of(config, headless), tied)
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
        self.assertIn("lm_head.weight", self.refusal(config, headless))

    def test_experts_may_be_joined_transposed_or_apart(self):
        # At a width of 32 gate_up_proj is square: its order follows from that of down_proj.
        for width in (24, 32):
            config, state = self.whole("qwen3_vl_moe", moe_intermediate_size=width)
            joined = [name for name in state if ".experts." in name]
            self.assertEqual(state[joined[0]].dim(), 3)
            run = self.run_of_whole("qwen3_vl_moe", moe_intermediate_size=width)
            turned = state | {name: state[name].mT for name in joined}
            apart = {k: v for k, v in state.items() if k not in joined}
            for name in joined:
                prefix = name.rpartition(".")[0]
                for i, matrix in enumerate(state[name]):
                    parts = zip(("gate", "up"), matrix.chunk(2)) if "gate" in name else [("down", matrix)]
                    apart |= {f"{prefix}.{i}.{part}_proj.weight": rows for part, rows in parts}
            for label, other in (("transposed", turned), ("apart", apart)):
                with self.subTest(width=width, experts=label):
                    self.assert_same(self.run_of(config, other), run)

    def test_experts_of_another_shape_are_refused(self):
        config, state = self.whole("qwen3_vl_moe", moe_intermediate_size=24)
        down = next(name for name in state if name.endswith("experts.down_proj"))
        self.assertIn("some are not", self.refusal(config, state | {down: state[down].mT}))
        self.assertIn(down, self.refusal(config, state | {down: state[down][:, :-1]}))

    def test_16_bit_transposed_experts_are_read(self):
        config, state = self.whole("qwen3_vl_moe", moe_intermediate_size=24)
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                half = {k: v.to(dtype) for k, v in state.items()}
                turned = half | {k: v.mT for k, v in half.items() if ".experts." in k}
                self.assert_same(self.run_of(config, turned), self.run_of(config, half))

    def test_fp8_with_the_prefix_of_the_whole_is_dequantized(self):
        self.check_fp8("qwen3_5", "model.language_model.", linear_key_head_dim=40)
        self.check_fp8("mistral", "language_model.model.", hidden_size=144, intermediate_size=328)

    def check_fp8(self, name, prefix, **sizes):
        config, state = self.whole(name, **sizes)
        stored, plain = dict(state), dict(state)
        for name, value in state.items():
            if name.startswith(prefix) and re.search(r"(_proj|in_proj_qkv|in_proj_z).weight$", name):
                codes, scales = fp8_layouts.quantize(value, "block", torch.bfloat16)
                stored |= fp8_layouts.stored(name, codes, scales, "block")
                plain[name] = fp8_layouts.dequantize(codes, scales, "block")
        quantized = config | {"quantization_config": fp8_layouts.quantization_config("block")}
        run = self.run_of(quantized, stored)
        self.assert_same(run, self.run_of(config, plain))
        # A text half may describe itself, but not otherwise than the whole does.
        quantized["text_config"]["quantization_config"] = {"quant_method": "fp8"}
        self.assertIn("described twice", self.refusal(quantized))

    def test_config_json_of_transformers_4_means_the_same(self):
        config, state = self.whole("qwen3_vl")
        run = self.run_of_whole("qwen3_vl")
        text = config["text_config"]
        theta = text.pop("rope_parameters")["rope_theta"]
        text.update(rope_theta=theta, rope_scaling=dict(
            rope_type="default", mrope_interleaved=True, mrope_section=[4, 2, 2]))
        self.assert_same(self.run_of(config, state), run)

    def test_keys_that_are_not_known_are_named_at_both_levels(self):
        config, _ = self.whole("qwen3_vl")
        config["new_tower"] = 3
        config["text_config"]["new_switch"] = True
        said = self.refusal(config)
        self.assertIn("new_tower: 3 (not known)", said)
        self.assertIn("text_config.new_switch: true (not known)", said)

    def test_what_the_whole_says_of_text_must_be_what_text_config_says(self):
        config, state = self.whole("mistral")
        run = self.run_of_whole("mistral")
        self.assert_same(self.run_of(config | {"hidden_size": 64}, state), run)
        self.assertIn("hidden_size", self.refusal(config | {"hidden_size": 128}))

    def test_what_is_not_supported_is_refused_by_name(self):
        for name, change, named in (
                ("mistral", dict(model_type="mistral4", kv_lora_rank=16), "MLA"),
                ("mistral", dict(model_type="llama"), "mistral or ministral3"),
                ("qwen3_vl", dict(rope_parameters=dict(AXES, mrope_section=[4, 4, 4])), "mrope_section"),
                ("qwen3_vl_moe", dict(norm_topk_prob=False), "norm_topk_prob"),
                ("qwen3_5", dict(attn_output_gate=False), "attn_output_gate"),
                ("qwen3_5", dict(attention_bias=True), "attention_bias"),
                ("qwen3_5", dict(output_gate_type="sigmoid"), "output_gate_type"),
                ("qwen3_5", dict(layer_types=["chunked_attention"] * 4), "chunked_attention"),
                ("qwen3_5", dict(layer_types=["linear_attention"] * 4), "nothing to quantize"),
                ("qwen3_5", dict(linear_num_value_heads=3), "linear_num_value_heads"),
                ("qwen3_5_moe", dict(norm_topk_prob=False), "norm_topk_prob"),
                ("gemma3", dict(final_logit_softcapping=30.0), "final_logit_softcapping")):
            with self.subTest(change=change):
                config, _ = self.whole(name)
                config["text_config"] |= change
                self.assertIn(named, self.refusal(config))
        config, _ = self.whole("gemma3")
        del config["text_config"]
        self.assertIn("text_config", self.refusal(config))


if __name__ == "__main__":
    unittest.main(verbosity=2)
