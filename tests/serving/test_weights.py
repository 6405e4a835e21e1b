#!/usr/bin/env python3
"""A bundle beside weights that it was not calibrated on: said or refused, in transformers and Generator.
The bundles and their samples are oscar-calibrate's. Runs with every transformers from 4.57."""
import contextlib
import copy
import dataclasses
import hashlib
import logging
import pathlib
import shutil
import tempfile
import unittest

import h5py
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import serving_case
import oscar_int2
import oscar_int2.transformers
from oscar_int2 import weight_files, weight_samples, weights
from oscar_int2.calibration import calibrate
from oscar_int2.errors import BundleMismatchError
from oscar_int2.transformers import apply, remove
from support import checkpoints
from support.programs import run


@contextlib.contextmanager
def silence(test):
    with test.assertNoLogs("oscar_int2"):
        yield


def without_samples(bundle):
    """As earlier versions wrote it."""
    return dataclasses.replace(bundle, layers={
        i: dataclasses.replace(layer, weight_samples=None) for i, layer in bundle.layers.items()})


def perturbed(model, share):
    """A copy in which each weight has moved by so much of its size, as fine-tuning moves them."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * share)
    return model


class Adapter(torch.nn.Module):
    """As peft wraps a linear layer."""

    weight = property(lambda self: self.base_layer.weight)

    def __init__(self, layer, b):
        super().__init__()
        self.base_layer, self.merged, self.disable_adapters = layer, False, False
        self.active_adapters, self.lora_A = ["default"], {"default": None}
        self.delta = b * torch.randn(layer.weight.shape)

    def get_delta_weight(self, name):
        return self.delta

    def forward(self, x):
        return x @ (self.weight + self.delta).T


class OtherAdapter(torch.nn.Module):
    """As peft wraps a linear layer with what is no LoRA."""

    weight = property(lambda self: self.base_layer.weight)
    adapter_layer_names = ("ia3_l",)

    def __init__(self, layer, factor):
        super().__init__()
        self.base_layer, self.merged, self.disable_adapters = layer, False, False
        self.active_adapters, self.ia3_l = ["default"], {"default": factor}

    def forward(self, x):
        return self.base_layer(x) * self.ia3_l["default"]


class TrainedCopy(torch.nn.Module):
    """As peft wraps a module of which it trains a copy (modules_to_save)."""

    def __init__(self, module):
        super().__init__()
        self.original_module, self.disable_adapters, self.active_adapters = module, False, ["default"]
        self.modules_to_save = torch.nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, x):
        return self.modules_to_save["default"](x)


class WeightsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        cls.ours, cls.other = cls.make(cls.folder / "ours", 0), cls.make(cls.folder / "other", 1)
        corpus, path = cls.folder / "corpus.txt", cls.folder / "ours.h5"
        corpus.write_text("".join(checkpoints.sample_text()))
        made = run("oscar-calibrate", cls.ours, corpus, path, "--device", "cpu", "--search", "off",
                   "--max-tokens", 2048, "--sequence-length", 512, "--quiet")
        assert made.returncode == 0, made.stderr
        cls.bundle = oscar_int2.load(path)
        cls.models = {folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
                      for folder in (cls.ours, cls.other)}

    @classmethod
    def make(cls, folder, seed):
        return checkpoints.write_checkpoint(folder, tensors=checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI, seed))

    def served(self, model, bundle=None, **options):
        """In both ways of this process."""
        bundle = bundle or self.bundle
        remove(apply(model, bundle, **options))
        oscar_int2.Generator(model, bundle, max_tokens=32, **options)

    def refused(self, model, *words, bundle=None):
        ways = (("apply", lambda: apply(model, bundle or self.bundle)),
                ("Generator", lambda: oscar_int2.Generator(model, bundle or self.bundle, max_tokens=32)))
        for name, way in ways:
            with self.assertRaises(BundleMismatchError) as caught:
                way()
            for word in ("ours.h5", f'weights="any" of {name}()', "docs/serving.md", *words):
                self.assertIn(word, str(caught.exception))
        self.assertFalse(hasattr(model, "oscar_int2"))


class Samples(WeightsTest):
    def test_the_right_weights_are_served_without_a_word(self):
        with silence(self):
            self.served(self.models[self.ours])
            for dtype in (torch.float32, torch.float16):  # the checkpoint is in float32
                apply(AutoModelForCausalLM.from_pretrained(self.ours, dtype=dtype), self.bundle)

    def test_another_checkpoint_of_the_same_shape_is_refused(self):
        self.refused(self.models[self.other], "W_Q of layer 0 differs, and 17 more of 27 tensors",
                     "another model of the same shape")
        config = self.models[self.ours].config
        for never in (AutoModelForCausalLM.from_config(config).bfloat16(),
                      copy.deepcopy(self.models[self.ours])):
            never.model.layers[2].self_attn.v_proj.weight.data.zero_()
            self.refused(never, "weights that were never loaded")

    def test_other_files_with_the_same_attention_are_said(self):
        """As of a fine-tune of MLPs alone, whose entries are all the bundle's."""
        folder = self.with_tensors("mlp", lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].mul_(1.5))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with self.assertLogs("oscar_int2", "WARNING") as said:
            self.served(model)
        self.assertEqual(len(said.output), 2)
        for line in said.output:
            self.assertRegex(line, "weights of q, k, v and o agree with .* files in .*mlp are not .* MLPs")
        (folder / "model.safetensors").rename(folder / "gone")
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
        with silence(self):  # weights that came from elsewhere, and files that say nothing
            self.served(model)

    def test_files_before_they_are_loaded(self):
        """What `check` says: entries of q, k, v and o are read from the files."""
        def said(folder, **options):
            return weights.compare_files(self.bundle, folder, option="THIS=any", **options)

        self.assertEqual(said(self.ours), "its files are those of the calibration")
        with self.assertRaisesRegex(BundleMismatchError, "W_Q of layer 0 differs.*another model of the same shape.*THIS=any"):
            said(self.other)
        self.assertIn("any weights are accepted", said(self.other, accepted="any"))
        tuned = self.with_tensors("tuned", lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].mul_(1.5))
        self.assertRegex(said(tuned), "^q, k, v and o in its files are those .* but the files are not: .* MLPs .* written anew")
        for name in ("self_attn.v_proj", "self_attn.k_norm"):
            tuned = self.with_tensors("tuned", lambda tensors: tensors[f"model.layers.2.{name}.weight"].mul_(1.01))
            with self.assertRaisesRegex(BundleMismatchError, "of layer 2 differs, and 0 more.*a fine-tune"):
                said(tuned)
        renamed = self.with_tensors("renamed", lambda tensors: tensors.update(
            {f"draft.layers.0.self_attn.{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"}))
        self.assertRegex(said(renamed), "^q, k, v and o in its files are those")
        elsewhere = self.with_tensors("elsewhere", lambda tensors: [tensors.update(
            {name.replace("self_attn", "attn"): tensors.pop(name)}) for name in list(tensors)])
        self.assertRegex(said(elsewhere), "^its files are not those of the calibration: the server compares")

    def with_tensors(self, name, change):
        """A copy of the calibrated folder with other tensors."""
        from safetensors.torch import load_file, save_file

        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.ours, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    def test_a_folder_says_which_gguf_file_it_was_made_of(self):
        """Attention alone is compared where it does not: a fine-tune of its MLPs looks the same."""
        file = self.folder / "small.gguf"
        file.write_bytes(b"GGUF")
        bundle = dataclasses.replace(self.bundle, model=dataclasses.replace(
            self.bundle.model, file_sha256=hashlib.sha256(b"GGUF").hexdigest()))
        folder = self.with_tensors("of_gguf", lambda tensors: None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

        def found():
            apply(model, bundle)
            state = oscar_int2.status(model).weights
            remove(model)
            return state, weights.compare_files(bundle, folder).partition(" (")[0]

        with self.assertLogs("oscar_int2", "WARNING") as said:
            self.assertEqual(found(), ("same attention",
                                       "q, k, v and o in its files are those of the calibration; of its other weights nothing is known"))
        self.assertEqual(len(said.output), 1)
        self.assertRegex(said.output[0], "Whether embeddings, MLPs and other norms do can't be told: .*GGUF file.*has no oscar_gguf.json")
        weight_files.write_gguf_source(folder, file)
        with silence(self):
            self.assertEqual(found(), ("same", "its files are those of the calibration"))
        shutil.copy(self.with_tensors("tuned", lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].mul_(1.5))
                    / "model.safetensors", folder)
        with self.assertLogs("oscar_int2", "WARNING") as said:
            self.assertEqual(found()[0], "other files")
        self.assertEqual(len(said.output), 1)

    def test_an_adapter_outside_attention_is_said_while_it_acts(self):
        model = copy.deepcopy(self.models[self.ours]).float()
        mlp = model.model.layers[1].mlp
        mlp.up_proj = adapter = Adapter(mlp.up_proj, 0.01)
        with self.assertLogs("oscar_int2", "WARNING") as said:
            apply(model, self.bundle)
        self.assertEqual(len(said.output), 1)
        self.assertRegex(said.output[0], "an adapter acts on model.layers.1.mlp.up_proj, which is not compared")
        self.assertEqual(oscar_int2.status(model).weights, "same attention")
        remove(model)
        for inert in ({"disable_adapters": True}, {"delta": 0 * adapter.delta}, {"active_adapters": []}):
            before = {key: getattr(adapter, key) for key in inert}
            vars(adapter).update(inert)
            with silence(self):
                remove(apply(model, self.bundle))
            vars(adapter).update(before)
        mlp.up_proj = OtherAdapter(adapter.base_layer, 3.0)
        with self.assertLogs("oscar_int2", "WARNING"):
            remove(apply(model, self.bundle))
        mlp.up_proj = kept = TrainedCopy(adapter.base_layer)
        with silence(self):  # as it begins
            remove(apply(model, self.bundle))
        with torch.no_grad():
            kept.modules_to_save["default"].weight.mul_(1.01)
        with self.assertLogs("oscar_int2", "WARNING"):
            remove(apply(model, self.bundle))
        kept.disable_adapters = True
        with silence(self):
            remove(apply(model, self.bundle))

    def test_it_is_served_to_those_who_accept_any(self):
        with self.assertLogs("oscar_int2", "WARNING") as said:
            self.served(self.models[self.other], weights="any")
        self.assertEqual(len(said.output), 2)
        for line in said.output:
            self.assertRegex(line, "calibrated on other weights than are served: .*another model")
        with silence(self):
            self.served(self.models[self.ours], weights="any")
        for way in (apply, oscar_int2.Generator):
            with self.assertRaisesRegex(oscar_int2.BundleError, "weights is 'all'; expected 'same' or 'any'"):
                way(self.models[self.ours], self.bundle, weights="all")

    def test_transforms_of_other_weights_are_warned_of_wherever_they_are_served(self):
        imported = dataclasses.replace(self.bundle, model=dataclasses.replace(
            self.bundle.model, fitted_weights_fingerprint="0" * 64, fitted_model="another"))
        with self.assertLogs("oscar_int2", "WARNING") as said:
            self.served(self.models[self.ours], imported)
        self.assertEqual(len(said.output), 2)
        for line in said.output:
            self.assertRegex(line, "ours.h5: its transforms were fitted to other weights .* those of another")

    def test_a_fine_tune_is_refused_as_one(self):
        for share in (0.003, 0.1):
            self.refused(perturbed(self.models[self.ours], share), "a fine-tune of the calibrated model")

    def test_an_adapter_is_a_fine_tune_while_it_acts(self):
        model = copy.deepcopy(self.models[self.ours]).float()
        attention = model.model.layers[1].self_attn
        attention.k_proj = adapter = Adapter(attention.k_proj, 0.01)
        with self.assertRaisesRegex(BundleMismatchError, "W_K of layer 1 differs, and 0 more.*fine-tune"):
            apply(model, self.bundle)
        adapter.disable_adapters = True
        with silence(self):
            apply(model, self.bundle)
        adapter.disable_adapters, adapter.delta = False, 0 * adapter.delta  # as an adapter begins
        with silence(self):
            apply(model, self.bundle)

    def test_an_adapter_that_is_no_lora_is_refused_while_it_acts(self):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for kind, shown in (("peft.tuners.ia3.layer", "ia3"), ("elsewhere", "Linear")):
                model = copy.deepcopy(self.models[self.ours]).float()
                attention = model.model.layers[1].self_attn
                adapter = OtherAdapter(getattr(attention, name), 3.0)
                adapter.__class__ = type("Linear", (OtherAdapter,), {"__module__": kind})
                setattr(attention, name, adapter)
                text = f"{name} of layer 1 has an adapter of kind {shown} .'default'.*Merge it.*calibrate"
                with self.assertRaisesRegex(BundleMismatchError, f"{text}.*weights=\"any\" of apply"):
                    apply(model, self.bundle)
                with self.assertLogs("oscar_int2", "WARNING") as said:
                    remove(apply(model, self.bundle, weights="any"))
                self.assertEqual(len(said.output), 1)
                self.assertRegex(said.output[0], text)
                for inert in ({"merged": True}, {"disable_adapters": True}, {"active_adapters": []},
                              {"active_adapters": ["another"]}):
                    before = {key: getattr(adapter, key) for key in inert}
                    vars(adapter).update(inert)
                    with silence(self):
                        remove(apply(model, self.bundle))
                    vars(adapter).update(before)
                setattr(attention, name, Adapter(adapter, 0.0))  # LoRA around it
                with self.assertRaisesRegex(BundleMismatchError, f"kind {shown}"):
                    apply(model, self.bundle)

    def test_an_adapter_in_the_models_folder_is_named(self):
        """transformers loads it with the model."""
        beside = self.ours / "adapter_config.json"
        model = copy.deepcopy(self.models[self.ours])
        model.model.layers[2].self_attn.v_proj.weight.data *= 1.01
        beside.write_text("{}")
        self.addCleanup(beside.unlink)
        said = f"{beside} may be why: transformers loads that adapter with the model"
        self.refused(model, said)
        with self.assertLogs("oscar_int2", "WARNING") as log:
            calibrate(model, [list(range(200)) * 2], self.folder / "adapted.h5", statistics_only=True, device="cpu")
        self.assertIn(said, log.output[0])

    def test_a_few_entries_that_differ_are_found(self):
        """One head's part of one matrix, of the last layer."""
        for name, rows, columns in (("q", slice(64, 128), slice(None)), ("k", slice(32, 64), slice(None)),
                                    ("o", slice(None), slice(0, 64))):
            model = copy.deepcopy(self.models[self.ours])
            matrix = getattr(model.model.layers[2].self_attn, f"{name}_proj").weight.data
            matrix[rows, columns] *= 1.01
            self.refused(model, f"W_{name.upper()} of layer 2 differs, and 0 more of 27")

    def test_half_precision_stands_for_what_it_rounds(self):
        found = torch.tensor([[[0.0, 0.0, 1.0, 6e-8]]])
        half = torch.ones(1, 1, 1, dtype=torch.bool)
        for kept, same in (([2e-8, 1e-4, 1.0, 6e-8], [1, 0, 1, 1]), ([0.0, 0.0, 1.0078125, 1e-7], [1, 1, 0, 0])):
            with self.subTest(kept=kept):
                kept = torch.tensor([[kept]]).bfloat16().float()
                self.assertEqual(weight_samples.rounds_to(found, kept, half)[0, 0].tolist(), [bool(x) for x in same])


class Recorded(WeightsTest):
    """A calibration in transformers names the files of the model if its weights in memory are theirs."""

    def recorded(self, model, name="sums.h5"):
        """(fingerprint in the file, warnings of a calibration)."""
        ids, path = torch.randint(0, 256, (2, 400), generator=torch.Generator().manual_seed(3)), self.folder / name
        path.unlink(missing_ok=True)
        with self.assertLogs("oscar_int2", "WARNING") as said:
            logging.getLogger("oscar_int2").warning("begun")
            calibrate(model, ids.tolist(), path, statistics_only=True, device="cpu")
        with h5py.File(path) as file:
            return file["model"].attrs["weights_fingerprint"].decode(), said.output[1:]

    def loaded(self, dtype=torch.float32, folder=None):
        return AutoModelForCausalLM.from_pretrained(folder or self.ours, dtype=dtype)

    def none_recorded(self, model, text):
        found, said = self.recorded(model)
        self.assertEqual((found, len(said)), ("", 1))
        self.assertRegex(said[0], f"the weights in memory {text}.*names no files of weights.*give their folder")

    def test_weights_of_the_files_are_named_in_every_dtype(self):
        expected = self.bundle.model.weights_fingerprint, []
        for model in (self.ours, *map(self.loaded, (torch.float32, torch.bfloat16, torch.float16))):
            self.assertEqual(self.recorded(model), expected)
        sharded = self.folder / "sharded"
        self.loaded().save_pretrained(sharded, max_shard_size="100KB")
        self.assertGreater(len(list(sharded.glob("*.safetensors"))), 1)
        self.assertEqual(self.recorded(self.loaded(folder=sharded)), (weight_files.fingerprint(sharded), []))

    def test_weights_that_were_edited_are_not(self):
        for name, part in (("self_attn.k_proj", slice(32, 64)), ("self_attn.o_proj", (slice(None), slice(64, 128))),
                           ("mlp.down_proj", slice(None)), ("self_attn.k_norm", slice(None))):
            model = self.loaded()
            model.get_parameter(f"model.layers.2.{name}.weight").data[part] *= 1.01
            self.none_recorded(model, f"are not those in {self.ours}: model.layers.2.{name}.weight differs, and 0 more of 35")

    def test_files_that_changed_behind_a_loaded_model_are_not(self):
        folder = self.make(self.folder / "behind", 0)
        model = self.loaded(folder=folder)
        checkpoints.write_checkpoint(folder, tensors=checkpoints.qwen3_tensors(checkpoints.QWEN3_MINI, 1))
        self.none_recorded(model, f"are not those in {folder}")

    def test_an_adapter_counts_while_it_acts(self):
        for linear in ("self_attn.q_proj", "mlp.up_proj"):
            model = self.loaded()
            holder, _, name = linear.rpartition(".")
            holder = model.get_submodule(f"model.layers.1.{holder}")
            setattr(holder, name, adapter := Adapter(getattr(holder, name), 0.01))
            adapter.in_features, adapter.out_features = adapter.base_layer.in_features, adapter.base_layer.out_features
            self.none_recorded(model, f"are not those.*layers.1.{linear}.weight differs, and 0 more")
            adapter.delta = 0 * adapter.delta  # as an adapter begins
            self.assertEqual(self.recorded(model), (self.bundle.model.weights_fingerprint, []))
            setattr(holder, name, OtherAdapter(adapter.base_layer, 3.0))
            self.none_recorded(model, f"are not those.*layers.1.{linear} has an adapter of another kind than LoRA")

    def test_weights_that_can_not_be_compared_are_not(self):
        model = self.loaded()
        torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
        self.none_recorded(model, f"could not be compared with those in {self.ours}: "
                                  "model.layers.0.mlp.up_proj.parametrizations.weight.original0 is not in them")

    def test_programs_know_such_a_bundle_by_its_samples(self):
        """And refuse one of other weights, whatever fingerprint it has."""
        model = self.loaded()
        model.model.layers[0].mlp.up_proj.weight.data *= 1.01
        self.none_recorded(model, "are not those")
        corpus, fitted = self.folder / "corpus.txt", self.folder / "fitted.h5"
        options = ["--corpus", corpus, "--compare", "bundle", "--max-tokens", 1024, "--sequence-length", 512, "--device", "cpu",
                   "--separators", "off"]
        run("oscar-bundle", "fit", self.folder / "sums.h5", "-o", fitted, "--force")
        taken = run("oscar-eval", self.ours, "--bundle", fitted, *options)
        self.assertEqual(taken.returncode, 0, taken.stderr)
        self.assertIn("names no files of weights", taken.stderr)
        model.model.layers[1].self_attn.v_proj.weight.data *= 1.01
        self.none_recorded(model, "are not those")
        run("oscar-bundle", "fit", self.folder / "sums.h5", "-o", fitted, "--force")
        for refused in (run("oscar-eval", self.ours, "--bundle", fitted, *options),
                        run("oscar-bundle", "fold", fitted, self.ours, self.folder / "folded")):
            self.assertEqual(refused.returncode, 1)
            self.assertIn("W_V of layer 1 differs, and 0 more of", refused.stderr)


class Vectors(WeightsTest):
    """Biases and norms, of a checkpoint that has both."""

    @classmethod
    def make(cls, folder, seed):
        config = checkpoints.QWEN3_MINI | {"attention_bias": True}
        tensors = checkpoints.qwen3_tensors(config, seed)
        rng = np.random.default_rng(seed)
        for layer in range(3):
            for name, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 64)):
                bias = rng.standard_normal(rows).astype(np.float32)
                tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
        return checkpoints.write_checkpoint(folder, config, tensors)

    def test_a_change_of_one_is_found(self):
        model = self.models[self.ours]
        for name, path, part in (("b_Q", "q_proj.bias", slice(64, 128)), ("b_K", "k_proj.bias", slice(0, 32)),
                                 ("b_V", "v_proj.bias", slice(32, 64)), ("q_norm", "q_norm.weight", slice(0, 16)),
                                 ("k_norm", "k_norm.weight", slice(16, 32))):
            changed = copy.deepcopy(model)
            changed.get_parameter(f"model.layers.2.self_attn.{path}").data[part] *= 1.01
            self.refused(changed, f"{name} of layer 2 differs, and 0 more of 27")

    def test_a_bias_that_is_gone_is_found(self):
        changed = copy.deepcopy(self.models[self.ours])
        changed.model.layers[1].self_attn.k_proj.bias = None
        with self.assertRaisesRegex(BundleMismatchError, "b_K of layer 1 differs, and 0 more of 27"):
            apply(changed, self.bundle)

    def test_a_rank_finds_its_own(self):
        """Of a fused projection, with a norm that heads share and one over the whole row."""
        layer = self.bundle.layers[1]
        ours = self.models[self.ours].model.layers[1].self_attn
        module = torch.nn.Module()
        rows = [(ours.q_proj, slice(64, 128)), (ours.k_proj, slice(32, 64)), (ours.v_proj, slice(32, 64))]
        module.qkv_proj = torch.nn.Linear(64, 128)
        module.qkv_proj.weight.data = torch.cat([linear.weight[part] for linear, part in rows]).data
        module.qkv_proj.bias.data = torch.cat([linear.bias[part] for linear, part in rows]).data
        module.q_norm, module.k_norm = ours.q_norm, copy.deepcopy(ours.k_norm)
        found = weight_samples.compare(self.bundle, {1: weight_samples.projections(module, layer, 1, 1)})
        self.assertEqual((found.differ, found.compared), (0, 8))
        self.assertEqual(len(weight_samples.compare(self.bundle, {1: weight_samples.projections(module, layer, 0, 1)}).tensors), 6)
        row = torch.arange(64.0)
        self.assertEqual(weight_samples.sample_vector(row, 2, 32)[:, 0].tolist(), [1.0, 33.0])
        self.assertEqual(weight_samples.sample_vector(row, 2, 64)[:, 0].tolist(), [2.0, 2.0])

    def test_a_bundle_without_their_samples_is_compared_by_matrices(self):
        old = dataclasses.replace(self.bundle, layers={
            i: dataclasses.replace(layer, vector_samples=None) for i, layer in self.bundle.layers.items()})
        changed = copy.deepcopy(self.models[self.ours])
        changed.model.layers[1].self_attn.k_proj.bias.data *= 2
        with silence(self):
            remove(apply(changed, old))


class Parts(WeightsTest):
    """Fused projections, and those that a rank of tensor parallelism has."""

    def attention(self, heads):
        """An attention module as vLLM has it, with these KV heads."""
        ours, d = self.models[self.ours].model.layers[1].self_attn, 32
        queries = [2 * head + i for head in heads for i in (0, 1)]

        def rows(name, of):
            matrix = getattr(ours, f"{name}_proj").weight
            return torch.cat([matrix[d * head:d * head + d] for head in of])

        module = torch.nn.Module()
        module.qkv_proj = torch.nn.Linear(64, 32, bias=False)
        module.qkv_proj.weight = torch.nn.Parameter(torch.cat([rows("q", queries), rows("k", heads),
                                                               rows("v", heads)]))
        module.o_proj = torch.nn.Linear(64, 64, bias=False)
        module.o_proj.weight = torch.nn.Parameter(
            torch.cat([ours.o_proj.weight[:, d * i:d * i + d] for i in queries], 1))
        return module

    def compared(self, heads, *part, layer_id=1):
        found = weight_samples.projections(self.attention(heads), self.bundle.layers[layer_id], *part)
        return weight_samples.compare(self.bundle, {layer_id: found})

    def test_a_fused_projection_is_taken_apart(self):
        self.assertEqual((self.compared([0, 1]).differ, self.compared([0, 1]).compared), (0, 7))
        self.assertEqual(len(self.compared([1, 0]).tensors), 4)
        self.assertEqual(len(self.compared([0, 1], layer_id=2).tensors), 4)

    def test_each_rank_compares_its_own_heads(self):
        for rank in (0, 1):
            found = self.compared([rank], rank, 1)
            self.assertEqual((found.differ, found.compared, found.entries), (0, 7, 112))
            self.assertEqual(len(self.compared([rank], 1 - rank, 1).tensors), 4)

    def test_packed_weights_are_not_compared(self):
        attention = self.attention([0, 1])
        for packed in (torch.empty(0), attention.qkv_proj.weight.T.contiguous(),
                       attention.qkv_proj.weight.to(torch.float8_e4m3fn), torch.empty(256, 64, device="meta")):
            attention.qkv_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
            attention.o_proj = torch.nn.Module()
            found = weight_samples.projections(attention, self.bundle.layers[1])
            self.assertIsNone(weight_samples.compare(self.bundle, {1: found}))


class Files(WeightsTest):
    """What can't be compared in memory is compared by the fingerprint of its files."""

    def setUp(self):
        self.old = without_samples(self.bundle)

    @contextlib.contextmanager
    def said_of_files(self):
        """The model's files are the calibrated ones, and nothing in memory was looked at."""
        with self.assertLogs("oscar_int2", "WARNING") as said:
            yield
        for line in said.output:
            self.assertRegex(line, "in memory were not compared with it: the bundle has no samples.*, or q, k, v and o of its model")

    def test_an_old_bundle_knows_its_checkpoint_by_the_files(self):
        with self.said_of_files():
            self.served(self.models[self.ours], self.old)
        self.refused(self.models[self.other], "the fingerprint of", str(self.other), bundle=self.old)
        with self.assertLogs("oscar_int2", "WARNING"):
            self.served(self.models[self.other], self.old, weights="any")

    def test_the_bundle_that_comes_with_the_repository_has_samples(self):
        self.assertIsNotNone(oscar_int2.load(serving_case.BUNDLE).layers[0].weight_samples)

    def test_what_can_not_be_compared_is_said(self):
        unknown = copy.deepcopy(self.models[self.other])
        unknown.name_or_path = ""
        missing = dataclasses.replace(self.old, model=dataclasses.replace(
            self.old.model, weights_fingerprint=""))
        for model, bundle, why in ((unknown, self.old, "no files that are known"),
                                   (self.models[self.other], missing, "no fingerprint")):
            with self.assertLogs("oscar_int2", "WARNING") as said:
                apply(copy.deepcopy(model), bundle)
            self.assertEqual(len(said.output), 1)
            self.assertRegex(said.output[0], f"ours.h5: weights could not be compared: .*{why}.*Make sure")

    def test_quantized_weights_are_compared_by_their_files(self):
        packed = {i: weight_samples.Projections(None, None, None, None) for i in self.bundle.layers}
        with self.assertLogs("oscar_int2", "WARNING") as said:
            weights.check(self.bundle, packed, "same", "", self.ours)
        self.assertRegex(said.output[0], "in memory were not compared with it: the weights are quantized")
        with self.assertRaisesRegex(BundleMismatchError, "a quantized form or a fine-tune of the calibrated"):
            weights.check(self.bundle, packed, "same", "", self.other)

    def test_a_gguf_file_is_compared_by_its_hash(self):
        file = self.folder / "model.gguf"
        file.write_bytes(np.arange(999).tobytes())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        of_file = dataclasses.replace(self.old, model=dataclasses.replace(self.old.model, file_sha256=digest))
        with self.said_of_files():
            weights.check(of_file, {}, "same", "", file)
        with self.assertRaisesRegex(BundleMismatchError, "that of no GGUF file"):
            weights.check(self.old, {}, "same", "", file)
        with self.assertLogs("oscar_int2", "WARNING") as said:
            weights.check(of_file, {}, "same", "", self.ours)
        self.assertIn("made from a GGUF file", said.output[0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
