#!/usr/bin/env python3
"""A GGUF file as MODEL of the programs: calibrated, inspected, evaluated, and told from others."""
import json
import re
import struct
import subprocess
import sys
import unittest
import unittest.mock

import gguf
import h5py
import numpy as np

from bundle.verify_bundle import datasets_of
from support.checkpoints import QWEN3_MINI, qwen3_tensors
from support.gguf_files import Type, decode, write_model
from support.programs import BIN, ENVIRONMENT, SOURCE, ProgramTest, run
from support.scripts import run_command

CALIBRATE = ["--sequence-length", "128", "--search", "off", "--quant-group-size", "32"]


class GgufModel(ProgramTest):
    def setUp(self):
        super().setUp()
        self.ids = self.folder / "ids.npy"
        rng = np.random.default_rng(1)
        np.save(self.ids, rng.integers(0, 256, 4096).astype(np.int32))

    def write(self, name, seed=0, kind=Type.Q8_0, metadata=None, factors=None, **changes):
        config = QWEN3_MINI | {"tie_word_embeddings": True} | changes
        path = self.folder / name
        write_model(path, config, qwen3_tensors(config, seed), lambda _: kind,
                    np.random.default_rng(0), metadata=metadata, factors=factors)
        return path

    def calibrate(self, model, *options, text=None):
        out = self.folder / f"{model.stem}.h5"
        self.run_ok("oscar-calibrate", model, text or self.ids, out, *CALIBRATE, *options)
        return out

    def inspect(self, bundle):
        return json.loads(self.run_ok("oscar-bundle", "inspect", bundle, "--json", "-").stdout)["model"]

    def test_the_bundle_names_the_file_and_its_types(self):
        import hashlib
        model = self.write("small.Q8_0.gguf")
        bundle = self.calibrate(model)
        about = self.inspect(bundle)
        self.assertEqual(about["name"], "small.Q8_0")
        self.assertEqual(about["quantization"], "Q8_0 (22 tensors), F32 (13)")
        self.assertEqual(about["file_sha256"], hashlib.sha256(model.read_bytes()).hexdigest())
        text = self.run_ok("oscar-bundle", "inspect", bundle, "--all").stdout
        self.assertIn("Q8_0 (22 tensors), F32 (13)", text)
        self.assertIn(about["file_sha256"], text)
        self.run_ok("oscar-bundle", "verify", bundle)

    def test_the_bundle_is_evaluated_with_its_model_and_refused_with_another(self):
        model, other = self.write("one.gguf"), self.write("other.gguf", seed=1)
        retyped = self.write("retyped.gguf", kind=Type.F16)
        renamed = self.write("renamed.gguf", metadata=lambda writer: writer.add_name("a new name"))
        bundle = self.calibrate(model)
        report = self.folder / "report.json"
        evaluate = ["--bundle", bundle, "--corpus", self.ids, "--sequence-length", "512", "--max-tokens",
                    "1024", "--separators", "off"]
        for same, name in ((model, "one"), (renamed, "a new name")):
            self.run_ok("oscar-eval", same, *evaluate, "--json", report)
            about = json.loads(report.read_text())["model"]
            self.assertEqual(about["name"], name)
            self.assertEqual(about["quantization"], "Q8_0 (22 tensors), F32 (13)")
            report.unlink()
        for another in (other, retyped):
            self.refuse("oscar-eval", [another, *evaluate], "of another model", "weight_samples")

    def test_the_folder_has_the_scaling_of_rope_that_the_programs_read(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        import torch
        import transformers

        import oscar_int2.transformers
        from oscar_int2 import rope
        from oscar_int2.commands import dequantize
        large = {"rope_theta": 5e5, "max_position_embeddings": 131072}
        llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        plain = 5e5 ** (-np.arange(64) / 64)
        factors = plain / rope.inverse_frequencies({"rope_type": "llama3", "rope_theta": 5e5} | llama3, 128)
        linear = [("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0)]
        yarn = [("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0), ("rope.scaling.original_context_length", 512)]
        for number, (name, keys, changes, wanted) in enumerate((
                ("linear", linear, {}, {"factor": 4.0}), ("linear", linear[1:], {}, {"factor": 4.0}),
                ("yarn", yarn, {}, {"factor": 4.0, "original_max_position_embeddings": 512}),
                ("yarn", [*yarn[:2], ("rope.scaling.yarn_beta_fast", 16.0), ("rope.scaling.attn_factor", 1.0)], {},
                 {"factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16.0}),
                ("llama3", [], large | {"factors": factors}, llama3), ("default", [("rope.scaling.type", "none")], {}, {}))):
            with self.subTest(name, keys=keys):
                model, out = self.write(f"{number}.gguf", metadata=self.tokens(keys), head_dim=128, **changes), self.folder / f"folder{number}"
                made = run_command(dequantize, model, out)
                self.assertEqual(made.returncode, 0, made.stderr)
                self.assertEqual("rope_freqs.weight is in config.json" in made.stdout, name == "llama3")
                config = transformers.AutoConfig.from_pretrained(out)
                found = dict(config.rope_parameters)
                self.assertEqual((found.pop("rope_type"), found.pop("rope_theta")), (name, changes.get("rope_theta", 1e4)))
                self.assertEqual(found, wanted)
                served = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
                bundle = self.calibrate(model, "--max-tokens", 512)
                with h5py.File(bundle) as file:
                    ours = json.loads(file["model"].attrs["rope"])
                np.testing.assert_allclose(served.model.rotary_emb.inv_freq.double(), rope.inverse_frequencies(ours, 128), rtol=1e-5)
                self.assertAlmostEqual(served.model.rotary_emb.attention_scaling, ours.get("attention_factor", 1), delta=1e-6)
                oscar_int2.transformers.apply(served, oscar_int2.load(bundle))

    def test_scaling_of_rope_that_no_folder_holds_is_refused_by_name(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        from oscar_int2.commands import dequantize
        linear = [("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0)]
        for number, (keys, changes, words) in enumerate((
                ([("rope.scaling.type", "longrope"), ("rope.scaling.factor", 4.0)], {}, ("rope.scaling.type", "longrope", "none, linear or yarn")),
                ([("rope.scaling.type", "yarn")], {}, ("factor",)),
                ([*linear, ("rope.scaling.attn_factor", 1.5)], {}, ("rope.scaling.attn_factor", "without YaRN")),
                ([("rope.scaling.alpha", 1.0)], {}, ("rope.scaling.alpha",)), ([("rope.scale_linear", 2.0)], {}, ("rope.scale_linear",)),
                ([], {"factors": np.linspace(1, 8, 64)}, ("rope_freqs.weight", "Llama 3")),
                ([], {"factors": np.ones(3)}, ("rope_freqs.weight", "another shape")),
                (linear, {"factors": np.ones(64)}, ("two ways", "rope.scaling.type")))):
            with self.subTest(keys=keys):
                model = self.write(f"{number}.gguf", metadata=self.tokens(keys), head_dim=128, **changes)
                out = self.folder / f"folder{number}"
                refused = run_command(dequantize, model, out)
                self.assertEqual(refused.returncode, 1, refused.stdout)
                for word in ("dequantize: ", str(model), *words):
                    self.assertIn(word, refused.stderr)
                self.assertFalse(out.exists() or list(self.folder.glob(".dequantize.*")))

    def tokens(self, keys=()):
        """metadata() of write(): a small tokenizer, and numbers and texts under names of the architecture."""
        def add(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("qwen2")
            writer.add_token_list(["a", "b", "c", "ab", "abc", *(f"<{i}>" for i in range(255))])
            writer.add_token_types([1] * 260)
            writer.add_token_merges(["a b", "ab c"])
            writer.add_eos_token_id(1)
            for name, value in keys:
                put = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
                put(f"qwen3.{name}", value)
        return add

    def test_metadata_that_the_programs_refuse_is_refused_in_their_words(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        from oscar_int2.commands import dequantize
        for number, (key, value, words) in enumerate((
                ("final_logit_softcapping", 30.0, "soft-capping of logits"), ("attention.scale", 0.5, "does not know"),
                ("attention.sliding_window", 512, "a sliding window"), ("logit_scale", 0.25, "a factor on the logits"))):
            with self.subTest(key):
                model, out = self.write(f"{number}.gguf", metadata=self.tokens([(key, value)])), self.folder / f"folder{number}"
                refused = run_command(dequantize, model, out)
                self.assertEqual(refused.returncode, 1, refused.stdout)
                for word in ("dequantize: ", str(model), f"qwen3.{key}", words):
                    self.assertIn(word, refused.stderr)
                self.assertFalse(out.exists() or list(self.folder.glob(".dequantize.*")))

    def test_every_tensor_of_the_folder_is_one_of_the_file(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        import torch
        import transformers
        from safetensors.torch import load_file

        from oscar_int2.commands import dequantize
        config = QWEN3_MINI | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        tensors = {name: values for name, values in qwen3_tensors(config).items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
        rng = np.random.default_rng(5)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.replace(".weight", ".bias")] = rng.standard_normal(len(tensors[name])).astype(np.float32)

        def add(writer):
            self.tokens()(writer)
            writer.add_bos_token_id(0)  # transformers reads no tokenizer of Llama without one

        for name, config, tensors in (("qwen3", QWEN3_MINI, qwen3_tensors(QWEN3_MINI)), ("llama", config, tensors),
                                      ("untied", QWEN3_MINI, qwen3_tensors(QWEN3_MINI) | {
                                          "lm_head.weight": rng.standard_normal((260, 64)).astype(np.float32)})):
            with self.subTest(name):
                model, out = self.folder / f"{name}.gguf", self.folder / f"folder-{name}"
                held = write_model(model, config, tensors, lambda _: Type.Q8_0, np.random.default_rng(0), metadata=add)
                made = run_command(dequantize, model, out)
                self.assertEqual(made.returncode, 0, made.stderr)
                written = load_file(out / "model.safetensors")
                self.assertEqual(set(written), set(held))
                for tensor, values in held.items():
                    expected = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
                    self.assertTrue(torch.equal(written[tensor], expected), tensor)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)[1]
                self.assertFalse(loaded["missing_keys"] or loaded["unexpected_keys"] or loaded["mismatched_keys"])

    def test_tensors_that_make_no_model_leave_no_folder(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        from oscar_int2.commands import dequantize
        layer, whole = "model.layers.1.", qwen3_tensors(QWEN3_MINI)
        down, norm = layer + "mlp.down_proj.weight", layer + "input_layernorm.weight"

        def with_value(name, value):
            changed = whole[name].copy()
            changed.flat[3] = value
            return whole | {name: changed}

        for number, (tensors, words) in enumerate((
                ({name: values for name, values in whole.items() if name not in (down, norm)},
                 ("tensors are missing in the file: blk.1.attn_norm.weight, blk.1.ffn_down.weight",)),
                ({name: values for name, values in whole.items() if not name.startswith(layer)}, ("are missing", " and 3 more")),
                (whole | {layer + "mlp.down_proj.bias": np.ones(64)}, ("has no place for: blk.1.ffn_down.bias",)),
                (whole | {down: np.ones((64, 64), np.float32)}, ("blk.1.ffn_down.weight has the shape [64, 64], expected [64, 128]",)),
                (with_value(down, np.nan), ("blk.1.ffn_down.weight holds numbers that are NaN or infinite",)),
                (with_value(norm, -np.inf), ("blk.1.attn_norm.weight holds numbers that are NaN or infinite",)),
                (with_value(down, -3.4e38), ("blk.1.ffn_down.weight holds 3.4e+38, beyond the range of bf16",)))):
            with self.subTest(words=words):
                model, out = self.folder / f"{number}.gguf", self.folder / f"folder{number}"
                write_model(model, QWEN3_MINI, tensors, lambda _: Type.F32, np.random.default_rng(0), metadata=self.tokens())
                refused = run_command(dequantize, model, out)
                self.assertEqual(refused.returncode, 1, refused.stdout)
                for word in (f"dequantize: {model}: ", *words):
                    self.assertIn(word, refused.stderr)
                self.assertFalse(out.exists() or list(self.folder.glob(".dequantize.*")))

    def test_generation_ends_at_both_tokens_that_the_file_names(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        from oscar_int2.commands import dequantize
        for number, (turn, wanted) in enumerate(((3, [1, 3]), (1, 1), (None, 1))):
            def add(writer, turn=turn):
                self.tokens()(writer)
                if turn is not None:
                    writer.add_eot_token_id(turn)
            model, out = self.write(f"{number}.gguf", metadata=add), self.folder / f"folder{number}"
            made = run_command(dequantize, model, out)
            self.assertEqual(made.returncode, 0, made.stderr)
            self.assertEqual(json.loads((out / "generation_config.json").read_text())["eos_token_id"], wanted)

    def test_rotations_in_the_file_stay_out_of_the_folder_and_are_counted(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        from oscar_int2.commands import dequantize
        model, exported = self.write("one.gguf", metadata=self.tokens(), head_dim=128), self.folder / "exported"
        self.run_ok("oscar-bundle", "export", self.calibrate(model), "--for", "gguf-rot", "--reduce", "--base", model, "-o", exported)
        rotated, = exported.glob("*.gguf")
        for file, said in ((model, ""), (rotated, f"left out {2 * QWEN3_MINI['num_hidden_layers']} rotations (attn_k_rot, attn_v_rot)")):
            out = self.folder / f"of-{file.stem}"
            made = run_command(dequantize, file, out)
            self.assertEqual(made.returncode, 0, made.stderr)
            self.assertRegex(made.stdout, f"^wrote {out}: [^\n]+\n{re.escape(said)}")
            self.assertEqual("left out" in made.stdout, bool(said))

    def test_servers_take_the_file_as_a_folder(self):
        sys.path.insert(0, str(BIN.parent / "python"))
        from oscar_int2.commands import dequantize
        model, out = self.write("one.gguf", metadata=self.tokens(), head_dim=128), self.folder / "folder"
        bundle = self.calibrate(model)
        command = [sys.executable, "-m", "oscar_int2", "dequantize", model, out]
        made = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | {"PYTHONPATH": str(SOURCE / "python")})
        self.assertEqual(made.returncode, 0, made.stderr)
        header, = struct.unpack("<Q", (out / "model.safetensors").read_bytes()[:8])
        stored = (out / "model.safetensors").stat().st_size - 8 - header
        self.assertEqual(made.stdout, f"wrote {out}: 35 tensors in bf16, {stored / 1024:.3g} KiB "
                                      f"(the file has {model.stat().st_size / 1024:.3g} KiB)\n")
        planned = json.loads(self.run_ok("oscar-bundle", "plan", model, "--json", "-").stdout)
        self.assertEqual(planned["weight_bytes"], stored)
        self.assertIn("in BF16, as dequantize writes them; the file has ", planned["weight_source"])
        again = run_command(dequantize, model, out)
        self.assertIn(f"{out} is there already", again.stderr)
        broken, nothing = self.folder / "broken.gguf", self.folder / "nothing"
        broken.write_bytes(model.read_bytes()[:2000])
        refused = run_command(dequantize, broken, nothing)
        for word in ("dequantize: ", str(broken)):
            self.assertIn(word, refused.stderr)
        self.assertEqual((again.returncode, refused.returncode), (1, 1))
        self.assertFalse(nothing.exists() or list(self.folder.glob(".dequantize.*")))
        card = self.folder / "card.md"
        (self.folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        self.run_ok("oscar-bundle", "card", bundle, "--model", model, "-o", card)
        self.assertIn("\nlicense: apache-2.0\n", card.read_text(), "as the README beside the file says")
        self.assertRegex(card.read_text(), r"VLLM_OSCAR_BUNDLE=one\.h5 vllm serve FOLDER\n(?s:.*)oscar_int2 dequantize FILE\.gguf FOLDER\n")
        code = f"""
import torch, transformers, oscar_int2.transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}, dtype=torch.bfloat16)
oscar_int2.transformers.apply(model, {str(bundle)!r})
print(oscar_int2.status(model).weights, model.generation_config.do_sample, model.generate(torch.arange(2, 42)[None], max_new_tokens=4).shape)
"""
        served = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                env=ENVIRONMENT | {"PYTHONPATH": str(BIN.parent / "python")})
        self.assertEqual(served.returncode, 0, served.stderr)
        self.assertIn("same False torch.Size([1, 44])", served.stdout)
        self.assertNotIn("can't be told", served.stderr)

    def test_runs_of_the_file_say_how_to_serve_it(self):
        place = self.folder / "models" / "mini"
        place.mkdir(parents=True)
        model = self.write("models/mini/mini.Q8_0.gguf")
        bundle = self.calibrate(model)
        evaluate = ["--bundle", bundle, "--corpus", self.ids, "--sequence-length", 512, "--max-tokens", 1024, "--separators",
                    "off", "--device", "cpu", "--compare", "bundle"]
        with unittest.mock.patch.dict(ENVIRONMENT, OSCAR_DATASETS=str(self.folder / "models")):
            for name in (model, "mini"):
                said = self.run_ok("oscar-eval", name, *evaluate).stdout.replace("\\\n", " ")
                self.assertEqual(said.partition("\nnext       ")[2].split(), [
                    "python", "-m", "oscar_int2", "dequantize", str(model), "mini.Q8_0-hf", "&&", f"VLLM_OSCAR_BUNDLE={bundle}",
                    "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "mini.Q8_0-hf", "--dtype", "bfloat16"])
            said = self.run_ok("oscar-calibrate", "mini", self.ids, self.folder / "x.h5", *CALIBRATE, "--dry-run").stdout
            self.assertIn(f"\n           python -m oscar_int2 dequantize {model} FOLDER writes;\n", said)

    def fold(self, kind, *options):
        """A model, its folded copy, and value rotations [layers, heads, d, d]."""
        model = self.write(f"one.{kind.name}.gguf", kind=kind,
                           metadata=lambda writer: writer.add_name("kept"))
        bundle, out = self.calibrate(model, "--no-statistics"), self.folder / f"out{kind.name}"
        self.said = self.run_ok("oscar-bundle", "fold", bundle, model, out, *options).stdout
        with h5py.File(bundle) as file:
            rotations = [datasets_of(file)[f"/layers/{i:03}/v_rotation"].astype(float) for i in range(3)]
        return model, out, rotations

    def test_values_are_folded_into_plain_weights_and_the_rest_stays(self):
        for kind, unit in ((Type.F32, 2**-24), (Type.F16, 2**-11), (Type.BF16, 2**-8)):
            with self.subTest(kind.name):
                model, out, rotations = self.fold(kind)
                self.assertIn("\nvalue mean  kept in the bundle, for servers that center values\n"
                              "llama.cpp   needs no bundle: its cache gets the transformed values, not centered\n", self.said)
                self.assertEqual({path.name for path in out.iterdir()},
                                 {model.name, "oscar.h5", "oscar_fold.json"})
                before, after = (gguf.GGUFReader(path) for path in (model, out / model.name))
                self.assertEqual({f.name: f.contents() for f in before.fields.values() if f.types},
                                 {f.name: f.contents() for f in after.fields.values() if f.types})
                old, new = ({t.name: t for t in file.tensors} for file in (before, after))
                self.assertEqual(list(old), list(new))
                for name, tensor in new.items():
                    was, now = (decode(t.data, t.tensor_type).astype(float) for t in (old[name], tensor))
                    if "attn_v" not in name and "attn_output" not in name:
                        self.assertEqual(old[name].data.tobytes(), tensor.data.tobytes(), name)
                        continue
                    T = rotations[int(name.split(".")[1])]
                    heads, d = T.shape[:2]
                    if "attn_v" in name:
                        wanted = np.concatenate([T[h].T @ was[h * d:(h + 1) * d] for h in range(heads)])
                    else:
                        back, joined = np.linalg.inv(T), was.shape[1] // d // heads
                        wanted = np.concatenate([was[:, j * d:(j + 1) * d] @ back[j // joined].T
                                                 for j in range(heads * joined)], axis=1)
                    self.assertGreater(np.abs(wanted - was).max(), .1)
                    np.testing.assert_allclose(now, wanted, rtol=unit, atol=1e-6)

    def test_the_folded_file_is_a_model_whose_bundle_lies_beside_it(self):
        model, out, _ = self.fold(Type.F32)
        report = self.folder / "report.json"
        kl = []
        for path, bundle in ((model, self.folder / "one.F32.h5"), (out / model.name, out / "oscar.h5")):
            self.run_ok("oscar-eval", path, "--bundle", bundle, "--corpus", self.ids, "--sequence-length", 512,
                        "--max-tokens", 1024, "--separators", "off", "--compare", "bundle", "--json", report,
                        "--force")
            methods = json.loads(report.read_text())["methods"]
            kl.append((methods["bf16"]["nll"]["mean"], methods["bundle"]["kl"]["mean"]))
        self.assertAlmostEqual(kl[0][0], kl[1][0], delta=1e-5)
        self.assertAlmostEqual(kl[0][1] / kl[1][1], 1, delta=1e-2)

    def test_values_are_not_folded_into_quantized_weights(self):
        model = self.write("one.gguf")
        self.refuse("oscar-bundle", ["fold", self.calibrate(model), model, self.folder / "out"],
                    "quantized weights", "blk.0.attn_v.weight", "Q8_0", "then quantize it")

    def test_text_needs_a_tokenizer_in_the_file(self):
        model = self.write("one.gguf")
        text = self.folder / "text.txt"
        text.write_text("some text")
        self.refuse("oscar-calibrate", [model, text, self.folder / "out.h5"],
                    "text needs the model's tokenizer", "one.gguf")

    def test_a_byte_level_tokenizer_in_the_file_reads_text(self):
        from tokenizers import pre_tokenizers
        tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens += ["<|endoftext|>", "Tw", "<unused0>", "<unused1>"]

        def add(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("qwen2")
            writer.add_token_list(tokens)
            writer.add_token_types([1] * 256 + [3, 1, 5, 5])
            writer.add_token_merges(["T w"])
            writer.add_eos_token_id(256)
        model = self.write("text.gguf", metadata=add)
        text = self.folder / "text.txt"
        text.write_text("Two bits a number, 1234 of them. " * 40)
        out = self.folder / "ids_out.npy"
        said = self.run_ok("oscar-calibrate", model, text, self.folder / "x.h5", "--sequence-length", "128",
                           "--separators", "off", "--dry-run", "--tokens-out", out).stdout
        self.assertRegex(said, r"(?m)^servers    vLLM and transformers, over the folder that\n"
                               r" +python -m oscar_int2 dequantize \S+ FOLDER writes;\n +llama\.cpp has no 2-bit cache for it")
        ids = {t: i for i, t in enumerate(tokens)}
        expected = [ids["Tw"] if c == "T" else ids[c.replace(" ", "Ġ")]
                    for c in text.read_text().replace("Tw", "T")]
        self.assertEqual(np.load(out).ravel().tolist()[:1024], expected[:1024])
        chat = self.folder / "chat.jsonl"
        chat.write_text(json.dumps({"messages": [{"role": "assistant", "content": text.read_text()}]}))
        command = [model, chat, self.folder / "y.h5", "--sequence-length", "128", "--dry-run", "--quiet"]
        self.refuse("oscar-calibrate", command, "no chat template", "beside the .gguf file")
        (self.folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        self.run_ok("oscar-calibrate", *command)

    def test_files_cut_short_are_refused(self):
        model = self.write("one.gguf")
        whole = model.read_bytes()
        cut = self.folder / "cut.gguf"
        for kept in (3, 20, 200, len(whole) // 2, len(whole) - 40):
            cut.write_bytes(whole[:kept])
            self.refuse("oscar-calibrate", [cut, self.ids, self.folder / "out.h5"], "cut.gguf")

    def test_help_says_that_a_gguf_file_is_a_model(self):
        for program in ("oscar-calibrate", "oscar-eval"):
            self.assertIn(".gguf", run(program, "--help").stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
