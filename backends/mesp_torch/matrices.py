"""Frozen matrices that torch itself multiplies, in the form in which they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mesp_core.formulas.frozen_matrix import (
    DenseMatrix,
    QuantizedMatrix,
    rows_per_tile,
    tiled_matmul,
    tiled_matmul_t,
)
from mesp_core.formulas.loops import Loops
from mesp_core.formulas.precision import accumulation_dtype
from mesp_core.stored_matrix import StoredMatrix
from mesp_torch.decoding import host_tensor


@dataclass(frozen=True)
class Native:
    """How matrices are multiplied.

    forward, backward: the dtype of both factors of x Wᵀ and of dy W; None for the accumulation
    dtype of the input, which is also what every result is in. wide: the accumulation dtype of the
    model, by name, in which rows are taken.
    """

    device: torch.device
    wide: str
    forward: torch.dtype | None
    backward: torch.dtype | None
    tile_weights: int
    xp: Any = field(repr=False)
    loops: Loops = field(repr=False)

    def load(self, stored: StoredMatrix) -> NativeMatrix:
        """The stored form on the device, rows in logical order; quantised weights stay quantised.

        On a CPU the bytes of the file are used where they lie, unless rows must be reordered.
        """
        if stored.quantized:
            words, scales, biases = stored.packed()
            return NativeMatrix(
                QuantizedMatrix(
                    self._tensor(words.view(np.uint8)),
                    self._tensor(scales),
                    self._tensor(biases),
                    stored.bits,
                    stored.group,
                    self.xp,
                    self.loops,
                ),
                self,
            )
        values = stored.values
        if stored.row_order is not None:
            values = stored.resident(np.empty).values
        assert values is not None
        return NativeMatrix(DenseMatrix(self._tensor(values), self.xp, self.loops), self)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        tensor = host_tensor(values)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


@dataclass(frozen=True)
class NativeMatrix:
    """A matrix of the formulas, multiplied as ``how`` says.

    A dense one in the dtype of the product is multiplied as it is; any other is dequantised or
    cast a tile at a time.
    """

    matrix: DenseMatrix | QuantizedMatrix
    how: Native

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        how, dtype = self.how, self.how.forward or self._result(x)
        if self._needs_tiles(dtype):
            return tiled_matmul(self, x, how.xp, how.loops, how.tile_weights)
        return _product(x.to(dtype), self._dense(dtype).T, self._result(x))

    def matmul_t(self, dy: torch.Tensor) -> torch.Tensor:
        how, dtype = self.how, self.how.backward or self._result(dy)
        if self._needs_tiles(dtype):
            return tiled_matmul_t(self, dy, how.xp, how.loops, how.tile_weights)
        return _product(dy.to(dtype), self._dense(dtype), self._result(dy))

    def tile(self, i: int, size: int, axis: int) -> NativeMatrix:
        return NativeMatrix(self.matrix.tile(i, size, axis), self.how)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        if isinstance(matrix, DenseMatrix):
            return matrix.take(rows)
        picked = [
            part.index_select(0, rows) for part in (matrix.codes, matrix.scales, matrix.biases)
        ]
        taken = replace(matrix, codes=picked[0], scales=picked[1], biases=picked[2])
        return taken.dense(getattr(torch, self.how.wide)).values

    def _result(self, x: torch.Tensor) -> torch.dtype:
        return accumulation_dtype(x.dtype, self.how.xp)

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The values in ``dtype``; a quantised matrix is decoded in float32 or wider."""
        if isinstance(self.matrix, DenseMatrix):
            return self.matrix.values.to(dtype)
        return self.matrix.dense(accumulation_dtype(dtype, self.how.xp)).values.to(dtype)

    def _needs_tiles(self, dtype: torch.dtype) -> bool:
        rows, width = self.shape
        if rows <= rows_per_tile(width, self.how.tile_weights):
            return False
        return isinstance(self.matrix, QuantizedMatrix) or self.matrix.values.dtype != dtype


def _product(a: torch.Tensor, b: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """a b in the dtype ``result``. Only CUDA gives the sum of 16-bit products unrounded."""
    if a.dtype != result and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=result)
    return torch.matmul(a, b).to(result)


@dataclass(frozen=True)
class NativeStreamed:
    """A matrix in a mapped file: a product reads all of it, a tile its bytes, ``take`` its rows.

    What was read lives as long as the product or the tile.
    """

    stored: StoredMatrix
    how: Native

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self.how.load(self.stored).matmul(x)

    def matmul_t(self, dy: torch.Tensor) -> torch.Tensor:
        return self.how.load(self.stored).matmul_t(dy)

    def tile(self, i: int, size: int, axis: int) -> NativeMatrix:
        lo, hi = i * size, min((i + 1) * size, self.shape[axis])
        return self.how.load(self.stored.rows(lo, hi) if axis == 0 else self.stored.columns(lo, hi))

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        taken = self.stored.take(rows.cpu().numpy(), getattr(np, self.how.wide))
        return torch.from_numpy(taken).to(self.how.device)
