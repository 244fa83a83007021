"""Frozen matrices on a device whose own quantised product is fast (Apple GPUs)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mesp_core.stored_matrix import StoredMatrix


def load_native(stored: StoredMatrix) -> NativeDense | NativeQuantized:
    """The stored form as MLX arrays, rows in logical order; quantised weights stay quantised."""
    if stored.quantized:
        words, scales, biases = stored.packed()
        arrays = (mx.array(words), _floats(scales), _floats(biases))
        return NativeQuantized(*arrays, stored.bits, stored.group)
    values = stored.resident(np.empty).values
    assert values is not None
    return NativeDense(_floats(values))


@dataclass(frozen=True)
class NativeStreamed:
    """A matrix in a mapped file: a product reads all of it, a tile its bytes, ``take`` its rows.

    What was read lives as long as the product or the tile.
    """

    stored: StoredMatrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def matmul(self, x: mx.array) -> mx.array:
        return load_native(self.stored).matmul(x)

    def matmul_t(self, dy: mx.array) -> mx.array:
        return load_native(self.stored).matmul_t(dy)

    def tile(self, i: int, size: int, axis: int) -> NativeDense | NativeQuantized:
        lo, hi = i * size, min((i + 1) * size, self.shape[axis])
        cut = self.stored.rows(lo, hi) if axis == 0 else self.stored.columns(lo, hi)
        return load_native(cut)

    def take(self, rows: mx.array) -> mx.array:
        return mx.array(self.stored.take(np.array(rows)))


@dataclass(frozen=True)
class NativeDense:
    """values: [out, in]. Products in the accumulation dtype of the input."""

    values: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def matmul(self, x: mx.array) -> mx.array:
        x = wide(x)
        return x @ self.values.astype(x.dtype).T

    def matmul_t(self, dy: mx.array) -> mx.array:
        dy = wide(dy)
        return dy @ self.values.astype(dy.dtype)

    def dense(self) -> mx.array:
        """The values, as they are stored. (Of a tile: never of a large matrix.)"""
        return self.values

    def tile(self, i: int, size: int, axis: int) -> NativeDense:
        return NativeDense(_cut(self.values, i, size, axis))

    def take(self, rows: mx.array) -> mx.array:
        return mx.take(self.values, rows, axis=0)


@dataclass(frozen=True)
class NativeQuantized:
    """words: uint32 [out, in · bits / 32]; scales, biases: [out, in / group] as stored.

    ``mx.quantized_matmul`` reads the packed words; a dense copy is never made. The product is in
    float32, so that neither a scale nor a sum is rounded to 16 bits.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.group

    def matmul(self, x: mx.array) -> mx.array:
        return self._product(x, transpose=True)

    def matmul_t(self, dy: mx.array) -> mx.array:
        return self._product(dy, transpose=False)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x.astype(mx.float32),
            self.words,
            self.scales.astype(mx.float32),
            self.biases.astype(mx.float32),
            transpose=transpose,
            group_size=self.group,
            bits=self.bits,
        )

    def dense(self) -> mx.array:
        """The values in float32. (Of a tile: never of a large matrix.)"""
        return self._dequantize([self.words, self.scales, self.biases])

    def tile(self, i: int, size: int, axis: int) -> NativeQuantized:
        words = size if axis == 0 else size * self.bits // 32
        groups = size if axis == 0 else size // self.group
        return NativeQuantized(
            mx.contiguous(_cut(self.words, i, words, axis)),
            mx.contiguous(_cut(self.scales, i, groups, axis)),
            mx.contiguous(_cut(self.biases, i, groups, axis)),
            self.bits,
            self.group,
        )

    def take(self, rows: mx.array) -> mx.array:
        return self._dequantize(
            [mx.take(a, rows, axis=0) for a in (self.words, self.scales, self.biases)]
        )

    def _dequantize(self, parts: list[mx.array]) -> mx.array:
        words, *rest = parts
        scales, biases = (part.astype(mx.float32) for part in rest)
        return mx.dequantize(words, scales, biases, group_size=self.group, bits=self.bits)


def wide(x: mx.array) -> mx.array:
    """In its accumulation dtype."""
    return x.astype(mx.float32) if x.dtype in (mx.bfloat16, mx.float16) else x


def _cut(a: mx.array, i: int, size: int, axis: int) -> mx.array:
    lo = i * size
    return a[lo : lo + size] if axis == 0 else a[:, lo : lo + size]


def _floats(values: np.ndarray) -> mx.array:
    """Stored floats as an MLX array of the same dtype; uint16 holds bfloat16."""
    array = mx.array(values)
    return array.view(mx.bfloat16) if values.dtype == np.uint16 else array
