"""The comparison itself can fail."""

from __future__ import annotations

import numpy as np
import pytest

import mesp_core as mesp
from mesp_reference.check.compare import assert_close, relative_error
from mesp_reference.check.tolerances import TOLERANCES, bound

#: A finite bound that no finite error here exceeds.
ANY = 1e300


@pytest.fixture
def reference() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((5, 7))


def test_equal_arrays_pass_with_no_slack(reference: np.ndarray) -> None:
    assert_close(reference.copy(), reference, 0.0, dtype="float64")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_perturbed_entry_fails_at_every_tolerance(dtype: str, reference: np.ndarray) -> None:
    wrong = reference.copy()
    wrong[4, 6] += 2 * bound(dtype) * float(np.linalg.norm(reference))
    with pytest.raises(AssertionError, match="weight: relative error"):
        assert_close(wrong, reference, bound(dtype), name="weight")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["actual", "reference", "both"])
def test_a_value_that_is_not_finite_fails_whatever_the_bound(
    value: float, side: str, reference: np.ndarray
) -> None:
    wrong = reference.copy()
    wrong[2, 3] = value
    actual = reference if side == "reference" else wrong
    expected = reference if side == "actual" else wrong
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(actual, expected, ANY)


@pytest.mark.parametrize("shape", [(7, 5), (1, 5, 7), (35,), (5, 1)])
def test_another_shape_fails_and_nothing_is_broadcast(
    shape: tuple[int, ...], reference: np.ndarray
) -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.resize(reference, shape), reference, ANY)


def test_another_dtype_fails(reference: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="dtype float32, not float64"):
        assert_close(reference.astype(np.float32), reference, ANY, dtype="float64")


@pytest.mark.parametrize("bound", [np.inf, np.nan])
def test_a_bound_that_lets_everything_pass_fails(bound: float, reference: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="would let everything pass"):
        assert_close(reference, reference, bound)


def test_values_that_are_not_numbers_fail(reference: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="not real numbers"):
        relative_error(reference > 0, reference)


def test_a_zero_reference_measures_the_size_of_what_should_be_zero() -> None:
    assert relative_error(np.array([3.0, 4.0]), np.zeros(2)) == 5.0
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0


def test_a_backend_is_asked_for_values_and_dtype(reference: np.ndarray) -> None:
    pytest.importorskip("mlx.core", reason="bfloat16 needs an array library that has it")
    backend = mesp.get_backend("mlx:cpu")
    array = backend.from_numpy(reference, "bfloat16")
    assert_close(array, reference, 2.0**-8, dtype="bfloat16", backend=backend)
    with pytest.raises(AssertionError, match="dtype bfloat16, not float32"):
        assert_close(array, reference, 2.0**-8, dtype="float32", backend=backend)
