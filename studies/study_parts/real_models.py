"""The plans of published models, on real text in several domains and on chats that the model writes itself."""
import dataclasses

from .vocabulary import (LAYER_ERRORS, LONG, OURS, PUBLISHED, Bundle, Plan, Run, Size, Text, clip_runs, group_runs,
                         main_run, needle_runs, offset_runs, part_bundles, backend_runs, window_runs)

CHAT = "chat"
NEEDLED = ("hadamard-clip", "perhead", "portable-perhead", "default")
MAPPED = "default"  # whose layers are looked at alone
AMOUNTS = (16384, 65536, 131072, 524288)  # calibration tokens beside those of the default
SEEDS = (1, 2)                            # of the order of the text, beside 0


def heldout(domain):
    return Text(domain, f"corpora/{domain}-heldout.jsonl")


def calibration(domain):
    return Text(domain, f"corpora/{domain}-calibration.jsonl")


def crossed_bundles(crossed):
    """The default calibrated on each text, but for the one that `default` itself is calibrated on."""
    return {name: Bundle(f"default, calibrated on {text}", OURS, (), searched=True, text=text)
            for text, name in crossed.items() if name != "default"}


def amount_bundles():
    more = {f"tokens-{n}": Bundle(f"{n:,} tokens", OURS, (), searched=True, tokens=n) for n in AMOUNTS}
    return more | {f"seed-{s}": Bundle(f"order {s}", OURS, ("--seed", str(s)), searched=True) for s in SEEDS}


def steps(domains, crossed, amounts=False):
    """Of a study of texts in `domains`; most steps measure the first of them."""
    texted = ("exact", "hadamard", "hadamard-clip", *PUBLISHED[:2], "perhead+clip", "portable-perhead", "orthogonal",
              "no-weights", "no-recall", "unsearched", "default", *(name for name in crossed.values() if name != "default"))

    def texts(size):
        """The headline: domain by domain, each also with separators, and chats."""
        runs = [Run(domain, texted, text=domain, tokens=size.headline_tokens, options=LAYER_ERRORS,
                    separated=f"{domain}, separators") for domain in domains]
        return [*runs, Run(CHAT, texted, text=CHAT, options=LAYER_ERRORS)]

    def long(size):
        return [Run("long", LONG, text=domains[0], tokens=size.long_sequence * 8, sequence_length=size.long_sequence,
                    options=LAYER_ERRORS)] if size.long_sequence else []

    def layers(size):
        """Each layer's keys alone and values alone at INT2."""
        return [Run("layers", (MAPPED, *(f"{MAPPED}@{side}@layer:{layer}" for layer in size.layers for side in "kv")),
                    text=domains[0], tokens=size.layer_tokens)]

    def on_first(make):
        """The runs of `make`, with the first domain's text."""
        return lambda size: [dataclasses.replace(run, text=domains[0]) for run in make(size)]

    made = {"texts": texts, "main": lambda size: [main_run(text=domains[0])], "backends": on_first(backend_runs),
            "layers": layers, "offsets": on_first(offset_runs), "long": long, "windows": on_first(window_runs),
            "needles": on_first(lambda size: needle_runs(size, NEEDLED, ("single", "multikey"))),
            "clip": on_first(clip_runs), "groups": on_first(group_runs)}
    if amounts:
        made["amounts"] = lambda size: [Run("amounts", ("default", *amount_bundles()), text=domains[0])]
        made["backends"] = made.pop("backends")  # last
    return made


SMOLLM2_DOMAINS = ("documentation", "code", "prose")
SMOLLM2_CROSSED = {"documentation": "default", "code": "default-code", "prose": "default-prose"}
SMOLLM2 = Plan(
    name="smollm2",
    title="The 2-bit cache on a real model, part by part",
    model="models/smollm2/*.gguf",
    lead="What each part of a 2-bit KV cache is worth on SmolLM2-135M-Instruct, a published model of 30 layers, 9 query and "
         "3 KV heads of 64 channels and 8,192 positions; its published Q4_1 file, dequantized. Calibrated on documentation; "
         "measured on other documentation, code and prose (the held-out parts of `datasets/real-text`), and on chats that the "
         "model wrote itself. No constant of the method was chosen on them.",
    fetch="python -m oscar_int2 fetch smollm2 corpora",
    calibration={domain: calibration(domain) for domain in SMOLLM2_DOMAINS},
    texts={**{domain: heldout(domain) for domain in SMOLLM2_DOMAINS}, CHAT: Text("chat", "self")},
    steps=steps(SMOLLM2_DOMAINS, SMOLLM2_CROSSED),
    size=Size(calibration_tokens=196608, tokens=32768, headline_tokens=90112, offsets=(2048, 4096), groups=(32, 16), needle_prompts=120,
              needle_lengths=(512, 1024, 2048), layer_tokens=16384, layers=tuple(range(30)), long_sequence=8192),
    quick=Size(calibration_tokens=6144, tokens=1024, headline_tokens=1024, sequence_length=1024, clips=("0.92", "0"), offsets=(4096,), groups=(32,),
               backends=("vllm-pr46774",), needle_prompts=0, layer_tokens=1024, layers=(7,), long_sequence=0),
    positions=8192,
    bundles=part_bundles(8192) | crossed_bundles(SMOLLM2_CROSSED),
    head_dim=64,
    needles="needles",
    separated=("documentation, separators", "documentation"),
    domains=SMOLLM2_DOMAINS,
    calibrated="on documentation: code, prose and chats are other texts than it has seen",
    crossed=SMOLLM2_CROSSED)

QWEN_DOMAINS = ("code", "documentation", "prose")
QWEN_MIXED = "code and documentation"
QWEN_CROSSED = {QWEN_MIXED: "default"} | {domain: f"default-{domain}" for domain in QWEN_DOMAINS}
QWEN_CODER = Plan(
    name="qwen2.5-coder-1.5b",
    title="The 2-bit cache on Qwen2.5-Coder-1.5B, part by part",
    model="models/qwen2.5-coder-1.5b/*.gguf",
    lead="What each part of a 2-bit KV cache is worth on Qwen2.5-Coder-1.5B-Instruct, a published model of 28 layers, 12 query "
         "and 2 KV heads of 128 channels, biases of q, k and v, and 32,768 positions; its published Q4_K_M file, dequantized. "
         "Calibrated on code and documentation, half of each; measured on other code, documentation and prose (the held-out "
         "parts of `datasets/real-text`), and on chats that the model wrote itself. No constant of the method was chosen on "
         "them. One was on other text of this model: stretches that calibration repeats (`--recall`).",
    fetch="python -m oscar_int2 fetch qwen2.5-coder-1.5b corpora",
    calibration={QWEN_MIXED: Text(QWEN_MIXED, ",".join(f"{calibration(domain).corpus}:0.5" for domain in QWEN_DOMAINS[:2]))}
    | {domain: calibration(domain) for domain in QWEN_DOMAINS},
    texts={**{domain: heldout(domain) for domain in QWEN_DOMAINS}, CHAT: Text("chat", "self")},
    steps=steps(QWEN_DOMAINS, QWEN_CROSSED, amounts=True),
    size=Size(calibration_tokens=262144, tokens=32768, headline_tokens=90112, offsets=(8192, 24576), groups=(64, 32),
              needle_prompts=96, needle_lengths=(2048, 8192), layer_tokens=8192, layers=tuple(range(28)), long_sequence=32768),
    quick=Size(calibration_tokens=2048, tokens=1024, headline_tokens=1024, sequence_length=1024, clips=("0.92",), offsets=(8192,), groups=(64,),
               backends=("vllm-pr46774",), needle_prompts=0, layer_tokens=1024, layers=(7,), long_sequence=0),
    positions=32768,
    bundles=part_bundles(32768) | crossed_bundles(QWEN_CROSSED) | amount_bundles(),
    head_dim=128,
    needles="needles",
    separated=("code, separators", "code"),
    domains=QWEN_DOMAINS,
    calibrated="on code and documentation: prose and chats are other texts than it has seen",
    crossed=QWEN_CROSSED)
