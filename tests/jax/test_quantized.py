"""Every stored form of a quantised matrix: how its bytes are handed over, and its values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.quantized import arrays_of

OUT, GROUPS, GROUP = 3, 2, 32
ORDER = np.array([2, 0, 1])


def apart(
    bits: int, order: str = "stream", *, dtype: str = "float16", group: int = GROUP, **options: Any
) -> Any:
    """Codes, scales and biases in arrays of their own."""
    generator = np.random.default_rng(bits)
    scales, biases = generator.uniform(0.5, 1.5, (2, OUT, GROUPS)).astype(np.float32)
    if dtype == "bfloat16":
        scales, biases = ((a.view(np.uint32) >> 16).astype(np.uint16) for a in (scales, biases))
    else:
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    codes = generator.integers(0, 256, (OUT, GROUPS, group * bits // 8), dtype=np.uint8)
    form = {"codes": codes, "scales": scales, "biases": biases, "bits": bits, "group": group}
    return StoredMatrix(**(form | {"order": order} | options))


def together(bits: int, floats: int, *, codes_first: bool = False, dtype: Any = np.float16) -> Any:
    """Blocks of ``floats`` scales and biases and the codes of a group, side by side."""
    generator = np.random.default_rng(bits + floats)
    length, head = GROUP * bits // 8, floats * np.dtype(dtype).itemsize
    raw = np.zeros((OUT, GROUPS, head + length), np.uint8)
    at = slice(0, length) if codes_first else slice(head, None)
    numbers = slice(length, None) if codes_first else slice(0, head)
    values = generator.uniform(0.5, 1.5, (OUT, GROUPS, floats)).astype(np.float32)
    values = values.view(np.uint32) >> 16 if dtype == np.uint16 else values
    raw[:, :, at] = generator.integers(0, 256, (OUT, GROUPS, length), dtype=np.uint8)
    raw[:, :, numbers] = np.ascontiguousarray(values.astype(dtype)).view(np.uint8)
    parts = raw[:, :, numbers].view(dtype)
    codes = raw[:, :, at]
    return StoredMatrix(
        codes=codes.view(np.int8) if bits == 8 else codes,
        scales=parts[:, :, 0],
        biases=parts[:, :, 1] if floats == 2 else None,
        bits=bits,
        group=GROUP,
        zero=8 if bits == 4 and floats == 1 else 0,
        order="stream" if bits == 8 else "halves",
    )


FORMS = {f"{bits}-bit": apart(bits) for bits in (2, 3, 4, 5, 6, 8)} | {
    "groups of eight": apart(6, group=8),
    "halves": apart(4, "halves"),
    "no biases": apart(4, biases=None, zero=8),
    "float32": apart(4, dtype="float32"),
    "bfloat16": apart(4, dtype="bfloat16"),
    "q4_0": together(4, 1),
    "q4_1": together(4, 2),
    "q8_0": together(8, 1),
    "codes first": together(4, 2, codes_first=True),
    "float32 blocks": together(4, 1, dtype=np.float32),
    "bfloat16 blocks": together(4, 1, dtype=np.uint16),
}
TOGETHER = ("q4_0", "q4_1", "q8_0", "codes first", "float32 blocks", "bfloat16 blocks")


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_handed_over_as_they_lie(form: str) -> None:
    stored = FORMS[form]
    layout, arrays = arrays_of(stored)
    assert len(arrays) == (1 if form in TOGETHER else 2 + (stored.biases is not None))
    assert sum(array.nbytes for array in arrays) == stored.nbytes
    assert np.shares_memory(arrays[0], stored.codes)
    assert form not in TOGETHER or not arrays[0].flags.writeable
    reordered, others = arrays_of(replace(stored, row_order=ORDER))
    assert reordered == layout
    for array, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(other, array)


def test_dense_values_are_handed_over_as_they_lie() -> None:
    for dtype in (np.float64, np.float32, np.float16):
        values = np.ones((1, 2), dtype)
        layout, arrays = arrays_of(StoredMatrix(values=values))
        assert layout is None and len(arrays) == 1 and arrays[0] is values
    _, (bfloat16,) = arrays_of(StoredMatrix(values=np.array([[0x3F80]], np.uint16)))
    assert bfloat16.dtype == "bfloat16" and bfloat16 == 1.0


@pytest.mark.parametrize(
    "spoil",
    ["gap", "every other row", "every other group", "codes apart", "one code", "one scale"],
)
def test_parts_that_do_not_fill_their_blocks_are_handed_over_apart(spoil: str) -> None:
    whole = together(4, 1)
    raw = np.asarray(whole.codes).base
    assert raw is not None and raw.shape == (OUT, GROUPS, 18)
    if spoil == "gap":
        raw = np.pad(raw, ((0, 0), (0, 0), (0, 1)))
    if spoil == "every other row":
        raw = np.repeat(raw, 2, axis=0)[::2]
    if spoil == "every other group":
        raw = np.repeat(raw, 2, axis=1)[:, ::2]
    codes, scales = raw[:, :, 2:18], raw[:, :, :2].view(np.float16)[:, :, 0]
    if spoil == "codes apart":
        codes = np.repeat(codes, 2, axis=2)[:, :, ::2]
    if spoil == "one code":
        codes = np.broadcast_to(codes[:, :, :1], codes.shape)
    if spoil == "one scale":
        scales = np.broadcast_to(scales[:, :1], scales.shape)
    stored = replace(whole, codes=codes, scales=scales)
    layout, arrays = arrays_of(stored)
    assert layout is not None and layout.inside is None and len(arrays) == 2
    assert (layout.bits, layout.group, layout.zero) == (4, GROUP, 8)
    for array, part in zip(arrays, (codes, scales), strict=True):
        assert array is part


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_stored_matrix(form: str) -> None:
    stored = FORMS[form]
    layout, arrays = arrays_of(stored)
    assert layout is not None
    values = jax.jit(lambda *a: layout.values(a, "float32"))(*(jnp.asarray(a) for a in arrays))
    np.testing.assert_allclose(values, stored.decode(dtype=np.float32), rtol=1e-6, atol=1e-6)
