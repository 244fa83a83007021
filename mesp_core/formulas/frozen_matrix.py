"""Frozen matrices: what a product with a weight that is never trained needs to know.

A frozen matrix W [out, in] multiplies from the right by Wᵀ (forward) and by W (input gradient),
and can be cut into tiles that are matrices again. A dense copy larger than a tile never exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from mesp_core.formulas.loops import EagerLoops, Loops
from mesp_core.formulas.precision import accumulation_dtype, cast, wide
from mesp_core.formulas.quantization import dequantize

Array = Any

#: Weights in one dense tile: 4 MB in float32.
TILE_WEIGHTS = 1 << 20


class FrozenMatrix(Protocol):
    """W: [out, in], frozen."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        ...

    def matmul(self, x: Array) -> Array:
        """x Wᵀ: [N, in] -> [N, out] in the accumulation dtype of x."""
        ...

    def matmul_t(self, dy: Array) -> Array:
        """dy W: [N, out] -> [N, in] in the accumulation dtype of dy."""
        ...

    def tile(self, i: Any, size: int, axis: int) -> FrozenMatrix:
        """Tile ``i`` of rows (axis 0) or columns (axis 1), itself a frozen matrix."""
        ...

    def take(self, rows: Array) -> Array:
        """The dense rows [N, in] at integer indices [N], in the widest dtype held."""
        ...


@dataclass(frozen=True)
class DenseMatrix:
    """values: [out, in] in any float dtype; products in the accumulation dtype of the input."""

    values: Array
    xp: Any = field(repr=False)
    loops: Loops = field(default_factory=EagerLoops, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def matmul(self, x: Array) -> Array:
        dtype = accumulation_dtype(x.dtype, self.xp)
        if self.values.dtype != dtype and _large(self):
            return tiled_matmul(self, x, self.xp, self.loops)
        values = cast(self.values, dtype, self.xp)
        return self.xp.matmul(wide(x, self.xp), self.xp.matrix_transpose(values))

    def matmul_t(self, dy: Array) -> Array:
        dtype = accumulation_dtype(dy.dtype, self.xp)
        if self.values.dtype != dtype and _large(self):
            return tiled_matmul_t(self, dy, self.xp, self.loops)
        return self.xp.matmul(wide(dy, self.xp), cast(self.values, dtype, self.xp))

    def tile(self, i: Any, size: int, axis: int) -> DenseMatrix:
        return DenseMatrix(self.loops.tile(self.values, i, size, axis), self.xp, self.loops)

    def take(self, rows: Array) -> Array:
        return wide(self.xp.take(self.values, rows, axis=0), self.xp)


@dataclass(frozen=True)
class QuantizedMatrix:
    """W = codes · scales + biases by groups of ``group`` columns (MLX's affine layout).

    codes: uint8 [out, in · bits / 8], one little-endian bit stream a row;
    scales, biases: [out, in / group] in any float dtype.
    """

    codes: Array
    scales: Array
    biases: Array
    bits: int
    group: int
    xp: Any = field(repr=False)
    loops: Loops = field(default_factory=EagerLoops, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.group

    def dense(self, dtype: Any) -> DenseMatrix:
        values = dequantize(
            self.codes, self.scales, self.biases, bits=self.bits, dtype=dtype, xp=self.xp
        )
        return DenseMatrix(values, self.xp, self.loops)

    def matmul(self, x: Array) -> Array:
        if _large(self):
            return tiled_matmul(self, x, self.xp, self.loops)
        return self.dense(accumulation_dtype(x.dtype, self.xp)).matmul(x)

    def matmul_t(self, dy: Array) -> Array:
        if _large(self):
            return tiled_matmul_t(self, dy, self.xp, self.loops)
        return self.dense(accumulation_dtype(dy.dtype, self.xp)).matmul_t(dy)

    def tile(self, i: Any, size: int, axis: int) -> QuantizedMatrix:
        """Columns are cut at multiples of the group; raises ValueError elsewhere."""
        widths = (size, size) if axis == 0 else (size * self.bits // 8, size // self.group)
        if axis == 1 and size % self.group:
            raise ValueError(f"a tile of {size} columns does not fall on groups of {self.group}")
        cut = self.loops.tile
        return QuantizedMatrix(
            cut(self.codes, i, widths[0], axis),
            cut(self.scales, i, widths[1], axis),
            cut(self.biases, i, widths[1], axis),
            self.bits,
            self.group,
            self.xp,
            self.loops,
        )

    def take(self, rows: Array) -> Array:
        xp = self.xp
        picked = [xp.take(part, rows, axis=0) for part in (self.codes, self.scales, self.biases)]
        dtype = accumulation_dtype(self.scales.dtype, xp)
        return dequantize(*picked, bits=self.bits, dtype=dtype, xp=xp)


def rows_per_tile(width: int, weights: int = TILE_WEIGHTS, multiple: int = 128) -> int:
    """Rows of ``width`` columns that make about ``weights`` weights, a multiple of ``multiple``."""
    return max(multiple, weights // width // multiple * multiple)


def _large(matrix: FrozenMatrix) -> bool:
    return matrix.shape[0] > rows_per_tile(matrix.shape[1])


def tiled_matmul(
    matrix: FrozenMatrix, x: Array, xp: Any, loops: Loops, tile_weights: int = TILE_WEIGHTS
) -> Array:
    """x Wᵀ by tiles of rows: each tile is read, multiplied and dropped. [N, in] -> [N, out]."""
    out, width = matrix.shape
    size = rows_per_tile(width, tile_weights)
    x = wide(x, xp)

    def body(i: Any, y: Array) -> Array:
        return loops.put(y, i, size, 1, matrix.tile(i, size, 0).matmul(x))

    return loops.fold_tiles(body, xp.zeros((x.shape[0], out), dtype=x.dtype), out, size)


def tiled_matmul_t(
    matrix: FrozenMatrix, dy: Array, xp: Any, loops: Loops, tile_weights: int = TILE_WEIGHTS
) -> Array:
    """dy W by tiles of rows, summed in the accumulation dtype. [N, out] -> [N, in]."""
    out, width = matrix.shape
    size = rows_per_tile(width, tile_weights)
    dy = wide(dy, xp)

    def body(i: Any, dx: Array) -> Array:
        return dx + matrix.tile(i, size, 0).matmul_t(loops.tile(dy, i, size, 1))

    zero = xp.zeros((dy.shape[0], width), dtype=dy.dtype)
    return loops.fold_tiles(body, zero, out, size)
