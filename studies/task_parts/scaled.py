"""A Hugging Face folder with calibrated scales of an FP8 cache, as compressed-tensors' scheme for a KV cache has them."""
import json
import os
import pathlib
import shutil

from . import texts

FP8_MAX = 448.0  # of e4m3
NAME, SCALES = "oscar_study_scales", "kv_scales.safetensors"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, "observer": "minmax"}
QUANTIZATION = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed", "config_groups": {},
                "ignore": [], "kv_cache_scheme": SCHEME}


def largest(model, sequences) -> dict:
    """{layer: [largest |q|, |k|, |v|]} of what attention uses, keys and queries after RoPE. `sequences`: tensors [1, tokens]."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen = {}

    def attention(module, query, key, value, mask, **options):
        found = torch.stack([rows.detach().abs().amax().float() for rows in (query, key, value)]).cpu()
        seen[module.layer_idx] = torch.maximum(seen.get(module.layer_idx, found), found)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        for ids in sequences:
            model(ids.to(model.device), use_cache=False, logits_to_keep=1)
    return {layer: values.tolist() for layer, values in sorted(seen.items())}


def write_scaled(folder: pathlib.Path, corpus: pathlib.Path, out: pathlib.Path, tokens: int, length: int) -> dict:
    """Copies the folder with scales of `tokens` tokens of the corpus, in sequences of `length`: the largest value of each layer
    over 448 for queries, keys and values. Returns {layer: [q, k, v]}, the largest values."""
    import torch
    import transformers
    from safetensors.torch import save_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [token for text in texts.documents(corpus) for token in tokenizer(text, add_special_tokens=False)["input_ids"]][:tokens]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    found = largest(model, (torch.tensor([ids[begin:begin + length]]) for begin in range(0, len(ids), length)))
    out.mkdir(parents=True, exist_ok=True)
    for path in (path for path in folder.iterdir() if path.is_file()):
        if path.suffix != ".safetensors":
            shutil.copy(path, out / path.name)
            continue
        (out / path.name).unlink(missing_ok=True)
        try:
            os.link(path, out / path.name)
        except OSError:  # another disk
            shutil.copy(path, out / path.name)
    scales = {f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(value / FP8_MAX)
              for layer, values in found.items() for side, value in zip("qkv", values)}
    # In a file of their own: without an index, servers read every file of the folder.
    save_file(scales, out / SCALES, metadata={"format": "pt"})
    index = out / "model.safetensors.index.json"
    if index.is_file():
        document = json.loads(index.read_text())
        document["weight_map"] |= dict.fromkeys(scales, SCALES)
        index.write_text(json.dumps(document, indent=1) + "\n")
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=1) + "\n")
    return found
