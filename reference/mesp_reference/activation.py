"""The gate's activations, SiLU and tanh-GELU. Derivation: docs/gated_mlp.md."""

from __future__ import annotations

import math

import numpy as np


def silu_forward(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x σ(x), any shape. Returns (y, saved), saved being x."""
    return x * _sigmoid(x), x


def silu_backward(dy: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """dx = dy σ (1 + x (1 - σ)), σ = σ(x)."""
    sigma = _sigmoid(saved)
    return dy * sigma * (1.0 + saved * (1.0 - sigma))


def gelu_tanh_forward(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """½ x (1 + tanh u), u = √(2/π) (x + 0.044715 x³). Returns (y, saved), saved being x."""
    return 0.5 * x * (1.0 + np.tanh(_gelu_argument(x))), x


def gelu_tanh_backward(dy: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """dx = dy (½ (1 + tanh u) + ½ x (1 - tanh² u) √(2/π) (1 + 3·0.044715 x²))."""
    squashed = np.tanh(_gelu_argument(saved))
    slope = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * saved**2)
    return dy * 0.5 * ((1.0 + squashed) + saved * (1.0 - squashed**2) * slope)


def activation_forward(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The activation named "silu" or "gelu_tanh"."""
    return {"silu": silu_forward, "gelu_tanh": gelu_tanh_forward}[kind](x)


def activation_backward(dy: np.ndarray, saved: np.ndarray, kind: str) -> np.ndarray:
    """The derivative of the activation named "silu" or "gelu_tanh"."""
    return {"silu": silu_backward, "gelu_tanh": gelu_tanh_backward}[kind](dy, saved)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # The tanh form overflows for no argument, unlike 1/(1 + exp(-x)).
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _gelu_argument(x: np.ndarray) -> np.ndarray:
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
