#!/usr/bin/env python3
"""Checkpoints as people have them: read as transformers does, or named as what they are with a way out that works."""
import json
import pathlib
import sys
import unittest

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import QWEN3_MINI, byte_tokenizer, qwen3_tensors
from support.gguf_files import Type, write_model
from support.programs import ProgramTest, run

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import fp8_layouts

EVALUATE = ["--compare", "bf16", "--separators", "off", "--device", "cpu", "--sequence-length", "256",
            "--first-position", "1", "--quiet", "--json", "-"]
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
       "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


class FoundCheckpoints(ProgramTest):
    def setUp(self):
        super().setUp()
        self.ids = self.folder / "ids.npy"
        np.save(self.ids, np.random.default_rng(1).integers(0, 256, 512).astype(np.int32))
        self.tensors = {n: torch.from_numpy(v) for n, v in qwen3_tensors(QWEN3_MINI).items()}

    def write(self, name, tensors=None, **config):
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(QWEN3_MINI | config))
        save_file(self.tensors if tensors is None else tensors, folder / "model.safetensors")
        return folder

    def nll(self, model, *notes):
        """The mean NLL of the ids, and that the program says `notes` of the model."""
        result = self.run_ok("oscar-eval", model, "--corpus", self.ids, *EVALUATE)
        said = run("oscar-eval", model, "--corpus", self.ids, *(o for o in EVALUATE if o != "--quiet")).stderr
        for note in notes:
            self.assertIn(note, said)
        return json.loads(result.stdout)["methods"]["bf16"]["nll"]["mean"]

    def refused(self, model, *words):
        self.refuse("oscar-eval", [model, "--corpus", self.ids, *EVALUATE], *words)

    def test_truncation_of_a_tokenizer_is_left_alone(self):
        model = self.write("model")
        byte_tokenizer(model / "tokenizer.json")
        text = self.folder / "text.txt"
        text.write_text("the cache keeps every token. " * 40)

        def ids():
            out = self.folder / "out.npy"
            self.run_ok("oscar-calibrate", model, text, self.folder / "o.h5", "--device", "cpu", "--dry-run",
                        "--force", "--sequence-length", "64", "--tokens-out", out)
            return np.load(out).tolist()
        whole = ids()
        file = model / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {
            "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}}))
        self.assertEqual(ids(), whole)

    def test_keys_that_say_what_the_family_does_change_nothing(self):
        tensors = {n: v for n, v in self.tensors.items() if ".mlp." not in n}
        generator = torch.Generator().manual_seed(1)
        for layer in range(QWEN3_MINI["num_hidden_layers"]):
            mlp = f"model.layers.{layer}.mlp."
            tensors[mlp + "gate.weight"] = torch.randn(4, 64, generator=generator) / 8
            for expert in range(4):
                for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
                    tensors[f"{mlp}experts.{expert}.{name}_proj.weight"] = torch.randn(*shape, generator=generator) / 8
        plain = self.nll(self.write("plain", tensors, **MOE))
        coder = self.write("coder", tensors, **MOE, qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)
        self.assertEqual(self.nll(coder), plain)

    def test_all_unknown_keys_are_named_at_once_and_a_copy_without_them_runs(self):
        model = self.write("model", new_switch=3, another="on")
        self.refused(model, "2 keys", "new_switch: 3", 'another: "on"', "remove it from a copy")
        config = json.loads((model / "config.json").read_text())
        for key in ("new_switch", "another"):
            del config[key]
        (model / "config.json").write_text(json.dumps(config))
        self.nll(model)

    def test_of_two_models_in_a_folder_that_of_transformers_is_read(self):
        model = self.write("model")
        plain = self.nll(model)
        other = {n: v * 1.5 if "q_norm" in n else v for n, v in self.tensors.items()}
        save_file(other, model / "model-00001-of-00001.safetensors")
        (model / "model.safetensors.index.json").write_text(json.dumps(
            {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}))
        self.assertEqual(self.nll(model, "model.safetensors is read, as in transformers"), plain)
        (model / "model.safetensors").unlink()
        self.assertNotEqual(self.nll(model), plain)

    def test_another_head_beside_a_tied_one_is_used_as_in_transformers(self):
        head = torch.randn(self.tensors["model.embed_tokens.weight"].shape,
                           generator=torch.Generator().manual_seed(3))
        tensors = self.tensors | {"lm_head.weight": head}
        untied = self.nll(self.write("untied", tensors, tie_word_embeddings=False))
        model = self.write("tied", tensors)
        self.assertEqual(self.nll(model, "they are used, as in transformers 5", "tie_word_embeddings: false"), untied)
        from transformers import AutoModelForCausalLM
        theirs = AutoModelForCausalLM.from_pretrained(model)
        self.assertTrue(torch.equal(theirs.lm_head.weight, head))
        copied = self.tensors | {"lm_head.weight": self.tensors["model.embed_tokens.weight"].clone()}
        self.assertEqual(self.nll(self.write("copied", copied)), self.nll(self.write("plain")))

    def test_fp8_of_modelopt_and_scales_of_the_cache(self):
        stored = fp8_layouts.store(self.tensors, "static")
        expected = self.nll(self.write("fp8", stored, quantization_config=fp8_layouts.quantization_config("static")))
        cached = stored | {f"model.layers.0.self_attn.{side}_proj.{side}_scale": torch.tensor(0.5) for side in "kv"}
        flat = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "config_groups": {},
                "producer": {"name": "modelopt", "version": "0.33.0"}}
        self.assertEqual(self.nll(self.write("flat", cached, quantization_config=flat)), expected)
        beside = self.write("beside", cached)
        (beside / "hf_quant_config.json").write_text(json.dumps(
            {"producer": {"name": "modelopt"},
             "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
        self.assertEqual(self.nll(beside), expected)
        halves = {n: v.half() if n.endswith("weight_scale") else v for n, v in stored.items()}
        floats = {n: v.half().float() if n.endswith("weight_scale") else v for n, v in stored.items()}
        config = {"quantization_config": fp8_layouts.quantization_config("static")}
        self.assertEqual(self.nll(self.write("halves", halves, **config)), self.nll(self.write("floats", floats, **config)))

    def test_scales_of_the_cache_beside_plain_weights_are_not_used(self):
        plain = self.nll(self.write("plain"))
        scaled = self.tensors | {f"model.layers.{i}.self_attn.{side}_scale": torch.tensor([0.5])
                                 for i in range(3) for side in "kv"}
        scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": [],
                  "kv_cache_scheme": scheme, "quantization_status": "compressed"}
        for name, more in (("stated", {"quantization_config": config}), ("bare", {})):
            self.assertEqual(self.nll(self.write(name, scaled, **more), "6 scales of activations or of the cache"), plain)

    def test_integers_are_named_by_who_wrote_them(self):
        bits = {"group_size": 64, "bits": 4}
        self.refused(self.write("mlx", quantization=bits, quantization_config=bits), "MLX's integers", "bf16")
        self.refused(self.write("gptq", quantization_config={"quant_method": "gptq", "bits": 4}), "GPTQ's integers")

    def test_a_pointer_of_git_lfs_is_named_in_any_place(self):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 123456\n"
        model = self.write("model")
        (model / "model.safetensors").write_text(pointer)
        self.refused(model, "a pointer of Git LFS", "model.safetensors", "git lfs pull")
        self.refuse("oscar-bundle", ["plan", model], "a pointer of Git LFS", "model.safetensors", "git lfs pull")
        text = self.folder / "text.txt"
        text.write_text(pointer)
        whole = self.write("whole")
        byte_tokenizer(whole / "tokenizer.json")
        self.refuse("oscar-eval", [whole, "--corpus", text, *EVALUATE], "a pointer of Git LFS", "text.txt")
        small = self.folder / "small.gguf"
        small.write_text(pointer)
        self.refused(small, "a pointer of Git LFS")

    def test_an_adapter_is_named_with_its_model(self):
        adapter = self.folder / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
        self.refused(adapter, "an adapter (LoRA), not a model", "org/base", "merge_and_unload()")
        model = self.write("model")
        (adapter / "adapter_config.json").rename(model / "adapter_config.json")
        said = self.run_ok("oscar-eval", model, "--corpus", self.ids, *EVALUATE, "--quiet").stderr
        for words in ("warning", "an adapter of org/base", "merge_and_unload()"):
            self.assertIn(words, said)

    def test_a_folder_of_gguf_files_is_told_which_file_is_the_model(self):
        place = self.folder / "download"
        place.mkdir()
        (place / "mmproj-F16.gguf").write_bytes(b"")
        self.refused(place, "the model folder has no config.json")
        model = self.gguf("download/one.F16.gguf")
        for command in (["oscar-eval", place, "--corpus", self.ids, *EVALUATE], ["oscar-bundle", "plan", place]):
            self.refuse(command[0], command[1:], "the folder holds GGUF files and no config.json",
                        f"give the file as MODEL: {model}\n")
        self.run_ok("oscar-bundle", "plan", model)

    def test_weights_of_torch_are_written_anew_by_the_hint(self):
        model = self.write("model")
        plain = self.nll(model)
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
        self.refused(model, "no weights were found", "save_pretrained")
        from transformers import AutoModelForCausalLM
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(self.folder / "anew")
        self.assertEqual(self.nll(self.folder / "anew"), plain)

    def gguf(self, name, kind=Type.F16, tensors=(), metadata=None):
        def add(writer):
            if metadata:
                metadata(writer)
            for tensor, values in tensors:
                writer.add_tensor(tensor, values)
        path = self.folder / name
        write_model(path, QWEN3_MINI, qwen3_tensors(QWEN3_MINI), lambda _: kind, np.random.default_rng(0), metadata=add)
        return path

    def test_rotations_in_a_gguf_file_are_left_out_and_a_bundle_of_the_model_fits_both(self):
        plain = self.gguf("plain.gguf")
        rotations = [(f"blk.{i}.attn_{side}_rot.weight", np.eye(32, dtype=np.float32)[::-1].copy())
                     for i in range(3) for side in "kv"]
        rotated = self.gguf("rotated.gguf", tensors=rotations)
        self.assertEqual(self.nll(rotated, "left out 6 rotations of OSCAR's llama.cpp branch"), self.nll(plain))
        bundle = self.folder / "plain.h5"
        self.run_ok("oscar-calibrate", plain, self.ids, bundle, "--sequence-length", "128", "--search", "off",
                    "--quant-group-size", "32", "--device", "cpu")
        for model in (plain, rotated):
            self.run_ok("oscar-eval", model, "--corpus", self.ids, "--bundle", bundle, *EVALUATE[2:], "--sink", 4, "--recent", 16)
        # The hint: a bundle of what was left out.
        self.run_ok("oscar-bundle", "import", rotated, "--model", plain, "-o", self.folder / "imported.h5")

    def test_types_of_gguf_are_called_by_their_names(self):
        model = self.gguf("model.gguf")
        content = model.read_bytes()
        name = b"blk.0.ffn_down.weight"
        at = content.index(name) + len(name) + 4 + 16  # behind the two sizes: the type
        for number, word in ((4, "Q4_2, which ggml has given up"), (99, "number 99, newer than this program")):
            model.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4:])
            with self.subTest(word):
                self.refused(model, word, "take a file of the model in one of these types", "IQ4_XS")

    def test_attn_factor_of_yarn_is_the_same_in_both_kinds_of_files(self):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        stated = self.write("stated", rope_scaling=yarn | {"attn_factor": 0.7})
        magnitude = 0.1 * np.log(4) + 1
        worked_out = self.write("worked-out", rope_scaling=yarn | {"attention_factor": 0.7 * magnitude})
        self.assertAlmostEqual(self.nll(stated), self.nll(worked_out), places=6)
        self.assertNotEqual(self.nll(stated), self.nll(self.write("plain", rope_scaling=yarn)))

        def scaling(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(512)
            writer.add_rope_scaling_attn_factors(0.7)
        file = self.gguf("yarn.gguf", Type.F32, metadata=scaling)
        self.assertAlmostEqual(self.nll(file), self.nll(stated), places=5)


if __name__ == "__main__":
    unittest.main(verbosity=2)
