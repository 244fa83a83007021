"""The reference run naively in a narrow dtype: every intermediate result is rounded to it.

``err(kernel) ≤ err(naive) + tolerance`` needs a naive computation in each dtype. NumPy has no
bfloat16, so the float64 reference itself runs on arrays that round after each operation.
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

    def __array_finalize__(self, obj: Any) -> None:
        self.narrow = getattr(obj, "narrow", "float64")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        result = self._round(getattr(ufunc, method)(*_plain(inputs), **_plain(options)))
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
            return rounded(np.asarray(result), self.narrow)
        return result


def rounded(values: np.ndarray, dtype: str) -> Rounded:
    """``values`` as an array that rounds to ``dtype``, now and after every operation."""
    array = round_to(values, dtype).view(Rounded)
    array.narrow = dtype
    return array


def _plain(tree: Any) -> Any:
    if isinstance(tree, Rounded):
        return tree.view(np.ndarray)
    if isinstance(tree, Mapping):
        return {name: _plain(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_plain(value) for value in tree)
    return tree
