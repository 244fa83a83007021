"""The reference run naively in a narrow dtype: every intermediate result is rounded to it.

``err(kernel) ≤ err(naive) + tolerance`` needs a naive computation in each dtype. NumPy has no
bfloat16, so the float64 reference itself runs on arrays that round after each operation.

A sum inside one operation is exact and rounded once, unless ``in_order`` says otherwise: then a
float32 matrix product adds one term after the other, as plain loops and many GPUs do. For sums of
a thousand terms that alone is off by more than the table's entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` rounded to the nearest of ``dtype``, in float64."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    nearest = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32).astype(np.float64).reshape(values.shape)


class Rounded(np.ndarray):
    """float64 values of a narrow dtype; what any NumPy function makes of them is rounded too."""

    narrow: str
    in_order: bool

    def __array_finalize__(self, obj: Any) -> None:
        self.narrow = getattr(obj, "narrow", "float64")
        self.in_order = getattr(obj, "in_order", False)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        inputs = _plain(inputs)
        if ufunc is np.matmul and self.in_order and self.narrow == "float32":
            return self._round(_product_in_order(*inputs))
        result = self._round(getattr(ufunc, method)(*inputs, **_plain(options)))
        if out is None:
            return result
        out[0][...] = result
        return out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._round(func(*_plain(args), **_plain(kwargs)))

    def _round(self, result: Any) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._round(part) for part in result)
        if isinstance(result, np.ndarray | np.floating) and result.dtype.kind == "f":
            return rounded(np.asarray(result), self.narrow, in_order=self.in_order)
        return result


def rounded(values: np.ndarray, dtype: str, *, in_order: bool = False) -> Rounded:
    """``values`` as an array that rounds to ``dtype``, now and after every operation."""
    array = round_to(values, dtype).view(Rounded)
    array.narrow = dtype
    array.in_order = in_order
    return array


def _product_in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b in float32: [M, K], [K, N] -> [M, N], each sum from its first term to its last."""
    # Unoptimised einsum over contiguous rows is that loop, in C; a test holds it to it.
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return np.einsum("mk,kn->mn", a, b, optimize=False).astype(np.float64)


def _plain(tree: Any) -> Any:
    if isinstance(tree, Rounded):
        return tree.view(np.ndarray)
    if isinstance(tree, Mapping):
        return {name: _plain(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_plain(value) for value in tree)
    return tree
