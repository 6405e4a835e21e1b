"""The plan of SmolLM2-135M-Instruct, a real model, on real text in three domains and on chats."""
import dataclasses

from .vocabulary import (LAYER_ERRORS, LONG, OURS, PUBLISHED, Bundle, Plan, Run, Size, Text, clip_runs, group_runs,
                         main_run, needle_runs, offset_runs, part_bundles, backend_runs, window_runs)

POSITIONS = 8192
DOMAINS = ("documentation", "code", "prose")
CHAT = "chat"
# The default calibrated on each domain; `default` itself is that of documentation.
CROSSED = {"documentation": "default", "code": "default-code", "prose": "default-prose"}
TEXTED = ("exact", "hadamard", "hadamard-clip", *PUBLISHED[:2], "perhead+clip", "portable-perhead", "orthogonal",
          "no-weights", "unsearched", "default", *list(CROSSED.values())[1:])
NEEDLED = ("hadamard-clip", "perhead", "portable-perhead", "default")
MAPPED = "default"  # whose layers are looked at alone

BUNDLES = part_bundles(POSITIONS)
BUNDLES |= {name: Bundle(f"default, calibrated on {domain}", OURS, (), searched=True, text=domain)
            for domain, name in CROSSED.items() if domain != DOMAINS[0]}


def texts(size):
    """The headline: domain by domain, each also with separators, and chats."""
    runs = [Run(domain, TEXTED, text=domain, tokens=size.headline_tokens, options=LAYER_ERRORS,
                separated=f"{domain}, separators") for domain in DOMAINS]
    return [*runs, Run(CHAT, TEXTED, text=CHAT, options=LAYER_ERRORS)]


def main(size):
    return [main_run(text=DOMAINS[0])]


def on_documentation(make):
    """The runs of `make`, with the first domain's text."""
    return lambda size: [dataclasses.replace(run, text=DOMAINS[0]) for run in make(size)]


def long(size):
    return [Run("long", LONG, text=DOMAINS[0], tokens=size.long_sequence * 8, sequence_length=size.long_sequence,
                options=LAYER_ERRORS)] if size.long_sequence else []


def layers(size):
    """Each layer's keys alone and values alone at INT2."""
    return [Run("layers", (MAPPED, *(f"{MAPPED}@{side}@layer:{layer}" for layer in size.layers for side in "kv")),
                text=DOMAINS[0], tokens=size.layer_tokens)]


def needles(size):
    return needle_runs(size, NEEDLED, ("single", "multikey"))


PLAN = Plan(
    name="smollm2",
    title="The 2-bit cache on a real model, part by part",
    model="models/smollm2/*.gguf",
    lead="What each part of a 2-bit KV cache is worth on SmolLM2-135M-Instruct, a published model of 30 layers, 9 query and "
         "3 KV heads of 64 channels and 8,192 positions; its published Q4_1 file, dequantized. Calibrated on documentation; "
         "measured on other documentation, code and prose (the held-out parts of `datasets/real-text`), and on chats that the "
         "model wrote itself. No constant of the method was chosen on them.",
    fetch="python -m oscar_int2 fetch smollm2 corpora",
    calibration={domain: Text(domain, f"corpora/{domain}-calibration.jsonl") for domain in DOMAINS},
    texts={**{domain: Text(domain, f"corpora/{domain}-heldout.jsonl") for domain in DOMAINS},
           CHAT: Text("chat", "self")},
    steps={"texts": texts, "main": main, "backends": on_documentation(backend_runs), "layers": layers,
           "offsets": on_documentation(offset_runs), "long": long, "windows": on_documentation(window_runs),
           "needles": on_documentation(needles), "clip": on_documentation(clip_runs), "groups": on_documentation(group_runs)},
    size=Size(calibration_tokens=196608, tokens=32768, headline_tokens=90112, offsets=(2048, 4096), groups=(32, 16), needle_prompts=120,
              needle_lengths=(512, 1024, 2048), layer_tokens=16384, layers=tuple(range(30)), long_sequence=8192),
    quick=Size(calibration_tokens=6144, tokens=1024, headline_tokens=1024, sequence_length=1024, clips=("0.92", "0"), offsets=(4096,), groups=(32,),
               backends=("vllm-pr46774",), needle_prompts=0, layer_tokens=1024, layers=(7,), long_sequence=0),
    positions=POSITIONS,
    bundles=BUNDLES,
    head_dim=64,
    needles="needles",
    separated=(f"{DOMAINS[0]}, separators", DOMAINS[0]),
    crossed=CROSSED)
