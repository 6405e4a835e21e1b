#!/usr/bin/env python3
"""GGUF as MODEL: values to the bit of the gguf package, logits as transformers', tokenizers alike.

Checkpoints of random weights are written with the gguf package in several types, and what the file
holds, dequantized by that package, is what transformers runs. Logits are held to 1e-4 of max |logit|
and every moment to 1e-5, as in test_forward.py.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "golden"))
from forward_runs import compare, ours, reference
from make_ggml_goldens import NAMES, random_blocks, values_of
from random_families import LLAMA3, YARN, config_json, family, make_weights, write_checkpoint
from support.gguf_files import Type, write_model

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

PROGRAM = pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-test-gguf"
# Rows of whole blocks of 256.
WIDE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=32)
K_TYPES = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL)


class Scratch(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)


class Values(Scratch):
    def test_random_blocks_of_every_type_are_decoded_to_the_bit(self):
        blocks = {name: random_blocks(name, 4096, seed) for seed, name in enumerate(NAMES)}
        writer = gguf.GGUFWriter(self.folder / "all.gguf", "llama")
        for name, data in blocks.items():
            rows = data.reshape(16, -1)
            if name in ("F32", "F16"):
                rows = rows.view(np.float32 if name == "F32" else np.float16)
            writer.add_tensor(name, rows, raw_dtype=Type[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        subprocess.run([PROGRAM, "tensors", self.folder / "all.gguf", self.folder], check=True)
        for name, data in blocks.items():
            with self.subTest(type=name):
                got = np.fromfile(self.folder / f"{name}.f32", np.uint32)
                np.testing.assert_array_equal(got, values_of(name, data).view(np.uint32))


def factors_of(rope, theta, head_dim):
    """What Llama 3's scaling divides the frequencies by, as a converter writes it."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * inverse / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).numpy()


def add_scaling(rope):
    def add(writer):
        kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    return add


LLAMA31 = dict(LLAMA3, original_max_position_embeddings=8192)
CASES = {
    "llama": family("llama", theta=5e5, max_position_embeddings=4096, **WIDE),
    "llama tied": family("llama", theta=1e5, max_position_embeddings=4096, tie_word_embeddings=True,
                         **WIDE),
    "llama biases": family("llama", attention_bias=True, mlp_bias=True, max_position_embeddings=2048,
                           **WIDE),
    "llama 3.1": family("llama", LLAMA31, theta=5e5, max_position_embeddings=131072, **WIDE),
    "llama, other factors": family("llama", LLAMA3, theta=5e5, max_position_embeddings=1024, **WIDE),
    "qwen2": family("qwen2", theta=1e6, max_position_embeddings=4096,
                    **{k: v for k, v in WIDE.items() if k != "head_dim"}),
    "qwen2 yarn": family("qwen2", YARN, theta=1e6, max_position_embeddings=64,
                         **{k: v for k, v in WIDE.items() if k != "head_dim"}),
    "qwen3": family("qwen3", theta=1e6, max_position_embeddings=4096, tie_word_embeddings=True,
                    **{**WIDE, "head_dim": 64}),
    "qwen3 linear": family("qwen3", dict(rope_type="linear", factor=2.0), theta=1e6,
                           max_position_embeddings=4096, **WIDE),
}


class Logits(Scratch):
    IDS = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(3))

    def write(self, name, kinds, paired=None):
        """The GGUF file of a case, and a folder of the same weights for transformers."""
        case = CASES[name]
        config = config_json(case, 4)
        folder = self.folder / name.replace(" ", "_")
        write_checkpoint(folder, case, 4, None)
        state = {k: v.numpy() for k, v in make_weights(folder, seed=5).items()}
        rope, factors, metadata = case["rope"], None, None
        if rope and rope["rope_type"] == "llama3":
            head_dim = config["head_dim"]
            factors = factors_of(rope, case["theta"], head_dim)
        elif rope:
            metadata = add_scaling(rope)
        path = folder.with_suffix(".gguf")
        held = write_model(path, config, state, kinds, np.random.default_rng(1), paired, metadata,
                           factors)
        save_file({k: torch.from_numpy(v) for k, v in held.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        return path, folder

    def differences(self, name, kinds, **options):
        path, folder = self.write(name, kinds, **options)
        return compare(ours(path, self.IDS), reference(folder, self.IDS), self.IDS)[0]

    def test_every_architecture_and_rope_agrees_with_transformers(self):
        for name in CASES:
            with self.subTest(model=name):
                self.assertEqual(self.differences(name, lambda _: Type.Q8_0), [])

    def test_every_kind_of_weight_agrees_with_transformers(self):
        for kind in (Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1,
                     *K_TYPES):
            with self.subTest(type=kind.name):
                self.assertEqual(self.differences("llama", lambda _, kind=kind: kind), [])

    def test_mixed_types_agree_with_transformers(self):
        def mixed(name):
            return Type.Q6_K if "v_proj" in name else Type.F16 if "embed" in name else Type.Q4_K
        for name in ("qwen2", "qwen3"):
            with self.subTest(model=name):
                self.assertEqual(self.differences(name, mixed), [])

    def test_rows_in_the_wrong_order_are_caught(self):
        for name in ("llama", "llama biases"):
            self.assertNotEqual(self.differences(name, lambda _: Type.F16, paired=False), [])
        self.assertNotEqual(self.differences("qwen2", lambda _: Type.F16, paired=True), [])


def byte_level_tables(extra=()):
    """Tokens and merges of a small byte-level BPE; `extra` tokens behind them."""
    from tokenizers import models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = (pathlib.Path(os.environ["OSCAR_SOURCE"]) / "docs/mathematics.md").read_text()
    trainer = trainers.BpeTrainer(vocab_size=1200, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return tokens + list(extra), merges


class Tokenizers(Scratch):
    SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

    def write(self, model, pre, tokens, types, **more):
        path = self.folder / "tokenizer.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        if pre:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for name, value in more.items():
            getattr(writer, "add_" + name)(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return subprocess.run([PROGRAM, "tokenizer", path], capture_output=True, text=True,
                              check=False)

    def read(self, *arguments, **more):
        result = self.write(*arguments, **more)
        self.assertEqual(result.returncode, 0, result.stderr)
        return Tokenizer.from_str(result.stdout)

    def byte_level(self, pre, **more):
        tokens, merges = byte_level_tables(self.SPECIAL)
        types = [1] * (len(tokens) - 3) + [3] * 3
        return self.read("gpt2", pre, tokens, types, token_merges=merges, **more), tokens

    def test_digits_and_the_gpt_2_split_are_those_of_smollm(self):
        tokenizer, tokens = self.byte_level("smollm")
        words = [w for w, _ in tokenizer.pre_tokenizer.pre_tokenize_str("in 2024's  end")]
        self.assertEqual(words, ["in", "Ġ", "2", "0", "2", "4", "'s", "Ġ", "Ġend"])
        ids = tokenizer.encode("<|im_start|>a<|im_end|>").ids
        self.assertEqual([tokens[i] for i in ids], ["<|im_start|>", "a", "<|im_end|>"])
        self.assertEqual(tokenizer.decode(tokenizer.encode("Größe 12, ok\n").ids), "Größe 12, ok\n")

    def test_words_are_cut_as_their_models_publish_it(self):
        expected = {
            "llama-bpe": ["It", "'S", "Ġ", "123", "45", "Ġok", "!ĊĊ", "Ġx"],
            "qwen2": ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!ĊĊ", "Ġx"],
            "gpt-2": ["It", "'", "S", "Ġ12345", "Ġok", "!", "ĊĊ", "Ġx"],
            "tekken": ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!ĊĊ", "Ġx"],
            "default": ["It", "'", "S", "Ġ", "123", "45", "Ġok", "!", "ĊĊ", "Ġx"],
        }
        for pre, words in expected.items():
            with self.subTest(pre=pre):
                tokenizer, _ = self.byte_level(pre, bos_token_id=1200)
                cut = tokenizer.pre_tokenizer.pre_tokenize_str("It'S 12345 ok!\n\n x")
                self.assertEqual([w for w, _ in cut], words)

    def test_a_bos_is_put_in_front_where_the_file_asks_for_it(self):
        tokenizer, tokens = self.byte_level("smollm", bos_token_id=1201, add_bos_token=True)
        self.assertEqual(tokenizer.encode("a").ids[0], 1201)
        tokenizer, _ = self.byte_level("smollm", bos_token_id=1201, add_bos_token=False)
        self.assertNotEqual(tokenizer.encode("a").ids[0], 1201)
        tokenizer, _ = self.byte_level("llama-bpe", bos_token_id=1201)
        self.assertEqual(tokenizer.encode("a").ids[0], 1201)
        self.assertEqual(tokenizer.encode("a", add_special_tokens=False).ids[0], tokens.index("a"))

    def scored(self):
        """A vocabulary with scores: pieces of a text by length and number."""
        pieces = "▁ t h e a n d r o i s ▁t ▁th ▁the an and ▁and he re er in on ▁a or ra ha".split()
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
        types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
        scores = [0.0] * 259 + [-float(i) if len(p) > 1 else -1e4 - i for i, p in
                                enumerate(pieces)]
        return tokens, types, scores

    def test_scores_become_merges_as_sentencepiece_applies_them(self):
        tokens, types, scores = self.scored()
        tokenizer = self.read("llama", None, tokens, types, token_scores=scores, bos_token_id=1,
                              eos_token_id=2, unk_token_id=0)
        ids = {t: i for i, t in enumerate(tokens)}
        rng = np.random.default_rng(2)
        for _ in range(500):
            text = "".join(rng.choice(list("theandrois ü"), rng.integers(1, 30)))
            self.assertEqual(tokenizer.encode(text, add_special_tokens=False).ids,
                             best_first(text, ids, scores), text)
        self.assertEqual(tokenizer.encode("the").ids, [1, ids["▁the"]])
        self.assertEqual(tokenizer.decode(tokenizer.encode("the über and").ids), "the über and")

    def test_what_cannot_be_expressed_is_refused_by_name(self):
        tokens, merges = byte_level_tables(self.SPECIAL)
        types = [1] * (len(tokens) - 3) + [3] * 3
        scored, scored_types, scores = self.scored()
        for arguments, more, words in (
                (("bert", None, tokens, types), {}, ["not implemented", "bert"]),
                (("gpt2", "chameleon", tokens, types), {}, ["pre-tokenizer", "chameleon"]),
                (("gpt2", None, tokens, types), {}, ["pre-tokenizer", "nothing"]),
                (("gpt2", "smollm", tokens, types), {}, ["merges", "missing"]),
                (("gpt2", "smollm", tokens, types[1:]), {"token_merges": merges}, ["one type"]),
                (("gpt2", "smollm", tokens + ["a"], types + [1]), {"token_merges": merges},
                 ["there twice"]),
                (("gpt2", "smollm", tokens, [9] * len(tokens)), {}, ["unknown type of a token"]),
                (("gpt2", "llama-bpe", tokens, types), {"token_merges": merges},
                 ["bos_token_id", "no token"]),
                (("gpt2", "smollm", tokens + [b"\xff"], types + [1]), {"token_merges": merges},
                 ["UTF-8"]),
                (("llama", None, scored, scored_types), {}, ["one score", "nothing"]),
                (("llama", None, scored + ["x" * 2000], scored_types + [1]),
                 {"token_scores": scores + [0.0]}, ["longer"]),
                (("llama", None, scored, scored_types),
                 {"token_scores": scores, "remove_extra_whitespaces": True}, ["joining spaces"])):
            with self.subTest(words=words):
                result = self.write(*arguments, **more)
                self.assertEqual(result.returncode, 1)
                for word in words:
                    self.assertIn(word, result.stderr)


def best_first(text, ids, scores):
    """Ids by joining the neighbours whose token has the best score, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        best = max(((scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
                    if a + b in ids), default=None)
        if best is None:
            break
        parts[-best[1]:2 - best[1]] = ["".join(parts[-best[1]:2 - best[1]])]
    return [i for part in parts for i in
            ([ids[part]] if part in ids else [3 + b for b in part.encode()])]


if __name__ == "__main__":
    unittest.main(verbosity=2)
