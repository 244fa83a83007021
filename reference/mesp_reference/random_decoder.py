"""Random weights for a decoder of any shape, for tests and checks."""

from __future__ import annotations

import math

import numpy as np

from mesp_reference.block import PROJECTIONS
from mesp_reference.config import DecoderConfig


def projection_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each of a block's projections."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden, config.ffn
    shapes = (
        (query, hidden),
        (key, hidden),
        (key, hidden),
        (hidden, query),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
    )
    return dict(zip(PROJECTIONS, shapes, strict=True))


def random_frozen(
    config: DecoderConfig, generator: np.random.Generator, *, biases: bool = False
) -> dict[str, np.ndarray]:
    """Base weights by Hugging Face name; biases: on q, k and v, as in Qwen2.

    Norm weights are scattered about the value that leaves a norm plain.
    """
    plain = 0.0 if config.norm_plus_one else 1.0

    def norm(width: int) -> np.ndarray:
        return plain + 0.3 * generator.standard_normal(width)

    frozen = {"model.embed_tokens.weight": generator.standard_normal((config.vocab, config.hidden))}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, (out, width) in projection_shapes(config).items():
            matrix = generator.standard_normal((out, width)) / math.sqrt(width)
            frozen[f"{prefix}{name}.weight"] = matrix
            if biases and name in PROJECTIONS[:3]:
                frozen[f"{prefix}{name}.bias"] = generator.standard_normal(out)
        frozen[f"{prefix}input_layernorm.weight"] = norm(config.hidden)
        frozen[f"{prefix}post_attention_layernorm.weight"] = norm(config.hidden)
        if config.qk_norm:
            frozen[f"{prefix}self_attn.q_norm.weight"] = norm(config.head_dim)
            frozen[f"{prefix}self_attn.k_norm.weight"] = norm(config.head_dim)
    frozen["model.norm.weight"] = norm(config.hidden)
    if not config.tied:
        frozen["lm_head.weight"] = generator.standard_normal((config.vocab, config.hidden))
    return frozen


def random_lora(
    config: DecoderConfig,
    rank: int,
    generator: np.random.Generator,
    targets: tuple[str, ...] = PROJECTIONS,
) -> dict[str, np.ndarray]:
    """LoRA tensors by mlx-lm name, both factors non-zero so that both have a gradient."""
    parameters = {}
    for layer in range(config.layers):
        for name, (out, width) in projection_shapes(config).items():
            if name in targets:
                prefix = f"model.layers.{layer}.{name}."
                lora_a = generator.standard_normal((width, rank)) / math.sqrt(width)
                parameters[f"{prefix}lora_a"] = lora_a
                parameters[f"{prefix}lora_b"] = 0.5 * generator.standard_normal((rank, out))
    return parameters
