"""The hyperparameters of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is, beside its weights.

    hidden: D; layers: L; ffn: F; heads: H; kv_heads: K; head_dim: E; vocab: V; eps: of the norms;
    activation: "silu" or "gelu_tanh"; norm_plus_one: norms multiply by 1 + w; rope_scaling: the
    `rope_parameters` of a Hugging Face configuration, or None; partial_rotary: the rotated share of
    E; interleaved: RoPE pairs neighbours; window: of sliding attention; softcap: of attention
    scores; qk_norm: RMS norm of each query and key head before RoPE; tied: the head is the
    embedding table.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-6
    activation: str = "silu"
    norm_plus_one: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary: float = 1.0
    interleaved: bool = False
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False
    tied: bool = False
