"""Linear layer with a low-rank adapter on a frozen weight (Hu et al. 2021; MeSP, Park et al. 2026).

Mathematics: docs/lora_linear.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp_core.formulas.dropout import Dropout, dropout_multiplier
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.precision import cast, wide

Array = Any


@dataclass(frozen=True)
class Projection:
    """weight: W [out, in], frozen; bias: [out] or None, frozen;
    lora_a: A [in, R] and lora_b: B [R, out], trained, or both None; scale: s."""

    weight: FrozenMatrix
    bias: Array | None = None
    lora_a: Array | None = None
    lora_b: Array | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class LoraGradients:
    """da: [in, R] and db: [R, out] in the accumulation dtype."""

    da: Array
    db: Array


@dataclass(frozen=True)
class LoraLinearSaved:
    """x: the input [N, in], from which h = xA is recomputed (R ≪ in, so that costs little).
    h: [N, R], kept only on request (``store_h``, the paper's ablation)."""

    x: Array
    h: Array | None = None


def low_rank(x: Array, projection: Projection, dropout: Dropout | None, *, xp: Any) -> Array | None:
    """h = (m ∘ x) A: [N, in] -> [N, R] in the accumulation dtype; None without an adapter."""
    if projection.lora_a is None:
        return None
    x = wide(x, xp)
    if dropout is not None:
        x = x * dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=xp)
    return xp.matmul(x, cast(projection.lora_a, x.dtype, xp))


def project(projection: Projection, x: Array, h: Array | None, *, xp: Any) -> Array:
    """x Wᵀ + b + s · h B in the accumulation dtype: [N, in], [N, R] -> [N, out]."""
    y = projection.weight.matmul(x)
    if projection.bias is not None:
        y = y + cast(projection.bias, y.dtype, xp)
    if h is not None:
        y = y + xp.matmul(projection.scale * h, cast(projection.lora_b, h.dtype, xp))
    return y


def lora_linear_forward(
    x: Array,
    projection: Projection,
    *,
    dropout: Dropout | None = None,
    store_h: bool = False,
    xp: Any,
) -> tuple[Array, LoraLinearSaved]:
    """y = x Wᵀ + b + s · h B with h = (m ∘ x) A; m is the dropout multiplier, 1 without dropout.

    x: [N, in]; y: [N, out] in the dtype of x, summed in float32 or wider and rounded once.
    """
    h = low_rank(x, projection, dropout, xp=xp)
    y = cast(project(projection, x, h, xp=xp), x.dtype, xp)
    return y, LoraLinearSaved(x, h if store_h else None)


def lora_linear_backward(
    dy: Array,
    saved: LoraLinearSaved,
    projection: Projection,
    *,
    dropout: Dropout | None = None,
    input_gradient: bool = True,
    xp: Any,
) -> tuple[Array | None, LoraGradients | None]:
    """t = s · dy Bᵀ, dB = s · hᵀ dy, dA = (m ∘ x)ᵀ t, dx = dy W + m ∘ (t Aᵀ).

    dy: [N, out]. Returns (dx, gradients): dx [N, in] in the accumulation dtype, or None without
    ``input_gradient``; gradients None where the projection has no adapter. Weight and bias are
    frozen and have none.
    """
    dy = wide(dy, xp)
    dx = projection.weight.matmul_t(dy) if input_gradient else None
    if projection.lora_a is None:
        return dx, None
    a, b = cast(projection.lora_a, dy.dtype, xp), cast(projection.lora_b, dy.dtype, xp)
    x = cast(saved.x, dy.dtype, xp)
    mask = None
    if dropout is not None:
        mask = dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=xp)
        x = x * mask
    h = xp.matmul(x, a) if saved.h is None else saved.h
    db = projection.scale * xp.matmul(xp.matrix_transpose(h), dy)
    t = projection.scale * xp.matmul(dy, xp.matrix_transpose(b))
    da = xp.matmul(xp.matrix_transpose(x), t)
    if dx is not None:
        through = xp.matmul(t, xp.matrix_transpose(a))
        dx = dx + (through if mask is None else through * mask)
    return dx, LoraGradients(da, db)
