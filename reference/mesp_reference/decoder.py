"""The whole decoder: tokens to loss, and the gradient of every LoRA tensor.

embedding → L blocks → norm → linear cross-entropy. Derivation: docs/block.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mesp_reference.block import (
    PROJECTIONS,
    BlockParameters,
    BlockSaved,
    block_backward,
    block_forward,
)
from mesp_reference.config import DecoderConfig
from mesp_reference.cross_entropy import (
    LinearCrossEntropySaved,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from mesp_reference.dropout import dropout_multiplier, dropout_words
from mesp_reference.embedding import embedding_forward
from mesp_reference.lora_linear import Projection
from mesp_reference.ragged import RaggedBatch, segment_and_position
from mesp_reference.rms_norm import RmsNormSaved, rms_norm_backward, rms_norm_forward

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Lora:
    """scale: s of every projection; dropout: its rate; seed, step: of the dropout masks."""

    scale: float
    dropout: float = 0.0
    seed: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class DecoderSaved:
    """What each step saved; inputs: [N, D] for each block, the checkpoints of MeSP."""

    inputs: list[np.ndarray]
    blocks: list[BlockSaved]
    norm: RmsNormSaved
    head: LinearCrossEntropySaved


def decoder_forward(
    batch: RaggedBatch,
    frozen: Arrays,
    parameters: Arrays,
    config: DecoderConfig,
    lora: Lora,
    normalizer: float | None = None,
) -> tuple[float, DecoderSaved]:
    """loss = Σ weights · cross-entropy / normalizer (Σ weights when None).

    frozen: the base weights by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`);
    parameters: the LoRA tensors by mlx-lm name (`model.layers.0.self_attn.q_proj.lora_a`), with
    none for a projection that is not adapted.
    """
    x, inputs, blocks = _hidden_forward(batch, frozen, parameters, config, lora)
    x, norm = _final_norm(x, frozen, config)
    loss, head = linear_cross_entropy_forward(
        x, _head_weight(frozen, config), batch.targets, batch.weights, normalizer
    )
    return loss, DecoderSaved(inputs, blocks, norm, head)


def decoder_backward(dloss: float, saved: DecoderSaved) -> dict[str, np.ndarray]:
    """The gradient of every LoRA tensor, under its name, the last block's first."""
    dx, _ = linear_cross_entropy_backward(dloss, saved.head)
    dx, _ = rms_norm_backward(dx, saved.norm)
    gradients = {}
    for layer in reversed(range(len(saved.blocks))):
        dx, block_gradients = block_backward(dx, saved.blocks[layer])
        for name, gradient in block_gradients.items():
            gradients[f"model.layers.{layer}.{name}"] = gradient
    return gradients


def loss_and_gradients(
    batch: RaggedBatch,
    frozen: Arrays,
    parameters: Arrays,
    config: DecoderConfig,
    lora: Lora,
    normalizer: float | None = None,
) -> tuple[float, dict[str, np.ndarray]]:
    """decoder_forward, then decoder_backward of a unit gradient."""
    loss, saved = decoder_forward(batch, frozen, parameters, config, lora, normalizer)
    return loss, decoder_backward(1.0, saved)


def decoder_logits(
    batch: RaggedBatch, frozen: Arrays, parameters: Arrays, config: DecoderConfig, lora: Lora
) -> np.ndarray:
    """The logits of every token, [N, V]; targets and weights are not looked at."""
    x, _, _ = _hidden_forward(batch, frozen, parameters, config, lora)
    return _final_norm(x, frozen, config)[0] @ _head_weight(frozen, config).T


def block_parameters(
    layer: int,
    frozen: Arrays,
    parameters: Arrays,
    config: DecoderConfig,
    lora: Lora,
    segment: np.ndarray,
    position: np.ndarray,
) -> BlockParameters:
    """Gather one block's tensors from the two dictionaries, and draw its dropout masks."""
    prefix = f"model.layers.{layer}."
    projections = {}
    for number, name in enumerate(PROJECTIONS):
        weight = frozen[f"{prefix}{name}.weight"]
        lora_a = parameters.get(f"{prefix}{name}.lora_a")
        multiplier = None
        if lora.dropout > 0.0 and lora_a is not None:
            words = dropout_words(
                lora.seed, lora.step, layer, number, segment, position, weight.shape[1]
            )
            multiplier = dropout_multiplier(lora.dropout, words)
        projections[name] = Projection(
            weight,
            frozen.get(f"{prefix}{name}.bias"),
            lora_a,
            parameters.get(f"{prefix}{name}.lora_b"),
            lora.scale,
            multiplier,
        )
    return BlockParameters(
        projections,
        frozen[f"{prefix}input_layernorm.weight"],
        frozen[f"{prefix}post_attention_layernorm.weight"],
        frozen[f"{prefix}self_attn.q_norm.weight"] if config.qk_norm else None,
        frozen[f"{prefix}self_attn.k_norm.weight"] if config.qk_norm else None,
    )


def _hidden_forward(
    batch: RaggedBatch, frozen: Arrays, parameters: Arrays, config: DecoderConfig, lora: Lora
) -> tuple[np.ndarray, list[np.ndarray], list[BlockSaved]]:
    """The last block's output [N, D], every block's input, and what every block saved."""
    segment, position = segment_and_position(batch.starts)
    x, _ = embedding_forward(batch.tokens, frozen["model.embed_tokens.weight"])
    inputs, blocks = [], []
    for layer in range(config.layers):
        inputs.append(x)
        block = block_parameters(layer, frozen, parameters, config, lora, segment, position)
        x, saved = block_forward(x, block, config, segment, position)
        blocks.append(saved)
    return x, inputs, blocks


def _final_norm(
    x: np.ndarray, frozen: Arrays, config: DecoderConfig
) -> tuple[np.ndarray, RmsNormSaved]:
    weight = frozen["model.norm.weight"]
    return rms_norm_forward(x, weight, config.eps, plus_one=config.norm_plus_one)


def _head_weight(frozen: Arrays, config: DecoderConfig) -> np.ndarray:
    return frozen["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
