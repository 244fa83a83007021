"""Matrices in a file: loaded, or fetched by a compiled program tile by tile."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.backend import TileSizes
from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.jax_backend import JaxBackend
from mesp_jax.matrices import JaxDense, JaxQuantized
from mesp_jax.streamed import (
    _BY_NUMBER,
    FetchedMatrix,
    HostMatrix,
    StreamedMatrix,
    load_streamed,
)
from mesp_reference.check.compare import assert_close
from tests.jax.stored import ALLOWED, GROUP, IN, OUT, STORED, N, blocks, dense


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
    assert streamed and loaded["a"][0] == 1 and isinstance(loaded["a"][1], FetchedMatrix)


def test_what_is_loaded_is_packed(backend: JaxBackend) -> None:
    """One transfer of GGUF's interleaved blocks as they are, and nothing decoded."""
    stored = replace(blocks(), row_order=None)
    matrix = backend.frozen(stored, "float32", "streamed")
    assert isinstance(matrix, StreamedMatrix)
    loaded = matrix.load()
    assert isinstance(loaded, JaxQuantized)
    assert [a.nbytes for a in loaded.arrays] == [stored.nbytes]


@pytest.fixture
def tiled() -> JaxBackend:
    """Tiles of 128 rows, the fewest."""
    return JaxBackend("cpu", tiles=TileSizes(weights=1))


def fetched(backend: JaxBackend, stored: StoredMatrix, dtype: str = "float32") -> FetchedMatrix:
    matrix = backend.frozen(stored, dtype, "streamed")
    assert isinstance(matrix, StreamedMatrix)
    argument = matrix.argument()
    assert isinstance(argument, FetchedMatrix) and argument.shape == stored.shape
    return argument


@pytest.mark.parametrize("form", STORED)
def test_a_fetched_matrix_is_the_loaded_one(tiled: JaxBackend, form: str) -> None:
    """Products over ragged tiles of rows, tiles of both axes, whole, cut off and traced, rows."""
    stored = STORED[form]()
    matrix, values = fetched(tiled, stored), stored.decode(dtype=np.float64)
    generator = np.random.default_rng(2)
    x, dy = (generator.normal(size=(N, size)).astype(np.float32) for size in (IN, OUT))

    @jax.jit
    def program(matrix: FetchedMatrix, x: Any, dy: Any, i: Any, rows: Any) -> Any:
        tiles = [matrix.tile(k, *cut).values for k in (i, 1) for cut in ((128, 0), (GROUP, 1))]
        cut_off = [matrix.tile(2, 128, 0).values, matrix.tile(0, IN + 1, 1).values]
        return matrix.matmul(x), matrix.matmul_t(dy), tiles, cut_off, matrix.take(rows)

    rows = generator.integers(0, OUT, 1500).astype(np.int32)
    y, dx, tiles, cut_off, taken = program(matrix, x, dy, 1, rows)
    assert_close(y, x @ values.T, ALLOWED, backend=tiled, dtype="float32")
    assert_close(dx, dy @ values, ALLOWED, backend=tiled, dtype="float32")
    expected = [values[128:256], values[:, GROUP : 2 * GROUP]] * 2
    for found, true in zip(tiles + cut_off, [*expected, values[256:], values], strict=True):
        assert_close(found, true, ALLOWED, backend=tiled, dtype="float32")
    assert_close(taken, values[rows], ALLOWED, backend=tiled, dtype="float32")


def test_columns_of_a_fetched_matrix_fall_on_groups(tiled: JaxBackend) -> None:
    with pytest.raises(ValueError, match="does not fall on groups of 32"):
        fetched(tiled, STORED["4 bits"]()).tile(0, 16, 1)


def test_one_program_is_for_every_fetched_matrix_of_a_form(tiled: JaxBackend) -> None:
    stored = STORED["4 bits"]()
    other = replace(stored, scales=2 * stored.scales, biases=2 * stored.biases)
    weights = [tiled.frozen(s, "float32", "streamed") for s in (stored, other)]
    first, second = (tiled.ops.frozen_linear.forward(jnp.eye(IN), w)[0] for w in weights)
    assert len(tiled.compiled()) == 1
    np.testing.assert_array_equal(2 * first, second)


def test_float64_is_fetched_in_what_jax_has(tiled: JaxBackend) -> None:
    stored = StoredMatrix(values=np.full((OUT, IN), 1 / 3))
    assert fetched(tiled, stored).tile(0, 128, 0).values.dtype == "float32"
    with jax.enable_x64(True):
        tile = fetched(tiled, stored, "float64").tile(0, 128, 0).values
        assert tile.dtype == "float64" and tile[0, 0] == 1 / 3


def test_what_is_fetched(tiled: JaxBackend) -> None:
    """Matrices larger than a tile, on a CPU: a GPU gets them in one transfer."""
    stored = dense("bfloat16")
    large = tiled.frozen(stored, "float32", "streamed")
    assert isinstance(large, StreamedMatrix)
    assert isinstance(large.argument(), FetchedMatrix)
    assert isinstance(replace(large, fetched=False).argument(), JaxDense)
    one_tile = tiled.frozen(stored.rows(0, 128), "float32", "streamed")
    assert isinstance(one_tile, StreamedMatrix) and isinstance(one_tile.argument(), JaxDense)


def test_a_program_holds_no_fetched_matrix(tiled: JaxBackend) -> None:
    """One tile of it at a time: the packed bytes are 16 of them."""
    rows = 16 * 128
    stored = StoredMatrix(values=np.zeros((rows, IN), np.uint16))
    matrix = fetched(tiled, stored)
    compiled = jax.jit(lambda m, dy: m.matmul_t(dy)).lower(matrix, jnp.ones((1, rows))).compile()
    assert compiled.memory_analysis().argument_size_in_bytes < 2 * 4 * rows
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * 128 * IN < 2 * rows * IN


def test_a_number_is_forgotten_with_its_matrix(tiled: JaxBackend) -> None:
    stored = dense("float32")
    number = fetched(tiled, stored).number
    assert fetched(tiled, stored).number == number and int(number) in _BY_NUMBER
    del stored
    assert int(number) not in _BY_NUMBER


def test_an_interruption_while_the_host_answers_is_one_again(
    tiled: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA would make a JaxRuntimeError of it."""

    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    def product(x: Any, weight: Any, *, ops: Any, backend: Any) -> Any:
        return weight.matmul(x)

    def broken(*given: Any) -> Any:
        raise OSError("the disk is gone")

    stored = dense("float32")
    weight = tiled.frozen(stored, "float32", "streamed")
    tiled.run(product, jnp.eye(IN), weight)
    monkeypatch.setattr(HostMatrix, "tile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiled.run(product, jnp.eye(IN), weight)
    monkeypatch.setattr(HostMatrix, "tile", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the disk is gone"):
        tiled.run(product, jnp.eye(IN), weight)


def test_threads_that_come_first_together_share_a_number() -> None:
    for _ in range(50):
        stored, barrier = dense("float32"), threading.Barrier(4)
        found: list[int] = []

        def ask(stored: StoredMatrix, barrier: threading.Barrier, found: list[int]) -> None:
            barrier.wait()
            found.append(int(HostMatrix.of(stored).number))

        threads = [threading.Thread(target=ask, args=(stored, barrier, found)) for _ in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert len(found) == 4 and len(set(found)) == 1 and found[0] in _BY_NUMBER
