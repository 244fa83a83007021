"""Group-quantised matrices: value = q·scale + bias. Derivation: docs/quantization.md.

A row's codes are one little-endian stream of bits: bit t of code i is bit i·bits + t of the row,
and bit p of the row is bit p mod 32 of its word p div 32.
"""

from __future__ import annotations

import numpy as np

_GGUF_BLOCK = 32


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes: [out, in] integers in [0, 2^bits). Returns [out, in·bits/32] uint32."""
    rows = codes.shape[0]
    stream = (codes[..., None] >> np.arange(bits)) & 1
    octets = np.packbits(stream.reshape(rows, -1).astype(np.uint8), axis=1, bitorder="little")
    return octets.view("<u4").astype(np.uint32)


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """packed: [out, in·bits/32] uint32. Returns codes: [out, in] int64."""
    rows = packed.shape[0]
    octets = np.ascontiguousarray(packed).astype("<u4").view(np.uint8)
    stream = np.unpackbits(octets, axis=1, bitorder="little").reshape(rows, -1, bits)
    return stream.astype(np.int64) @ (1 << np.arange(bits))


def quantize(
    weight: np.ndarray, group_size: int = 64, bits: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Affine quantisation of each group of neighbouring columns, with zero among the values.

    The step is first (max - min)/(2^bits - 1), signed so that codes count up from the end of the
    larger magnitude, then stretched until that end lies a whole number of steps from zero.
    weight: [out, in], in a multiple of group_size.
    Returns packed: [out, in·bits/32] uint32, scales, biases: [out, in/group_size].
    """
    top = 2**bits - 1
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    low_is_larger = np.abs(low) > np.abs(high)
    edge = np.where(low_is_larger, low, high)
    scales = np.maximum((high - low) / top, 1e-7)
    scales = np.where(low_is_larger, scales, -scales)
    steps = np.round(edge / scales)
    reachable = steps != 0
    scales = np.where(reachable, edge / np.where(reachable, steps, 1), scales)
    biases = np.where(reachable, edge, 0.0)
    codes = np.round((groups - biases[..., None]) / scales[..., None])
    codes = np.clip(codes, 0, top).astype(np.int64).reshape(weight.shape)
    return pack_codes(codes, bits), scales, biases


def dequantize(
    packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, group_size: int, bits: int
) -> np.ndarray:
    """value = q·scale + bias, in float64.

    packed: [out, in·bits/32] uint32; scales, biases: [out, in/group_size] of any float dtype.
    Returns [out, in].
    """
    codes = unpack_codes(packed, bits)
    groups = codes.reshape(codes.shape[0], -1, group_size)
    values = groups * _float64(scales)[..., None] + _float64(biases)[..., None]
    return values.reshape(codes.shape)


def dequantize_q4_0(blocks: np.ndarray) -> np.ndarray:
    """GGUF Q4_0: blocks of 32 values, (q - 8)·d; 2 bytes of float16 d, 16 bytes of nibbles.

    blocks: [out, in/32·18] uint8. Returns [out, in].
    """
    d, nibbles = _split_blocks(blocks, (2, 16))
    return _join_blocks((_nibbles(nibbles) - 8.0) * _half(d))


def dequantize_q4_1(blocks: np.ndarray) -> np.ndarray:
    """GGUF Q4_1: blocks of 32 values, q·d + m; float16 d and m, 16 bytes of nibbles.

    blocks: [out, in/32·20] uint8. Returns [out, in].
    """
    d, m, nibbles = _split_blocks(blocks, (2, 2, 16))
    return _join_blocks(_nibbles(nibbles) * _half(d) + _half(m))


def dequantize_q8_0(blocks: np.ndarray) -> np.ndarray:
    """GGUF Q8_0: blocks of 32 values, q·d; float16 d, 32 signed bytes q.

    blocks: [out, in/32·34] uint8. Returns [out, in].
    """
    d, codes = _split_blocks(blocks, (2, _GGUF_BLOCK))
    return _join_blocks(codes.view(np.int8).astype(np.float64) * _half(d))


def _split_blocks(blocks: np.ndarray, widths: tuple[int, ...]) -> list[np.ndarray]:
    """The fields of each block, each [out, blocks, width] bytes."""
    per_block = blocks.reshape(blocks.shape[0], -1, sum(widths))
    fields = np.split(per_block, np.cumsum(widths)[:-1], axis=-1)
    return [np.ascontiguousarray(field) for field in fields]


def _nibbles(octets: np.ndarray) -> np.ndarray:
    """Low nibbles are the first half of a block, high nibbles the second."""
    return np.concatenate([octets & 15, octets >> 4], axis=-1).astype(np.float64)


def _half(octets: np.ndarray) -> np.ndarray:
    return octets.view("<f2").astype(np.float64)


def _join_blocks(values: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape[0], -1)


def _float64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, dtype=np.float64)
