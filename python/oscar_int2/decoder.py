"""The forward pass of dense decoder models with few launches a layer, for the decode loop.

Weights are those of a transformers model; W_Q, W_K, W_V and the two input matrices of the MLP are
laid side by side, so that each pair or triple is one product, and the model's own parameters become
views of them, biases and norms of heads too: nothing is held twice, and values that are loaded into the
model's parameters are computed with from then on. Parameters that lie elsewhere later are refused.
"""
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

from .bundle import has_other_attention
from .codec import is_served_scale
from .errors import UnsupportedError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TORCH_MODULES = (torch.nn.Embedding, torch.nn.ModuleList, torch.nn.SiLU)


@dataclass(frozen=True)
class LayerWeights:
    input_norm: torch.Tensor          # [hidden]
    qkv: torch.Tensor                 # [(Hq + 2 Hkv) d, hidden]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None      # [2, d]: of q's heads, and of k's
    o: torch.Tensor                   # [hidden, Hq d]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor           # [hidden]
    gate_up: torch.Tensor             # [2 intermediate, hidden]
    down: torch.Tensor                # [hidden, intermediate]


class Pieces(NamedTuple):
    """What lies between the matrix products of a layer: Decoder's methods, plain or compiled."""

    rms: Callable
    heads_of: Callable
    gated: Callable
    turn: Callable


def model_config(model):
    """The config of a loaded model. Raises TypeError for anything else."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"a Generator takes a causal language model of transformers, found a "
                        f"{type(model).__name__}; AutoModelForCausalLM.from_pretrained(folder, "
                        "dtype=torch.bfloat16) loads one")
    return model.config


def check_linear(linear):
    """Raises UnsupportedError for a module that computes more than its weight and bias say, as one
    with an adapter does, or one with quantized weights."""
    if type(linear) is not torch.nn.Linear:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        raise UnsupportedError(f"a {kind} in place of a torch.nn.Linear; merge adapters into the weights, and "
                               "load weights in bf16")


def check_modules(model):
    """Raises UnsupportedError for a model that does not compute what transformers' own of its family does:
    with hooks, with modules of other classes, or with a forward() that was replaced."""
    family = f"transformers.models.{model.config.model_type}."
    for name, module in model.named_modules():
        kind, found = type(module), None
        if module._forward_hooks or module._forward_pre_hooks:
            found = "a hook on"
        elif "forward" in vars(module):
            found = "a forward() of its own in"
        elif not (kind.__module__.startswith(family) or kind in TORCH_MODULES
                  or isinstance(module, torch.nn.Linear)  # those have their own check
                  or kind.__module__ == "transformers.activations" and kind.__name__.startswith("SiLU")):
            found = f"a {kind.__module__}.{kind.__name__} as"
        if found:
            raise UnsupportedError(f"{found} {name or 'the model'}: a Generator computes its own steps from the weights "
                                   "and calls no module; use apply() of oscar_int2.transformers")


def joined(parameters):
    """One tensor of several parameters one behind another, which become views of it, or are already:
    several decoders of a model share it."""
    first, rows = parameters[0].data, [len(parameter) for parameter in parameters]
    starts = [parameter.data_ptr() for parameter in parameters]
    ends = [start + parameter.nbytes for start, parameter in zip(starts, parameters)]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) == 1 and ends[:-1] == starts[1:]:
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split(rows)):
        parameter.data = part
    return whole


def side_by_side(linears):
    """One matrix of several torch.nn.Linear, whose weights become views of it; and one bias."""
    for linear in linears:
        check_linear(linear)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        raise UnsupportedError("a bias in some of q_proj, k_proj and v_proj alone; give the others a bias "
                               "of zeros")
    return joined([linear.weight for linear in linears]), joined(biases) if biases else None


def fused(piece, device):
    """`piece` compiled. From Hopper on its kernels are launched while those before them end (CUDA's
    programmatic dependent launch), which changes no bit of the results."""
    options = {}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        options = {name: True for name in ("triton.enable_pdl",)
                   if name in torch._inductor.list_options()}  # torch 2.9 has it or not
    return torch.compile(piece, dynamic=False, options=options)


class Decoder:
    """`model`: a causal language model of transformers in bf16, of one of FAMILIES.

    `compile`: fuse what lies between matrix products and operators by torch.compile; None: on a GPU.
    Raises UnsupportedError for models that it would not compute right.
    """

    def __init__(self, model, compile=None):
        config = model_config(model)
        if config.model_type not in FAMILIES:
            raise UnsupportedError(f"models of type {config.model_type!r}; expected {', '.join(FAMILIES)}")
        if model.dtype != torch.bfloat16:
            raise UnsupportedError(f"weights in {model.dtype}: load the model with dtype=torch.bfloat16")
        if getattr(config, "hidden_act", "silu") != "silu":
            raise UnsupportedError(f"activation {config.hidden_act!r}; expected 'silu'")
        if has_other_attention(config):
            raise UnsupportedError("layers with a sliding window, or other than full attention")
        if not hasattr(getattr(model, "model", None), "layers") or not hasattr(model, "lm_head"):
            raise UnsupportedError(f"a {type(model).__name__} around the model; give the causal language "
                                   "model of transformers itself, adapters merged into it")
        check_modules(model)
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1 or devices == ["meta"]:
            raise UnsupportedError(f"a model on {', '.join(devices)}; load it whole on one device, without "
                                   "device_map and offloading")
        self.device = model.device
        if compile is None:
            compile = self.device.type == "cuda"
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        for name, module in model.named_modules():
            if abs(getattr(module, "variance_epsilon", self.eps) - self.eps) > 1e-3 * self.eps:
                raise UnsupportedError(f"{name} with an epsilon of its own, {module.variance_epsilon}")
            if not is_served_scale(getattr(module, "scaling", self.head_dim**-0.5), self.head_dim):
                raise UnsupportedError(f"{name} with logits times {module.scaling} in place of 1 / sqrt(head_dim)")
        self.embedding = model.model.embed_tokens.weight.data
        self.layers = [self._layer(block) for block in model.model.layers]
        check_linear(model.lm_head)
        if model.lm_head.bias is not None:
            raise UnsupportedError("a bias in lm_head")
        self.norm, self.head = model.model.norm.weight.data, model.lm_head.weight.data
        rotary = model.model.rotary_emb
        self.inv_freq = rotary.inv_freq.float().to(self.device)
        self.rotary_scale = float(rotary.attention_scaling)
        self.plain = Pieces(self._rms, self._heads_of, self._gated, self._turn)
        self.fused = self.plain
        if compile:
            self.fused = Pieces(*(fused(piece, self.device) for piece in self.plain))
        self.model = weakref.ref(model)
        self.addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    def check_weights(self):
        """Raises UnsupportedError for a model whose parameters lie elsewhere than when this was made, since
        steps would go on with the old ones, and for one whose modules were changed."""
        model = self.model()
        if model is None:
            return
        check_modules(model)
        now = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for name, address in self.addresses.items():
            if now.get(name) != address:
                raise UnsupportedError(
                    f"{name} of the model lies elsewhere since this Generator was made, as after "
                    "load_state_dict(assign=True), model.to() or a replaced parameter; load weights in "
                    "place, load_state_dict() without assign, or make a new Generator")

    @staticmethod
    def _layer(block):
        attention, mlp = block.self_attn, block.mlp
        for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            check_linear(linear)
        if any(linear.bias is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            raise UnsupportedError("biases in the MLP")
        qkv, qkv_bias = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up, _ = side_by_side([mlp.gate_proj, mlp.up_proj])
        qk_norm = None
        if hasattr(attention, "q_norm"):
            qk_norm = joined([attention.q_norm.weight, attention.k_norm.weight]).view(2, -1)
        bias = attention.o_proj.bias
        return LayerWeights(
            block.input_layernorm.weight.data, qkv, qkv_bias, qk_norm,
            attention.o_proj.weight.data, None if bias is None else bias.data,
            block.post_attention_layernorm.weight.data, gate_up, mlp.down_proj.weight.data)

    def _rms(self, x, weight):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).bfloat16() * weight

    def _turn(self, positions):
        """cos and sin [rows, 1, d] in bf16 of int positions [rows]."""
        angles = positions.float()[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        return ((angles.cos() * self.rotary_scale).bfloat16(),
                (angles.sin() * self.rotary_scale).bfloat16())

    @staticmethod
    def _turned(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def _heads_of(self, qkv, w, cos, sin):
        """W_QKV's product to q [rows, Hq, d], k and v [rows, Hkv, d], normalised and turned."""
        qkv = qkv.view(qkv.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if w.qk_norm is not None:
            qk = self._rms(qk, torch.cat((w.qk_norm[:1].expand(self.heads, -1),
                                          w.qk_norm[1:].expand(self.kv_heads, -1))))
        q, k = self._turned(qk, cos, sin).split((self.heads, self.kv_heads), dim=1)
        return q, k, v

    @staticmethod
    def _gated(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _layer_step(self, residual, w, cos, sin, attend, do):
        """Hidden states [rows, hidden] behind one layer, in place of those before it."""
        qkv = F.linear(do.rms(residual, w.input_norm), w.qkv, w.qkv_bias)
        o = attend(*do.heads_of(qkv, w, cos, sin)).flatten(1)
        if w.o_bias is not None:
            residual += w.o_bias
        residual.addmm_(o, w.o.mT)  # in place: the product adds what was there
        gate_up = F.linear(do.rms(residual, w.post_norm), w.gate_up)
        return residual.addmm_(do.gated(gate_up), w.down.mT)

    def _forward(self, tokens, positions, attend, do):
        residual = F.embedding(tokens, self.embedding)
        cos, sin = do.turn(positions)
        for index, weights in enumerate(self.layers):
            residual = self._layer_step(residual, weights, cos, sin, partial(attend, index), do)
        return residual

    def step(self, tokens, positions, attend):
        """Logits [rows, vocab] of one token of each request; tokens and positions int [rows].
        attend(layer index, q [rows, Hq, d], k, v [rows, Hkv, d]) gives attention's output like q."""
        residual = self._forward(tokens, positions, attend, self.fused)
        return F.linear(self.fused.rms(residual, self.norm), self.head)

    def prompt(self, tokens, write):
        """Logits [vocab] behind the last of a prompt's tokens [n], attended exactly.
        write(layer index, k, v) is given all rows [n, Hkv, d]."""
        def attend(index, q, k, v):
            write(index, k, v)
            rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
            o = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
            return o[0].transpose(0, 1)

        positions = torch.arange(len(tokens), device=self.device)
        residual = self._forward(tokens, positions, attend, self.plain)
        return F.linear(self._rms(residual[-1], self.norm), self.head)
