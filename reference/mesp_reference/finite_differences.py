"""Central differences, against which every backward here is checked.

The four-point stencil, ((f(-2h) - f(2h)) + 8 (f(h) - f(-h)))/12h, errs by O(h⁴): with h = 1e-3 the
truncation and the rounding error of float64 are both near 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable

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
