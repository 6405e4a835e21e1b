"""Writes text with the trained model: batched sampling with a key/value cache, replayed as CUDA graphs on a GPU."""

import numpy as np
import torch
import torch.nn.functional as F

from .network import rope_tables, rotate
from .settings import SPECIAL_TOKENS, Settings

BUCKET = 1024  # one captured graph per this many cached positions
RUN = 10  # a stream never repeats a run of this many of its own tokens: small models fall into loops otherwise


class Sampler:
    """All streams advance one token a step; a stream's prompt is fed before it samples. Special tokens are never drawn."""

    def __init__(self, weights: dict, settings: Settings, prompts: list, length: int, device: torch.device):
        arch = settings.architecture
        self.arch, self.settings, self.length, self.device = arch, settings, length, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.w = {name: tensor.to(device, self.dtype) for name, tensor in weights.items()}
        self.cos, self.sin = rope_tables(arch, length, device)
        count = len(prompts)
        self.ids = torch.zeros(count, length, dtype=torch.int64, device=device)
        self.prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, :len(prompt)] = torch.tensor(prompt, device=device)
        shape = (arch.num_hidden_layers, count, arch.num_key_value_heads, length, arch.head_dim)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        # run_hashes[:, i] identifies the RUN - 1 tokens that end at i
        self.run_hashes = torch.zeros(count, length, dtype=torch.int64, device=device)
        self.back = torch.arange(RUN - 2, -1, -1, device=device)
        self.factors = torch.from_numpy(np.random.default_rng(3).integers(1, 2**62, size=RUN - 1) * 2 + 1).to(device)

    def norm(self, x, name):
        return F.rms_norm(x.float(), (x.shape[-1],), self.w[name].float(), self.arch.rms_norm_eps).to(self.dtype)

    def attention(self, layer: int, x, cos, sin, mask, cached: int):
        """Attention of one new token [count, hidden] over the first `cached` rows of the cache."""
        arch, name = self.arch, f"model.layers.{layer}.self_attn."
        shape = (x.shape[0], -1, arch.head_dim)
        q = rotate(self.norm(F.linear(x, self.w[name + "q_proj.weight"]).view(shape), name + "q_norm.weight"), cos, sin)
        k = rotate(self.norm(F.linear(x, self.w[name + "k_proj.weight"]).view(shape), name + "k_norm.weight"), cos, sin)
        v = F.linear(x, self.w[name + "v_proj.weight"]).view(shape)
        self.keys[layer].index_copy_(2, self.position, k[:, :, None])
        self.values[layer].index_copy_(2, self.position, v[:, :, None])
        q = q.view(x.shape[0], arch.num_key_value_heads, -1, arch.head_dim)
        scores = q @ self.keys[layer][:, :, :cached].transpose(-1, -2) * arch.head_dim ** -0.5
        weights = torch.softmax(scores.float() + mask, dim=-1).to(self.dtype)
        out = weights @ self.values[layer][:, :, :cached]
        return F.linear(out.reshape(x.shape[0], -1), self.w[name + "o_proj.weight"])

    def logits(self, cached: int):
        """Next-token logits, fp32 [count, vocab], after the token at the current position."""
        x = self.w["model.embed_tokens.weight"][self.ids.index_select(1, self.position)[:, 0]]
        cos, sin = self.cos.index_select(0, self.position), self.sin.index_select(0, self.position)
        behind = torch.arange(cached, device=self.device) <= self.position
        mask = torch.zeros(cached, device=self.device).masked_fill(~behind, float("-inf"))
        for layer in range(self.arch.num_hidden_layers):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(x, name + "input_layernorm.weight"), cos, sin, mask, cached)
            h = self.norm(x, name + "post_attention_layernorm.weight")
            gate = F.silu(F.linear(h, self.w[name + "mlp.gate_proj.weight"]))
            x = x + F.linear(gate * F.linear(h, self.w[name + "mlp.up_proj.weight"]), self.w[name + "mlp.down_proj.weight"])
        return F.linear(self.norm(x, "model.norm.weight"), self.w["model.embed_tokens.weight"]).float()

    def repeats(self, cached: int):
        """[count, vocab] True for tokens that would complete a run the stream already holds; records the newest run."""
        tail = self.ids.index_select(1, (self.position - self.back).clamp(min=0))
        newest = ((tail + 1) * self.factors).sum(dim=1, keepdim=True)  # wraps around modulo 2^64
        known = (self.run_hashes[:, :cached - 1] == newest).float()  # position i: the run was followed by token i + 1
        self.run_hashes.index_copy_(1, self.position, newest)
        seen = torch.zeros(len(self.ids), self.arch.vocab_size, device=self.device)
        return seen.scatter_add_(1, self.ids[:, 1:cached], known) > 0

    def step(self, cached: int) -> None:
        """Nucleus sampling by the Gumbel trick, then one position on."""
        logits = self.logits(cached) / self.settings.temperature
        logits[:, :len(SPECIAL_TOKENS)] = float("-inf")
        logits = logits.masked_fill(self.repeats(cached), float("-inf"))
        ordered, order = logits.sort(dim=-1, descending=True)
        chances = ordered.softmax(dim=-1)
        ordered = ordered.masked_fill(chances.cumsum(dim=-1) - chances > self.settings.top_p, float("-inf"))
        noise = -torch.log(-torch.log(torch.rand_like(ordered).clamp(1e-20, 1 - 1e-7)))
        drawn = order.gather(1, (ordered + noise).argmax(dim=-1, keepdim=True))
        following = (self.position + 1).clamp(max=self.length - 1)
        given = self.ids.index_select(1, following)
        chosen = torch.where((following < self.prompt_lengths)[:, None], given, drawn)
        self.ids.index_copy_(1, following, chosen)
        self.position += 1

    def capture(self, cached: int):
        """A CUDA graph of one step; running it for warm-up leaves the position as it was."""
        saved = self.position.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(cached)
                self.position.copy_(saved)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(cached)
        return graph

    @torch.no_grad()
    def run(self):
        """Ids [count, length] on the CPU."""
        for begin in range(0, self.length - 1, BUCKET):
            cached = min(begin + BUCKET, self.length)
            steps = min(cached, self.length - 1) - begin
            advance = self.capture(cached).replay if self.device.type == "cuda" else lambda c=cached: self.step(c)
            for _ in range(steps):
                advance()
        return self.ids.cpu().numpy()
