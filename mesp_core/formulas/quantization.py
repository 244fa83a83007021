"""Group-quantised weights: codes to values. Mathematics and layouts: docs/quantization.md."""

from __future__ import annotations

from typing import Any

from mesp_core.formulas.precision import cast

Array = Any

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


def unpack(codes: Array, *, bits: int, xp: Any) -> Array:
    """The integers in a little-endian bit stream: uint8 [rows, n · bits / 8] -> int32 [rows, n].

    Eight integers of any width fill ``bits`` whole bytes, so one rule serves every width:
    integer j of an octet starts at bit j · bits, and lies in that byte and at most the next.
    Raises ValueError for a width that is not in ``BITS``.
    """
    if bits not in BITS:
        raise ValueError(f"{bits}-bit codes are not supported; choose from {BITS}")
    rows, length = codes.shape
    octets = xp.reshape(codes, (rows, length // bits, bits))
    mask = xp.asarray(2**bits - 1, dtype=xp.int32)
    integers = []
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        word = cast(octets[:, :, byte], xp.int32, xp)
        if shift + bits > 8:
            following = cast(octets[:, :, byte + 1], xp.int32, xp)
            word = word + xp.bitwise_left_shift(following, xp.asarray(8, dtype=xp.int32))
        word = xp.bitwise_right_shift(word, xp.asarray(shift, dtype=xp.int32))
        integers.append(xp.bitwise_and(word, mask))
    return xp.reshape(xp.stack(integers, axis=-1), (rows, length * 8 // bits))


def dequantize(
    codes: Array, scales: Array, biases: Array, *, bits: int, dtype: Any, xp: Any
) -> Array:
    """value = code · scale + bias, the scale and bias of the code's group, computed in ``dtype``.

    codes: uint8 [rows, n · bits / 8]; scales, biases: [rows, n / group] in any float dtype;
    out: [rows, n] in ``dtype``.
    """
    rows, groups = scales.shape
    values = cast(unpack(codes, bits=bits, xp=xp), dtype, xp)
    values = xp.reshape(values, (rows, groups, -1))
    scales = xp.expand_dims(cast(scales, dtype, xp), axis=-1)
    biases = xp.expand_dims(cast(biases, dtype, xp), axis=-1)
    return xp.reshape(values * scales + biases, (rows, -1))
