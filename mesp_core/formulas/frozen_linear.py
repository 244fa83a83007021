"""Linear layer with a frozen weight and bias. Mathematics: docs/linear.md."""

from __future__ import annotations

from typing import Any

from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.precision import cast

Array = Any


def frozen_linear_forward(
    x: Array, weight: FrozenMatrix, bias: Array | None = None, *, xp: Any
) -> tuple[Array, None]:
    """y = x Wᵀ + b.

    x: [N, in]; weight: W [out, in], dense or quantised; bias: [out] or None; y: [N, out] in the
    dtype of x, summed in float32 or wider. Nothing is saved: dx needs only W.
    """
    y = weight.matmul(x)
    if bias is not None:
        y = y + cast(bias, y.dtype, xp)
    return cast(y, x.dtype, xp), None


def frozen_linear_backward(dy: Array, saved: None, weight: FrozenMatrix, *, xp: Any) -> Array:
    """dx = dy W, [N, in] in the dtype of dy. The frozen weight and bias have no gradient."""
    return cast(weight.matmul_t(dy), dy.dtype, xp)
