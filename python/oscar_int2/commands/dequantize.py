"""A GGUF file as the Hugging Face folder that vLLM and transformers load: its dequantized weights in bf16.

    python -m oscar_int2 dequantize MODEL.gguf FOLDER

A bundle of that file is served over the folder: it holds the numbers that were calibrated, which those of the
original checkpoint are not. Rotations that `oscar-bundle export --for gguf-rot` put into the file stay out of it.
It needs transformers, and PyPI's gguf. What oscar-calibrate refuses is refused here in its words:
another architecture than llama, qwen2 and qwen3, and metadata that the model is not computed by. Every tensor of
the folder is one of the file. A tensor that is missing, has no place in the folder or holds numbers that bf16 does
not is an error. The file's RoPE scaling is written where it is linear, YaRN or Llama 3's, whose factors are held
against those in rope_freqs.weight. Other scaling is refused.
"""
import argparse
import copy
import json
import pathlib
import sys
import tempfile

from .. import programs
from ..errors import OscarError
from ..weight_files import write_gguf_source

# What transformers adds to every configuration, and what says nothing about the dequantized model.
NOT_CONFIG = ("quantization_config", "id2label", "label2id", "problem_type", "output_hidden_states",
              "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder")

# Tensors and keys of RoPE, as lib/oscar/model/checkpoint/gguf_model.cpp reads them.
FACTORS, LONG_FACTORS = "rope_freqs.weight", ("rope_factors_long.weight", "rope_factors_short.weight")
KEPT = {"type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow", "finetuned"}
NEUTRAL = {"attn_factor": 1, "yarn_attn_factor": 1, "yarn_ext_factor": 1}  # any other value is refused
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as published; a converter keeps the factors alone
LLAMA3_LENGTH = 8192


def scaled(config, scaling):
    """A configuration of transformers with this RoPE scaling, in the form of its version. Raises OscarError."""
    config = copy.deepcopy(config)
    if not hasattr(config, "rope_parameters"):  # transformers 4
        config.rope_scaling = scaling
        return config
    plain = config.rope_parameters or {}
    if any(isinstance(value, dict) for value in plain.values()):
        raise OscarError("layers of several kinds of RoPE cannot be written with a scaling")
    config.rope_parameters = {key: plain[key] for key in ("rope_theta", "partial_rotary_factor") if key in plain} | scaling
    return config


def frequencies(config, scaling):
    """(base, scaled frequencies, factor on cos and sin), as transformers works them out; float64, radians a position."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](scaled(config, scaling), "cpu")
    base = config.rope_parameters["rope_theta"] if hasattr(config, "rope_parameters") else config.rope_theta
    return float(base), found.double().numpy(), magnitude


def factor_scaling(tensor, original, config):
    """Llama 3's scaling, whose factors rope_freqs.weight holds. Raises OscarError where they are others."""
    import gguf
    import numpy as np

    factors = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64).ravel()
    found = {"rope_type": "llama3", "factor": float(factors.max(initial=1)), **LLAMA3, "original_max_position_embeddings": original}
    base, stretched, _ = frequencies(config, found)
    plain = base ** (-np.arange(len(stretched)) / len(stretched))
    if factors.shape != plain.shape or not np.allclose(plain / stretched, factors, rtol=1e-5, atol=0):
        raise OscarError(f"the factors in {FACTORS} are not those of Llama 3's scaling, and config.json has no other form for them")
    return found


def keyed_scaling(kind, keys, config):
    """Linear scaling or YaRN of the file's keys. Raises OscarError where transformers makes something else of it."""
    import numpy as np

    from ..rope import inverse_frequencies

    if kind not in ("linear", "yarn") or "factor" not in keys:
        raise OscarError(f"rope.scaling.type is {kind}, expected none, linear or yarn with a rope.scaling.factor")
    found = {"rope_type": kind, "factor": float(keys["factor"])}
    if kind == "yarn":
        found["original_max_position_embeddings"] = int(keys.get("original_context_length", config.max_position_embeddings))
        found |= {name: float(keys["yarn_" + name]) for name in ("beta_fast", "beta_slow") if keys.get("yarn_" + name)}
    base, stretched, magnitude = frequencies(config, found)
    whole = {"rope_theta": base, "truncate": True, "beta_fast": 32.0, "beta_slow": 1.0} | found
    wanted = 1 + 0.1 * np.log(max(found["factor"], 1)) if kind == "yarn" else 1
    same = np.allclose(inverse_frequencies(whole, 2 * len(stretched)), stretched, rtol=1e-5, atol=0)
    if not same or abs(magnitude - wanted) > 1e-6:
        raise OscarError(f"rope.scaling of type {kind} is another here in transformers than in the file")
    return found


def rope_scaling(reader, config):
    """The RoPE scaling of a GGUF file as transformers' configurations hold it, None without one. Raises OscarError."""
    prefix = reader.fields["general.architecture"].contents() + ".rope."
    keys = {name.removeprefix(prefix): field.contents() for name, field in reader.fields.items() if name.startswith(prefix)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in filter(tensors.__contains__, LONG_FACTORS):
        raise OscarError(f"{name}: factors for short and long texts cannot be written into config.json")
    scaling = {name.removeprefix("scaling."): value for name, value in keys.items() if name.startswith("scaling.")}
    if keys.get("scale_linear", 1) != 1:
        raise OscarError("rope.scale_linear: this older form of RoPE scaling cannot be written into config.json")
    for name, value in scaling.items():
        if name not in KEPT and value != NEUTRAL.get(name):
            raise OscarError(f"rope.scaling.{name} is {value}, which cannot be written into config.json")
    kind = scaling.get("type", "linear" if "factor" in scaling else "none")
    if FACTORS not in tensors:
        return None if kind == "none" else keyed_scaling(kind, scaling, config)
    if kind not in ("none", "llama3"):
        raise OscarError(f"RoPE is scaled in two ways, by rope.scaling.type {kind} and by {FACTORS}")
    return factor_scaling(tensors[FACTORS], int(scaling.get("original_context_length", LLAMA3_LENGTH)), config)


# Of the cache's rows: a folder has no place for them. lib/oscar/model/checkpoint/gguf_model.h
ROTATIONS = (".attn_k_rot.weight", ".attn_v_rot.weight")


def require_readable(path: pathlib.Path):
    """Raises OscarError where our own programs refuse the file's metadata: transformers passes by what it does not know."""
    try:
        programs.run("oscar-bundle", ["plan", path, "--json", "-"])  # reads no weight
    except (OscarError, ValueError) as error:
        raise OscarError(str(error).removeprefix("oscar-bundle: ")) from error


def shape_config(reader, config):
    """A configuration of transformers with what the file says and transformers leaves at its defaults."""
    config = copy.deepcopy(config)
    prefix = reader.fields["general.architecture"].contents() + "."
    keys = {name.removeprefix(prefix): field for name, field in reader.fields.items() if name.startswith(prefix)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = int(keys["attention.head_count"].contents())
    size = int(keys["attention.key_length"].contents()) if "attention.key_length" in keys else config.hidden_size // heads
    config.num_key_value_heads = int(keys["attention.head_count_kv"].contents()) if "attention.head_count_kv" in keys else heads
    if hasattr(config, "head_dim") or size * heads != config.hidden_size:
        config.head_dim = size
    config.vocab_size = int(tensors["token_embd.weight"].shape[-1])  # gguf: columns first
    config.tie_word_embeddings = "output.weight" not in tensors
    for switch, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_gate.bias")):
        if hasattr(config, switch):
            setattr(config, switch, tensor in tensors)
    return config


def names_in_file(model):
    """{name in the folder: name in the file} of the tensors of a model of transformers."""
    import gguf

    config = model.config
    architecture, = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: names.get_name(name, try_suffixes=(".weight", ".bias")) or name for name in model.state_dict() if name not in tied}


def some(names):
    """The first few names, and how many more."""
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def bf16_tensor(tensor, name, shape, config):
    """A tensor of the file in the folder's order of rows. Raises OscarError, also for numbers that bf16 does not hold."""
    import gguf
    import numpy as np
    import torch

    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise OscarError(f"{tensor.name}: gguf cannot dequantize {tensor.tensor_type.name}") from error
    if values.shape != shape:
        raise OscarError(f"{tensor.name} has the shape {list(values.shape)}, expected {list(shape)} by the metadata")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
    if heads and config.model_type == "llama":  # stored in pairs for ggml's RoPE: has_paired_rows of gguf_model.h
        pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    exact = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    written = exact.to(torch.bfloat16)
    if not torch.isfinite(exact).all():
        raise OscarError(f"{tensor.name} holds numbers that are NaN or infinite: the file is damaged, or its model is")
    if not torch.isfinite(written).all():
        raise OscarError(f"{tensor.name} holds {exact.abs().max().item():.3g}, beyond the range of bf16")
    return written


def read_tensors(reader, model):
    """{name: tensor in bf16} of all tensors of a model of transformers. Raises OscarError where the file's are not these."""
    held = {tensor.name: tensor for tensor in reader.tensors if tensor.name != FACTORS and not tensor.name.endswith(ROTATIONS)}
    names = names_in_file(model)
    if missing := set(names.values()) - set(held):
        raise OscarError(f"tensors are missing in the file: {some(missing)}")
    if further := set(held) - set(names.values()):
        raise OscarError(f"the file has tensors that {type(model).__name__} has no place for: {some(further)}")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: bf16_tensor(held[names[name]], name, shapes[name], model.config) for name in names}


def end_tokens(reader, config):
    """eos_token_id of generation_config.json: that of the file, and where it has another one for ends of turns, both."""
    found = [reader.fields[key].contents() for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
             if key in reader.fields]
    ends = list(dict.fromkeys(map(int, found)))
    return ends if len(ends) > 1 else ends[0] if ends else config.get("eos_token_id")


def refuse_no_file(path: pathlib.Path):
    """Ends the run where `path` is no GGUF file."""
    if path.is_dir():
        inside = sorted(str(file) for file in path.glob("*.gguf"))
        sys.exit(f"dequantize: {path} is a folder, and this takes a .gguf file"
                 + (f": {' or '.join(inside)}" if inside else "; a Hugging Face folder is served as it is"))
    if not path.is_file():
        sys.exit(f"dequantize: {path} is missing")
    if path.suffix != ".gguf":
        sys.exit(f"dequantize: {path} has no name that ends in .gguf, by which such a file is known")


def write_folder(path: pathlib.Path, out: pathlib.Path):
    """Writes config.json, generation_config.json, model.safetensors, oscar_gguf.json and the tokenizer; returns how many tensors, their bytes, and
    the names of the file's tensors that are not among them.

    Raises OscarError for its metadata, its tensors and its RoPE.
    """
    import gguf
    import torch
    import transformers
    from safetensors.torch import save_file

    require_readable(path)
    reader = gguf.GGUFReader(path)
    config = shape_config(reader, transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    scaling = rope_scaling(reader, config)
    with torch.device("meta"):  # for the names and shapes of its tensors: no number comes from here
        model = transformers.AutoModelForCausalLM.from_config(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tensors = read_tensors(reader, model)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = scaled(model.config, scaling) if scaling else model.config
    config = {key: value for key, value in config.to_dict().items() if key not in NOT_CONFIG and not key.startswith("_")}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16", "torch_dtype": "bfloat16",
               "transformers_version": transformers.__version__}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    # No temperature, no penalty: vLLM takes them from here when a request leaves them open.
    ends = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    if (last := end_tokens(reader, config)) is not None:
        ends["eos_token_id"] = last
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False, **ends}, indent=1) + "\n")
    beside = path.parent / "chat_template.jinja"
    if not tokenizer.chat_template and beside.is_file():  # which the programs read, too
        tokenizer.chat_template = beside.read_text()
    tokenizer.save_pretrained(out)
    write_gguf_source(out, path)
    others = [tensor.name for tensor in reader.tensors if tensor.name == FACTORS or tensor.name.endswith(ROTATIONS)]
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values()), others


def size_text(count):
    """Bytes in the largest unit of which there is one."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count / 1024:.3g} KiB"


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 dequantize", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path, metavar="MODEL.gguf")
    parser.add_argument("out", type=pathlib.Path, metavar="FOLDER", help="to write; it must not be there, or be empty")
    arguments = parser.parse_args(words)
    refuse_no_file(arguments.gguf)
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        sys.exit(f"dequantize: {arguments.out} is there already; choose another name, or remove it")
    try:
        import gguf  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        sys.exit(f"dequantize: {error.name} is missing; this needs transformers (4.57.3 to 5.24) and PyPI's gguf")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dequantize.", dir=arguments.out.parent) as scratch:
        whole = pathlib.Path(scratch, "whole")
        whole.mkdir()
        try:
            tensors, size, others = write_folder(arguments.gguf, whole)
        except OscarError as error:
            place = "" if str(arguments.gguf) in str(error) else f"{arguments.gguf}: "
            sys.exit(f"dequantize: {place}{error}")
        except Exception as error:  # readers of a damaged file raise what they meet
            sys.exit(f"dequantize: transformers cannot read {arguments.gguf}: {type(error).__name__}: {error}")
        whole.replace(arguments.out)  # it appears whole or not at all
    print(f"wrote {arguments.out}: {tensors} tensors in bf16, {size_text(size)} (the file has {size_text(arguments.gguf.stat().st_size)})")
    if FACTORS in others:
        print(f"{FACTORS} is in config.json, as its RoPE scaling")
    if rotations := len(others) - others.count(FACTORS):
        print(f"left out {rotations} rotations (attn_k_rot, attn_v_rot), which are of the cache and no weights: serve the folder "
              "with the bundle that they were exported from")
    return 0
