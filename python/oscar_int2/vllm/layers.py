"""Which attention layers of a model hold 2-bit rows in vLLM, and what is refused of them.

A bundle says what each layer does. Layers with full attention hold INT2 pages. The others stay as vLLM
has them: a layer with a window keeps it in BF16 and runs on vLLM's own backend, and a layer of linear
attention keeps its state.
"""
import math

from ..errors import BundleMismatchError, UnsupportedError


def is_int2(layer):
    """Whether a bundle's layer holds 2-bit rows here."""
    return layer.attention == "full" and layer.quantized and not layer.sliding_window


def _keeps_window(layer):
    """Whether it keeps the last rows alone, in BF16."""
    return layer.attention in ("local", "sliding") and layer.sliding_window > 0 and not layer.quantized


def has_others(bundle):
    """Whether some layers hold no 2-bit rows: windows in BF16, or linear attention."""
    return not all(map(is_int2, bundle.layers.values()))


def sees_less(config):
    """Whether some layers of a model do not see all tokens, by its Hugging Face config."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def check_served(bundle):
    """Raises UnsupportedError for a bundle with layers that vLLM can't serve with it."""
    for layer in bundle.layers.values():
        if not (is_int2(layer) or _keeps_window(layer) or layer.attention == "none"):
            raise UnsupportedError(
                f"layer {layer.layer_id} of {bundle.model.name!r} has {layer.attention} attention"
                f"{f' over {layer.sliding_window} tokens' if layer.sliding_window else ''}"
                f"{', in 2 bits' if layer.quantized else ' and is not quantized'}; in vLLM layers hold 2-bit "
                "rows of all tokens, or a window in BF16, or no rows")
    if not any(map(is_int2, bundle.layers.values())):
        raise UnsupportedError(f"no layer of {bundle.model.name!r} holds 2-bit rows by {bundle.path}: there is "
                               "nothing to serve with it")


def holds_int2(bundle, prefix, window, shared):
    """Whether an attention layer that vLLM makes holds 2-bit rows. `prefix`: its name; `window`: tokens that it
    sees, None for all; `shared`: the layer whose rows it reads, None for its own.

    Raises BundleMismatchError where the bundle says something else of it, UnsupportedError where vLLM's own
    backend would read rows that are not there."""
    from vllm.model_executor.models.utils import extract_layer_index

    layer_id = extract_layer_index(prefix)
    layer = bundle.layers.get(layer_id)
    if layer is None or layer.attention == "none":
        raise BundleMismatchError(
            f"{bundle.path} is of another model: layer {layer_id} ({prefix}) has softmax attention here, and in "
            f"the bundle {'no rows of its own' if layer else 'there is none'}; calibrate this model")
    if is_int2(layer):
        return True  # what OscarAttention can't serve it refuses
    if window != layer.sliding_window:
        raise BundleMismatchError(
            f"{bundle.path} is of another model: layer {layer_id} sees {window or 'all'} tokens here and "
            f"{layer.sliding_window} in the bundle; calibrate this model")
    if shared:
        raise UnsupportedError(f"the INT2 cache does not serve KV sharing (layer {layer_id} reads rows of {shared})")
    return False


def check_layer(scale, *, alibi_slopes, sliding_window, logits_soft_cap, attn_type, kv_sharing_target_layer_name,
                others):
    """Raises UnsupportedError unless this attention layer is plain causal attention. `scale`: of its logits."""
    refused = (("ALiBi", alibi_slopes is not None), ("a sliding window over 2-bit rows", sliding_window is not None),
               ("a soft cap of logits", logits_soft_cap), ("KV sharing", kv_sharing_target_layer_name),
               (f"attention of type {attn_type}", attn_type != "decoder"),
               (f"a softmax scale of {scale}", not 0 < scale < math.inf),
               *((f"attention with {other}", value is not None) for other, value in others.items()))
    for what, found in refused:
        if found:
            raise UnsupportedError(f"the INT2 cache does not serve {what}")
