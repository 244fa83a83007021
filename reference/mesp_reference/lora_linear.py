"""LoRA linear layer: y = x Wᵀ + b + s ((m∘x) A) B. Derivation: docs/lora_linear.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mesp_reference.linear import LinearSaved, linear_backward, linear_forward


class Projection(NamedTuple):
    """Everything a projection is made of; unpacks into the arguments of lora_linear_forward.

    weight: [out, in] and bias: [out] or None are frozen; lora_a: [in, R] and lora_b: [R, out] are
    trained, both None where the projection is not adapted; multiplier: [N, in] is the dropout
    factor m of each input feature, None for no dropout.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    lora_a: np.ndarray | None = None
    lora_b: np.ndarray | None = None
    scale: float = 1.0
    multiplier: np.ndarray | None = None


class LoraGradients(NamedTuple):
    """dlora_a: [in, R] and dlora_b: [R, out]; both None where the projection is not adapted."""

    dlora_a: np.ndarray | None
    dlora_b: np.ndarray | None


@dataclass(frozen=True, eq=False)
class LoraLinearSaved:
    """What the backward needs; h could be recomputed from dropped_x and lora_a.

    linear: of the frozen part; dropped_x: [N, in], m∘x; h: [N, R], (m∘x) A; the parameters.
    """

    linear: LinearSaved
    dropped_x: np.ndarray
    h: np.ndarray | None
    lora_a: np.ndarray | None
    lora_b: np.ndarray | None
    scale: float
    multiplier: np.ndarray | None


def lora_linear_forward(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    lora_a: np.ndarray | None = None,
    lora_b: np.ndarray | None = None,
    scale: float = 1.0,
    multiplier: np.ndarray | None = None,
) -> tuple[np.ndarray, LoraLinearSaved]:
    """y = x Wᵀ + b + s h B with h = (m∘x) A.

    x: [N, in]; the others as in `Projection`. Returns y: [N, out].
    """
    if (lora_a is None) != (lora_b is None):
        raise ValueError("lora_a and lora_b must be given together")
    y, linear = linear_forward(x, weight, bias)
    dropped_x = x if multiplier is None else multiplier * x
    h = None
    if lora_a is not None and lora_b is not None:
        h = dropped_x @ lora_a
        y = y + scale * (h @ lora_b)
    return y, LoraLinearSaved(linear, dropped_x, h, lora_a, lora_b, scale, multiplier)


def lora_linear_backward(
    dy: np.ndarray, saved: LoraLinearSaved
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """t = s dy Bᵀ, dx = dy W + m∘(t Aᵀ), dA = (m∘x)ᵀ t, dB = s hᵀ dy.

    dy: [N, out]. Returns dx: [N, in], dlora_a: [in, R], dlora_b: [R, out].
    """
    dx = linear_backward(dy, saved.linear)
    if saved.h is None or saved.lora_a is None or saved.lora_b is None:
        return dx, None, None
    t = saved.scale * (dy @ saved.lora_b.T)
    ddropped_x = t @ saved.lora_a.T
    dx = dx + (ddropped_x if saved.multiplier is None else saved.multiplier * ddropped_x)
    dlora_a = saved.dropped_x.T @ t
    dlora_b = saved.scale * (saved.h.T @ dy)
    return dx, dlora_a, dlora_b
