#!/usr/bin/env python3
"""Calibration in transformers of many families, made tiny at random: what is collected against rows that an attention of
this test records, and predictions against the models' own attention."""
import functools
import os
import pathlib
import sys
import unittest
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_BIN"]).parent / "python"))
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from oscar_int2.calibration.collect import Collection
from oscar_int2.calibration.interface import exact_attention, observing
from oscar_int2.calibration.layers import run_layers
from oscar_int2.calibration.model import check_config, observed
from oscar_int2.errors import UnsupportedError
from oscar_int2.recipe import CacheFormat
from tiny_transformers import FAMILIES, REFUSED, random_ids, tiny_model

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

FORMAT = CacheFormat(quant_group_size=0, sink_tokens=8, recent_tokens=16)
FULL, LOCAL = ["full"] * 4, ["local", "full"] * 2
# Kinds of layers, dimensions that turn, whether pairs are neighbours: what each model computes by its source.
EXPECTED = {
    "glm4": (FULL, 8, True), "glm4_moe": (FULL, 8, False), "mistral": (["sliding"] * 4, 16, False),
    "gemma2": (["sliding", "full"] * 2, 16, False), "gemma3": (LOCAL, 16, False), "gemma3 whole": (LOCAL, 16, False),
    "qwen3_5": (["none"] * 3 + ["full"], 8, False), "qwen3_5 whole": (["none"] * 3 + ["full"], 8, False),
    "qwen3_5_moe": (["none"] * 3 + ["full"], 8, False), "qwen3_next": (["none"] * 3 + ["full"], 8, False),
    "gpt_oss": (["sliding", "full"] * 2, 16, False), "minimax_m2": (FULL, 8, False),
    "step3p7 whole": (["full", "local"] * 2, 8, False), "cohere": (FULL, 16, True), "cohere2": (LOCAL, 0, False),
    "exaone4": (LOCAL, 0, False), "olmo3": (["sliding", "full"] * 2, 16, False), "phi3 longrope": (FULL, 12, False),
    "llama4": (LOCAL, 0, False), "gpt2": (FULL, 0, False), "gpt_neox": (FULL, 8, False)}
GATED = {"qwen3_5", "qwen3_5 whole", "qwen3_5_moe", "qwen3_next", "step3p7 whole"}
# Of transformers 4 some are missing. Others read other keys of their config, or have attention code of their own.
OLDER = transformers.__version__.startswith("4.")
OF_VERSION_5 = {"qwen3_5", "qwen3_5 whole", "qwen3_5_moe", "step3p7 whole", "minimax_m2", "hy_v3", "ministral3",
                "mistral3 whole", "qwen3_vl whole", "qwen3_next", "phi3 longrope", "gpt2"}
ROWS = {}


def recorder(module, q, k, v, mask, scaling=None, softcap=None, s_aux=None, **_):
    """Attention in float64, score by score; keeps the rows of each layer."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scores = q.double() @ keys.mT * (q.shape[-1]**-0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1) if mask is None else scores + mask.double()
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.double()[None, :, None, None].expand(*scores.shape[:-1], 1)), -1)
    p = scores.softmax(-1)
    o = p[..., :keys.shape[2]] @ values
    ROWS.setdefault(module, []).append((q, k, v, o, p[..., :keys.shape[2]]))
    return o.to(q.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("test_recorder", recorder)
AttentionMaskInterface.register("test_recorder", eager_mask)


def batches():
    return [random_ids(2, 80, 1), random_ids(1, 57, 2)]


@functools.cache
def collected(name):
    model = tiny_model(name)
    with observed(model):
        return model, Collection(model, batches(), FORMAT)


@torch.no_grad()
def recorded(model):
    """{layer: rows of its attention in each batch}, and logits."""
    ROWS.clear()
    with observed(model):
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation = "test_recorder"
        logits = [model(ids, use_cache=False).logits for ids in batches()]
    return dict(ROWS), logits


def moments(rows, heads):
    """Sums of x^T x and x [heads, ...] over batches of [batch, H, T, d]."""
    flat = torch.cat([x.detach().double().reshape(x.shape[0], heads, -1, x.shape[-1]).transpose(0, 1).flatten(1, 2) for x in rows], 1)
    return flat.mT @ flat, flat.sum(1)


def relative(a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def for_each_family(test):
    @functools.wraps(test)
    def run(self):
        for name in FAMILIES:
            with self.subTest(family=name):
                if OLDER and name in OF_VERSION_5:
                    self.skipTest(f"transformers {transformers.__version__} has not all of it")
                test(self, name)
    return run


class EveryFamily(unittest.TestCase):
    def test_at_least_25_families_are_tried(self):
        tried = {folder for name, (folder, *_) in FAMILIES.items() if not (OLDER and name in OF_VERSION_5)}
        self.assertGreaterEqual(len(tried), 20 if OLDER else 25)

    @for_each_family
    def test_layers_are_what_the_source_of_each_family_says(self, name):
        _, found = collected(name)
        kinds, turning, interleaved = EXPECTED.get(name, (FULL, 16, False))
        self.assertEqual(found.kinds, kinds)
        self.assertEqual(2 * len(found.base.rope.inv_freq), turning)
        self.assertEqual(found.base.rope.interleaved, interleaved)
        self.assertEqual(found.base.facts.gated, name in GATED)

    def test_layers_without_rope_are_told_among_others(self):
        _, found = collected("smollm3")
        self.assertEqual([attributes.get("turned", 1) for attributes, _ in found.file_layers()], [1, 0, 1, 0])

    @for_each_family
    def test_sums_are_those_of_recorded_rows(self, name):
        model, found = collected(name)
        rows, _ = recorded(model)
        layers = list(found.file_layers())
        fitted = [i for i, kind in enumerate(found.kinds) if kind in ("full", "sliding")]
        self.assertTrue(fitted)
        for i in fitted:
            seen, datasets = rows[found.layers[i].facts.attention], layers[i][1]
            heads = found.base.facts.shape[0]
            for letter, place in (("q", 0), ("k", 1), ("v", 2), ("attn_out", 3)):
                moment, total = moments([batch[place] for batch in seen], heads)
                self.assertLess(relative(datasets[f"statistics/{letter}_moment"], moment), 2e-5, (i, letter))
                self.assertLess(relative(datasets[f"statistics/{letter}_sum"], total), 2e-5, (i, letter))
            self.assertEqual(datasets["statistics/count_kv"], 2 * 80 + 57)

    @for_each_family
    def test_values_weighted_by_attention_are_those_of_recorded_weights(self, name):
        model, found = collected(name)
        rows, _ = recorded(model)
        i = found.kinds.index("full" if "full" in found.kinds else "sliding")
        expected = self.attended_values(rows[found.layers[i].facts.attention], found.base.facts.shape[0])
        self.assertLess(relative(list(found.file_layers())[i][1]["statistics/v_attended_moment"], expected), 2e-5)

    @staticmethod
    def attended_values(seen, heads):
        """By loops over queries (math 2.6)."""
        total = 0
        for _, _, v, _, p in seen:
            batch, tokens = v.shape[0], v.shape[2]
            weight = torch.zeros(batch, heads, tokens, dtype=torch.float64)
            for m in range(-(-tokens // 16)):
                i = 16 * m + 7 * m % 16
                end = i + 1 - FORMAT.recent_tokens  # rows from the sink on that have left the window
                reads = [t for t in range(FORMAT.sink_tokens, max(end, 0)) if i < tokens and p[:, :, i, t].max() > 0]
                for t in reads:
                    squares = p[:, :, i, t].reshape(batch, heads, -1).square().sum(-1)
                    weight[:, :, t] += 0.9 * squares
                    weight[:, :, reads] += 0.1 * squares[..., None] / len(reads)
            total = total + torch.einsum("bht,bhtd,bhte->hde", weight, v.double(), v.double())
        return total

    @for_each_family
    def test_keys_turn_back_to_one_position(self, name):
        """A pair of a key has the same length at every position, and RoPE is undone: two tokens alike at different
        positions have the same key before RoPE in the first layer."""
        model, found = collected(name)
        i = next(i for i, layer in enumerate(found.layers) if layer is not None)
        if i or name == "gpt2":  # layers before it mix tokens; positions are in gpt2's embeddings
            return
        ids = torch.full((1, 40), 5)
        kept = []
        with observed(model), torch.no_grad():
            with observing(lambda call: (kept.append(call.k), exact_attention(call))[1]):
                model(ids, use_cache=False)
        back = found.layers[0].rope.back(kept[0])
        self.assertLess(float((back - back[:, :, :1]).abs().max() / back.abs().max()), 2e-3)

    @for_each_family
    def test_predictions_are_the_models_own(self, name):
        model, _ = collected(name)
        _, expected = recorded(model)
        with observed(model):
            ours = run_layers(model, batches(), visit=run_exactly)
            for batch, logits in enumerate(expected):
                off = (ours.logits(batch) - logits).abs().max() / logits.abs().max()
                self.assertLess(float(off), 5e-5)

    @unittest.skipIf(OLDER, "its gated families read another config")
    def test_a_gate_weighs_the_metric_of_values(self):
        for name in sorted(GATED):
            with self.subTest(family=name):
                self.check_metric(name)

    def test_without_a_gate_the_metric_is_of_the_weights(self):
        self.check_metric("llama")

    def check_metric(self, name):
        """The mean of |(e s) W_O|^2 over tokens for an error e of a value that every query head sees."""
        model, found = collected(name)
        i = found.kinds.index("full")
        facts = found.layers[i].facts
        into = []
        hook = facts.output.register_forward_pre_hook(lambda _, args: into.append(args[0]))
        rows, _ = recorded(model)
        hook.remove()
        o = torch.cat([batch[3].transpose(1, 2).flatten(0, 1) for batch in rows[facts.attention]])  # [rows, Hq, d]
        s = torch.cat([x.reshape(-1, *o.shape[1:]) for x in into]).double() / o
        w = facts.output.weight.detach().double().view(-1, *o.shape[1:])  # [hidden, Hq, d]
        e = torch.randn(o.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        heads = facts.shape[0]
        cost = torch.einsum("d,njd,hjd->njh", e, s, w).square().sum(-1).mean(0).view(heads, -1).sum(1)
        ours = torch.einsum("d,hde,e->h", e, torch.as_tensor(found.metric(i)), e)
        self.assertLess(relative(ours, cost), 1e-4)


def run_exactly(index, batch, layer, arguments, keywords, run):
    with observing(exact_attention):
        return run()


class Refusals(unittest.TestCase):
    def refused(self, name, words, cases=REFUSED, **more):
        with self.assertRaisesRegex(UnsupportedError, words):
            model = tiny_model(name, cases, **more)
            check_config(model.config)
            with observed(model):
                Collection(model, batches(), FORMAT)

    def test_latent_attention_is_refused_by_its_config(self):
        self.refused("deepseek_v3", "MLA")

    def test_latent_attention_is_refused_by_its_cache(self):
        model = tiny_model("deepseek_v3", REFUSED)
        seen_first = "keys turn with positions in a way" if OLDER else "cache holds"
        with self.assertRaisesRegex(UnsupportedError, f"layer 0 .*{seen_first}"), observed(model):
            Collection(model, batches(), FORMAT)

    def test_attention_of_its_own_is_refused(self):
        self.refused("bloom", "attention interface")

    @unittest.skipIf(OLDER, "it has no Gemma 4")
    def test_heads_that_no_row_holds_are_refused(self):
        self.refused("gemma4", "512 dimensions")

    def test_overflow_names_layer_and_sum(self):
        model = tiny_model("llama")
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1e30)
            model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
        with self.assertRaisesRegex(UnsupportedError, "layer 1.*not finite"), observed(model):
            list(Collection(model, batches(), FORMAT).file_layers())


if __name__ == "__main__":
    torch.set_num_threads(2)
    unittest.main(verbosity=2)
