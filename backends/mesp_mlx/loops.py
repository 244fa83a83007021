"""Loops over tiles in MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mesp_core.formulas.loops import EagerLoops, arrays_in
from mesp_mlx.namespace import host_view


def evaluate(*trees: Any) -> None:
    """Evaluates every array in ``trees``. (``mx.eval`` of a dataclass does nothing, silently.)"""
    mx.eval([array for tree in trees for array in arrays_in(tree)])


class CpuLoops(EagerLoops):
    """On a CPU a tile is written in place through a view of the array's memory.

    MLX's own assignment copies the whole array when a slice of it was read just before, which
    every accumulation does.
    """

    def __init__(self) -> None:
        super().__init__(evaluate)

    def put(self, a: Any, i: int, size: int, axis: int, x: Any) -> Any:
        # What replaces the tiles may be computed from them, so all of it comes first.
        evaluate(x)
        return super().put(a, i, size, axis, x)

    def assign(self, a: mx.array, span: tuple[slice, ...], x: mx.array) -> mx.array:
        _writable(a)[span] = _writable(x.astype(a.dtype))
        return a


def _writable(array: mx.array) -> np.ndarray:
    """A view of the array's memory; bfloat16 as the 16-bit integers of its bits."""
    if array.dtype != mx.bfloat16:
        return host_view(array)
    mx.eval(array)
    return host_view(array.view(mx.uint16))
