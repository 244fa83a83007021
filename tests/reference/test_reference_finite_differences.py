"""The measuring stick itself: right on known functions, and able to fail."""

import math

import numpy as np
import pytest

from mesp_reference.finite_differences import (
    central_gradient,
    directional_derivative,
    gradient_errors,
    relative_error,
)


def cubic(x: np.ndarray) -> float:
    return float(np.sum(x**3) + np.prod(x[:2]))


def test_gradient_of_a_known_function():
    x = np.array([0.3, -1.1, 0.7])
    expected = 3 * x**2 + np.array([x[1], x[0], 0.0])
    assert relative_error(central_gradient(cubic, x), expected) < 1e-11
    direction = np.array([1.0, 2.0, -0.5])
    assert directional_derivative(cubic, x, direction) == pytest.approx(
        float(expected @ direction), rel=1e-11
    )


def test_argument_is_not_written_to():
    x = np.array([0.3, -1.1, 0.7])
    x.setflags(write=False)
    central_gradient(cubic, x)


def test_a_wrong_gradient_is_noticed():
    x, y = np.array([0.3, -1.1]), np.array([2.0, 0.4, 1.5])

    def function(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.sum(x**2) * np.sum(y))

    right = [2 * x * np.sum(y), np.full(3, np.sum(x**2))]
    assert max(gradient_errors(function, [x, y], right)) < 1e-11
    wrong = [right[0], right[1] + np.array([0.0, 1e-5, 0.0])]
    errors = gradient_errors(function, [x, y], wrong)
    assert errors[0] < 1e-11
    assert errors[1] > 1e-6
    assert gradient_errors(function, [x, y], [right[0], None])[1] == math.inf


def test_relative_error_is_infinite_on_nan_and_on_something_for_nothing():
    assert relative_error(np.array([1.0, math.nan]), np.ones(2)) == math.inf
    assert relative_error(np.ones(2), np.array([1.0, math.nan])) == math.inf
    assert relative_error(np.ones(2), np.zeros(2)) == math.inf
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(np.ones(2), np.ones((2, 1)))
