"""Cross-entropy of a linear head, in tiles; the logits [N, V] never exist.

Linear cross-entropy after Wijmans et al. 2024, with one online-softmax pass for the loss and the
hidden gradient together. Mathematics: docs/cross_entropy.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp_core.formulas.attention import MASKED
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import Loops
from mesp_core.formulas.precision import accumulation_dtype, cast, wide

Array = Any


@dataclass(frozen=True)
class CrossEntropySaved:
    """dx: ∂loss/∂x [N, D] for a unit upstream gradient, in the dtype of x, or None when it was
    not asked for. The loss is a scalar, so any other upstream gradient only scales it, and the
    logits never have to be computed again."""

    dx: Array | None


def linear_cross_entropy_forward(
    x: Array,
    weight: FrozenMatrix,
    targets: Array,
    weights: Array,
    *,
    normalizer: float,
    gradient: bool = True,
    vocabulary_tile: int,
    token_tile: int,
    loops: Loops,
    xp: Any,
) -> tuple[Array, CrossEntropySaved]:
    """loss = Σ weights · (lse(x Wᵀ) − (x Wᵀ)[target]) / normalizer.

    x: [N, D]; weight: W [V, D], tied or not; targets: [N] integers < V; weights: [N] floats;
    loss: scalar in the accumulation dtype. One pass over tiles of W, each read once: the running
    maximum, sum, and with ``gradient`` also the running mean o = softmax(x Wᵀ) W, from which
    dx = weights / normalizer · (o − W[target]).
    """
    target_rows = cast(weight.take(targets), accumulation_dtype(x.dtype, xp), xp)
    tokens, vocabulary = x.shape[0], weight.shape[0]
    top = xp.full((tokens, 1), MASKED, dtype=target_rows.dtype)
    mean = xp.zeros(x.shape if gradient else (tokens, 1), dtype=top.dtype)

    def vocabulary_tiles(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tile = weight.tile(i, vocabulary_tile, 0)

        def token_tiles(j: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
            here = tuple(loops.tile(part, j, token_tile, 0) for part in state)
            here = _take_in(loops.tile(x, j, token_tile, 0), tile, here, gradient, xp)
            return loops.put(state, j, token_tile, 0, here)

        return loops.fold_tiles(token_tiles, carry, tokens, token_tile)

    carry = (top, xp.zeros_like(top), mean)
    top, total, mean = loops.fold_tiles(vocabulary_tiles, carry, vocabulary, vocabulary_tile)
    logit = xp.sum(wide(x, xp) * target_rows, axis=-1)
    share = cast(weights, logit.dtype, xp) / normalizer
    loss = xp.sum(share * ((top + xp.log(total))[:, 0] - logit))
    if not gradient:
        return loss, CrossEntropySaved(None)
    dx = xp.expand_dims(share, axis=1) * (mean / total - target_rows)
    return loss, CrossEntropySaved(cast(dx, x.dtype, xp))


def linear_cross_entropy_backward(dloss: float | Array, saved: CrossEntropySaved) -> Array:
    """dx = dloss · (the saved unit gradient): [N, D]. Head, targets and weights have none."""
    if saved.dx is None:
        raise ValueError("the forward pass ran with gradient=False, so there is no gradient")
    return saved.dx * dloss


def _take_in(
    x: Array, tile: FrozenMatrix, state: tuple[Array, ...], gradient: bool, xp: Any
) -> tuple[Array, ...]:
    """One tile of the vocabulary taken into (running maximum, running sum, running p W)."""
    top, total, mean = state
    logits = tile.matmul(x)
    new_top = xp.maximum(top, xp.max(logits, axis=-1, keepdims=True))
    p = xp.exp(logits - new_top)
    shrink = xp.exp(top - new_top)
    total = total * shrink + xp.sum(p, axis=-1, keepdims=True)
    if gradient:
        mean = mean * shrink + tile.matmul_t(p)
    return new_top, total, mean
