"""Whether a bundle was calibrated on the weights that a model has, whatever served them.

Entries of attention are compared with the weights in memory (weight_samples.py). Where either side has none, as
quantized weights and bundles of earlier versions, the files of the model are compared with the fingerprint that the
bundle stores (lib/oscar/io/weight_source.cpp).
"""
import logging
import pathlib

import numpy as np
import torch

from .errors import BundleError, BundleMismatchError
from .weight_files import GGUF_SOURCE, files_of, fingerprint, is_of, is_of_gguf, sha256_of, tensors_of
from .weight_samples import FILE_DTYPES, compare, is_plain, of_files, projections, rounds_to, weight_of

SAME, ANY = "same", "any"  # what weights are accepted
COST = "docs/serving.md has what that costs, under \"Whose weights\""
_logger = logging.getLogger("oscar_int2")


def check(bundle, layers, accepted, option, model=None, revision=None, logger=_logger, adapter=None):
    """Raises BundleMismatchError if the bundle was calibrated on other weights than {layer id:
    Projections}, or logs a warning where `accepted` is "any". What can't be compared is warned of.
    Returns which it is: "same", "same attention", "same files", "other files", "any" or "not compared".

    `option`: what a user writes to accept any, for the message. `model`: the folder, the GGUF file or
    the hub's name that the weights came from, if it is known. `adapter`: _other_adapter()'s."""
    require_choice(accepted, option)
    problem = adapter or _problem(bundle, layers, files_of(model, revision))
    who = "oscar_int2" if logger is _logger else "OSCAR INT2"
    if bundle.model.fitted_weights_fingerprint:
        logger.warning("%s: %s: its transforms were fitted to other weights than it is for, those of %s "
                       "(import --weights any); %s", who, bundle.path, bundle.model.fitted_model, COST)
    if problem is None:
        return SAME
    if isinstance(problem, (_OfFiles, _OtherFiles, _OfAttention)):
        if problem:
            logger.warning("%s: %s: %s", who, bundle.path, problem)
        return problem.said
    elif isinstance(problem, Unknown):
        logger.warning("%s: %s: %s. Make sure that the bundle was calibrated on this very checkpoint", who,
                       bundle.path, problem)
        return "not compared"
    elif accepted == ANY:
        logger.warning("%s: %s was calibrated on other weights than are served: %s; %s", who, bundle.path,
                       problem, COST)
        return ANY
    else:
        raise _mismatch(bundle, problem, model, option)


def _mismatch(bundle, problem, model, option):
    return BundleMismatchError(
        f"{bundle.path} (of {bundle.model.name!r}) was calibrated on other weights than these: "
        f"{problem}.{adapter_beside(model)} Calibrate this very checkpoint with oscar-calibrate, or accept it with {option} "
        f"({COST})")


def check_model(bundle, model, attentions, accepted, caller):
    """check() of a model of transformers, whose attention modules are {layer id: module}. `caller`: the
    function whose option `weights` accepts any, for the message."""
    found = check(bundle, {i: projections(module, bundle.layers[i]) for i, module in attentions.items()}, accepted,
                  f'weights="any" of {caller}()', model.name_or_path, getattr(model.config, "_commit_hash", None),
                  adapter=_other_adapter(attentions))
    elsewhere = _adapter_elsewhere(model, attentions)
    if found != SAME or elsewhere is None:
        return found
    _logger.warning("oscar_int2: %s: an adapter acts on %s, which is not compared with the weights that were calibrated; "
                    "calibrate the model with it", bundle.path, elsewhere)
    return _OfAttention.said


def _other_adapter(attentions):
    """What acts on a weight and is no LoRA, whose product with inputs weight_of can't say, as text; None.
    `attentions`: {layer id: attention module}."""
    for layer_id, attention in attentions.items():
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"):
            module = getattr(attention, name, None)
            while hasattr(module, "base_layer"):
                active = _acting(module)
                if active:
                    kind = type(module)
                    family = kind.__module__.removeprefix("peft.tuners.").split(".")[0]
                    shown = family if kind.__module__.startswith("peft.tuners.") else kind.__name__
                    return (f"{name} of layer {layer_id} has an adapter of kind {shown} ({active[0]!r}), "
                            "which is not compared. Merge it into the weights, and calibrate those")
                module = module.base_layer
    return None


def _acting(module):
    """Names of the adapters of a module of peft that change its output, but for LoRA's."""
    if hasattr(module, "lora_A") or getattr(module, "merged", False) or getattr(
            module, "disable_adapters", False):
        return []
    held = [getattr(module, kept, ()) for kept in getattr(module, "adapter_layer_names", ())]
    return [name for name in getattr(module, "active_adapters", ())
            if not held or any(name in kept for kept in held)]


def _adapter_elsewhere(model, attentions):
    """The name of a module outside the attention layers whose output an adapter of peft changes; None."""
    within = {id(part) for attention in attentions.values() for part in attention.modules()}
    for name, module in model.named_modules():
        if id(module) not in within and (_copy_acts(module) or hasattr(module, "base_layer") and (
                _acting(module) or _lora_acts(module))):
            return name
    return None


def _copy_acts(module):
    """Whether a trained copy takes a module's place (peft's modules_to_save), with other parameters."""
    original, copies = getattr(module, "original_module", None), getattr(module, "modules_to_save", {})
    if original is None or getattr(module, "disable_adapters", False):
        return False
    return any(not torch.equal(trained, before) for name in module.active_adapters[:1] if name in copies
               for trained, before in zip(copies[name].parameters(), original.parameters()))


def _lora_acts(module):
    """Whether a module's LoRA changes what it computes, merged or not."""
    held = {name for kept in ("lora_A", "lora_embedding_A") for name in getattr(module, kept, ())}
    return not getattr(module, "disable_adapters", False) and any(
        module.get_delta_weight(name).any() for name in held & set(module.active_adapters))


def adapter_beside(folder):
    """A sentence on an adapter in a model's folder, which transformers loads with the model; "" without one."""
    beside = pathlib.Path(folder or "", "adapter_config.json")
    return (f" {beside} may be why: transformers loads that adapter with the model, and oscar-calibrate reads the model "
            "alone. Move the adapter elsewhere to have the model alone." if folder and beside.is_file() else "")


def require_choice(accepted, option):
    """Raises BundleError for what is neither "same" nor "any"."""
    if accepted not in (SAME, ANY):
        raise BundleError(f"{option.split('=')[0].strip()} is {accepted!r}; expected {SAME!r} or {ANY!r}")


class Unknown(str):
    """Why weights could not be compared."""


class _OfFiles(str):
    """That the model's files are the calibrated ones, and that nothing in memory was looked at."""

    said = "same files"


class _OtherFiles(str):
    """That the sampled weights in memory are the calibrated ones, and that the model's files are not."""

    said = "other files"


class _OfAttention(str):
    """That the sampled weights in memory are the calibrated ones, and that nothing is known of the others; "" where a
    warning would tell nobody more."""

    said = "same attention"


def _problem(bundle, layers, files):
    """What differs, as text; an Unknown; an _OfFiles; an _OtherFiles; or None: the weights in memory are those."""
    difference = compare(bundle, layers)
    if difference is not None and difference.differ:
        return str(difference)
    if difference is not None:
        same = _may_be_of_calibration(bundle, files)
        if same is None:
            return _OfAttention(
                f"the weights of q, k, v and o agree with the bundle's samples. Whether embeddings, MLPs and other norms do can't "
                f"be told: {_why_files_say_nothing(bundle, files)}. Calibrate a fine-tune anew"
                if files is not None and bundle.model.file_sha256 else "")
        return None if same else _OtherFiles(
            f"the weights of q, k, v and o agree with the bundle's samples, but the files in {files} are not those of the "
            "calibration: embeddings, MLPs or other norms are others, or the files were written anew. Calibrate "
            "a fine-tune anew")
    why = ("the weights are quantized, or not in memory" if _has_samples(bundle) else
           "the bundle has no samples of its weights (it is of an earlier version, or q, k, v and o of its model are no plain "
           "matrices)")
    same = _of_calibration(bundle, files)
    if same is None:
        return Unknown(f"weights could not be compared: {why}, and {_why_files_say_nothing(bundle, files)}")
    if same:
        return _OfFiles(f"{files} is what the bundle was calibrated on, but the weights in memory were not "
                        f"compared with it: {why}. What was changed behind loading is not seen")
    return _other_files(bundle, files)


def _has_samples(bundle):
    return any(layer.weight_samples is not None for layer in bundle.layers.values())


def _of_calibration(bundle, files):
    """Whether a model's files (files_of) are those that a bundle was calibrated on; None: it can't be told."""
    if files is None or not bundle.model.weights_fingerprint:
        return None
    if files.suffix == ".gguf":
        return sha256_of(files) == bundle.model.file_sha256
    if bundle.model.file_sha256:
        return is_of_gguf(files, bundle.model.file_sha256)
    return is_of(files, bundle.model.weights_fingerprint)


def _may_be_of_calibration(bundle, files):
    """_of_calibration() where attention's weights in memory are the bundle's: of a GGUF file that lies there nothing more is
    asked, since its hash takes seconds."""
    try:
        return files is not None and files.suffix == ".gguf" or _of_calibration(bundle, files)
    except (OSError, ValueError, KeyError):  # shards that are not there: weights came from elsewhere
        return None


def _why_files_say_nothing(bundle, files):
    if not bundle.model.weights_fingerprint:
        return "no fingerprint"
    return "the model has no files that are known" if files is None else (
        f"it was made from a GGUF file, and {files} has no {GGUF_SOURCE}, which python -m oscar_int2 dequantize writes")


def _other_files(bundle, files):
    gguf = files.suffix == ".gguf"
    found, made = ((sha256_of(files), bundle.model.file_sha256) if gguf else
                   (fingerprint(files), bundle.model.weights_fingerprint))
    return (f"the fingerprint of {files} is {found[:12]}, the bundle's {made[:12] or 'that of no GGUF file'}. "
            "These weights are a quantized form or a fine-tune of the calibrated model, or another model "
            "of the same shape")


def compare_files(bundle, model, revision=None, accepted=SAME, option="", quantized=False):
    """What a model's files say before its weights are loaded, in words. `model`, `revision`, `accepted`, `option`: as check()
    has them. Raises BundleMismatchError for others than those of the calibration, by their entries where they have the
    bundle's samples. `quantized`: a server could compare nothing but the fingerprint."""
    files = files_of(model, revision)
    same = _of_calibration(bundle, files)
    if same:
        return "its files are those of the calibration"
    difference = None if quantized or files is None or files.suffix == ".gguf" else compare(bundle, of_files(bundle, files))
    if difference is not None and difference.differ and accepted != ANY:
        raise _mismatch(bundle, difference, files, option)
    if difference is not None and not difference.differ:
        return "q, k, v and o in its files are those of the calibration" + (
            f"; of its other weights nothing is known ({_why_files_say_nothing(bundle, files)})" if same is None else
            ", but the files are not: embeddings, MLPs or other norms are others, or the files were written anew. Calibrate a "
            "fine-tune anew")
    later = "the server compares weights with the bundle's samples when it has loaded them"
    if same is None:
        return f"its files say nothing of the calibration ({_why_files_say_nothing(bundle, files)}); {later}"
    if accepted == ANY:
        return "its files are not those of the calibration, and any weights are accepted"
    if quantized or not _has_samples(bundle):
        raise BundleMismatchError(f"{bundle.path}: {_other_files(bundle, files)}")
    return f"its files are not those of the calibration: {later}"


_ENTRIES = 64  # of a tensor that are compared with its file


def other_than_files(model, layers, folder):
    """Whether a model in memory has other weights than the safetensors files of its folder: "" if it has the same, else what
    differs, or why that can't be told (an Unknown), as text. `layers`: its decoder layers.

    Compared are entries of every parameter whose name is in the files, by compare()'s rule. It can't be told unless
    all parameters of `layers` are among them."""
    files = tensors_of(folder)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if hasattr(module, "base_layer") and _acting(module):
            return f"{name} has an adapter of another kind than LoRA"
    maps, ends, differ, compared, missed = {}, {}, [], 0, None
    for name in files:
        ends.setdefault(_from_layers(name), []).append(name)
    within = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        holder, _, leaf = name.rpartition(".")
        owner = next((path for path in _parents(holder) if hasattr(modules[path], "base_layer")), None)
        if owner is not None and not name.startswith(f"{owner}.base_layer."):
            continue  # an adapter's own
        if leaf == "weight" and owner == holder.removesuffix(".base_layer"):
            parameter = weight_of(modules[owner])
        plain = name.replace(".base_layer.", ".")
        found = [key for key in (plain, plain.removeprefix(f"{model.base_model_prefix}.")) if key in files][:1] or [
            key for key in ends.get(_from_layers(plain), ()) if tuple(files[key][2]["shape"]) == tuple(parameter.shape)]
        place = files[found[0]] if len(found) == 1 else None
        if place and place[2]["dtype"] in FILE_DTYPES and is_plain(parameter, place[2]["shape"]):
            compared += 1
            if not _same_entries(parameter.data, *place, maps):
                differ.append(plain)
        elif id(model.get_parameter(name)) in within:
            missed = missed or plain
    if differ:
        return f"{differ[0]} differs, and {len(differ) - 1} more of {compared} tensors"
    return Unknown(f"{missed} is not in them by that name, shape and kind of number") if missed else ""


def _parents(path):
    """The paths of a module and of those around it, from the innermost."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _from_layers(name):
    """The part of a tensor's name that checkpoints and versions of transformers agree on."""
    return name[name.index("layers."):] if "layers." in name else name


def _same_entries(tensor, path, base, entry, maps):
    """Whether entries of a tensor are those of its file: one in each of 64 equal strips of rows, and of columns."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    rows = max(tensor.numel() // max(columns, 1), 1)
    strips = torch.arange(_ENTRIES)
    across = sum((strips >> bit & 1) << (5 - bit) for bit in range(6)) if rows > 1 else strips  # bits reversed
    row, column = (2 * strips + 1) * rows // (2 * _ENTRIES), (2 * across + 1) * columns // (2 * _ENTRIES)
    if not tensor.numel():
        return True
    dtype = FILE_DTYPES[entry["dtype"]]
    places = row * columns + column
    if path not in maps:
        maps[path] = np.memmap(path, np.uint8, "r")
    begin = base + entry["data_offsets"][0]
    stored = np.array(maps[path][begin + places.numpy()[:, None] * dtype.itemsize + np.arange(dtype.itemsize)])
    kept = torch.from_numpy(stored).view(dtype)[:, 0].bfloat16().float()
    found = tensor.reshape(-1)[places.to(tensor.device)].float().cpu()
    return bool(rounds_to(found, kept, torch.tensor(tensor.dtype == torch.float16)).all())
