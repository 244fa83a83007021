"""Activations of the gated MLP, with their slopes. Mathematics: docs/gated_mlp.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Array = Any

ACTIVATIONS = ("silu", "gelu_tanh")

#: exp(80) is finite in float32; beyond it the logistic is 0 to every digit that matters.
_STEEP = 80.0


def activation(g: Array, kind: str, *, xp: Any) -> Array:
    """act(g), elementwise: silu g·σ(g), or gelu_tanh g/2·(1 + tanh(√(2/π)(g + 0.044715 g³))).

    Raises ValueError for another ``kind``.
    """
    if kind == "silu":
        return g * _logistic(g, xp)
    return 0.5 * g * (1.0 + _gelu_tanh(g, kind, xp))


def activation_with_slope(g: Array, kind: str, *, xp: Any) -> tuple[Array, Array]:
    """(act(g), act′(g)); silu′ = σ + silu · (1 − σ)."""
    if kind == "silu":
        logistic = _logistic(g, xp)
        act = g * logistic
        return act, logistic + act * (1.0 - logistic)
    t = _gelu_tanh(g, kind, xp)
    inner_slope = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * g * g)
    slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * inner_slope
    return 0.5 * g * (1.0 + t), slope


@dataclass(frozen=True)
class Activations:
    """How a gated MLP computes its activation: these functions, or a backend's faster ones.

    value: (g, kind, xp=xp) -> act(g); with_slope: (g, kind, xp=xp) -> (act(g), act′(g)).
    """

    value: Callable[..., Array] = activation
    with_slope: Callable[..., tuple[Array, Array]] = activation_with_slope


FORMULA = Activations()


def _logistic(g: Array, xp: Any) -> Array:
    return 1.0 / (1.0 + xp.exp(xp.minimum(-g, xp.asarray(_STEEP, dtype=g.dtype))))


def _gelu_tanh(g: Array, kind: str, xp: Any) -> Array:
    if kind != "gelu_tanh":
        raise ValueError(f"unknown activation {kind!r}; choose from {', '.join(ACTIVATIONS)}")
    return xp.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g * g * g))
