"""Rotary position embedding (Su et al. 2021). Mathematics: docs/rope.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mesp_core.formulas.precision import cast, wide

Array = Any


def rope_frequencies(
    dim: int, theta: float, scaling: Mapping[str, Any] | None = None, max_positions: int = 0
) -> tuple[list[float], float]:
    """Angular frequencies of the ``dim``/2 rotated pairs, and the factor on cos and sin.

    scaling: None, or Hugging Face's ``rope_scaling`` with ``rope_type`` linear, llama3 or yarn.
    max_positions: the model's positions before scaling, where ``scaling`` does not say.
    Returns (inv_freq, attention_factor). Raises ValueError for an unknown ``rope_type``.
    """
    base = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    kind = "default" if scaling is None else scaling.get("rope_type", "default")
    if kind == "default":
        return base, 1.0
    assert scaling is not None
    if kind == "linear":
        return [f / scaling["factor"] for f in base], 1.0
    if kind == "llama3":
        return [_llama3(f, scaling) for f in base], 1.0
    if kind == "yarn":
        return _yarn(base, dim, theta, scaling, max_positions)
    raise ValueError(f"unknown rope_type {kind!r}; known: default, linear, llama3, yarn")


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Low frequencies divided by ``factor``, high ones kept, a linear blend in between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2.0 * math.pi)
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return keep * frequency + (1.0 - keep) * frequency / factor


def _yarn(
    base: list[float], dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[list[float], float]:
    """YaRN (Peng et al. 2023), eq. 18-23: interpolate slow dimensions, keep fast ones."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or max_positions

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32.0)
    high = dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    ramp = [min(1.0, max(0.0, (i - low) / span)) for i in range(dim // 2)]
    inv_freq = [f * (1.0 - r) + f / factor * r for f, r in zip(base, ramp, strict=True)]
    return inv_freq, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return given

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(mscale) / magnitude(mscale_all)
    return magnitude(1.0)


def rope_tables(position: Array, inv_freq: Array, factor: float, *, xp: Any) -> tuple[Array, Array]:
    """cos and sin of position · inv_freq, times ``factor``.

    position: [N] in the dtype of the tables; inv_freq: [E'/2]. Returns two [N, E'/2] tables.
    """
    angle = xp.expand_dims(position, axis=1) * xp.expand_dims(inv_freq, axis=0)
    return xp.cos(angle) * factor, xp.sin(angle) * factor


def rope_forward(
    x: Array, cos: Array, sin: Array, *, interleaved: bool = False, xp: Any
) -> tuple[Array, None]:
    """Rotate each pair (a, b) of the first E' features to (a·cos − b·sin, b·cos + a·sin).

    x: [N, H, E]; cos, sin: [N, E'/2] with E' ≤ E (the rest passes through). A pair is features
    (i, i + E'/2), or (2i, 2i + 1) when ``interleaved``. out: [N, H, E] in the dtype of x.
    Nothing is saved: the rotation is undone with the tables alone.
    """
    return _rotate(x, cos, sin, interleaved, xp), None


def rope_backward(
    dout: Array, saved: None, cos: Array, sin: Array, *, interleaved: bool = False, xp: Any
) -> Array:
    """dx: the transpose of the rotation, which is the rotation by the opposite angle."""
    return _rotate(dout, cos, -sin, interleaved, xp)


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool, xp: Any) -> Array:
    half = cos.shape[-1]
    tokens, heads, _ = x.shape
    cos, sin = xp.expand_dims(cos, axis=1), xp.expand_dims(sin, axis=1)
    turned = wide(x[:, :, : 2 * half], xp)
    if interleaved:
        pairs = xp.reshape(turned, (tokens, heads, half, 2))
        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
        rotated = xp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        rotated = xp.reshape(rotated, (tokens, heads, 2 * half))
    else:
        a, b = turned[:, :, :half], turned[:, :, half:]
        rotated = xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)
    rotated = cast(rotated, x.dtype, xp)
    if 2 * half == x.shape[-1]:
        return rotated
    return xp.concat([rotated, x[:, :, 2 * half :]], axis=-1)
