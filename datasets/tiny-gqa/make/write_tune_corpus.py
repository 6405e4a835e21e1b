#!/usr/bin/env python3
"""Writes text of tiny-gqa for choosing constants of the method, as datasets/tiny-gqa/tune.jsonl.

The model writes it as it wrote its other corpora (tiny_model/corpora.py), and spans that share a run
of 20 tokens with one of these are cut. The text that it was trained on is not shipped, so runs of that
are not looked for.
  write_tune_corpus.py datasets/tiny-gqa OUT.jsonl
"""
import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_model import corpora, tokens  # noqa: E402
from tiny_model.settings import Settings  # noqa: E402

SEED = 301
STREAMS = 24
STREAM_TOKENS = 4_800
LENGTHS = (4150,) * 16


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of tiny-gqa with its corpora")
    parser.add_argument("out", type=Path, help=".jsonl file to write")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = tokens.load_tokenizer(arguments.model)
    weights = {name: tensor for shard in sorted(arguments.model.glob("*.safetensors"))
               for name, tensor in load_file(shard).items()}
    torch.manual_seed(SEED)
    streams = corpora.write_streams(weights, Settings(seed=SEED), tokenizer, device, STREAMS, STREAM_TOKENS,
                                    np.random.default_rng(SEED))
    index = corpora.RunIndex(device)
    for part in ("calibration", "heldout"):
        for line in (arguments.model / f"{part}.jsonl").read_text(encoding="utf-8").splitlines():
            index.add(corpora.encode(tokenizer, json.loads(line)["text"]))
    counts = dict.fromkeys(("clean_at_once", "cut", "tokens_cut", "dropped"), 0)
    documents = corpora.take(streams, LENGTHS, index, tokenizer, counts)
    corpora.save_jsonl(arguments.out, documents)
    sizes = [len(corpora.encode(tokenizer, document["text"])) for document in documents]
    print(json.dumps(counts | {"documents": len(sizes), "tokens": sum(sizes)}))


if __name__ == "__main__":
    main()
