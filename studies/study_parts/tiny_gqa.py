"""The plan of tiny-gqa, the embedded model."""
from .vocabulary import (LAYER_ERRORS, MAIN, PUBLISHED, SEPARATED, Plan, Run, Size, Text, clip_runs, group_runs, main_run,
                         needle_runs, offset_runs, part_bundles, backend_runs, window_runs)

SHIPPED = "0.6"  # sigma of the outliers in datasets/tiny-gqa
SIGMAS = ("0", SHIPPED, "1.0")
PLANTED = ("identity", "hadamard-clip", *PUBLISHED, "portable", "unsearched", "default")
NEEDLED = ("identity", "hadamard-clip", "perhead", "portable-perhead", "unsearched", "default")
POSITIONS = 131072  # that the model serves; what --position-span is by default


def main(size):
    return [main_run(options=LAYER_ERRORS)]


def separators(size):
    return [Run("", SEPARATED, options=LAYER_ERRORS, separated="separators")]


def planting(size):
    return [Run(f"sigma {s}", ("exact", *PLANTED), variant=s, options=LAYER_ERRORS) for s in SIGMAS if s != SHIPPED]


def needles(size):
    return needle_runs(size, NEEDLED, ("multikey",))


assert set(PLANTED) <= set(MAIN)
PLAN = Plan(
    name="tiny-gqa",
    title="The 2-bit cache, part by part",
    model="datasets/tiny-gqa",
    lead="What each part of a 2-bit KV cache is worth on `datasets/tiny-gqa`, a synthetic model of 21.6M parameters that "
         "this project trained, with planted channel outliers.",
    fetch="",
    calibration={"calibration": Text("calibration text", "datasets/tiny-gqa/calibration.jsonl")},
    texts={"heldout": Text("held-out text", "datasets/tiny-gqa/heldout.jsonl")},
    steps={"main": main, "separators": separators, "clip": clip_runs, "windows": window_runs, "offsets": offset_runs,
           "groups": group_runs, "planting": planting, "backends": backend_runs, "needles": needles},
    size=Size(offsets=(32768, 98304, 126976), groups=(64, 32), needle_prompts=400, needle_lengths=(3968,)),
    quick=Size(calibration_tokens=8192, tokens=4096, sequence_length=1024, clips=("0.86", "0.92", "0.96", "0"),
               offsets=(98304,), groups=(32,), backends=("vllm-pr46774",)),
    positions=POSITIONS,
    bundles=part_bundles(POSITIONS),
    head_dim=128,
    needles="3-key needles",
    separated=("separators", "main"),
    variants={s: f"outliers of sigma {s}" for s in SIGMAS if s != SHIPPED})
