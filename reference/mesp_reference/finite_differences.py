"""Central differences, against which every backward here is checked.

The four-point stencil, ((f(-2h) - f(2h)) + 8 (f(h) - f(-h)))/12h, errs by O(h⁴): with h = 1e-3 the
truncation and the rounding error of float64 are both near 1e-12 for values near 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

ScalarFunction = Callable[[np.ndarray], float]


def directional_derivative(
    function: ScalarFunction, x: np.ndarray, direction: np.ndarray, step: float = 1e-3
) -> float:
    """d/dt function(x + t·direction) at t = 0. direction: the shape of x."""

    def along(t: float) -> float:
        return float(function(x + t * direction))

    near = along(step) - along(-step)
    far = along(2 * step) - along(-2 * step)
    return (8.0 * near - far) / (12.0 * step)


def central_gradient(function: ScalarFunction, x: np.ndarray, step: float = 1e-3) -> np.ndarray:
    """The gradient of a scalar function, one entry of x at a time, in the shape of x."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        direction = np.zeros(x.shape)
        direction[index] = 1.0
        gradient[index] = directional_derivative(function, x, direction, step)
    return gradient


def gradient_errors(
    function: Callable[..., float],
    arguments: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray | None],
) -> list[float]:
    """The relative error of each gradient of a scalar function of several arrays.

    gradients[i], the claimed derivative by arguments[i], is compared with central differences; a
    gradient that is missing (None) has an infinite error.
    """
    errors = []
    for i, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):

        def of_one(value: np.ndarray, i: int = i) -> float:
            return float(function(*arguments[:i], value, *arguments[i + 1 :]))

        numeric = central_gradient(of_one, argument)
        errors.append(math.inf if gradient is None else relative_error(gradient, numeric))
    return errors


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual - expected‖ / ‖expected‖; infinite where anything is NaN, or expected is all zero
    and actual is not; unequal shapes raise."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    difference = float(np.linalg.norm(actual - expected))
    size = float(np.linalg.norm(expected))
    if difference == 0.0 and size == 0.0:
        return 0.0
    error = difference / size if size > 0.0 else math.inf
    return error if math.isfinite(error) else math.inf
