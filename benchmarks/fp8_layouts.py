"""FP8 E4M3 weights with their scales, in the layouts that checkpoints come in.

block: as DeepSeek and Qwen publish them, `X.weight_scale_inv` for every 128 x 128;
channel and tensor: compressed-tensors, `X.weight_scale` of [rows, 1] and of [1];
static: as AutoFP8 writes them, `X.weight_scale` and `X.input_scale`, numbers.
"""
import torch

BLOCK = 128
LAYOUTS = ("block", "channel", "tensor", "static")
LARGEST = 448.0  # torch.finfo(torch.float8_e4m3fn).max


def is_quantized(name):
    """Such checkpoints quantize the products in the layers, but for small ones."""
    return name.startswith("model.layers.") and name.endswith(
        ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight"))


def blocks_of(shape, layout):
    """Rows and columns that share a scale."""
    return {"block": (BLOCK, BLOCK), "channel": (1, shape[1])}.get(layout, tuple(shape))


def spread(scales, shape, block):
    """The scale of every element; the last blocks may be partial."""
    rows = torch.arange(shape[0], device=scales.device) // block[0]
    columns = torch.arange(shape[1], device=scales.device) // block[1]
    return scales[rows][:, columns]


def quantize(weight, layout, scale_dtype=torch.float32):
    """Codes [rows, columns] and scales [row blocks, column blocks] whose product is about weight."""
    rows, columns = blocks_of(weight.shape, layout)
    padded = torch.nn.functional.pad(
        weight.float().abs(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    grid = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = (grid.amax((1, 3)).clamp_min(1e-12) / LARGEST).to(scale_dtype)
    scaled = weight.float() / spread(scales.float(), weight.shape, (rows, columns))
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def dequantize(codes, scales, layout):
    """fp32, each code's value times its scale."""
    block = blocks_of(codes.shape, layout)
    return codes.to(torch.float32) * spread(scales.float(), codes.shape, block)


def stored(name, codes, scales, layout):
    """The tensors of one weight as a file holds them, by name."""
    if layout == "block":
        return {name: codes, name + "_scale_inv": scales}
    if layout == "channel":
        return {name: codes, name + "_scale": scales}
    tensors = {name: codes, name + "_scale": scales.reshape(1 if layout == "tensor" else ())}
    if layout == "static":
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
    return tensors


def store(tensors, layout, scale_dtype=torch.float32):
    """A checkpoint's tensors with the layers' matrices in FP8."""
    result = {}
    for name, value in tensors.items():
        if is_quantized(name):
            result |= stored(name, *quantize(value, layout, scale_dtype), layout)
        else:
            result[name] = value
    return result


def quantization_config(layout):
    """What config.json says of it."""
    if layout == "block":
        return {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK]}
    if layout == "static":
        return {"activation_scheme": "static", "ignored_layers": ["lm_head"],
                "quant_method": "fp8"}
    common = {"actorder": None, "block_structure": None, "group_size": None, "num_bits": 8,
              "observer_kwargs": {}, "symmetric": True, "type": "float"}
    weights = {**common, "dynamic": False, "observer": "minmax", "strategy": layout}
    inputs = {**common, "dynamic": True, "observer": None,
              "strategy": "token" if layout == "channel" else "tensor"}
    return {"config_groups": {"group_0": {"input_activations": inputs, "output_activations": None,
                                          "targets": ["Linear"], "weights": weights}},
            "format": "float-quantized", "global_compression_ratio": 1.5, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
            "version": "0.12.0"}
