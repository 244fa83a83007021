"""A frozen matrix whose bytes lie in host memory or in a mapped file, decoded by NumPy.

On a CPU this is the fast path: a tile is decoded straight from its stored form into one buffer
of the backend, multiplied there, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesp_core.formulas.frozen_matrix import (
    DenseMatrix,
    rows_per_tile,
    tiled_matmul,
    tiled_matmul_t,
)
from mesp_core.formulas.loops import Loops
from mesp_core.stored_matrix import StoredMatrix

Array = Any


@dataclass(frozen=True)
class HostRuntime:
    """What decoding needs of a backend: its namespace and loops, and ``new_buffer(shape, dtype)``,
    an uninitialised array of the backend together with a writable NumPy view of it."""

    xp: Any
    loops: Loops
    new_buffer: Callable[[tuple[int, int], Any], tuple[Array, np.ndarray]]
    tile_weights: int


@dataclass(frozen=True)
class HostMatrix:
    """stored: the matrix as it lies in memory; dtype: NumPy float32 or float64, of its tiles."""

    stored: StoredMatrix
    dtype: Any
    runtime: HostRuntime

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def dense(self) -> DenseMatrix:
        """All of it, decoded. Only for a tile."""
        array, view = self.runtime.new_buffer(self.shape, self.dtype)
        self.stored.decode(out=view)
        return DenseMatrix(array, self.runtime.xp, self.runtime.loops)

    def matmul(self, x: Array) -> Array:
        if self._large():
            run = self.runtime
            return tiled_matmul(self, x, run.xp, run.loops, run.tile_weights)
        return self.dense().matmul(x)

    def matmul_t(self, dy: Array) -> Array:
        if self._large():
            run = self.runtime
            return tiled_matmul_t(self, dy, run.xp, run.loops, run.tile_weights)
        return self.dense().matmul_t(dy)

    def tile(self, i: int, size: int, axis: int) -> DenseMatrix:
        lo = i * size
        hi = min(lo + size, self.shape[axis])
        cut = self.stored.rows(lo, hi) if axis == 0 else self.stored.columns(lo, hi)
        return replace(self, stored=cut).dense()

    def take(self, rows: Array) -> Array:
        indices = np.asarray(rows)
        array, view = self.runtime.new_buffer((len(indices), self.shape[1]), self.dtype)
        view[...] = self.stored.take(indices, self.dtype)
        return array

    def _large(self) -> bool:
        return self.shape[0] > rows_per_tile(self.shape[1], self.runtime.tile_weights)
