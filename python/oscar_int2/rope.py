"""The rotary frequencies of a bundle, from the parameters that it keeps (docs/mathematics.md, 8)."""
import math

import numpy as np
import torch

from .errors import BundleError


def turned(rows, parameters, positions):
    """Rows [..., positions, d] float64 turned from position 0 to `positions`, an array, by a bundle's RoPE."""
    angles = torch.from_numpy(np.outer(positions, inverse_frequencies(parameters, rows.shape[-1])))
    cos, sin, n = angles.cos(), angles.sin(), 2 * angles.shape[1]
    if parameters.get("interleaved"):
        x, y = rows[..., 0:n:2], rows[..., 1:n:2]
        return torch.cat((torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2), rows[..., n:]), -1)
    x, y = rows[..., :n // 2], rows[..., n // 2:n]
    return torch.cat((x * cos - y * sin, y * cos + x * sin, rows[..., n:]), -1)


def decoder_frequencies(model):
    """What decoders of a model of transformers turn keys by: the tensors inv_freq, radians a position, of modules with layers."""
    for module in model.modules():
        found = getattr(getattr(module, "rotary_emb", None), "inv_freq", None)
        if found is not None and hasattr(module, "layers"):
            yield found


def inverse_frequencies(parameters, head_dim):
    """float64 [n / 2], radians a position; a pair of a head's first n dimensions turns together: (i, i + n / 2), or
    (2i, 2i + 1) where the parameters say interleaved. n is head_dim, the part of it that partial_rotary_factor says,
    or 0 of type none.

    `parameters`: the attribute rope of a bundle's /model, every default filled in. Types default,
    linear, llama3 (Llama 3.1), yarn (Peng et al., arXiv 2309.00071) and freq_factors, a divisor for each
    pair as GGUF files hold them. Raises BundleError.
    """
    try:
        kind = parameters["rope_type"]
        if kind == "none":
            return np.zeros(0)
        theta = float(parameters["rope_theta"])
        turning = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        if not 0 < turning <= head_dim or turning % 2:
            raise ValueError(f"partial_rotary_factor: {turning} of {head_dim} dimensions would turn, "
                             "expected an even number")
        plain = theta ** (-np.arange(0, turning, 2, dtype=np.float64) / turning)
        if kind == "default":
            return plain
        if kind == "linear":
            return plain / parameters["factor"]
        if kind == "llama3":
            return _llama3(plain, parameters)
        if kind == "yarn":
            return _yarn(plain, parameters, theta)
        if kind == "freq_factors":
            return plain / np.asarray(parameters["freq_factors"], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the bundle's RoPE parameters lack or garble {error}") from error
    raise BundleError(f"RoPE type {kind!r} is not known; expected default, linear, llama3, "
                      "yarn or freq_factors")


def _llama3(plain, parameters):
    """Slow dimensions are stretched, fast ones stay, between them linearly in turns."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / parameters["factor"])


def yarn_attention_factor(parameters):
    """By which YaRN multiplies queries and keys, as transformers works it out from a config's parameters."""
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]

    def magnitude(scale=1.0):
        factor = parameters.get("factor") or 1.0
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude()


def _yarn(plain, parameters, theta):
    """A ramp over dimensions between those that turn beta_fast and beta_slow times."""
    original, turning = parameters["original_max_position_embeddings"], 2 * len(plain)

    def dimension(turns):
        return turning * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters["beta_fast"]), dimension(parameters["beta_slow"])
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turning - 1)
    if low == high:
        high += 0.001  # a step
    stretched = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
    return plain * (stretched / parameters["factor"] + 1 - stretched)
