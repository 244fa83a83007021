"""Frozen matrices on the device: in their stored form, widened or dequantised by tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mesp_core.formulas.frozen_matrix import rows_per_tile, tiled_matmul, tiled_matmul_t
from mesp_jax.loops import LOOPS
from mesp_jax.namespace import XP
from mesp_jax.quantized import Layout


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
        if self.values.dtype != self.dtype and is_large(self):
            return tiled_matmul(self, x, XP, LOOPS, self.tile_weights)
        return XP.matmul(x, self.values.astype(self.dtype).T)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        """dy W: [N, out] -> [N, in]."""
        if self.values.dtype != self.dtype and is_large(self):
            return tiled_matmul_t(self, dy, XP, LOOPS, self.tile_weights)
        return XP.matmul(dy, self.values.astype(self.dtype))

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        """Tile ``i`` of rows or columns, in ``dtype``."""
        i, values = _inside_the_loop(i, self.values)
        return replace(self, values=LOOPS.tile(values, i, size, axis)).dense()

    def dense(self) -> JaxDense:
        """The same in ``dtype``."""
        return replace(self, values=self.values.astype(self.dtype))

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
        if is_large(self):
            return tiled_matmul(self, x, XP, LOOPS, self.tile_weights)
        return self.dense().matmul(x)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        """dy W: [N, out] -> [N, in]."""
        if is_large(self):
            return tiled_matmul_t(self, dy, XP, LOOPS, self.tile_weights)
        return self.dense().matmul_t(dy)

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        """Tile ``i`` of rows or columns, dequantised; ValueError for columns inside a group."""
        step = size if axis == 0 else self.layout.groups(size, self.shape[1])
        i, arrays = _inside_the_loop(i, self.arrays)
        cut = tuple(LOOPS.tile(array, i, step, axis) for array in arrays)
        return replace(self, arrays=cut).dense()

    def dense(self) -> JaxDense:
        """The same, dequantised."""
        values = self.layout.values(self.arrays, self.dtype)
        return JaxDense(values, self.dtype, self.tile_weights)

    def take(self, rows: jax.Array) -> jax.Array:
        """The rows at indices [n], dequantised: [n, in] in ``dtype``."""
        return replace(self, arrays=tuple(_rows_at(a, rows) for a in self.arrays)).dense().values


def _inside_the_loop(i: Any, weights: Any) -> tuple[Any, Any]:
    """The same index and weights, which XLA may not look at before the index is known.

    Otherwise it widens or dequantises the whole matrix before the loop, once for all turns.
    """
    return (i, weights) if isinstance(i, int) else lax.optimization_barrier((i, weights))


def is_large(matrix: Any) -> bool:
    """Whether it has more rows than a tile of its ``tile_weights``."""
    return matrix.shape[0] > rows_per_tile(matrix.shape[1], matrix.tile_weights)


def _rows_at(array: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(array, rows, axis=0, mode="clip")
