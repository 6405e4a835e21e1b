#!/usr/bin/env python3
"""oscar_int2.load: what it reads of the bundle in the zoo, and every file that it refuses."""
import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import types
import unittest

import h5py
import numpy as np
import torch

from serving_case import BIN, BUNDLE, SOURCE, tiny_model
import random_models as small
import oscar_int2
import oscar_int2.transformers
from oscar_int2.bundle import content_sha256
from oscar_int2.cache import check_served
from oscar_int2.codec import key_center_table
from oscar_int2.rope import inverse_frequencies


def objects_of(file):
    found = {"/": file}
    file.visititems(lambda name, item: found.__setitem__("/" + name, item))
    return found


class Changed(unittest.TestCase):
    @contextlib.contextmanager
    def changed(self, sign=True):
        """An open copy of the bundle to change; signed again behind, unless told not to."""
        with tempfile.TemporaryDirectory() as folder:
            self.path = pathlib.Path(folder) / "bundle.h5"
            shutil.copy(BUNDLE, self.path)
            with h5py.File(self.path, "r+") as file:
                self.edit(file)
                if sign:
                    file.attrs["content_sha256"] = np.bytes_(content_sha256(objects_of(file)))
            yield self.path

    def refused(self, text, edit, sign=True):
        self.edit = edit
        with self.changed(sign) as path, self.assertRaisesRegex(oscar_int2.BundleError, text) as caught:
            oscar_int2.load(path)
        self.assertIn(str(self.path), str(caught.exception))

    def test_a_full_bundle_and_its_serving_profile_are_served_alike(self):
        full, serving = (oscar_int2.load(BUNDLE.with_name(name)) for name in
                         ("tiny-gqa.h5", "tiny-gqa.serving.h5"))
        self.assertNotEqual(full.content_sha256, serving.content_sha256)
        self.assertEqual(full.serving_sha256, serving.content_sha256)
        self.assertEqual(serving.serving_sha256, serving.content_sha256)

    def test_a_stored_evaluation_is_no_part_of_what_is_served(self):
        self.edit = lambda file: file.create_group("evaluation").attrs.__setitem__("mode", np.bytes_('"decode"'))
        with self.changed() as path:
            stored = oscar_int2.load(path)
        plain = oscar_int2.load(BUNDLE)
        self.assertNotEqual(stored.content_sha256, plain.content_sha256)
        self.assertEqual(stored.serving_sha256, plain.serving_sha256)

    def test_what_is_changed_behind_the_hash_is_refused(self):
        def edit(file):
            file["layers/000/k_mean"][0, 0] += 1
        self.refused("content_sha256", edit, sign=False)

    def test_missing_misshapen_and_foreign_parts_are_refused_by_name(self):
        def without(name):
            return lambda file: file.__delitem__(name)

        def attribute(where, name, value):
            return lambda file: file[where].attrs.__setitem__(name, value)

        def replaced(name, change):
            def edit(file):
                values = file[name][()]
                del file[name]
                file[name] = change(values)
            return edit

        cases = {
            "k_rotation: is missing": without("layers/003/k_rotation"),
            "7 layers of a model of 8": without("layers/007"),
            "attribute format_version is missing": lambda f: f.attrs.__delitem__("format_version"),
            "format_version 2": attribute("/", "format_version", np.int64(2)),
            "no rotation bundle": attribute("/", "format", np.bytes_("oscar-statistics")),
            "needs a reader of three_bits": attribute(
                "/", "required_features", np.bytes_(json.dumps(["key_centres", "three_bits"]))),
            "is not JSON": attribute("/", "required_features", np.bytes_("[")),
            "fitted for another backend's codec": attribute("quantizer", "ties", np.bytes_("even")),
            "attribute bits is 3": attribute("quantizer", "bits", np.int64(3)),
            "expected <f4": replaced("layers/001/k_mean", lambda x: x.astype("<f8")),
            "v_rotation: expected": replaced("layers/001/v_rotation", lambda x: x[:, :64]),
            "not finite": replaced("layers/002/v_mean", lambda x: np.where(x == x[0, 0], np.nan, x)),
            "away from the identity": replaced("layers/002/q_rotation", lambda x: x * 1.001),
            "not unit upper triangular": replaced("layers/002/k_feedback", lambda x: 2 * x),
            "outside 0 to 1": replaced("layers/002/k_clip_ratio", lambda x: x + 1),
            "kind or scale correction": replaced("layers/002/k_scale_correction", lambda x: x + 7),
        }
        for text, edit in cases.items():
            with self.subTest(text):
                self.refused(text, edit)

    def test_local_layers_are_read_without_transforms_and_not_served(self):
        def edit(file):
            layer = file["layers/003"]
            for name in list(layer):
                del layer[name]
            for name, value in (("attention", np.bytes_("local")), ("quantized", np.int64(0)),
                                ("sliding_window", np.int64(512))):
                layer.attrs[name] = value
        self.edit = edit
        with self.changed() as path:
            bundle = oscar_int2.load(path)
        self.assertIsNone(bundle.layers[3].key)
        self.assertIsNotNone(bundle.layers[2].key)
        with self.assertRaisesRegex(oscar_int2.UnsupportedError,
                                    "layer 3 .* local attention over 512 tokens"):
            check_served(bundle)

    def test_links_and_data_outside_the_file_are_refused(self):
        def soft(file):
            file["layers/000/extra"] = h5py.SoftLink("/layers/001")

        def external(file):
            file["layers/000/extra"] = h5py.ExternalLink("/etc/passwd", "/")
        for edit in (soft, external):
            self.refused("links are not followed", edit, sign=False)

        def stored_outside(file):
            del file["layers/000/k_mean"]
            file["layers/000"].create_dataset("k_mean", (2, 128), "<f4",
                                              external=[("/dev/zero", 0, 1024)])
        self.refused("outside the file", stored_outside, sign=False)

    def test_no_bundle_at_all(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\x89HDF\r\n\x1a\n" + bytes(100))
            file.flush()
            with self.assertRaisesRegex(oscar_int2.BundleError, "HDF5"):
                oscar_int2.load(file.name)
        with self.assertRaises(FileNotFoundError):
            oscar_int2.load("/no/such/file.h5")


class Version01(unittest.TestCase):
    """Bundles that leave out what the rest of them says (lib/oscar/bundle/derived.h)."""

    def test_they_are_refused_with_the_command_that_writes_them_anew(self):
        earlier = SOURCE / "tests" / "bundle" / "version_0_1" / "left_out.h5"
        with self.assertRaisesRegex(oscar_int2.BundleError, "left_out.h5.*oscar-bundle rewrite IN OUT"):
            oscar_int2.load(earlier)
        with tempfile.TemporaryDirectory() as folder:
            anew = pathlib.Path(folder) / "anew.h5"
            subprocess.run([BIN / "oscar-bundle", "rewrite", earlier, anew], check=True)
            bundle = oscar_int2.load(anew)
            with h5py.File(earlier) as file:
                self.assertEqual(bundle.content_sha256, file.attrs["content_sha256"].decode())


class Loaded(unittest.TestCase):
    def test_the_defaults_of_a_server_that_loads_a_model_change_nothing(self):
        plain = oscar_int2.load(BUNDLE)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                loaded = oscar_int2.load(BUNDLE)
            self.assertEqual(torch.get_default_dtype(), torch.bfloat16)
        finally:
            torch.set_default_dtype(before)
        for i, layer in plain.layers.items():
            for ours, theirs in ((layer.key, loaded.layers[i].key), (layer.value, loaded.layers[i].value)):
                for name, value in vars(ours).items():
                    if isinstance(value, torch.Tensor):
                        torch.testing.assert_close(getattr(theirs, name), value, rtol=0, atol=0)

    def test_it_holds_what_the_file_holds(self):
        bundle = oscar_int2.load(BUNDLE)
        with h5py.File(BUNDLE) as file:
            self.assertEqual(list(bundle.layers), list(range(8)))
            for index, layer in bundle.layers.items():
                group = file[f"layers/{index:03}"]
                for letter, side in (("k", layer.key), ("v", layer.value)):
                    for field in ("forward", "mean", "clip_ratio", "feedback", "metric"):
                        name = f"{letter}_{'rotation' if field == 'forward' else field}"
                        self.assertEqual(getattr(side, field) is None, name not in group)
                        if name in group:
                            np.testing.assert_array_equal(getattr(side, field), group[name])
                np.testing.assert_array_equal(layer.key.partner, group["q_rotation"])
                np.testing.assert_array_equal(layer.key.key_centers, group["k_centres"])
        quantizer = bundle.quantizer
        self.assertEqual((quantizer.sink_tokens, quantizer.recent_tokens, quantizer.quant_group_size),
                         (64, 256, 128))

    def test_a_model_of_another_shape_or_other_positions_is_refused(self):
        bundle, config = oscar_int2.load(BUNDLE), tiny_model().config
        bundle.check_model(config)
        for change, text in (({"num_hidden_layers": 9}, "num_layers is 9 here and 8"),
                             ({"num_key_value_heads": 4}, "num_kv_heads"),
                             ({"architectures": ["LlamaForCausalLM"]}, "architecture"),
                             ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
                             ({"rope_parameters": {"partial_rotary_factor": 0.5}},
                              "partial_rotary_factor"),
                             ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type")):
            other = types.SimpleNamespace(**{**config.to_dict(), **change})
            with self.subTest(text), self.assertRaisesRegex(oscar_int2.BundleMismatchError, text):
                bundle.check_model(other)

    def test_settings_of_the_config_that_change_the_computation_are_compared(self):
        bundle, config = oscar_int2.load(BUNDLE), tiny_model().config
        bundle = dataclasses.replace(bundle, model=dataclasses.replace(bundle.model, numerics={
            "rms_norm_eps": 9.999999974752427e-07, "hidden_act": "silu", "num_experts_per_tok": 8}))  # as a GGUF states it
        bundle.check_model(types.SimpleNamespace(**{**config.to_dict(), "rms_norm_eps": 1e-6}))
        for change, text in (({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 here and 9.99"),
                             ({"hidden_act": "gelu"}, "hidden_act gelu here and silu"),
                             ({"num_experts_per_tok": 4}, "num_experts_per_tok 4 here and 8")):
            other = types.SimpleNamespace(**{**config.to_dict(), "rms_norm_eps": 1e-6, **change})
            with self.subTest(text), self.assertRaisesRegex(oscar_int2.BundleMismatchError, text):
                bundle.check_model(other)

    def test_both_engines_record_the_same_settings(self):
        header = (SOURCE / "lib/oscar/model/checkpoint/config.h").read_text()
        keys = re.search(r"kNumericKeys\[\] = \{([^}]*)\}", header)[1]
        self.assertEqual(tuple(re.findall(r'"(\w+)"', keys)), oscar_int2.bundle.NUMERIC_KEYS)

    def test_what_a_model_turns_by_is_compared_whatever_its_config_says(self):
        bundle, model = oscar_int2.load(BUNDLE), tiny_model()
        bundle.check_frequencies(model)
        bundle.check_frequencies(model.half())
        half = model.model.rotary_emb.inv_freq
        for other in half[::2].contiguous(), half * 1.1:
            model.model.rotary_emb.inv_freq = other
            with self.assertRaisesRegex(oscar_int2.BundleMismatchError, "of other positions: this model turns"):
                bundle.check_frequencies(model)

    def test_frequencies_that_a_model_has_rounded_are_warned_of(self):
        bundle, model = oscar_int2.load(BUNDLE), tiny_model()
        self.assertIsNone(bundle.rounded_frequencies(model))
        with self.assertLogs("oscar_int2", "WARNING") as log:
            oscar_int2.transformers.apply(model.bfloat16(), bundle, weights="any")
        self.assertIn("frequencies of this model are rounded to bfloat16", log.output[0])
        few = dataclasses.replace(bundle, positions=4)
        self.assertIsNone(few.rounded_frequencies(model))  # no key turns far enough

    def test_dimensions_that_turn_and_yarns_truncate_are_compared(self):
        bundle, config = oscar_int2.load(BUNDLE), tiny_model().config
        as_bundle = lambda **rope: dataclasses.replace(bundle, model=dataclasses.replace(bundle.model, rope={
            **bundle.model.rope, **rope}))
        as_config = lambda **keys: types.SimpleNamespace(**{**config.to_dict(), **keys})
        part = as_bundle(partial_rotary_factor=0.5)
        part.check_model(as_config(rotary_dim=config.head_dim // 2))
        with self.assertRaisesRegex(oscar_int2.BundleMismatchError, "partial_rotary_factor is 0.25 here and 0.5"):
            part.check_model(as_config(rotary_dim=config.head_dim // 4))
        yarn = dict(rope_type="yarn", rope_theta=config.rope_parameters["rope_theta"], factor=4.0,
                    original_max_position_embeddings=1024, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0)
        whole = as_bundle(**yarn, truncate=True)
        whole.check_model(as_config(rope_parameters=yarn))
        with self.assertRaisesRegex(oscar_int2.BundleMismatchError, "truncate is False here and True"):
            whole.check_model(as_config(rope_parameters={**yarn, "truncate": False}))

    def test_a_model_whose_rope_is_scaled_in_another_way_is_refused(self):
        bundle, config = oscar_int2.load(BUNDLE), tiny_model().config
        llama3 = {**bundle.model.rope, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        scaled = dataclasses.replace(bundle, model=dataclasses.replace(bundle.model, rope=llama3))
        for name, value in (("factor", 32.0), ("low_freq_factor", 2.0), ("high_freq_factor", 8.0),
                            ("original_max_position_embeddings", 4096)):
            config_as = lambda rope: types.SimpleNamespace(**{**config.to_dict(), "rope_parameters": rope})
            scaled.check_model(config_as(llama3))
            with self.subTest(name), self.assertRaisesRegex(oscar_int2.BundleMismatchError, name):
                scaled.check_model(config_as({**llama3, name: value}))

    def test_a_model_whose_yarn_multiplies_otherwise_is_refused(self):
        bundle, config = oscar_int2.load(BUNDLE), tiny_model().config
        yarn = {"rope_type": "yarn", "rope_theta": bundle.model.rope["rope_theta"], "factor": 4.0,
                "original_max_position_embeddings": 32768}
        for said, stored in (({}, 1.1386294361), ({"attention_factor": 1.3}, 1.3),
                             ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.1386294361 / 1.0693147181)):
            scaled = dataclasses.replace(bundle, model=dataclasses.replace(
                bundle.model, rope={**bundle.model.rope, **yarn, "attention_factor": stored}))
            config_as = lambda more: types.SimpleNamespace(
                **{**config.to_dict(), "rope_parameters": {**yarn, **more}})
            scaled.check_model(config_as(said))
            with self.assertRaisesRegex(oscar_int2.BundleMismatchError, "attention_factor is 2"):
                scaled.check_model(config_as({"attention_factor": 2.0}))

    def test_rope_frequencies_are_those_of_transformers(self):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        cases = {
            "linear": {"factor": 4.0},
            "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192},
            "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 32.0,
                     "beta_slow": 1.0, "truncate": True},
        }
        for kind, parameters in cases.items():
            parameters = {"rope_type": kind, "rope_theta": 5e5, **parameters}
            config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128,
                                 max_position_embeddings=131072, rope_parameters=parameters)
            expected = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].double().numpy()
            with self.subTest(kind):
                np.testing.assert_allclose(inverse_frequencies(parameters, 128), expected, rtol=1e-6)
            config.rope_parameters["partial_rotary_factor"] = 0.5
            expected = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].double().numpy()
            self.assertEqual(len(expected), 32)
            with self.subTest(kind, part=0.5):
                np.testing.assert_allclose(
                    inverse_frequencies({**parameters, "partial_rotary_factor": 0.5}, 128), expected,
                    rtol=1e-6)
        with self.assertRaisesRegex(oscar_int2.BundleError, "even number"):
            inverse_frequencies({"rope_type": "default", "rope_theta": 1e4,
                                 "partial_rotary_factor": 0.2}, 16)

    def test_centers_turn_with_the_part_of_the_head_that_rope_turns(self):
        bundle = small.random_bundle("Glm4Moe", "shaped")
        key = bundle.layers[1].key
        table = key_center_table(bundle, 1).double()
        half = small.HEAD_DIM // 4
        frequencies = small.THETA ** (-np.arange(half) / half)
        for segment in (0, 3):
            angles = torch.from_numpy((1024 * segment + 511.5) * frequencies)
            center = key.key_centers[1, 0].double()
            x, y, still = center.split((half, half, small.HEAD_DIM - 2 * half))
            turned = torch.cat((x * angles.cos() - y * angles.sin(),
                                y * angles.cos() + x * angles.sin(), still))
            row = (turned - key.mean[1].double()) @ key.forward[1].double()
            torch.testing.assert_close(table[segment, 1, 0], row, rtol=2**-7, atol=2**-7)

    def test_a_gguf_file_gives_a_divisor_for_each_rope_frequency(self):
        parameters = {"rope_type": "freq_factors", "rope_theta": 1e4, "freq_factors": [1.0, 2.0, 8.0, 8.0]}
        np.testing.assert_allclose(inverse_frequencies(parameters, 8), [1, 0.1 / 2, 0.01 / 8, 0.001 / 8])
        for wrong in ([1.0, 2.0], "no numbers"):
            with self.assertRaises(oscar_int2.BundleError):
                inverse_frequencies({**parameters, "freq_factors": wrong}, 8)

    def test_centers_are_turned_to_the_middle_of_each_segment(self):
        bundle = oscar_int2.load(BUNDLE)
        key = bundle.layers[2].key
        table = key_center_table(bundle, 2).double()
        self.assertEqual(tuple(table.shape), (128, 2, 2, 128))
        frequencies = 1e6 ** (-np.arange(64) / 64)
        for segment, head, which in ((0, 0, 0), (3, 1, 1), (127, 0, 1)):
            center = key.key_centers[head, which].double().numpy()
            turning = np.exp(1j * (1024 * segment + 511.5) * frequencies)
            turned = (center[:64] + 1j * center[64:]) * turning
            row = np.concatenate((turned.real, turned.imag)) - key.mean[head].double().numpy()
            row = row @ key.forward[head].double().numpy()
            np.testing.assert_allclose(table[segment, head, which], row, rtol=2**-8, atol=1e-6)


if __name__ == "__main__":
    unittest.main()
