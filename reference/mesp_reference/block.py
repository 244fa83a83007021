"""Pre-norm decoder block with LoRA on its seven projections. Derivation: docs/block.md.

Source: Park et al., MeSP (arXiv 2602.13069), section 3: the block whose backward is written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mesp_reference.attention import AttentionSaved, attention_backward, attention_forward
from mesp_reference.config import DecoderConfig
from mesp_reference.gated_mlp import GatedMlpSaved, gated_mlp_backward, gated_mlp_forward
from mesp_reference.lora_linear import (
    LoraGradients,
    LoraLinearSaved,
    Projection,
    lora_linear_backward,
    lora_linear_forward,
)
from mesp_reference.rms_norm import RmsNormSaved, rms_norm_backward, rms_norm_forward
from mesp_reference.rope import RopeSaved, rope_backward, rope_forward, rope_frequencies

#: The projections by block-relative name; the order is that of their numbers in the dropout key.
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, eq=False)
class BlockParameters:
    """projections: one for each name in PROJECTIONS; input_layernorm, post_attention_layernorm:
    [D]; q_norm, k_norm: [E], or None without query/key norm."""

    projections: dict[str, Projection]
    input_layernorm: np.ndarray
    post_attention_layernorm: np.ndarray
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class HeadsSaved:
    """Of one of q, k: its projection, its norm (None without one) and its rotation."""

    projection: LoraLinearSaved
    norm: RmsNormSaved | None
    rope: RopeSaved


@dataclass(frozen=True, eq=False)
class SelfAttentionSaved:
    """What each step of the self-attention saved."""

    q: HeadsSaved
    k: HeadsSaved
    v_proj: LoraLinearSaved
    attention: AttentionSaved
    o_proj: LoraLinearSaved


@dataclass(frozen=True, eq=False)
class BlockSaved:
    """What each step of the block saved. x_mid: [N, D], after the attention's residual."""

    norm1: RmsNormSaved
    self_attention: SelfAttentionSaved
    x_mid: np.ndarray
    norm2: RmsNormSaved
    mlp: GatedMlpSaved


def block_forward(
    x: np.ndarray,
    parameters: BlockParameters,
    config: DecoderConfig,
    segment: np.ndarray,
    position: np.ndarray,
) -> tuple[np.ndarray, BlockSaved]:
    """x_mid = x + self_attention(norm1(x)), y = x_mid + mlp(norm2(x_mid)).

    x: [N, D]; segment, position: [N] integers. Returns y: [N, D].
    """
    eps, plus_one = config.eps, config.norm_plus_one
    n1, norm1 = rms_norm_forward(x, parameters.input_layernorm, eps, plus_one=plus_one)
    attended, attention = _self_attention_forward(n1, parameters, config, segment, position)
    x_mid = x + attended
    n2, norm2 = rms_norm_forward(x_mid, parameters.post_attention_layernorm, eps, plus_one=plus_one)
    gate, up, down = (parameters.projections[name] for name in PROJECTIONS[4:])
    mlp_out, mlp = gated_mlp_forward(n2, gate, up, down, config.activation)
    return x_mid + mlp_out, BlockSaved(norm1, attention, x_mid, norm2, mlp)


def block_backward(dy: np.ndarray, saved: BlockSaved) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The steps of the forward in reverse; each residual passes its gradient on unchanged.

    dy: [N, D]. Returns dx: [N, D] and the LoRA gradients, named like
    `self_attn.q_proj.lora_a`; a projection that is not adapted has none.
    """
    dn2, *dmlp = gated_mlp_backward(dy, saved.mlp)
    dx_mid = dy + rms_norm_backward(dn2, saved.norm2)[0]
    dn1, dattention = _self_attention_backward(dx_mid, saved.self_attention)
    dx = dx_mid + rms_norm_backward(dn1, saved.norm1)[0]
    return dx, _named(dict(zip(PROJECTIONS, [*dattention, *dmlp], strict=True)))


def _self_attention_forward(
    n1: np.ndarray,
    parameters: BlockParameters,
    config: DecoderConfig,
    segment: np.ndarray,
    position: np.ndarray,
) -> tuple[np.ndarray, SelfAttentionSaved]:
    q_proj, k_proj, v_proj, o_proj = (parameters.projections[name] for name in PROJECTIONS[:4])
    tokens = n1.shape[0]
    q, q_saved = _heads_forward(n1, q_proj, parameters.q_norm, position, config)
    k, k_saved = _heads_forward(n1, k_proj, parameters.k_norm, position, config)
    v, v_saved = lora_linear_forward(n1, *v_proj)
    v = v.reshape(tokens, config.kv_heads, config.head_dim)
    o, attention = attention_forward(
        q, k, v, segment, position, window=config.window, softcap=config.softcap
    )
    out, o_saved = lora_linear_forward(o.reshape(tokens, -1), *o_proj)
    return out, SelfAttentionSaved(q_saved, k_saved, v_saved, attention, o_saved)


def _self_attention_backward(
    dout: np.ndarray, saved: SelfAttentionSaved
) -> tuple[np.ndarray, list[LoraGradients]]:
    """dn1: [N, D], and the LoRA gradients of q, k, v, o."""
    do, *do_proj = lora_linear_backward(dout, saved.o_proj)
    dq, dk, dv = attention_backward(do.reshape(saved.attention.q.shape), saved.attention)
    dn1_q, *dq_proj = _heads_backward(dq, saved.q)
    dn1_k, *dk_proj = _heads_backward(dk, saved.k)
    dn1_v, *dv_proj = lora_linear_backward(dv.reshape(len(dv), -1), saved.v_proj)
    gradients = [LoraGradients(*pair) for pair in (dq_proj, dk_proj, dv_proj, do_proj)]
    return dn1_q + dn1_k + dn1_v, gradients


def _heads_forward(
    n1: np.ndarray,
    projection: Projection,
    norm_weight: np.ndarray | None,
    position: np.ndarray,
    config: DecoderConfig,
) -> tuple[np.ndarray, HeadsSaved]:
    """Projection, split into heads, optional norm of each head, RoPE: q or k, [N, H or K, E]."""
    flat, projection_saved = lora_linear_forward(n1, *projection)
    heads = flat.reshape(n1.shape[0], -1, config.head_dim)
    norm_saved = None
    if norm_weight is not None:
        heads, norm_saved = rms_norm_forward(
            heads, norm_weight, config.eps, plus_one=config.norm_plus_one
        )
    frequencies, amplitude = rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, config.partial_rotary
    )
    rotated, rope_saved = rope_forward(
        heads, position, frequencies, amplitude=amplitude, interleaved=config.interleaved
    )
    return rotated, HeadsSaved(projection_saved, norm_saved, rope_saved)


def _heads_backward(
    drotated: np.ndarray, saved: HeadsSaved
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    dheads = rope_backward(drotated, saved.rope)
    if saved.norm is not None:
        dheads, _ = rms_norm_backward(dheads, saved.norm)
    return lora_linear_backward(dheads.reshape(len(dheads), -1), saved.projection)


def _named(by_projection: dict[str, LoraGradients]) -> dict[str, np.ndarray]:
    """Flatten to lora_a and lora_b entries, leaving out what is not adapted."""
    gradients = {}
    for name, (dlora_a, dlora_b) in by_projection.items():
        if dlora_a is not None and dlora_b is not None:
            gradients[f"{name}.lora_a"] = dlora_a
            gradients[f"{name}.lora_b"] = dlora_b
    return gradients
