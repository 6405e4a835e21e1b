"""A GGUF file as the Hugging Face folder that vLLM and transformers load: its dequantized weights in bf16.

    python -m oscar_int2 dequantize MODEL.gguf FOLDER

A bundle of that file is served over the folder: it holds the numbers that were calibrated, which those of the
original checkpoint are not. It needs transformers, and PyPI's gguf and accelerate. The model's family must be one
whose GGUF files transformers reads.
"""
import argparse
import json
import pathlib
import sys
import tempfile

# What transformers adds to every configuration, and what says nothing about the dequantized model.
NOT_CONFIG = ("quantization_config", "id2label", "label2id", "problem_type", "output_hidden_states",
              "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder")


def write_folder(gguf: pathlib.Path, out: pathlib.Path):
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer."""
    import torch
    import transformers
    from safetensors.torch import save_file

    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tied = model.config.tie_word_embeddings
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
               if not (tied and name == "lm_head.weight")}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_CONFIG and not key.startswith("_")}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16", "torch_dtype": "bfloat16",
               "transformers_version": transformers.__version__}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    # No temperature, no penalty: vLLM takes them from here when a request leaves them open.
    ends = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False, **ends}, indent=1) + "\n")
    tokenizer.save_pretrained(out)


def main(words):
    parser = argparse.ArgumentParser(prog="python -m oscar_int2 dequantize", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path, metavar="MODEL.gguf")
    parser.add_argument("out", type=pathlib.Path, metavar="FOLDER", help="to write; it must not be there, or be empty")
    arguments = parser.parse_args(words)
    if not arguments.gguf.is_file():
        sys.exit(f"dequantize: {arguments.gguf} is missing")
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        sys.exit(f"dequantize: {arguments.out} is there already; choose another name, or remove it")
    try:
        import accelerate  # noqa: F401: transformers asks for both
        import gguf  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        sys.exit(f"dequantize: {error.name} is missing; this needs transformers (4.57.3 to 5.23), gguf and accelerate of PyPI")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".dequantize.", dir=arguments.out.parent) as scratch:
        whole = pathlib.Path(scratch, "whole")
        whole.mkdir()
        try:
            write_folder(arguments.gguf, whole)
        except Exception as error:  # readers of a damaged file raise what they meet
            sys.exit(f"dequantize: transformers cannot read {arguments.gguf}: {type(error).__name__}: {error}")
        whole.replace(arguments.out)  # it appears whole or not at all
    print(f"wrote {arguments.out}")
    return 0
