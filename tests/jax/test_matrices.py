"""Frozen matrices in every stored form: products, rows and tiles are those of the values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.stored_matrix import StoredMatrix
from mesp_jax import matrices
from mesp_jax.jax_backend import JaxBackend
from mesp_jax.matrices import JaxDense, JaxQuantized
from mesp_jax.quantized import Layout
from mesp_reference.check.compare import assert_close
from tests.jax.stored import ALLOWED, GROUP, IN, OUT, STORED, N, quantized


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
        assert held.shape == stored.shape
        taken = held.take(backend.from_numpy(rows))
        assert_close(taken, values[rows], ALLOWED, backend=backend, dtype="float32")
