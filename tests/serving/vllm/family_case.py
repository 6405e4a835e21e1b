"""Random models of other families: folders, bundles from transformers' engine, and what the definition of the
cache gives (tests/parity/int2_reference.py), which shares nothing with the plugin. Imported behind vllm_case."""
import contextlib
import gc
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import sys
import tempfile
import types
from unittest import mock

import vllm_case as case
import torch
from chunk_reference import ROUNDINGS, Recorder

sys.path.insert(0, str(case.SOURCE / "tests" / "parity"))
import int2_reference
import tiny_transformers

# CUDA kernels take no smaller heads than of 64.
VOCAB, HEAD_DIM, POSITIONS = 300, 64 if torch.cuda.is_available() else 32, 2048
SHAPE = dict(head_dim=HEAD_DIM, vocab_size=VOCAB, max_position_embeddings=POSITIONS)
# All experts of a layer are chosen: a choice may turn on the rounding of a cached row.
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
GATED_DELTA = dict(layer_types=["linear_attention", "linear_attention", "full_attention"] * 2, num_hidden_layers=6,
                   linear_key_head_dim=32, linear_value_head_dim=32)
# vLLM's first choice of a linear attention on Hopper takes heads of 128 alone.
STATES = {"mamba_ssm_cache_dtype": "float32", **({"gdn_prefill_backend": "triton"} if torch.cuda.is_available() else {})}
HALF_TURNS = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
# Keys of the config beside those of tiny_transformers.
KEYS = {
    "llama": {}, "qwen2": dict(hidden_size=4 * HEAD_DIM), "qwen3": {}, "mistral": dict(sliding_window=None),
    "qwen3_moe": dict(EXPERTS, num_experts=2),
    "glm4_moe": dict(EXPERTS, n_routed_experts=2),
    "minimax_m2": dict(num_experts_per_tok=2, num_local_experts=2, rotary_dim=HEAD_DIM // 2, scoring_func="sigmoid",
                       use_routing_bias=True, intermediate_size=64),
    "hy_v3": dict(EXPERTS, num_experts=2, expert_hidden_dim=32),
    "gemma3": dict(sliding_window=40),  # in two blocks of 32 tokens
    "gpt_oss": dict(sliding_window=40, num_local_experts=2, intermediate_size=64, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=POSITIONS // 4, truncate=False,
        beta_fast=32.0, beta_slow=1.0)),
    "qwen3_next": dict(GATED_DELTA, **EXPERTS, num_experts=2, shared_expert_intermediate_size=32,
                       rope_parameters=HALF_TURNS),
    "qwen3_5 whole": dict(GATED_DELTA, rope_parameters=dict(
        HALF_TURNS, mrope_section=[HEAD_DIM // 8, HEAD_DIM // 16, HEAD_DIM // 16], mrope_interleaved=True)),
}
MIXED = ("gemma3", "gpt_oss", "qwen3_next", "qwen3_5 whole")  # some layers hold no 2-bit rows
ROUTED_IN_FLOAT32 = ("minimax_m2", "hy_v3")
KEYS = {name: {**SHAPE, **keys} for name, keys in KEYS.items()}


class _Absent(types.ModuleType):
    """A module that vLLM imports for images, of which nothing runs."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def without_torchvision():
    """vLLM's module of Qwen3.5 asks for torchvision, which is not installed here; texts use none of it."""
    if importlib.util.find_spec("torchvision"):
        return
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2",
                 "torchvision.transforms.v2.functional", "torchvision.transforms.functional"):
        module = sys.modules[name] = _Absent(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)


@contextlib.contextmanager
def complete_cpu_engine():
    """vLLM 0.26's CPU engine with what routers of experts need: it lacks sigmoid scores without groups (MiniMax-M2), and
    its oneDNN product writes past the end of float32 ones (Hy3, MiniMax-M2)."""
    from vllm import _custom_ops

    try:
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    except ImportError:  # a later one
        cpu_fused_moe = None
    if torch.cuda.is_available() or cpu_fused_moe is None:
        yield
        return

    select = cpu_fused_moe.select_experts

    def in_one_group(*args, **options):
        if options["scoring_func"] == "sigmoid" and not options["use_grouped_topk"]:
            options |= dict(use_grouped_topk=True, num_expert_group=1, topk_group=1)
        return select(*args, **options)

    with mock.patch.object(_custom_ops, "_supports_onednn", False), \
            mock.patch.object(cpu_fused_moe, "select_experts", in_one_group):
        yield


def random_ids(rows, tokens, seed):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def sharpened(model):
    """A model whose answers turn on what its softmax attention reads, more than on the rounding of other layers."""
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "in_proj_qkv") or hasattr(module, "in_proj_qkvz"):
                module.out_proj.weight.mul_(0.1)
            elif hasattr(module, "q_norm") and hasattr(module, "o_proj"):
                module.q_norm.weight.mul_(2).add_(1)  # by which 1 + weight doubles
                module.o_proj.weight.mul_(8)
            elif hasattr(module, "sinks"):
                module.v_proj.weight.mul_(2)
                module.o_proj.weight.mul_(2)
            elif hasattr(module, "gate_up_proj_bias"):
                module.down_proj.mul_(0.03)
                module.down_proj_bias.mul_(0.03)
            elif hasattr(module, "gate_up_proj"):
                module.down_proj.mul_(0.1)
    return model


class Family:
    """One model: its folder, its bundle, and itself in float32. `recent`: tokens of the exact window; `keys`: further
    ones of the model's config."""

    def __init__(self, name, folder, recent=256, **keys):
        from oscar_int2 import load
        from oscar_int2.calibration import calibrate
        from oscar_int2.recipe import CacheFormat

        self.folder, self.path = pathlib.Path(folder) / "model", pathlib.Path(folder) / "bundle.h5"
        model = tiny_transformers.tiny_model(name, **{**KEYS[name], **keys})
        model = (sharpened(model) if name in MIXED else model).bfloat16()
        model.save_pretrained(self.folder)
        calibrate(str(self.folder), random_ids(4, 600, 7).numpy(), self.path, search="off",
                  format=CacheFormat(quant_group_size=0, sink_tokens=64, recent_tokens=recent))
        self.model, self.bundle = model.float(), load(self.path)
        for module in self.model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation = int2_reference.NAME
        self.texts = random_ids(4, 1000, 8).tolist()

    @torch.no_grad()
    def log_probabilities(self, ids, prompt, exact):
        """float64 [len(ids) - prompt, vocab], predictions of ids[prompt:] by the definition of the cache, where the
        first `prompt` ids are a prompt that is read whole. `exact`: over BF16 rows."""
        from oscar_int2.rope import inverse_frequencies

        format = self.bundle.quantizer.served()
        sides = [None if exact or layer.key is None else tuple(
            int2_reference.Side(s.forward, s.partner, s.mean, s.clip_ratio.tolist(), s.scale_correction.tolist(),
                                s.feedback, s.metric, s.key_centers) for s in (layer.key, layer.value))
            for layer in self.bundle.layers.values()]
        rule = int2_reference.Rule(
            format.sink_tokens, format.recent_tokens, format.demote_block, "prefill", prompt, layers=sides,
            inv_freq=torch.from_numpy(inverse_frequencies(self.bundle.model.rope, HEAD_DIM)),
            last_segment=POSITIONS // 1024 - 1)
        self.model.config.get_text_config(decoder=True).int2_rule = rule
        logits = self.model(torch.tensor([ids]), use_cache=False).logits
        return logits[0, prompt - 1:len(ids) - 1].double().log_softmax(-1)

    def distances(self, prompt, output):
        """How far an answer's log probabilities (CompletionOutput) are, in the mean, from those of the definition and
        from those over BF16."""
        answer = list(output.token_ids)
        found = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, answer)],
                             dtype=torch.float64)
        expected = (self.log_probabilities(prompt + answer, len(prompt), exact) for exact in (False, True))
        return tuple((found - log_p.gather(-1, torch.tensor(answer)[:, None])[:, 0]).abs().mean().item()
                     for log_p in expected)


# Most of the distance from BF16 that an answer may be from the definition of the cache. bf16 sums of the model, and
# codes that turn on them, make the one; what 2 bits change makes the other.
SHARE = 0.75


def check_attention(engine, bundle, index, layer_id, prompt, chunk=160):
    """One request alone, in chunks and then token by token: pages of the engine's INT2 layer number `index` hold the
    bytes that layer `layer_id` of the bundle makes of its rows, and outputs are those of float64. Raises
    AssertionError."""
    from oscar_int2.codec import LayerCodec

    impl = engine.builder.layers[index]
    codec = LayerCodec(bundle, layer_id, impl.window_k.device, positions=impl.positions, sm_scale=impl.scale)
    with engine.in_chunks(chunk), Recorder(engine, index, codec) as recorder:
        engine.alone(prompt, 4)
    reading, error = recorder.check()
    assert reading >= 4, "too few tokens for INT2 rows"
    assert error < ROUNDINGS, f"an output row is {error} off"


@contextlib.contextmanager
def serving(name, recent=256, places=None, keys=(), finish=None, **options):
    """(Family, Engine) of a random model, as long as they are needed. `places`: sinks that are kept at most; `keys`:
    further ones of its config; `finish(folder)` adds to the folder before the engine starts."""
    from oscar_int2.vllm import settings
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    if "qwen3_5" in name:
        without_torchvision()
    if "whole" in name:
        options["language_model_only"] = True
    complete = complete_cpu_engine() if name in ROUTED_IN_FLOAT32 else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, complete:
        family = Family(name, folder, recent, **dict(keys))
        if finish:
            finish(family.folder)
        # Else vLLM imports itself in another process, once an architecture.
        with case.bundle_variable(family.path), mock.patch.object(registry, "_run_in_subprocess", lambda run: run()):
            if places:
                os.environ[settings.SINK_BYTES] = str(places * settings.bytes_of_sink(family.bundle))
            engine = case.Engine(family.folder, family.texts, **options)
        try:
            yield family, engine
        finally:
            logging.getLogger("vllm").removeHandler(engine.log)
            engine.core.engine_core.shutdown()
            cleanup_dist_env_and_memory()  # the next model may need other groups: those of experts
            del engine.llm, engine.core, engine.scheduler, engine.runner, engine.builder
            gc.collect()
