"""Frozen matrices on a device whose own quantised product is fast (Apple GPUs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class NativeDense:
    """values: [out, in]. Products in the dtype of the input, summed by the GPU in float32."""

    values: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def matmul(self, x: mx.array) -> mx.array:
        return x @ self.values.astype(x.dtype).T

    def matmul_t(self, dy: mx.array) -> mx.array:
        return dy @ self.values.astype(dy.dtype)

    def tile(self, i: int, size: int, axis: int) -> NativeDense:
        return NativeDense(_cut(self.values, i, size, axis))

    def take(self, rows: mx.array) -> mx.array:
        return mx.take(self.values, rows, axis=0)


@dataclass(frozen=True)
class NativeQuantized:
    """words: uint32 [out, in · bits / 32]; scales, biases: [out, in / group].

    ``mx.quantized_matmul`` reads the packed words; a dense copy is never made.
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
            x,
            self.words,
            self.scales.astype(x.dtype),
            self.biases.astype(x.dtype),
            transpose=transpose,
            group_size=self.group,
            bits=self.bits,
        )

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
        picked: list[Any] = [
            mx.take(a, rows, axis=0) for a in (self.words, self.scales, self.biases)
        ]
        picked[1:] = [part.astype(mx.float32) for part in picked[1:]]
        return mx.dequantize(*picked, group_size=self.group, bits=self.bits)


def _cut(a: mx.array, i: int, size: int, axis: int) -> mx.array:
    lo = i * size
    return a[lo : lo + size] if axis == 0 else a[:, lo : lo + size]
