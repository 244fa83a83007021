"""Frozen matrices as XLA reads them: in their stored form, widened or dequantised by tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesp_core.formulas.frozen_matrix import rows_per_tile, tiled_matmul, tiled_matmul_t
from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.loops import LOOPS
from mesp_jax.namespace import XP
from mesp_jax.quantized import Layout, arrays_of, stored_floats


@dataclass(frozen=True)
class JaxDense:
    """values: [out, in] in their stored dtype; dtype: the products' accumulation dtype, by name.

    tile_weights: weights that may be alive in ``dtype`` at once.
    """

    values: jax.Array
    dtype: str
    tile_weights: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def matmul(self, x: jax.Array) -> jax.Array:
        """x Wᵀ: [N, in] -> [N, out]."""
        if self.values.dtype != self.dtype and _large(self):
            return tiled_matmul(self, x, XP, LOOPS, self.tile_weights)
        return XP.matmul(x, self.values.astype(self.dtype).T)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        """dy W: [N, out] -> [N, in]."""
        if self.values.dtype != self.dtype and _large(self):
            return tiled_matmul_t(self, dy, XP, LOOPS, self.tile_weights)
        return XP.matmul(dy, self.values.astype(self.dtype))

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        """Tile ``i`` of rows or columns, in ``dtype``."""
        i, values = _inside_the_loop(i, self.values)
        cut = LOOPS.tile(values, i, size, axis)
        return JaxDense(cut.astype(self.dtype), self.dtype, self.tile_weights)

    def take(self, rows: jax.Array) -> jax.Array:
        """The rows at indices [n]: [n, in] in ``dtype``."""
        return _rows_at(self.values, rows).astype(self.dtype)


@dataclass(frozen=True)
class JaxQuantized:
    """arrays: the stored bytes, as ``layout`` says; dequantised in ``dtype``, by name."""

    arrays: tuple[jax.Array, ...]
    layout: Layout
    dtype: str
    tile_weights: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups = self.arrays[0].shape[:2]
        return rows, groups * self.layout.group

    def matmul(self, x: jax.Array) -> jax.Array:
        """x Wᵀ: [N, in] -> [N, out]."""
        if _large(self):
            return tiled_matmul(self, x, XP, LOOPS, self.tile_weights)
        return self._dense(self.arrays).matmul(x)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        """dy W: [N, out] -> [N, in]."""
        if _large(self):
            return tiled_matmul_t(self, dy, XP, LOOPS, self.tile_weights)
        return self._dense(self.arrays).matmul_t(dy)

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        """Tile ``i`` of rows or columns, dequantised; ValueError for columns inside a group."""
        group = self.layout.group
        if axis == 1 and size % group and size < self.shape[1]:
            raise ValueError(f"a tile of {size} columns does not fall on groups of {group}")
        step = size if axis == 0 else -(-size // group)
        i, arrays = _inside_the_loop(i, self.arrays)
        return self._dense(tuple(LOOPS.tile(array, i, step, axis) for array in arrays))

    def take(self, rows: jax.Array) -> jax.Array:
        """The rows at indices [n], dequantised: [n, in] in ``dtype``."""
        return self._dense(tuple(_rows_at(array, rows) for array in self.arrays)).values

    def _dense(self, arrays: tuple[jax.Array, ...]) -> JaxDense:
        values = self.layout.values(arrays, self.dtype)
        return JaxDense(values, self.dtype, self.tile_weights)


@dataclass(frozen=True)
class StreamedMatrix:
    """A matrix in a mapped file. ``load`` is called when a stage runs; what it gives lives as
    long as the stage. Outside of stages a product loads too.

    put: places NumPy arrays on the device.
    """

    stored: StoredMatrix
    dtype: str
    tile_weights: int
    put: Callable[[list[np.ndarray]], list[Any]]

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def load(self) -> JaxDense | JaxQuantized:
        """The stored bytes on the device, rows in logical order, nothing decoded."""
        stored = self.stored
        if stored.quantized:
            layout, arrays = arrays_of(stored)
            return JaxQuantized(tuple(self.put(arrays)), layout, self.dtype, self.tile_weights)
        assert stored.values is not None
        rows = stored.row_order
        values = stored.values if rows is None else np.take(stored.values, rows, axis=0)
        return JaxDense(self.put([stored_floats(values)])[0], self.dtype, self.tile_weights)

    def rows(self, lo: int, hi: int) -> StreamedMatrix:
        """Rows [lo, hi), clamped, still in the file."""
        return StreamedMatrix(self.stored.rows(lo, hi), self.dtype, self.tile_weights, self.put)

    def matmul(self, x: jax.Array) -> jax.Array:
        return self.load().matmul(x)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        return self.load().matmul_t(dy)

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        return self.load().tile(i, size, axis)

    def take(self, rows: jax.Array) -> jax.Array:
        """The rows at indices [n]: [n, in] in ``dtype``, decoded on the host; no other is read."""
        return self.put([self.stored.take(np.asarray(rows), np.dtype(self.dtype).type)])[0]


def load_streamed(tree: Any) -> tuple[Any, bool]:
    """``tree`` with what its streamed matrices hold, and whether there was any."""
    leaves, structure = jax.tree.flatten(tree)
    if not any(isinstance(leaf, StreamedMatrix) for leaf in leaves):
        return tree, False
    loaded = [leaf.load() if isinstance(leaf, StreamedMatrix) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, loaded), True


def _inside_the_loop(i: Any, weights: Any) -> tuple[Any, Any]:
    """The same index and weights, which XLA may not look at before the index is known.

    Otherwise it widens or dequantises the whole matrix before the loop, once for all turns.
    """
    return (i, weights) if isinstance(i, int) else lax.optimization_barrier((i, weights))


def _large(matrix: JaxDense | JaxQuantized) -> bool:
    return matrix.shape[0] > rows_per_tile(matrix.shape[1], matrix.tile_weights)


def _rows_at(array: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(array, rows, axis=0, mode="clip")
