"""How results are compared: one relative error for a whole tensor, and no silent way to pass."""

from __future__ import annotations

from typing import Any

import numpy as np


def relative_error(actual: Any, reference: Any) -> float:
    """‖actual − reference‖ / ‖reference‖ in float64; ‖actual‖ where the reference is all zero.

    Raises AssertionError for a shape that differs (nothing is broadcast) or a value that is not
    finite on either side.
    """
    given, true = _float64(actual, "actual"), _float64(reference, "reference")
    assert given.shape == true.shape, f"shape {given.shape}, reference {true.shape}"
    size = float(np.linalg.norm(true.ravel()))
    return float(np.linalg.norm((given - true).ravel())) / (size or 1.0)


def assert_close(
    actual: Any,
    reference: Any,
    bound: float,
    *,
    dtype: str | None = None,
    backend: Any = None,
    name: str = "array",
) -> None:
    """Raises AssertionError unless the relative error is at most ``bound``.

    dtype: the dtype ``actual`` must have, by name. backend: the backend whose array ``actual`` is;
    None for NumPy arrays and numbers. The shapes must be equal, and every value and the bound
    finite.
    """
    assert np.isfinite(bound), f"{name}: a bound of {bound} would let everything pass"
    if dtype is not None:
        found = np.asarray(actual).dtype.name if backend is None else backend.dtype_name(actual)
        assert found == dtype, f"{name}: dtype {found}, not {dtype}"
    values = actual if backend is None else backend.to_numpy(actual)
    try:
        error = relative_error(values, reference)
    except AssertionError as problem:
        raise AssertionError(f"{name}: {problem}") from None
    assert error <= bound, f"{name}: relative error {error:.3e} exceeds {bound:.3e}"


def _float64(values: Any, side: str) -> np.ndarray:
    array = np.asarray(values)
    assert array.dtype.kind in "fiu", f"{side} is of dtype {array.dtype}, not real numbers"
    array = array.astype(np.float64)
    assert np.isfinite(array).all(), f"{side} has values that are not finite"
    return array
