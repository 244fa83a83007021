"""Frozen matrices in every stored form: products, rows and tiles are those of the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.stored_matrix import StoredMatrix
from mesp_jax import matrices
from mesp_jax.jax_backend import JaxBackend
from mesp_jax.matrices import JaxDense, JaxQuantized, StreamedMatrix, load_streamed
from mesp_jax.quantized import Layout
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import bound

OUT, IN, N, GROUP = 300, 64, 5, 32
ALLOWED = bound("float32", bound("float32"))


def dense(dtype: str) -> StoredMatrix:
    values = np.random.default_rng(1).normal(size=(OUT, IN)).astype(np.float32)
    if dtype == "bfloat16":
        return StoredMatrix(values=(values.view(np.uint32) >> 16).astype(np.uint16))
    return StoredMatrix(values=values.astype(dtype))


def quantized(bits: int) -> StoredMatrix:
    generator = np.random.default_rng(bits)
    groups = IN // GROUP
    return StoredMatrix(
        codes=generator.integers(0, 256, (OUT, groups, GROUP * bits // 8), dtype=np.uint8),
        scales=generator.normal(size=(OUT, groups)).astype(np.float16),
        biases=generator.normal(size=(OUT, groups)).astype(np.float16),
        bits=bits,
        group=GROUP,
    )


def blocks() -> StoredMatrix:
    """Scale, bias and codes interleaved as in GGUF's q4_1, rows in another order."""
    generator = np.random.default_rng(7)
    groups = IN // GROUP
    raw = generator.integers(0, 256, (OUT, groups, 4 + GROUP // 2), dtype=np.uint8)
    raw[:, :, :4] = generator.normal(size=(OUT, groups, 2)).astype(np.float16).view(np.uint8)
    halves = raw[:, :, :4].view(np.float16)
    return StoredMatrix(
        codes=raw[:, :, 4:],
        scales=halves[:, :, 0],
        biases=halves[:, :, 1],
        bits=4,
        group=GROUP,
        order="halves",
        row_order=generator.permutation(OUT),
    )


#: ``test_quantized.py`` has every form of bytes.
STORED: dict[str, Callable[[], StoredMatrix]] = {
    "float32": lambda: dense("float32"),
    "bfloat16": lambda: dense("bfloat16"),
    "4 bits": lambda: quantized(4),
    "q4_1": blocks,
}


def test_column_tiles_fall_on_groups(backend: JaxBackend) -> None:
    stored = quantized(4)
    matrix = backend.frozen(stored, "float32", "resident")
    tile = jax.jit(lambda i: matrix.tile(i, GROUP, 1).values)(1)
    assert_close(tile, stored.columns(GROUP, IN).decode(), ALLOWED, backend=backend)
    with pytest.raises(ValueError, match="does not fall on groups of 32"):
        matrix.tile(0, 16, 1)
    assert matrix.tile(0, IN + 1, 1).shape == (OUT, IN)


def test_large_matrices_that_must_be_widened_are_multiplied_by_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest tile is 128 rows."""
    tiled: list[str] = []
    for name in ("tiled_matmul", "tiled_matmul_t"):
        monkeypatch.setattr(matrices, name, lambda *given, name=name: tiled.append(name))
    scales = jnp.ones((129, 1), jnp.float16)
    packed = jnp.zeros((129, 1, 3), jnp.uint8)
    layout = Layout(bits=3, group=8, zero=0, order="stream")

    def large(matrix: JaxDense | JaxQuantized) -> bool:
        tiled.clear()
        jax.eval_shape(matrix.matmul, jnp.ones((1, matrix.shape[1])))
        jax.eval_shape(matrix.matmul_t, jnp.ones((1, matrix.shape[0])))
        assert tiled in ([], ["tiled_matmul", "tiled_matmul_t"])
        return bool(tiled)

    def dense(rows: int, dtype: str) -> JaxDense:
        return JaxDense(jnp.ones((rows, 3), dtype), "float32", 1)

    assert large(dense(129, "bfloat16"))
    assert not large(dense(129, "float32")) and not large(dense(128, "bfloat16"))
    assert large(JaxQuantized((packed, scales), layout, "float32", 1))
    assert not large(JaxQuantized((packed[:128], scales[:128]), layout, "float32", 1))


def test_no_tile_is_widened_before_its_index_is_known() -> None:
    matrix = JaxDense(jnp.ones((256, 3), jnp.bfloat16), "float32", 1)
    traced = jax.make_jaxpr(lambda i: matrix.tile(i, 128, 0).values)(1)
    eager = jax.make_jaxpr(lambda: matrix.tile(1, 128, 0).values)()
    assert "optimization_barrier" in str(traced) and "optimization_barrier" not in str(eager)


def test_a_streamed_matrix_is_its_rows_in_logical_order(backend: JaxBackend) -> None:
    values, order = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([2, 0, 1])
    stored = StoredMatrix(values=values, row_order=order)
    matrix, logical = backend.frozen(stored, "float32", "streamed"), values[order]
    np.testing.assert_array_equal(matrix.matmul(jnp.eye(4)), logical.T)
    np.testing.assert_array_equal(matrix.matmul_t(jnp.eye(3)), logical)
    np.testing.assert_array_equal(matrix.tile(0, 2, 0).values, logical[:2])


def test_whether_anything_was_streamed_is_told(backend: JaxBackend) -> None:
    tree = {"a": [1, 2.0]}
    assert load_streamed(tree) == (tree, False)
    matrix = backend.frozen(dense("float32"), "float32", "streamed")
    loaded, streamed = load_streamed({"a": [1, matrix]})
    assert streamed and loaded["a"][0] == 1 and isinstance(loaded["a"][1], JaxDense)


def test_what_is_loaded_is_packed(backend: JaxBackend) -> None:
    """One transfer of GGUF's interleaved blocks as they are, and nothing decoded."""
    stored = replace(blocks(), row_order=None)
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
