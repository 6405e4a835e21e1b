#!/usr/bin/env python3
"""Exports for OSCAR's SGLang in that server: its perplexity against what `oscar-eval` predicts for the same files.

Calibrates MODEL, exports its portable variant, its --for variant and the published recipe to sglang-v1, predicts each
with the server's codec, starts the server with the lines of each export's README as they stand, forces the ids of the
held-out text one by one through its decode path, and compares. Writes OUT/results.json and OUT/results.md.

  oscar_server.py OUT --model FOLDER --corpus TEXT --ids IDS.npy --server T

FOLDER is a Hugging Face folder, IDS.npy [texts, tokens]. T is a folder with OSCAR's SGLang: env.sh, which sets the
environment of its python3, and oscar_force.py, the logit processor that forces ids. What was made is kept: the same
command goes on where it was stopped. --steps and --runs do a part of it.
"""
import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(__file__).resolve().parent.parent
STEPS = ("bundles", "predict", "serve", "compare")
# By export: what is calibrated, and how it is exported.
EXPORTS = {
    "published": (("--preset", "paper", "--for", "sglang-v1"), ()),
    "portable": ((), ("--reduce",)),
    "for": (("--for", "sglang-v1"), ()),
}
RUNS = ("bf16", "identity", *EXPORTS)  # of the server
PROMPT = 512       # tokens that the server reads in one pass
FLUSH = 8          # tokens that leave its recent window together
AGREEMENT = .02    # nats
PROOF = ("Enable unified mixed KV (int2)", "Loaded Oscar rotation from", "Oscar rotation enabled")
# What the measurement needs of the server beside the README's line. None of it touches the codec.
FORCING = ("--enable-custom-logit-processor", "--disable-radix-cache", "--disable-overlap-schedule",
           "--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.5",
           "--max-running-requests", "8", "--max-total-tokens", "65536", "--chunked-prefill-size", "8192",
           "--max-prefill-tokens", "8192", "--cuda-graph-max-bs", "8", "--disable-piecewise-cuda-graph",
           "--random-seed", "0")
BF16 = "python -m sglang.launch_server --model-path MODEL --kv-cache-dtype bf16 " \
       "--prefill-attention-backend fa3 --decode-attention-backend triton\n"


class Failed(Exception):
    """A step did not do what was asked."""


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT")
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--corpus", help="calibration text")
    parser.add_argument("--ids", type=pathlib.Path, help="held-out token ids, .npy of [texts, tokens]")
    parser.add_argument("--server", type=pathlib.Path, metavar="T", help="the folder of OSCAR's SGLang")
    parser.add_argument("--bin", type=pathlib.Path, default=SOURCE / "build" / "bin", help="the programs (build/bin)")
    parser.add_argument("--tokens", type=int, default=196608, help="calibration tokens")
    parser.add_argument("--device", default="auto", help="of oscar-calibrate and oscar-eval")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=STEPS, help=", ".join(STEPS))
    parser.add_argument("--runs", type=lambda text: text.split(","), default=RUNS, help=", ".join(RUNS))
    return parser.parse_args(words)


def call(*command, out=None):
    """Runs a command unless `out` is there."""
    if out is not None and out.exists():
        return
    began = time.monotonic()
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    print(f"{time.monotonic() - began:6.1f} s  {pathlib.Path(command[0]).name} {command[1]} {out or ''}", flush=True)


def make_exports(o):
    for name, (fit, export) in EXPORTS.items():
        bundle, folder = o.out / f"{name}.h5", o.out / "exports" / name
        call(o.bin / "oscar-calibrate", o.model, o.corpus, bundle, "--max-tokens", o.tokens, "--device", o.device,
             "--quiet", *fit, out=bundle)
        folder.parent.mkdir(exist_ok=True)
        call(o.bin / "oscar-bundle", "export", bundle, "--for", "sglang-v1", "-o", folder, *export, out=folder)
        call(o.bin / "oscar-bundle", "verify", folder, "--for", "sglang-v1")


def decode_clip(ratio, head_dim):
    """The ratio by which oscar-eval clips as this server's decode does.

    Rows that leave its window (QuantKernel/gpu_flush_int2.py) are clipped where at most head_dim - rank magnitudes are
    larger, found by halving: at one magnitude below that of the ratio's rank. Rows of a prompt are clipped at the rank.
    """
    if ratio <= 0 or head_dim < 64:  # off, or sorted
        return ratio
    return (min(int(ratio * head_dim), head_dim - 1) - .5) / head_dim


def predict(o):
    """Perplexities by oscar-eval, of the exported files in the codec that their manifests name."""
    for name in EXPORTS:
        folder, bundle = o.out / "exports" / name, o.out / f"{name}-exported.h5"
        said = json.loads((folder / "oscar-export.json").read_text())
        clips = [decode_clip(ratio, said[f"head_dim_{side}"]) for ratio, side in zip(said["clip"], "kv")]
        call(o.bin / "oscar-bundle", "import", folder, "--model", o.model, "--name", name, "-o", bundle,
             "--for", "sglang-v1", "--metadata-dtype", said["metadata_dtype"],
             "--quant-group-size", said["quant_group_size"], "--clip", "{:g},{:g}".format(*clips),
             "--sink", said["sink_tokens"], "--recent", said["recent_tokens"], "--demote-block", FLUSH, out=bundle)
        report = o.out / f"{name}-predicted.json"
        call(o.bin / "oscar-eval", o.model, "--bundle", bundle, "--corpus", o.ids, "--sequence-length", length(o.ids),
             "--mode", "prefill", "--first-position", PROMPT, "--separators", "off", "--device", o.device, "--quiet",
             "--compare", "bf16,identity-clip,bundle", "--json", report, out=report)


def predicted_ppl(o, run):
    """Of a run of the server. BF16 and identities are beside every export."""
    report = json.loads((o.out / f"{run if run in EXPORTS else 'published'}-predicted.json").read_text())
    method = {"bf16": "bf16", "identity": "identity-clip"}.get(run, "bundle")
    return report["methods"][method]["ppl"]["mean"], report["device"]


def length(ids):
    import numpy as np
    return np.load(ids, mmap_mode="r").shape[1]


def launch_lines(folder):
    """The first code block of an export's README, as it stands."""
    return re.search(r"^```\n(.*?)^```$", (folder / "README.md").read_text(), re.S | re.M).group(1)


def write_identity(folder, like):
    """Files of the export `like` with identities in place of its rotations."""
    import shutil
    import torch
    shutil.copytree(like, folder)
    for path in folder.glob("*.pt"):
        state = torch.load(path, weights_only=True)
        for layer in state["layers"].values():
            layer["rotation"] = torch.eye(layer["rotation"].shape[-1])
        torch.save(state, path)


def serve(o, run):
    """Starts the server by the lines of the README and lets serve_forced, inside, force the ids."""
    import numpy as np
    folder = o.out / "exports" / run
    if run == "identity" and not folder.exists():
        write_identity(folder, o.out / "exports" / "published")
    lines = BF16 if run == "bf16" else launch_lines(folder)
    if "--model-path MODEL" not in lines:
        raise Failed(f"{folder}/README.md has no launch line")
    result, log = o.out / f"{run}.json", o.out / f"{run}.log"
    if result.exists():
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "plan.json").write_text(json.dumps(
            {"ids": np.load(o.ids).tolist(), "prompt": PROMPT, "out": str(result.resolve()), "scratch": str(scratch)}))
        # `python` of the README's line is the server's own, with this file around its launch_server.
        python = scratch / "python"
        python.write_text(f'#!/bin/sh\nexec python3 "{pathlib.Path(__file__).resolve()}" --inside "$@"\n')
        python.chmod(0o755)
        script = (f'. "{o.server.resolve()}/env.sh"\nexport PYTHONPATH="{o.server.resolve()}:$PYTHONPATH"\n'
                  f'export PATH="{scratch}:$PATH" STUDY_PLAN="{scratch}/plan.json"\n'
                  + lines.replace("--model-path MODEL", f'--model-path "{o.model.resolve()}"'))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "SGL_", "LD_LIBRARY_PATH"))}
        with open(log, "w") as file:
            code = subprocess.run(["bash", "-euc", script], cwd=folder if run != "bf16" else o.out, stdout=file,
                                  stderr=subprocess.STDOUT, env=environment).returncode
    text = log.read_text(errors="replace")
    if code != 0 or not result.exists():
        raise Failed(f"{run}: the server ended with {code}; the end of {log}:\n{text[-6000:]}")
    missing = [] if run == "bf16" else [line for line in PROOF if line not in text]
    missing += [] if run == "bf16" or text.count(PROOF[1]) == 2 else [f"{PROOF[1]} twice"]
    if missing:
        result.unlink()
        raise Failed(f"{run}: not served as exported; {log} lacks {missing}")
    print(f"{time.monotonic() - began:6.1f} s  {run} served", flush=True)


def serve_forced(words):
    """In the server's own python: launch_server's arguments, its engine, and the ids of STUDY_PLAN."""
    assert words[:2] == ["-m", "sglang.launch_server"], words
    from oscar_force import Force
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args
    plan = json.loads(pathlib.Path(os.environ["STUDY_PLAN"]).read_text())
    engine = Engine(server_args=prepare_server_args([*words[2:], *FORCING]))
    prompt, texts = plan["prompt"], plan["ids"]
    files = [f"{plan['scratch']}/forced{i}.json" for i in range(len(texts))]
    params = [{"temperature": 0.0, "max_new_tokens": len(ids) - prompt, "ignore_eos": True,
               "custom_params": {"targets": ids[prompt:], "out": file}} for ids, file in zip(texts, files)]
    engine.generate(input_ids=[ids[:prompt] for ids in texts], sampling_params=params,
                    custom_logit_processor=[Force.to_str()] * len(texts))
    losses = [[-x for x in json.loads(pathlib.Path(file).read_text())["logprobs"]] for file in files]
    pathlib.Path(plan["out"]).write_text(json.dumps({"nll": [sum(x) / len(x) for x in losses],
                                                     "tokens": sum(map(len, losses))}))
    engine.shutdown()


def mean_nll(path):
    found = json.loads(path.read_text())
    return sum(found["nll"]) / len(found["nll"])


def compare(o):
    rows = {}
    for run in RUNS:
        predicted, device = predicted_ppl(o, run)
        measured = mean_nll(o.out / f"{run}.json")
        rows[run] = {"predicted": predicted, "measured": math.exp(measured), "nats": measured - math.log(predicted)}
    held = {name: abs(rows[name]["nats"]) <= AGREEMENT for name in EXPORTS}
    better = {name: rows[name]["measured"] < rows["published"]["measured"] for name in EXPORTS if name != "published"}
    lines = ["| cache | predicted perplexity | measured | difference, nats |", "|---|---|---|---|"]
    lines += ["| {} | {predicted:.3f} | {measured:.3f} | {nats:+.4f} |".format(run, **row) for run, row in rows.items()]
    (o.out / "results.md").write_text("\n".join(lines) + "\n")
    (o.out / "results.json").write_text(json.dumps(
        {"rows": rows, "within": held, "better_than_published": better, "predicted_on": device,
         "tokens": json.loads((o.out / "bf16.json").read_text())["tokens"]}, indent=1) + "\n")
    print("\n".join(lines))
    wrong = [f"{name}: {rows[name]['nats']:+.4f} nats from the prediction" for name, ok in held.items() if not ok]
    wrong += [f"{name}: no better than the published recipe" for name, ok in better.items() if not ok]
    if wrong:
        raise Failed("; ".join(wrong))


def main(words):
    o = parse(words)
    o.out.mkdir(parents=True, exist_ok=True)
    o.out = o.out.resolve()
    try:
        for step in STEPS:
            if step not in o.steps:
                continue
            if step == "serve":
                for run in o.runs:
                    serve(o, run)
            else:
                {"bundles": make_exports, "predict": predict, "compare": compare}[step](o)
    except Failed as failed:
        print(f"study_oscar_server: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        serve_forced(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
