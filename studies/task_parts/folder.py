"""A GGUF file as the Hugging Face folder that a server loads: its dequantized weights in bf16."""
import json
import pathlib

# What transformers adds to every configuration, and what says nothing about the dequantized model.
NOT_CONFIG = ("quantization_config", "id2label", "label2id", "problem_type", "output_hidden_states",
              "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder")


def write_folder(gguf: pathlib.Path, out: pathlib.Path) -> dict:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer; returns the config."""
    import torch
    import transformers
    from safetensors.torch import save_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
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
    return config
