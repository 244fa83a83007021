"""Which dtype a formula computes in: sums of 16-bit inputs are always float32."""

from __future__ import annotations

from typing import Any

Array = Any


def accumulation_dtype(dtype: Any, xp: Any) -> Any:
    """float64 for float64, float32 for everything narrower."""
    return xp.float64 if dtype == xp.float64 else xp.float32


def cast(x: Array, dtype: Any, xp: Any) -> Array:
    """``x`` in ``dtype``; the same array when it already is."""
    return x if x.dtype == dtype else xp.astype(x, dtype)


def wide(x: Array, xp: Any) -> Array:
    """``x`` in its accumulation dtype."""
    return cast(x, accumulation_dtype(x.dtype, xp), xp)
