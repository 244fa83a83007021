"""Comparison of tensors: one relative error a tensor, and no way to pass by accident."""

from __future__ import annotations

import math

import numpy as np


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; infinite where anything is not finite, or
    where expected is all zero and actual is not. Raises AssertionError for unequal shapes."""
    assert actual.shape == expected.shape, f"shapes differ: {actual.shape} and {expected.shape}"
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    difference = float(np.linalg.norm(actual - expected))
    size = float(np.linalg.norm(expected))
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def assert_close(
    actual: np.ndarray, expected: np.ndarray, bound: float, what: str = "tensor"
) -> None:
    """Raises AssertionError unless the relative error is at most ``bound``, naming ``what``."""
    assert math.isfinite(bound), f"{what}: a bound of {bound} would let everything pass"
    error = relative_error(actual, expected)
    assert error <= bound, f"{what}: relative error {error:.3g} exceeds {bound:.3g}"
