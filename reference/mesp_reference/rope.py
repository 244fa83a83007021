"""Rotary position embedding. Derivation: docs/rope.md.

Sources: Su et al., RoFormer (2021); Peng et al., YaRN (2023); the scalings as the
`rope_parameters` of Hugging Face configurations define them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    partial_rotary: float = 1.0,
) -> tuple[np.ndarray, float]:
    """Angles per position, and the factor on cosine and sine.

    ω_i = θ^(-2i/P) for the P = ⌊partial_rotary·E⌋ rotated features, then scaled as
    scaling["rope_type"] says: default, linear, llama3 or yarn.
    Returns frequencies: [P/2], amplitude: float (1 but for YaRN).
    """
    rotary = int(head_dim * partial_rotary)
    if rotary % 2:
        raise ValueError(f"the number of rotated features must be even, not {rotary}")
    frequencies = theta ** (-np.arange(0, rotary, 2) / rotary)
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, rotary, theta, scaling), _yarn_amplitude(scaling)
    raise ValueError(f"unknown rope_type {kind!r}")


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Blend ω/factor and ω by the number of turns within the original context.

    turns ≤ low_freq_factor: ω/factor; turns ≥ high_freq_factor: ω; linear in the turns between.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling["factor"]


def _yarn(
    frequencies: np.ndarray, rotary: int, theta: float, scaling: Mapping[str, Any]
) -> np.ndarray:
    """Blend ω/factor and ω by the index i, linearly between two indices.

    The index at which a feature makes n turns within the original context solves
    context·θ^(-2i/P) = 2πn; the ramp runs from the one of beta_fast turns (ω kept below) to the
    one of beta_slow turns (ω/factor above), widened to whole numbers unless truncate is false.
    """
    context = scaling["original_max_position_embeddings"]

    def index_of_turns(turns: float) -> float:
        return rotary * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    first = index_of_turns(scaling.get("beta_fast") or 32)
    last = index_of_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary - 1)
    if first == last:
        last = last + 0.001  # the published ramp of an empty interval
    interpolated = np.clip((np.arange(rotary // 2) - first) / (last - first), 0.0, 1.0)
    return (1.0 - interpolated) * frequencies + interpolated * frequencies / scaling["factor"]


def _yarn_amplitude(scaling: Mapping[str, Any]) -> float:
    """attention_factor where given, else 0.1·mscale·ln(factor) + 1 (a ratio with two mscales)."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def amplitude(mscale: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return amplitude(mscale) / amplitude(mscale_all_dim)
    return amplitude(1.0)


@dataclass(frozen=True, eq=False)
class RopeSaved:
    """cosine, sine: [N, 1, P/2], the rotation of each token; interleaved: the pairing."""

    cosine: np.ndarray
    sine: np.ndarray
    interleaved: bool


def rope_forward(
    x: np.ndarray,
    position: np.ndarray,
    frequencies: np.ndarray,
    *,
    amplitude: float = 1.0,
    interleaved: bool = False,
) -> tuple[np.ndarray, RopeSaved]:
    """Rotate each pair (x₁, x₂) of the first P features by the angle position·ω_i.

    y₁ = a (x₁ cos - x₂ sin), y₂ = a (x₂ cos + x₁ sin). The i-th pair is (i, i + P/2), or
    (2i, 2i + 1) when interleaved; features from P on pass unchanged.
    x: [N, H, E]; position: [N] integers; frequencies: [P/2]. Returns y: [N, H, E].
    """
    angle = position[:, None, None] * frequencies
    saved = RopeSaved(amplitude * np.cos(angle), amplitude * np.sin(angle), interleaved)
    return _rotate(x, saved.cosine, saved.sine, interleaved), saved


def rope_backward(dy: np.ndarray, saved: RopeSaved) -> np.ndarray:
    """The transpose of a rotation is the rotation by the negative angle.

    dy: [N, H, E]. Returns dx: [N, H, E].
    """
    return _rotate(dy, saved.cosine, -saved.sine, saved.interleaved)


def _rotate(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray, interleaved: bool) -> np.ndarray:
    half = cosine.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    y = x.copy()
    y[..., first] = x[..., first] * cosine - x[..., second] * sine
    y[..., second] = x[..., second] * cosine + x[..., first] * sine
    return y
