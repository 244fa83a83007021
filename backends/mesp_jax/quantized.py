"""How a quantised matrix lies in bytes, and its values, as expressions that XLA vectorises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesp_core.stored_matrix import StoredMatrix

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Layout:
    """value = (code − zero) · scale + bias; ``StoredMatrix`` defines bits, group, zero and order.

    inside: None where codes, scales and biases are arrays of their own. Otherwise one uint8 array
    [out, in / group, bytes] holds them, as in GGUF's blocks, and this says where: an offset, a
    width and a dtype for each.
    """

    bits: int
    group: int
    zero: int
    order: str
    inside: tuple[tuple[int, int, str], ...] | None = None

    def groups(self, columns: int, width: int) -> int:
        """Groups in a tile of ``columns`` of ``width``; ValueError where one would be cut."""
        if columns % self.group and columns < width:
            raise ValueError(f"a tile of {columns} columns does not fall on groups of {self.group}")
        return -(-columns // self.group)

    def parts(self, arrays: Arrays) -> Arrays:
        """codes [out, in / group, bytes], scales and perhaps biases [out, in / group]."""
        if self.inside is None:
            return arrays
        (blocks,) = arrays
        # The bytes of one float make one float; of codes each byte stays one.
        codes, *scales = [
            lax.bitcast_convert_type(blocks[:, :, offset : offset + width], dtype)
            for offset, width, dtype in self.inside
        ]
        # Converted once for a group, rather than once for each of its weights.
        return codes, *lax.optimization_barrier(scales)

    def values(self, arrays: Arrays, dtype: str) -> jax.Array:
        """The weights [out, in], computed in ``dtype``."""
        codes, scales, *biases = self.parts(arrays)
        values = unpack(codes, self.bits, self.order).astype(dtype)
        if self.zero:
            values = values - self.zero
        values = values * scales[:, :, None].astype(dtype)
        if biases:
            values = values + biases[0][:, :, None].astype(dtype)
        return values.reshape(values.shape[0], -1)


def arrays_of(stored: StoredMatrix) -> tuple[Layout | None, list[np.ndarray]]:
    """The layout of a stored matrix (None: values as they are) and views of its bytes, rows in
    stored order."""
    if stored.values is not None:
        return None, [_floats(stored.values)]
    form = (stored.bits, stored.group, stored.zero, stored.order)
    parts = [part for part in (stored.codes, stored.scales, stored.biases) if part is not None]
    inside = _interleaved(parts)
    if inside is None:
        arrays = [parts[0], *(_floats(part) for part in parts[1:])]
        return Layout(*form), arrays
    first = min(parts, key=lambda part: part.ctypes.data)
    rows, groups = first.shape[:2]
    length = sum(width for _, width, _ in inside)
    octets = first[..., None] if first.ndim == 2 else first
    blocks = np.lib.stride_tricks.as_strided(
        octets.view(np.uint8), (rows, groups, length), (*first.strides[:2], 1), writeable=False
    )
    return Layout(*form, inside), [blocks]


def _floats(values: np.ndarray) -> np.ndarray:
    """Stored floats in their own dtype; uint16 holds bfloat16."""
    return values.view(jnp.bfloat16) if values.dtype == np.uint16 else values


def unpack(codes: jax.Array, bits: int, order: str) -> jax.Array:
    """Integers [rows, groups, group] of codes [rows, groups, bytes] in the given bit order.

    Written as shifts of broadcast words, which XLA turns into one vector loop; stacking the codes
    of a period took several times as long.
    """
    if bits == 8:
        return codes
    rows, groups, length = codes.shape
    if order == "halves":
        shifts = jnp.asarray([[0], [4]], jnp.int32)
        integers = (codes[:, :, None, :].astype(jnp.int32) >> shifts) & 15
        return integers.reshape(rows, groups, 2 * length)
    per_word = 2 if bits == 4 else 4
    if bits in (3, 5):
        words = _words_of_four(codes, bits)
    else:
        words = _little_endian(codes.reshape(rows, groups, -1, bits * per_word // 8))
    shifts = bits * jnp.arange(per_word, dtype=jnp.int32)
    integers = (words[..., None] >> shifts) & (2**bits - 1)
    return integers.reshape(rows, groups, length * 8 // bits)


def _words_of_four(codes: jax.Array, bits: int) -> jax.Array:
    """Four codes to a word, of widths whose period of eight fills no 32-bit word."""
    rows, groups, _ = codes.shape
    octets = codes.reshape(rows, groups, -1, bits)
    end, shift = divmod(4 * bits, 8)
    low = _little_endian(octets[..., : end + 1])
    high = _little_endian(octets[..., end:]) >> shift
    return jnp.stack([low, high], axis=-1).reshape(rows, groups, -1)


def _little_endian(octets: jax.Array) -> jax.Array:
    """int32 words of up to four bytes along the last axis."""
    word = octets[..., 0].astype(jnp.int32)
    for byte in range(1, octets.shape[-1]):
        word = word | (octets[..., byte].astype(jnp.int32) << (8 * byte))
    return word


def _interleaved(parts: list[np.ndarray]) -> tuple[tuple[int, int, str], ...] | None:
    """Where each part lies in a block, if the parts are slices of one array of whole blocks."""
    rows, groups = parts[0].shape[:2]
    strides = parts[0].strides[:2]
    start = min(part.ctypes.data for part in parts)
    inside = []
    for part in parts:
        width = part.itemsize * (part.shape[2] if part.ndim == 3 else 1)
        if part.strides[:2] != strides or (part.ndim == 3 and part.strides[2] != 1):
            return None
        name = "bfloat16" if part.dtype == np.uint16 else part.dtype.name
        inside.append((part.ctypes.data - start, width, name))
    at = 0
    for offset, width, _ in sorted(inside):
        if offset != at:
            return None
        at += width
    return tuple(inside) if strides == (groups * at, at) and rows else None
