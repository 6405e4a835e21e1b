"""Drafts for tests: tokens in place of a drafter's own, and drafters of random weights. Imported behind vllm_case."""
import json
import random

import vllm_case as case
import torch
from safetensors.torch import load_file, save_file


class Drafts:
    """What an engine's drafter proposes, in place of its own: the tokens that come, some of them changed.

    `texts`: {request: the answer that is expected}. Requests without one get drafts that are wrong."""

    def __init__(self, engine, k, wrong=0.3, ragged=False, vocabulary=8192):
        self.engine, self.k, self.wrong, self.ragged, self.vocabulary = engine, k, wrong, ragged, vocabulary
        self.texts, self.source = {}, random.Random(k)

    def of(self, request_id, begin):
        """The next drafts of a request that has so many tokens behind its prompt."""
        text = self.texts.get(request_id.rsplit("-", 1)[0], [])
        drafts = (text[begin:begin + self.k] + [0] * self.k)[:self.k]
        return [token if self.source.random() > self.wrong else (token + 1) % self.vocabulary for token in drafts]

    def in_first_runner(self, scheduler_output, sampled_token_ids, *_):
        rows = sampled_token_ids.tolist() if torch.is_tensor(sampled_token_ids) else sampled_token_ids
        known = self.engine.scheduler.requests
        drafts = [self.of(request, known[request].num_output_tokens + sum(token >= 0 for token in row))
                  for request, row in zip(self.engine.runner.input_batch.req_ids, rows)]
        if self.ragged:
            return [row[:self.source.randrange(self.k + 1)] for row in drafts]
        return torch.tensor(drafts, dtype=torch.int32, device=self.engine.builder.device)

    def in_second_runner(self, input_batch, *_, **__):
        states, rows = self.engine.runner.req_states, input_batch.idx_mapping_np
        answered = states.total_len.gpu.cpu().numpy()[rows] - states.prompt_len.np[rows]
        drafts = [self.of(*pair) for pair in zip(input_batch.req_ids, answered.tolist())]
        return torch.tensor(drafts, dtype=torch.int64, device=self.engine.builder.device)

    def __enter__(self):
        runner = self.engine.runner
        self.owner, self.name, ours = (
            (runner, "propose_draft_token_ids", self.in_first_runner) if case.RUNNER == 1 else
            (runner.speculator, "propose", self.in_second_runner))
        setattr(self.owner, self.name, ours)
        return self

    def __exit__(self, *_):
        delattr(self.owner, self.name)


def write_eagle_head(folder, method, model):
    """A head of random weights for the model in a folder: one layer of Llama's. `method`: "eagle", whose input is the
    model's last hidden state, or "eagle3", with those of three layers and a vocabulary of its own."""
    model = json.loads((model / "config.json").read_text())
    hidden, inner, d, vocabulary = model["hidden_size"], model["intermediate_size"], model["head_dim"], 1024
    queries, heads = model["num_attention_heads"], model["num_key_value_heads"]
    third = method == "eagle3"
    config = {"architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"], "model_type": "llama",
              "num_hidden_layers": 1, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
              **({"draft_vocab_size": vocabulary} if third else {}), **{name: model[name] for name in (
                  "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
                  "vocab_size", "rms_norm_eps", "max_position_embeddings")}}
    (folder / "config.json").write_text(json.dumps(config))
    inputs = 2 * hidden if third else hidden  # of attention: embeddings beside hidden states
    shapes = {"self_attn.q_proj": (queries * d, inputs), "self_attn.k_proj": (heads * d, inputs),
              "self_attn.v_proj": (heads * d, inputs), "self_attn.o_proj": (hidden, queries * d),
              "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    torch.manual_seed(0)
    layer = "midlayer" if third else "layers.0"
    tensors = {f"{layer}.{name}.weight": (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    tensors["fc.weight"] = (torch.randn(hidden, (3 if third else 2) * hidden) * 0.02).bfloat16()
    norms = [f"{layer}.post_attention_layernorm"]
    if third:
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
        tensors["lm_head.weight"] = (torch.randn(vocabulary, hidden) * 0.02).bfloat16()
        tensors["d2t"] = torch.arange(vocabulary) * 7  # to be added: draft i is token 8 i
    for name in norms:
        tensors[f"{name}.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, folder / "model.safetensors")


def add_mtp_layer(folder):
    """Puts a layer that predicts one token more behind the last one of GLM-4.5: this one's weights over again, and
    random ones for what joins a hidden state and an embedding."""
    path = folder / "model.safetensors"
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, more = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors |= {more + name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    tensors |= {f"{more}{name}.weight": torch.ones(hidden).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    torch.manual_seed(0)
    tensors[f"{more}eh_proj.weight"] = (torch.randn(hidden, 2 * hidden) * 0.1).bfloat16()
    tensors |= {f"{more}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
                f"{more}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
