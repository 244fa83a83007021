"""The end of the decoder: the last norm, the head and the loss. Mathematics: docs/cross_entropy.md.

Written once against ``Operations``, like the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.precision import wide
from mesp_core.operations import Operations

Array = Any


@dataclass(frozen=True)
class Head:
    """norm: the last norm's weight [D]; weight: W [V, D], tied to the embedding or not."""

    norm: Array
    weight: FrozenMatrix


@dataclass(frozen=True)
class HeadPlan:
    """eps, norm_plus_one: of the norm; vocabulary_tile, token_tile: how the loss is cut."""

    eps: float
    norm_plus_one: bool
    vocabulary_tile: int
    token_tile: int


def head_loss(
    x: Array,
    head: Head,
    targets: Array,
    weights: Array,
    normalizer: float,
    *,
    plan: HeadPlan,
    gradient: bool,
    ops: Operations,
    backend: Any,
) -> tuple[Array, Array | None]:
    """(loss, dx): Σ weights · cross-entropy(norm(x) Wᵀ, targets) / normalizer, and ∂loss/∂x.

    x: [N, D], the last block's output; targets, weights: [N]; dx: [N, D] in the accumulation
    dtype, None without ``gradient``. The logits [N, V] never exist.
    """
    normed, norm = _normed(x, head, plan, ops, backend)
    backend.stage(normed, norm.rstd)
    loss, saved = ops.linear_cross_entropy.forward(
        normed,
        head.weight,
        targets,
        weights,
        normalizer=normalizer,
        gradient=gradient,
        vocabulary_tile=plan.vocabulary_tile,
        token_tile=plan.token_tile,
    )
    backend.stage(loss, saved)
    del normed
    if not gradient:
        return loss, None
    dnormed = ops.linear_cross_entropy.backward(1.0, saved)
    dx, _ = ops.rms_norm.backward(dnormed, norm, head.norm, plus_one=plan.norm_plus_one)
    backend.stage(dx)
    return loss, dx


def head_logits(x: Array, head: Head, *, plan: HeadPlan, ops: Operations, backend: Any) -> Array:
    """norm(x) Wᵀ: [N, D] -> [N, V], for looking at; training never makes them."""
    normed, _ = _normed(x, head, plan, ops, backend)
    logits = head.weight.matmul(normed)
    backend.stage(logits)
    return logits


def _normed(
    x: Array, head: Head, plan: HeadPlan, ops: Operations, backend: Any
) -> tuple[Array, Any]:
    """The last norm in the accumulation dtype, with what its backward pass needs."""
    return ops.rms_norm.forward(
        wide(x, backend.xp), head.norm, eps=plan.eps, plus_one=plan.norm_plus_one
    )
