"""Linear cross-entropy: the head and the loss in one. Derivation: docs/cross_entropy.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LinearCrossEntropySaved:
    """x: [N, D]; weight: [V, D]; dlogits: [N, V], ∂loss/∂logits (all of it: no tiles here);
    log_sum_exp: [N]."""

    x: np.ndarray
    weight: np.ndarray
    dlogits: np.ndarray
    log_sum_exp: np.ndarray


def linear_cross_entropy_forward(
    x: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    normalizer: float | None = None,
) -> tuple[float, LinearCrossEntropySaved]:
    """loss = Σ_i weights_i (lse_i - z_i[targets_i]) / normalizer, z = x Wᵀ, lse = log Σ_v exp z_v.

    x: [N, D]; weight: [V, D]; targets: [N] integers; weights: [N]; normalizer: Σ weights when
    None, and 1 where that is 0, so that a batch with every target masked has loss 0.
    """
    normalizer = (float(np.sum(weights)) or 1.0) if normalizer is None else normalizer
    logits = x @ weight.T
    peak = np.max(logits, axis=1, keepdims=True)
    log_sum_exp = peak[:, 0] + np.log(np.sum(np.exp(logits - peak), axis=1))
    tokens = np.arange(len(targets))
    loss = float(np.sum(weights * (log_sum_exp - logits[tokens, targets])) / normalizer)
    dlogits = np.exp(logits - log_sum_exp[:, None])
    dlogits[tokens, targets] -= 1.0
    dlogits = dlogits * (weights / normalizer)[:, None]
    return loss, LinearCrossEntropySaved(x, weight, dlogits, log_sum_exp)


def linear_cross_entropy_backward(
    dloss: float, saved: LinearCrossEntropySaved
) -> tuple[np.ndarray, np.ndarray]:
    """dz = dloss (weights/normalizer) (softmax(z) - onehot(targets)), dx = dz W, dW = dzᵀ x.

    Returns dx: [N, D], dweight: [V, D].
    """
    dlogits = dloss * saved.dlogits
    return dlogits @ saved.weight, dlogits.T @ saved.x
