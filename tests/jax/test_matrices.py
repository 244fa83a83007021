"""Frozen matrices in every stored form: products, rows and tiles are those of the values."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.jax_backend import JaxBackend
from mesp_jax.matrices import JaxQuantized, StreamedMatrix
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import bound

OUT, IN, N, GROUP = 300, 64, 5, 32
ALLOWED = bound("float32", bound("float32"))


def dense(dtype: str) -> StoredMatrix:
    values = np.random.default_rng(1).normal(size=(OUT, IN)).astype(np.float32)
    if dtype == "bfloat16":
        return StoredMatrix(values=(values.view(np.uint32) >> 16).astype(np.uint16))
    return StoredMatrix(values=values.astype(dtype))


def quantized(bits: int, *, biased: bool = True, zero: int = 0) -> StoredMatrix:
    generator = np.random.default_rng(bits)
    groups = IN // GROUP
    return StoredMatrix(
        codes=generator.integers(0, 256, (OUT, groups, GROUP * bits // 8), dtype=np.uint8),
        scales=generator.normal(size=(OUT, groups)).astype(np.float16),
        biases=generator.normal(size=(OUT, groups)).astype(np.float16) if biased else None,
        bits=bits,
        group=GROUP,
        zero=zero,
    )


def blocks(kind: str) -> StoredMatrix:
    """Scale, perhaps bias, and codes interleaved as GGUF stores them, rows in another order."""
    generator = np.random.default_rng(7)
    groups, head = IN // GROUP, 4 if kind == "q4_1" else 2
    width = head + (GROUP if kind == "q8_0" else GROUP // 2)
    raw = generator.integers(0, 256, (OUT, groups, width), dtype=np.uint8)
    floats = generator.normal(size=(OUT, groups, head // 2)).astype(np.float16)
    raw[:, :, :head] = floats.view(np.uint8)
    halves = raw[:, :, :head].view(np.float16)
    codes = raw[:, :, head:]
    return StoredMatrix(
        codes=codes.view(np.int8) if kind == "q8_0" else codes,
        scales=halves[:, :, 0],
        biases=halves[:, :, 1] if kind == "q4_1" else None,
        bits=8 if kind == "q8_0" else 4,
        group=GROUP,
        zero=8 if kind == "q4_0" else 0,
        order="stream" if kind == "q8_0" else "halves",
        row_order=generator.permutation(OUT),
    )


STORED = {name: lambda name=name: dense(name) for name in ("float32", "float16", "bfloat16")}
STORED |= {f"{bits} bits": lambda bits=bits: quantized(bits) for bits in (2, 3, 4, 5, 6, 8)}
STORED |= {"no bias": lambda: quantized(4, biased=False, zero=8)}
STORED |= {kind: lambda kind=kind: blocks(kind) for kind in ("q4_0", "q4_1", "q8_0")}


@pytest.mark.parametrize("form", STORED)
def test_products_and_rows(backend: JaxBackend, form: str) -> None:
    stored = STORED[form]()
    matrix = backend.frozen(stored, "float32", "streamed")
    values = stored.decode(dtype=np.float64)
    generator = np.random.default_rng(2)
    x, dy = (generator.normal(size=(N, size)).astype(np.float32) for size in (IN, OUT))
    ops = backend.ops.frozen_linear
    y, _ = ops.forward(backend.from_numpy(x), matrix)
    dx = ops.backward(backend.from_numpy(dy), None, matrix)
    assert_close(y, x @ values.T, ALLOWED, backend=backend, dtype="float32")
    assert_close(dx, dy @ values, ALLOWED, backend=backend, dtype="float32")
    rows = np.array([0, 299, 7, 7], np.int32)
    resident = backend.frozen(stored, "float32", "resident")
    for held in (matrix, resident):
        taken = held.take(backend.from_numpy(rows))
        assert_close(taken, values[rows], ALLOWED, backend=backend, dtype="float32")


def test_column_tiles_fall_on_groups(backend: JaxBackend) -> None:
    stored = quantized(4)
    matrix = backend.frozen(stored, "float32", "resident")
    tile = jax.jit(lambda i: matrix.tile(i, GROUP, 1).values)(1)
    assert_close(tile, stored.columns(GROUP, IN).decode(), ALLOWED, backend=backend)
    with pytest.raises(ValueError, match="does not fall on groups of 32"):
        matrix.tile(0, 16, 1)


def test_what_is_loaded_is_packed(backend: JaxBackend) -> None:
    """One transfer of GGUF's interleaved blocks as they are, and nothing decoded."""
    stored = replace(blocks("q4_1"), row_order=None)
    matrix = backend.frozen(stored, "float32", "streamed")
    assert isinstance(matrix, StreamedMatrix)
    loaded = matrix.load()
    assert isinstance(loaded, JaxQuantized)
    assert [a.nbytes for a in loaded.arrays] == [stored.nbytes]


def test_resident_bytes_are_a_copy(backend: JaxBackend) -> None:
    values = np.ones((OUT, IN), np.float32)
    matrix = backend.frozen(StoredMatrix(values=values), "float32", "resident")
    values[...] = 0.0
    assert np.asarray(matrix.take(np.array([3])))[0, 0] == 1.0
