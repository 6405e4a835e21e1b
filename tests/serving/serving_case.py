"""What the tests of the Python package share: the model and the bundle that come with the repository."""
import functools
import os
import pathlib
import sys

BIN = pathlib.Path(os.environ["OSCAR_BIN"])
SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
sys.path[:0] = [str(pathlib.Path(os.environ["OSCAR_BIN"]).parent / "python"), str(SOURCE / "benchmarks")]
MODEL = SOURCE / "datasets" / "tiny-gqa"
BUNDLE = SOURCE / "rotation_zoo" / "tiny-gqa" / "tiny-gqa.h5"


@functools.cache
def tiny_model():
    """The model of the repository in bf16; do not change it."""
    import torch
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16,
                                                attn_implementation="sdpa").eval()


@functools.cache
def held_out_ids(count):
    """Ids of held-out text, `count` of them."""
    import json
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = []
    for line in (MODEL / "heldout.jsonl").read_text().splitlines():
        ids += tokenizer(json.loads(line)["text"])["input_ids"]
        if len(ids) >= count:
            return ids[:count]
    raise ValueError(f"{len(ids)} ids of held-out text")


def kl_divergence(reference, logits):
    """[rows] KL in nats of two [rows, vocab]."""
    p, q = (x.float().log_softmax(-1) for x in (reference, logits))
    return (p.exp() * (p - q)).sum(-1)
