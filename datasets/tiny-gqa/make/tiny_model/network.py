"""The Qwen3 architecture in plain PyTorch, with the tensor names of its checkpoints, for training."""

import torch
import torch.nn.functional as F
from torch import nn

from .settings import Architecture


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rope_tables(arch: Architecture, length: int, device) -> tuple:
    """(cos, sin), each fp32 [length, head_dim]; channels i and i + head_dim / 2 form a pair."""
    pairs = torch.arange(0, arch.head_dim, 2, device=device, dtype=torch.float64) / arch.head_dim
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * arch.rope_theta ** -pairs[None]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    """RoPE of x [..., head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, arch: Architecture):
        super().__init__()
        q_size, kv_size = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(arch.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(arch.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, arch.hidden_size, bias=False)
        self.q_norm = RmsNorm(arch.head_dim, arch.rms_norm_eps)
        self.k_norm = RmsNorm(arch.head_dim, arch.rms_norm_eps)
        self.head_dim = arch.head_dim
        self.heads_per_kv = arch.num_attention_heads // arch.num_key_value_heads

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads_per_kv, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.self_attn = Attention(arch)
        self.mlp = Mlp(arch)
        self.input_layernorm = RmsNorm(arch.hidden_size, arch.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and final norm: ids [batch, length] to hidden states."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.num_hidden_layers))
        self.norm = RmsNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(self, ids, cos, sin):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Trunk with the embedding tied to the output."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.arch = arch
        self.model = Trunk(arch)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, ids, cos, sin):
        return F.linear(self.model(ids, cos, sin), self.model.embed_tokens.weight)

    def loss(self, ids, cos, sin):
        """Mean next-token cross entropy of ids [batch, length + 1]."""
        logits = self.logits(ids[:, :-1], cos, sin).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
