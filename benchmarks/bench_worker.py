"""What bench_vllm.py changes in each process of an engine. Workers start anew and import this (worker_extension_cls).

OSCAR_BENCH_MODEL: a folder with a config.json, whose bundle is random. OSCAR_BENCH_QUICK_PROMPTS: a kind of cache,
over which attention of prompts is left out.
"""
import os

left_out = []  # an item for every call without attention


class Worker:
    """A method of each worker."""

    def prompts_left_out(self):
        return len(left_out)


def take_random_bundle(model):
    """Whatever the engine names, a bundle with random numbers of the right kind is loaded."""
    from bench_serving import random_bundle
    from oscar_int2.vllm import settings
    from transformers import AutoConfig

    bundle = random_bundle(AutoConfig.from_pretrained(model))
    settings._stamp, settings._load = lambda path: None, lambda path, stamp: bundle


def leave_out_int2():
    from oscar_int2.vllm.backend import OscarAttention

    def write_alone(self, pages, q, k, v, metadata, out):
        self.codec.append(pages, metadata.appended, *self.codec.transform_kv(k, v))
        left_out.append(None)
        out.zero_()

    OscarAttention._read_prompts = write_alone


def leave_out_flash_attention():
    """Of vLLM's own steps with prompts; rows enter its cache outside of forward()."""
    import torch
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    original = FlashAttentionImpl.forward

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **options):
        if (attn_metadata is None or attn_metadata.max_query_len == 1
                or torch.cuda.is_current_stream_capturing()):
            return original(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **options)
        left_out.append(None)
        return output.zero_()

    FlashAttentionImpl.forward = forward


if os.environ.get("OSCAR_BENCH_MODEL"):
    take_random_bundle(os.environ["OSCAR_BENCH_MODEL"])
if os.environ.get("OSCAR_BENCH_QUICK_PROMPTS"):
    (leave_out_int2 if os.environ["OSCAR_BENCH_QUICK_PROMPTS"] == "int2" else leave_out_flash_attention)()
