"""Frozen linear layer: y = x Wᵀ + b. Derivation: docs/linear.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LinearSaved:
    """weight: [out, in], the only thing dx depends on."""

    weight: np.ndarray


def linear_forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
) -> tuple[np.ndarray, LinearSaved]:
    """y = x Wᵀ + b.

    x: [N, in]; weight: [out, in]; bias: [out] or None. Returns y: [N, out].
    """
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    return y, LinearSaved(weight)


def linear_backward(dy: np.ndarray, saved: LinearSaved) -> np.ndarray:
    """dx = dy W; the weight and the bias are frozen and have no gradient.

    dy: [N, out]. Returns dx: [N, in].
    """
    return dy @ saved.weight
