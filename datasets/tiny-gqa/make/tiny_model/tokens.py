"""The tokenizer (byte-level BPE with the pre-tokenizer of Qwen2 and Qwen3) and token streams made with it."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np

from .settings import END_OF_TEXT, SPECIAL_TOKENS

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts, vocab_size: int, max_bytes: int):
    """BPE trained on the first texts up to max_bytes; special tokens get the first ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated", False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    count, size = 0, 0
    while count < len(texts) and size < max_bytes:
        size += len(texts[count])
        count += 1
    tokenizer.train_from_iterator(texts[:count], trainer)
    return tokenizer


def load_tokenizer(folder: Path):
    """The tokenizer saved in a folder."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _encode_part(job):
    """Token ids of a list of documents, each followed by the end-of-text id."""
    folder, texts = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(folder)
    return np.concatenate([np.array(tokenizer.encode(t).ids + [END_OF_TEXT], dtype=np.uint16) for t in texts])


def encode_documents(folder: Path, texts, processes: int) -> np.ndarray:
    """One stream of ids, uint16 [n]: every document, then end-of-text."""
    size = max(1, len(texts) // (processes * 8))
    jobs = [(folder, texts[i:i + size]) for i in range(0, len(texts), size)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return np.concatenate(pool.map(_encode_part, jobs, chunksize=1))


def write_tokenizer_config(folder: Path, context: int) -> None:
    """tokenizer_config.json as transformers reads it; no chat template: this is a base model."""
    added = {str(i): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                      "special": True} for i, token in enumerate(SPECIAL_TOKENS)}
    config = {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added, "bos_token": None,
              "clean_up_tokenization_spaces": False, "eos_token": SPECIAL_TOKENS[0], "errors": "replace",
              "model_max_length": context, "pad_token": SPECIAL_TOKENS[0], "split_special_tokens": False,
              "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
