#!/usr/bin/env python3
"""Makes datasets/tiny-gqa: gathers licensed text, trains tokenizer and model, plants outliers, writes corpora, measures.

Needs torch, transformers, tokenizers, safetensors and numpy, no network, and one GPU for a useful model (made on one
NVIDIA H200 in stages of under ten minutes):

  train_tiny_model.py WORK --stage prepare     gather text, train the tokenizer, encode
  train_tiny_model.py WORK --stage train       train (--train-seconds, --long-seconds); prepares if that was not done
  train_tiny_model.py WORK --stage finish      plant, write the corpora, measure; result in WORK/tiny-gqa
  train_tiny_model.py WORK --smoke             the whole path, tiny, on a CPU
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plant_outliers  # noqa: E402
from tiny_model import text, tokens  # noqa: E402
from tiny_model.settings import Settings, smoke  # noqa: E402

START = time.time()


def log(message: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.time() - START:6.1f} s] {message}", flush=True)


def prepare(work: Path, settings: Settings) -> None:
    """Text to WORK/train.npy, WORK/real_heldout.npy, tokenizer.json and sources.tsv."""
    texts, table, refused = text.gather(settings.text_bytes, settings.processes, settings.seed)
    rows = ["package\tversion\tlicence\tfiles\tbytes"] + ["\t".join(map(str, row)) for row in table]
    (work / "sources.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    log(f"text: {len(texts)} documents, {sum(row[4] for row in table) / 1e6:.1f} MB of {len(table)} packages; "
        f"{len(refused)} packages not used for their licence: {', '.join(refused)}")
    held = max(4, int(len(texts) * settings.held_out_share))
    if not (work / "tokenizer.json").exists():  # one that is there already is used: its model goes with it
        tokens.train_tokenizer(texts[held:], settings.architecture.vocab_size, settings.tokenizer_bytes).save(
            str(work / "tokenizer.json"))
    tokenizer = tokens.load_tokenizer(work)
    log(f"tokenizer: {tokenizer.get_vocab_size()} tokens")
    np.save(work / "real_heldout.npy", tokens.encode_documents(work, texts[:held], settings.processes))
    ids = tokens.encode_documents(work, texts[held:], settings.processes)
    np.save(work / "train.npy", ids)
    log(f"training stream: {len(ids)} tokens; held out: {held} documents")


def start_prepare(work: Path, arguments) -> subprocess.Popen | None:
    """Prepares in a process of its own, so that the model compiles meanwhile; None when that was done before."""
    if (work / "train.npy").exists():
        return None
    command = [sys.executable, __file__, str(work), "--stage", "prepare", "--seed", str(arguments.seed)]
    return subprocess.Popen(command + (["--smoke"] if arguments.smoke else []))


def train(work: Path, settings: Settings, arguments) -> None:
    """Trains and writes WORK/plain (the model without outliers, bf16) and WORK/training.json."""
    import torch

    from tiny_model import checkpoint, training

    preparing = start_prepare(work, arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = training.Trainer(settings, device)
    trainer.warm_up()
    log(f"{sum(p.numel() for p in trainer.model.parameters())} parameters, compiled on {device}")
    if preparing and preparing.wait() != 0:
        sys.exit("preparing the text failed")
    source = training.SequenceSource(np.load(work / "train.npy"), tokens.load_tokenizer(work), settings.seed)
    seconds = [arguments.train_seconds, arguments.long_seconds]
    if arguments.deadline:
        scale = min(1.0, (arguments.deadline - (time.time() - START)) / sum(seconds))
        seconds = [scale * s for s in seconds]
    border = seconds[0] / max(1e-9, sum(seconds))
    trainer.phase(source, settings.context, (0.0, border), seconds[0], log)
    short_tokens = trainer.tokens
    trainer.phase(source, settings.long_context, (border, 1.0), seconds[1], log)
    checkpoint.write(work / "plain", trainer.model.state_dict(), settings.architecture)
    summary = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "steps": trainer.steps,
               "tokens": trainer.tokens, "tokens_at_long_context": trainer.tokens - short_tokens,
               "train_seconds": seconds[0], "long_seconds": seconds[1], "settings": asdict(settings)}
    (work / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    log(f"trained on {trainer.tokens / 1e6:.1f} M tokens in {trainer.steps} steps")


def quick_look(work: Path, settings: Settings) -> None:
    """Perplexity and three-key accuracy of WORK/plain, to know early whether the run was good."""
    import torch

    from tiny_model import measure

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, ids = tokens.load_tokenizer(work), np.load(work / "real_heldout.npy")
    model = measure.load(work / "plain", torch.bfloat16, device)
    rows = max(1, settings.micro_tokens // 4 // settings.context)
    figure = measure.perplexity(model, ids[:settings.measured_tokens // 4], settings.context, rows)
    needle = measure.needle_accuracy(model, "multikey", tokenizer, ids, settings.prompt_tokens, settings.prompts_other_kinds, rows, 1)
    log(f"held-out perplexity {figure['ppl']:.3f}, three-key accuracy {needle['accuracy']:.3f} of {needle['prompts']} prompts")


def finish(work: Path, settings: Settings, arguments) -> None:
    """Plants outliers, writes corpora and figures: WORK/tiny-gqa is what the repository ships."""
    import torch

    from safetensors.torch import load_file

    from tiny_model import corpora, measure

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = work / "tiny-gqa"
    plant_outliers.transform(work / "plain", out, arguments.plant, arguments.plant_seed)
    for name in ("tokenizer.json", "sources.tsv"):
        (out / name).write_bytes((work / name).read_bytes())
    tokens.write_tokenizer_config(out, settings.architecture.max_position_embeddings)
    tokenizer, real = tokens.load_tokenizer(work), np.load(work / "real_heldout.npy")
    weights = {k: v for path in sorted((work / "plain").glob("*.safetensors")) for k, v in load_file(path).items()}
    real_text = tokenizer.decode(real[:250_000].tolist())[:600_000]
    counts = corpora.build(out, weights, settings, tokenizer, np.load(work / "train.npy"), real_text, device, log)
    log(f"corpora: {json.dumps(counts)}")
    streams = {"real": real, "shipped": measure.stream_of(out / "heldout.jsonl", tokenizer)}
    figures = {"training": json.loads((work / "training.json").read_text(encoding="utf-8")), "corpora": counts}
    figures["needles"] = measure.all_needles(measure.load(out, torch.bfloat16, device), tokenizer, streams, settings)
    log("needle accuracy: " + ", ".join(f"{k} {v['accuracy']:.3f}" for k, v in figures["needles"].items()))
    folders = {"planted": out, "plain": work / "plain"}
    figures["perplexity"] = measure.all_perplexities(folders, streams, settings, device)
    log("perplexity: " + ", ".join(f"{k} {v['ppl']:.4f}" for k, v in figures["perplexity"].items()))
    (out / "measurements.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for everything made")
    parser.add_argument("--stage", choices=("all", "prepare", "train", "finish"), default="all", help="what to do (all)")
    parser.add_argument("--train-seconds", type=float, default=345, help="training at the short context (345)")
    parser.add_argument("--long-seconds", type=float, default=85, help="training at the long context (85)")
    parser.add_argument("--deadline", type=float, help="seconds after the start by which training must be over; shortens both phases")
    parser.add_argument("--plant", type=float, default=0.6, help="sigma of the planted outliers, 0 for none (0.6)")
    parser.add_argument("--plant-seed", type=int, default=7, help="seed of the outliers (7)")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything else (1)")
    parser.add_argument("--smoke", action="store_true", help="a dry run of the whole path with everything small")
    arguments = parser.parse_args()
    settings = smoke(arguments.seed) if arguments.smoke else Settings(seed=arguments.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.stage == "prepare":
        return prepare(arguments.work, settings)
    if arguments.stage in ("all", "train"):
        train(arguments.work, settings, arguments)
        quick_look(arguments.work, settings)
    if arguments.stage in ("all", "finish"):
        finish(arguments.work, settings, arguments)


if __name__ == "__main__":
    main()
