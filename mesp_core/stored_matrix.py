"""A frozen matrix as it lies in a file: views of its bytes, and the ways to read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mesp_core.errors import MespError

BITS = (2, 3, 4, 5, 6, 8)

#: Weights decoded at a time: bounds the temporaries. Smaller chunks are slower, whatever the cache.
CHUNK_WEIGHTS = 1 << 18

_NAMES = {"float64": "float64", "float32": "float32", "float16": "float16", "uint16": "bfloat16"}


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """W: [out, in], never trained, as NumPy views of a mapped file or of memory; nothing is copied.

    Dense: ``values`` [out, in] in float32, float16, float64, or uint16 holding bfloat16.

    Group-quantised: value = (code - zero) · scale + bias, with one scale and bias for each
    ``group`` columns. codes: [out, in / group, group · bits / 8] uint8, or int8 for signed 8-bit
    codes; scales, biases: [out, in / group], float or uint16 holding bfloat16; biases None is 0.
    ``order`` is the order of the codes in a group's bytes: "stream", one little-endian bit stream
    (MLX), or "halves", 4 bits, low nibbles the first half of the group, high ones the second
    (GGUF).

    row_order: the stored row of each logical row, or None when they are the same.
    on_release: told the address and the size of bytes that will not be read again soon.
    """

    values: np.ndarray | None = None
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None
    bits: int = 0
    group: int = 0
    zero: int = 0
    order: str = "stream"
    row_order: np.ndarray | None = None
    on_release: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.values is not None:
            _check_float(self.values, "values")
            return
        if self.codes is None or self.scales is None:
            raise MespError("a stored matrix needs values, or codes and scales")
        if self.bits not in BITS:
            raise MespError(f"{self.bits}-bit codes are not supported; choose from {BITS}")
        if self.group < 8 or self.group % 8 or self.order not in ("stream", "halves"):
            raise MespError(f"codes in groups of {self.group}, order {self.order!r}, are unknown")
        expected = (*self.scales.shape, self.group * self.bits // 8)
        if self.codes.shape != expected or self.codes.dtype not in (np.uint8, np.int8):
            raise MespError(f"codes {self.codes.dtype} {self.codes.shape}, expected {expected}")
        for part in (self.scales, self.biases):
            if part is not None:
                _check_float(part, "scales")
                if part.shape != self.scales.shape:
                    raise MespError(f"biases {part.shape} do not match scales {self.scales.shape}")

    @property
    def quantized(self) -> bool:
        return self.values is None

    @property
    def shape(self) -> tuple[int, int]:
        first = self._parts()[0]
        rows = first.shape[0] if self.row_order is None else len(self.row_order)
        return rows, first.shape[1] * (self.group if self.quantized else 1)

    @property
    def dtype(self) -> str:
        """The stored dtype: of the values, or of the scales of a quantised matrix."""
        stored = self.scales if self.values is None else self.values
        assert stored is not None
        return _NAMES[stored.dtype.name]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the logical rows."""
        rows = self.shape[0]
        return sum(part[:1].nbytes * rows for part in self._parts())

    def rows(self, lo: int, hi: int) -> StoredMatrix:
        """Rows [lo, hi), clamped to the matrix, as a view."""
        if self.row_order is not None:
            return replace(self, row_order=self.row_order[lo:hi])
        return self._map(lambda part: part[lo:hi])

    def columns(self, lo: int, hi: int) -> StoredMatrix:
        """Columns [lo, hi), clamped to the matrix, as a view.

        Raises MespError where a quantised matrix would be cut inside a group.
        """
        if not self.quantized:
            return self._map(lambda part: part[:, lo:hi])
        hi = min(hi, self.shape[1])
        if lo % self.group or hi % self.group:
            raise MespError(f"columns {lo}:{hi} are not whole groups of {self.group}")
        return self._map(lambda part: part[:, lo // self.group : hi // self.group])

    def decode(self, out: np.ndarray | None = None, dtype: type = np.float32) -> np.ndarray:
        """The values, dense: [out, in] in float32 or float64, computed in that dtype.

        Written into ``out`` when given, in chunks of rows whose temporaries are small. A row of
        ``out`` must be contiguous. Raises MespError for another dtype or shape.
        """
        if out is None:
            out = np.empty(self.shape, dtype)
        if out.shape != self.shape or out.dtype not in (np.float32, np.float64):
            raise MespError(f"cannot decode {self.shape} into {out.dtype} {out.shape}")
        step = max(1, CHUNK_WEIGHTS // max(1, self.shape[1]))
        for lo in range(0, self.shape[0], step):
            chunk = self.rows(lo, lo + step)._in_logical_order()
            if chunk.values is not None:
                _widen(chunk.values, out[lo : lo + step])
            else:
                chunk._dequantize(out[lo : lo + step])
        return out

    def take(self, indices: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        """The rows at ``indices`` [n], dense: [n, in] in float32 or float64; no other is touched.

        Raises MespError for an index outside the matrix.
        """
        indices = np.asarray(indices)
        if indices.size and not 0 <= indices.min() <= indices.max() < self.shape[0]:
            bad = indices[(indices < 0) | (indices >= self.shape[0])][0]
            raise MespError(f"row {bad} does not exist in a matrix of {self.shape[0]} rows")
        stored = indices if self.row_order is None else self.row_order[indices]
        return replace(self, row_order=stored.astype(np.intp)).decode(dtype=dtype)

    def release(self) -> None:
        """Give mapped pages back; they are read from the file again if they are needed again."""
        if self.on_release is None:
            return
        for start, end in self._byte_ranges():
            self.on_release(start, end - start)

    def resident(self, allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray]) -> StoredMatrix:
        """The same matrix in memory that ``allocate(shape, dtype)`` gives, in logical row order."""

        def copy(part: np.ndarray) -> np.ndarray:
            target = allocate((self.shape[0], *part.shape[1:]), part.dtype)
            if self.row_order is None:
                np.copyto(target, part)
            else:
                np.take(part, self.row_order, axis=0, out=target, mode="clip")
            return target

        return replace(self._map(copy), row_order=None, on_release=None)

    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(words uint32 [out, in · bits / 32], scales, biases [out, in / group]) as MLX packs them.

        Codes become unsigned and in stream order, rows logical; value = code · scale + bias.
        scales and biases keep their stored dtype, unless a bias that follows from ``zero`` would
        overflow it: then both are float32. Raises MespError for a dense matrix.
        """
        if self.codes is None:
            raise MespError("a dense matrix has no packed form")
        chunk = self._in_logical_order()
        codes, scales, zero = chunk.codes, chunk.scales, chunk.zero
        assert codes is not None and scales is not None
        if codes.dtype == np.int8:
            codes, zero = codes.view(np.uint8) ^ np.uint8(0x80), zero + 128
        if chunk.order == "halves":
            codes = _nibbles_in_stream_order(codes)
        words = np.ascontiguousarray(codes).reshape(chunk.shape[0], -1).view(np.uint32)
        if not zero and chunk.biases is not None:
            return words, scales, chunk.biases
        return words, *_with_biases(scales, chunk.biases, zero)

    def _parts(self) -> list[np.ndarray]:
        parts = (self.values, self.codes, self.scales, self.biases)
        return [part for part in parts if part is not None]

    def _map(self, function: Callable[[np.ndarray], np.ndarray]) -> StoredMatrix:
        def apply(part: np.ndarray | None) -> np.ndarray | None:
            return None if part is None else function(part)

        return replace(
            self,
            values=apply(self.values),
            codes=apply(self.codes),
            scales=apply(self.scales),
            biases=apply(self.biases),
        )

    def _in_logical_order(self) -> StoredMatrix:
        order = self.row_order
        if order is None:
            return self
        return replace(self._map(lambda part: part[order]), row_order=None)

    def _byte_ranges(self) -> list[tuple[int, int]]:
        parts = self._parts()
        if self.row_order is not None:
            if not len(self.row_order):
                return []
            first, last = int(self.row_order.min()), int(self.row_order.max())
            parts = [part[first : last + 1] for part in parts]
        ranges = sorted(np.lib.array_utils.byte_bounds(part) for part in parts if part.size)
        merged: list[tuple[int, int]] = []
        for start, end in ranges:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def _dequantize(self, out: np.ndarray) -> None:
        assert self.codes is not None and self.scales is not None
        view = out.reshape(*self.scales.shape, self.group)
        _unpack(self.codes, self.bits, self.order, view)
        if self.zero:
            view -= self.zero
        view *= _widen(self.scales, np.empty(self.scales.shape, out.dtype))[..., None]
        if self.biases is not None:
            view += _widen(self.biases, np.empty(self.biases.shape, out.dtype))[..., None]


def _check_float(array: np.ndarray, what: str) -> None:
    if array.dtype.name not in _NAMES or array.ndim != 2:
        raise MespError(f"{what} must be a matrix of floats, not {array.dtype} {array.shape}")


def _widen(stored: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Stored floats (uint16 is bfloat16) into ``out`` of the same shape."""
    if stored.dtype == np.uint16:
        if out.dtype == np.float32:
            np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
            return out
        stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    np.copyto(out, stored)
    return out


def _unpack(codes: np.ndarray, bits: int, order: str, out: np.ndarray) -> None:
    """Codes [rows, groups, bytes] as integers in the floats ``out`` [rows, groups, group].

    A stream repeats after whole bytes: ``period`` codes fill ``bits · period / 8`` of them. Code j
    of a period starts at bit j · bits, and lies in that byte and at most the next.
    """
    if order == "halves":
        half = out.shape[-1] // 2
        np.bitwise_and(codes, 15, out=out[..., :half], casting="unsafe")
        np.right_shift(codes, 4, out=out[..., half:], casting="unsafe")
        return
    if bits == 8:
        np.copyto(out, codes)
        return
    period = 8 // math.gcd(bits, 8)
    octets = codes.reshape(*codes.shape[:2], -1, bits * period // 8)
    target = out.reshape(*out.shape[:2], -1, period)
    mask = np.uint8(2**bits - 1)
    for j in range(period):
        byte, shift = divmod(j * bits, 8)
        code = octets[..., byte]
        if shift + bits == 8:
            np.right_shift(code, shift, out=target[..., j], casting="unsafe")
            continue
        if shift:
            code = code >> np.uint8(shift)
        if shift + bits > 8:
            code = code | (octets[..., byte + 1] << np.uint8(8 - shift))
        np.bitwise_and(code, mask, out=target[..., j], casting="unsafe")


def _nibbles_in_stream_order(codes: np.ndarray) -> np.ndarray:
    """Codes in the order "halves" [rows, groups, group / 2] to the order "stream"."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    low = (even & np.uint8(15)) | (odd << np.uint8(4))
    high = (even >> np.uint8(4)) | (odd & np.uint8(0xF0))
    return np.concatenate([low, high], axis=-1)


def _with_biases(
    scales: np.ndarray, biases: np.ndarray | None, zero: int
) -> tuple[np.ndarray, np.ndarray]:
    wide = _widen(scales, np.empty(scales.shape, np.float32))
    total = wide * np.float32(-zero)
    if biases is not None:
        return wide, total + _widen(biases, np.empty(biases.shape, np.float32))
    if scales.dtype == np.float16 and np.abs(total).max(initial=0) > np.finfo(np.float16).max:
        return wide, total
    if scales.dtype == np.uint16:
        return scales, (total.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return scales, total.astype(scales.dtype)
