"""What a statistics file says of its model, and the file itself (lib/oscar/bundle/SCHEMA.md)."""
import hashlib
import json
import logging
import math
import os
import pathlib
import time

import h5py
import numpy as np
import torch
import transformers

from .._version import __version__
from ..bundle import NUMERIC_KEYS, content_sha256
from ..recipe import METADATA_DTYPES
from ..rope import inverse_frequencies, yarn_attention_factor
from ..weight_files import fingerprint
from ..weights import Unknown, adapter_beside, other_than_files
from .layers import decoder_layers, text_config
from .probe import Rope
from .shared_text import CAPACITY, NGRAM, RULE, ngram_hashes

_log = logging.getLogger("oscar_int2")


# RoPE: the config's parameters where they give the frequencies that were seen, else the frequencies themselves.

def settled_rope(rope, head_dim, config, tokens):
    """(Rope with exact frequencies, its parameters as bundles hold them, max_positions among them). `tokens`: of the
    sequences that it was seen on, which bounds what can be told."""
    served = int(getattr(config, "max_position_embeddings", 0) or tokens)
    if not len(rope.inv_freq):
        return rope, {"rope_type": "none", "max_positions": served}
    for parameters in _of_config(config, served):
        turning = 2 * len(rope.inv_freq)
        if turning == head_dim:
            parameters.pop("partial_rotary_factor", None)
        elif not parameters["partial_rotary_factor"]:
            parameters["partial_rotary_factor"] = turning / head_dim
        exact = torch.from_numpy(inverse_frequencies(parameters, head_dim))
        if exact.shape == rope.inv_freq.shape and _agree(exact, rope.inv_freq, tokens):
            return Rope(exact, rope.interleaved), _with_layout(parameters, rope)
    theta = _theta(config)
    turning = 2 * len(rope.inv_freq)
    plain = theta ** (-np.arange(0, turning, 2) / turning)
    factors = plain / np.maximum(rope.inv_freq.numpy(), 1e-5 * plain)
    parameters = {"rope_type": "freq_factors", "rope_theta": theta, **(
        {"partial_rotary_factor": turning / head_dim} if turning != head_dim else {}),
        "freq_factors": factors.tolist(), "max_positions": served}
    return (Rope(torch.from_numpy(inverse_frequencies(parameters, head_dim)), rope.interleaved),
            _with_layout(parameters, rope))


def turns_by(rope, parameters, head_dim, tokens):
    """Whether a bundle's parameters give what keys of so many tokens were seen to turn by."""
    exact = torch.from_numpy(inverse_frequencies(parameters, head_dim))
    return exact.shape == rope.inv_freq.shape and (not len(exact) or (
        rope.interleaved == bool(parameters.get("interleaved")) and _agree(exact, rope.inv_freq, tokens)))


def served_positions(config):
    """Positions that a model serves, scaled by RoPE as servers scale them; None: its config does not say."""
    served = getattr(config, "max_position_embeddings", None)
    return served and max([int(served), *(parameters["max_positions"] for parameters in _of_config(config, int(served)))])


def _with_layout(parameters, rope):
    return {**parameters, "interleaved": True} if rope.interleaved else parameters


def _agree(exact, seen, tokens):
    """Whether phases differ by less than what cos and sin in bf16 hide, over all positions that were seen."""
    return bool(((exact - seen).abs() * tokens).max() < 2.0**-5)


def _theta(config):
    kinds = _parameters(config)
    return float(kinds[0].get("rope_theta") or 1e4) if kinds else 1e4


def _parameters(config):
    """RoPE's parameters of a config of transformers 4 or 5: one set, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None)
    if not found:
        found = {**(getattr(config, "rope_scaling", None) or {}), "rope_theta": getattr(config, "rope_theta", None)}
    sets = [value for value in found.values() if isinstance(value, dict)] or [found]
    local = getattr(config, "rope_local_base_freq", None)  # of transformers 4
    if local:
        sets.append({"rope_theta": local})
    sets = [{"partial_rotary_factor": getattr(config, "partial_rotary_factor", None), **one} for one in sets]
    return [one for one in sets if isinstance(one.get("rope_theta"), (int, float))]


def _of_config(config, served):
    """Parameters with every default filled in, in the order of make_rope() of lib/oscar/model/checkpoint/rope.h."""
    sets = _parameters(config)
    for given in sets:
        kind = given.get("rope_type") or given.get("type") or "default"
        known = {"rope_type": kind, "rope_theta": float(given["rope_theta"]),
                 "partial_rotary_factor": given.get("partial_rotary_factor")}
        factor = float(given.get("factor") or 1.0)
        original = int(given.get("original_max_position_embeddings") or served)
        if kind == "linear":
            # Configs with a set for each kind of layer state the length behind scaling.
            yield known | {"factor": factor, "max_positions": int(served * factor) if len(sets) == 1 else served}
        elif kind == "llama3":
            yield known | {"factor": factor, "low_freq_factor": float(given["low_freq_factor"]),
                           "high_freq_factor": float(given["high_freq_factor"]),
                           "original_max_position_embeddings": original,
                           "max_positions": served if served > original else int(original * factor)}
        elif kind == "yarn":
            yield known | {"factor": factor, "original_max_position_embeddings": original,
                           "attention_factor": float(yarn_attention_factor(given)),
                           "beta_fast": float(given.get("beta_fast") or 32.0),
                           "beta_slow": float(given.get("beta_slow") or 1.0),
                           "truncate": bool(given.get("truncate", True)),
                           "max_positions": max(served, int(original * factor))}
        yield known | {"rope_type": "default", "max_positions": served}  # which mrope and the like are on text


# Model and text.

def describe_model(model, shape, num_qo_heads, rope, loaded_here=False):
    """Attributes of /model. `loaded_here`: by this run, from the files that are there."""
    config, folder = model.config, _folder(model)
    files = folder if folder and (folder / "config.json").is_file() else None
    text = (files / "config.json").read_text() if files else config.to_json_string()
    stated = json.loads(text).get("_name_or_path") or ""
    name = stated if stated.count("/") == 1 and not stated.startswith(("/", ".")) else (
        folder.resolve().name if folder else type(model).__name__)
    weights = files is not None and any((files / n).is_file()
                                        for n in ("model.safetensors", "model.safetensors.index.json"))
    described = text_config(model)
    method = (getattr(config, "quantization_config", None) or {})
    method = method if isinstance(method, dict) else method.to_dict()
    return {"name": name, "architecture": type(model).__name__, "num_layers": described.num_hidden_layers,
            "num_qo_heads": num_qo_heads, "num_kv_heads": shape[0], "head_dim_k": shape[1], "head_dim_v": shape[2],
            "hidden_size": described.hidden_size, "rope": json.dumps(rope, separators=(",", ":")),
            "numerics": json.dumps(_numerics(json.loads(text)), separators=(",", ":")),
            "config_sha256": _sha256(text.encode()),
            "tokenizer_sha256": _sha256_of(files, "tokenizer.json"), "chat_template_sha256": _chat_template(files),
            "weights_fingerprint": _fingerprint(model, files, loaded_here) if weights else "",
            "engine": f"transformers {transformers.__version__}, {str(model.dtype).removeprefix('torch.')}",
            **({"quantization": str(method["quant_method"])} if method.get("quant_method") else {})}


def _numerics(config):
    """What a config.json states of NUMERIC_KEYS, of the part that reads text."""
    text = config.get("text_config") or config
    return {key: text[key] for key in NUMERIC_KEYS if text.get(key) is not None}


def _fingerprint(model, folder, loaded_here):
    """That of the folder's files; "", with a warning, if the model's weights are others, or may be."""
    problem = other_than_files(model, decoder_layers(model), folder)
    if not problem or isinstance(problem, Unknown) and loaded_here:
        return fingerprint(folder)
    said = (f"could not be compared with those in {folder}: {problem}" if isinstance(problem, Unknown) else
            f"are not those in {folder}: {problem}")
    _log.warning("oscar_int2: the weights in memory %s.%s The bundle names no files of weights; it is known by the "
                 "samples of attention weights that it holds. To calibrate the files, give their folder", said,
                 adapter_beside(folder))
    return ""


def _folder(model):
    path = getattr(model, "name_or_path", "")
    return pathlib.Path(path) if path and pathlib.Path(path).is_dir() else None


def _sha256(data):
    return hashlib.sha256(data).hexdigest()


def _sha256_of(folder, name):
    return _sha256((folder / name).read_bytes()) if folder and (folder / name).is_file() else ""


def _chat_template(folder):
    if folder is None:
        return ""
    if (folder / "chat_template.jinja").is_file():
        return _sha256_of(folder, "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            value = json.loads((folder / name).read_text()).get("chat_template")
            if isinstance(value, list):
                value = next((one.get("template") for one in value if one.get("name") == "default"), None)
            if isinstance(value, str):
                return _sha256(value.encode())
    return ""


def describe_text(sequences, sources, recall):
    """(attributes of /corpus, n-gram hashes) of token ids, int64 arrays. `sources`: dictionaries of name and sha256.
    `recall`: what of them was repeated, in words; "": nothing."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.array([len(ids), *ids], dtype="<u4").tobytes())
    tokens = sum(map(len, sequences))
    used = [{"name": s["name"], "sha256": s["sha256"], "kind": s.get("kind", "ids"), "weight": 1.0, "documents_read":
             s.get("documents", 0), "documents_used": s.get("documents", 0), "tokens_read": s.get("tokens", tokens),
             "tokens_used": s.get("tokens", tokens), "dropped": []} for s in sources]
    told = {"recall": recall} if recall else {}
    return told | {"sources": json.dumps(used), "sequences_read": len(sequences), "sequences_used": len(sequences),
            "tokens": tokens, "chunk_len": max(map(len, sequences)), "order_seed": 0, "tokens_sha256": digest.hexdigest(),
            "bos_eos_policy": "as given", "template": "as given", "separators": "off"}, ngram_hashes(sequences)


# The file.

def write_statistics(path, model, corpus, hashes, format, layers):
    """A statistics file at `path`, which appears whole or not at all. `layers`: of each layer its attributes, and
    datasets by name below it."""
    path = pathlib.Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with h5py.File(beside, "w") as file:
            _attributes(file, format="oscar-statistics", format_version=1, required_features="[]",
                        tool_version=__version__, tool_commit="python", created_utc=_now(), preset="best", method="",
                        objective_k="qtq", objective_v="sv", composition="", granularity="per-head",
                        row_weights="attention", position_span=0, fit_seed=0, run_key="")
            _attributes(file.create_group("model"), **model)
            _attributes(file.create_group("corpus"), **corpus)
            if len(hashes):
                _attributes(_dataset(file["corpus"], "ngram_hashes", hashes), ngram=NGRAM, capacity=CAPACITY, rule=RULE)
            _attributes(file.create_group("quantizer"), bits=2,
                        quant_group_size=format.quant_group_size or math.gcd(model["head_dim_k"], model["head_dim_v"]),
                        sink_tokens=format.sink_tokens, recent_tokens=format.recent_tokens,
                        demote_block=format.demote_block, clip_span="head_row",
                        metadata_dtype=next(name for name, dtype in METADATA_DTYPES.items() if dtype == format.metadata_dtype),
                        zero="code_units", ties="up", metadata_rounding="before_coding")
            for number, (attributes, datasets) in enumerate(layers):
                group = file.create_group(f"layers/{number:03}")
                group.create_group("statistics")
                _attributes(group, layer_id=number, **attributes)
                for name, values in datasets.items():
                    _dataset(group, name, values)
            objects = {"/": file}
            file.visititems(lambda name, item: objects.__setitem__(f"/{name}", item))
            _attributes(file, content_sha256=content_sha256(objects))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _now():
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(seconds) if seconds else None))


def _attributes(group, **values):
    for name, value in values.items():
        group.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else np.int64(value)


def _dataset(group, name, values):
    values = np.asarray(values)
    if not values.shape:
        return group.create_dataset(name, data=values)
    return group.create_dataset(name, data=values, chunks=values.shape, shuffle=True, compression=4, fletcher32=True)
