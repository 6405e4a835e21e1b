"""Every number of the default model's recipe, once; `smoke()` shrinks them for a dry run on a CPU."""

from dataclasses import dataclass

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = 0  # special tokens come first in the vocabulary
OVERLAP_TOKENS = 20  # shipped text shares no run of this many tokens with training text


@dataclass(frozen=True)
class Architecture:
    """Qwen3 architecture; field names are those of config.json."""

    vocab_size: int = 8192
    hidden_size: int = 384
    intermediate_size: int = 1152
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131_072


@dataclass(frozen=True)
class Settings:
    """Sizes in tokens, bytes, seconds or sequences, as named."""

    architecture: Architecture = Architecture()
    seed: int = 1
    processes: int = 16
    text_bytes: int = 260_000_000
    tokenizer_bytes: int = 100_000_000
    held_out_share: float = 0.02
    # training: tokens_per_step = micro_tokens * accumulate, in both phases
    context: int = 4096
    long_context: int = 16_384
    micro_tokens: int = 65_536
    accumulate: int = 4
    peak_lr: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    # shipped corpora
    streams: int = 176
    stream_tokens: int = 5_300
    long_streams: int = 10
    long_stream_tokens: int = 18_400
    temperature: float = 1.0
    top_p: float = 0.98
    held_out_lengths: tuple = (4150,) * 24
    held_out_long_lengths: tuple = (16_000,) * 2
    calibration_lengths: tuple = (4096,) * 40 + (2048,) * 24 + (768,) * 40
    needle_documents: int = 4
    needle_document_tokens: int = 3_900
    # measuring
    measured_tokens: int = 524_288
    prompt_tokens: int = 3_900
    prompts: int = 500
    prompts_other_kinds: int = 200
    long_prompt_tokens: int = 15_800
    long_prompts: int = 100


def smoke(seed: int) -> Settings:
    """The same path with everything small: for finding mistakes, not for a useful model."""
    return Settings(
        architecture=Architecture(hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32),
        seed=seed, processes=2, text_bytes=2_500_000, tokenizer_bytes=1_500_000,
        context=256, long_context=512, micro_tokens=1024, accumulate=2, warmup_steps=4,
        streams=12, stream_tokens=260, long_streams=3, long_stream_tokens=420,
        held_out_lengths=(120,) * 3, held_out_long_lengths=(200,) * 1,
        calibration_lengths=(110,) * 3 + (60,) * 4, needle_documents=2, needle_document_tokens=240,
        measured_tokens=2048, prompt_tokens=240, prompts=6, prompts_other_kinds=2,
        long_prompt_tokens=500, long_prompts=2,
    )
