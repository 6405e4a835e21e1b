#!/usr/bin/env python3
"""Weights that vLLM loads, beside the bundle that they are served with."""
import os
import pathlib
import shutil
import tempfile
import unittest
from unittest import mock

import vllm_case as case
import torch
from vllm_case import needs_vllm, vllm


@needs_vllm
class OtherWeights(unittest.TestCase):
    """Starts with weights that the bundle was not calibrated on."""

    def start(self, bundle, model=case.MODEL, accepted=None, **options):
        with case.bundle_variable(bundle), mock.patch.dict(os.environ):
            if accepted:
                os.environ["VLLM_OSCAR_WEIGHTS"] = accepted
            with self.assertLogs("vllm.oscar_int2", "WARNING") as said:
                llm = vllm.LLM(str(model), **case.OPTIONS, **options)
        llm.llm_engine.engine_core.shutdown()
        return "\n".join(said.output)

    def refused(self, *words, **options):
        from oscar_int2 import BundleMismatchError

        with self.assertRaises(BundleMismatchError) as caught:
            self.start(**options)
        for word in ("was calibrated on other weights", "VLLM_OSCAR_WEIGHTS=any", *words):
            self.assertIn(word, str(caught.exception))

    def test_another_checkpoint_of_the_same_shape_stops_the_start(self):
        def other(samples):
            return torch.randn(samples.shape, generator=torch.Generator().manual_seed(0)) * samples.std()

        with case.edited_bundle(case.samples_of_the_model(other)) as bundle:
            self.refused("bundle.h5", "W_Q of layer 0 differs, and 31 more of 72", "another model",
                         bundle=bundle)

    def test_a_fine_tune_stops_the_start_as_one(self):
        with case.edited_bundle(case.samples_of_the_model(lambda samples: samples * 1.02)) as bundle:
            self.refused("a fine-tune of the calibrated model", bundle=bundle)

    def test_weights_that_are_not_loaded_stop_the_start_or_are_accepted_by_name(self):
        with case.edited_bundle(case.samples_of_the_model()) as bundle:
            self.refused("weights that were never loaded", bundle=bundle, load_format="dummy")
            said = self.start(bundle, accepted="any", load_format="dummy")
        self.assertRegex(said, "bundle.h5 was calibrated on other weights than are served: .*docs/serving.md")
        with case.edited_bundle(case.without_samples) as bundle:
            self.assertIn("weights could not be compared", self.start(bundle, load_format="dummy"))

    def test_a_bundle_without_samples_knows_its_checkpoint_by_the_files(self):
        with tempfile.TemporaryDirectory() as folder:
            model = pathlib.Path(folder) / "model"
            shutil.copytree(case.MODEL, model)
            shard = sorted(model.glob("*.safetensors"))[0]
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
            with case.edited_bundle(case.without_samples) as bundle:
                self.refused("the fingerprint of", bundle=bundle, model=model)


@needs_vllm
class Ranks(unittest.TestCase):
    """A worker's part of a model, where kernels have not packed it."""

    def loaded(self, rank):
        """One layer with KV head `rank` of two, 2 query heads each, and samples of the whole layer."""
        from oscar_int2 import weight_samples
        from oscar_int2.vllm.backend import OscarAttention
        from oscar_int2.vllm.weights import Loaded

        torch.manual_seed(3)
        q, k, v, o = (torch.randn(*size) for size in ((32, 64), (16, 64), (16, 64), (64, 32)))
        samples = torch.stack([weight_samples.sample(x, 2, x is o).bfloat16().float() for x in (q, k, v, o)], 1)
        impl = OscarAttention.__new__(OscarAttention)
        impl.num_kv_heads = 1
        layer = torch.nn.Module()
        layer.attn = torch.nn.Module()
        layer.attn.impl = impl
        layer.qkv_proj, layer.o_proj = torch.nn.Module(), torch.nn.Module()
        layer.qkv_proj.tp_size, layer.qkv_proj.tp_rank = 2, rank
        layer.qkv_proj.weight = torch.nn.Parameter(torch.cat([x.chunk(2)[rank] for x in (q, k, v)]))
        layer.o_proj.weight = torch.nn.Parameter(o.chunk(2, 1)[rank])
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([torch.nn.Module()])
        model.layers[0].self_attn = layer
        bundle = mock.Mock(path="ours.h5", layers={0: mock.Mock(
            weight_samples=samples, vector_samples=None, num_kv_heads=2, num_qo_heads=4, head_dim=8)})
        bundle.model.hidden_size = 64
        config = mock.Mock(additional_config={"oscar_int2": {"weights": "same"}})
        config.load_config.load_format = "dummy"  # there are no files
        with mock.patch("oscar_int2.vllm.settings.bundle", lambda config: bundle):
            return Loaded(model, config), layer

    def test_each_rank_compares_its_own_heads(self):
        from oscar_int2 import BundleMismatchError

        for rank in (0, 1):
            loaded, layer = self.loaded(rank)
            loaded.check()
            layer.qkv_proj.weight.data[24:] *= 1.01  # values, behind 16 rows of queries and 8 of keys
            with self.assertRaisesRegex(BundleMismatchError, "W_V of layer 0 differs, and 0 more of 4"):
                loaded.check()

    def test_weights_that_have_become_others_are_said_once(self):
        loaded, layer = self.loaded(1)
        with self.assertNoLogs("vllm.oscar_int2"):
            loaded.again(0)
        layer.o_proj.weight.data *= 1.01
        with self.assertLogs("vllm.oscar_int2", "WARNING") as said:
            loaded.again(0)
            loaded.again(0)
        self.assertEqual(len(said.output), 1)
        self.assertRegex(said.output[0], "loaded again, and the bundle was calibrated on others: W_O of layer 0")


if __name__ == "__main__":
    unittest.main(verbosity=2)
