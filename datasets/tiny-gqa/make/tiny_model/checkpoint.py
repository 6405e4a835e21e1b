"""Writes a Hugging Face folder: bf16 shards with an index, config.json as transformers 4 writes it."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from .settings import END_OF_TEXT, Architecture

SHARD_BYTES = 15_000_000


def config(arch: Architecture) -> dict:
    """config.json; keys as transformers 4 writes them (rope_theta, torch_dtype), which transformers 5 reads too."""
    values = asdict(arch) | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT, "hidden_act": "silu", "initializer_range": 0.02,
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_cache": True,
    }
    return dict(sorted(values.items()))


def fill_shards(tensors: dict) -> list:
    """Tensors in name order, largest first into the first shard with room: lists of names."""
    shards = []
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        for shard in shards:
            if shard["size"] + tensors[name].nbytes <= SHARD_BYTES:
                break
        else:
            shards.append(shard := {"size": 0, "names": []})
        shard["size"] += tensors[name].nbytes
        shard["names"].append(name)
    return [sorted(shard["names"]) for shard in shards]


def write(folder: Path, weights: dict, arch: Architecture) -> None:
    """Weights (any float dtype; the tied output is not among them) to `folder` in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    shards = fill_shards(tensors)
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": dict(sorted(where.items()))}
    generation = {"bos_token_id": END_OF_TEXT, "do_sample": True, "eos_token_id": END_OF_TEXT, "temperature": 0.85, "top_p": 0.95}
    for file, values in (("model.safetensors.index.json", index), ("config.json", config(arch)),
                         ("generation_config.json", generation)):
        (folder / file).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
