"""Tiles in XLA loops, against plain Python loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.formulas.loops import EagerLoops
from mesp_jax.loops import LOOPS


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("extent", [3, 4, 12, 14], ids=["part", "one", "whole", "ragged"])
def test_tiles_are_those_of_a_plain_loop(extent: int, axis: int) -> None:
    """Every tile read, changed by its own number, and put where it came from."""
    shape = (extent, 5) if axis == 0 else (5, extent)
    values = np.arange(5.0 * extent, dtype=np.float32).reshape(shape)

    def run(a: Any, out: Any, loops: Any) -> Any:
        def body(i: Any, out: Any) -> Any:
            return loops.put(out, i, 4, axis, loops.tile(a, i, 4, axis) * (i + 2))

        return loops.fold_tiles(body, out, extent, 4)

    expected = run(values, np.zeros_like(values), EagerLoops())
    actual = jax.jit(lambda a: run(a, jnp.zeros_like(a), LOOPS))(values)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("extent", "bodies"), [(4, 1), (400, 1), (402, 2)])
def test_a_body_is_traced_once_and_once_more_for_a_shorter_tile(extent: int, bodies: int) -> None:
    indices = []

    def body(i: Any, total: Any) -> Any:
        indices.append(i)
        return total + 1

    total = jax.jit(lambda: LOOPS.fold_tiles(body, jnp.asarray(0), extent, 4))()
    assert int(total) == -(-extent // 4)
    # JAX traces a body a second time to settle its types, never once a turn.
    assert bodies <= len(indices) <= 2 * bodies
    assert isinstance(indices[-1], int) == (extent % 4 != 0 or extent == 4)


def test_bounds_may_be_traced() -> None:
    run = jax.jit(lambda lo, hi: LOOPS.fold(lambda i, t: t + i, jnp.asarray(0), lo, hi))
    assert int(run(3, 7)) == 3 + 4 + 5 + 6
    assert int(run(7, 7)) == 0
    assert run._cache_size() == 1


def test_one_bound_may_be_traced() -> None:
    run = jax.jit(lambda n: LOOPS.fold(lambda i, t: t + i, jnp.asarray(0), 3, n))
    assert int(run(5)) == 3 + 4
    run = jax.jit(lambda n: LOOPS.fold(lambda i, t: t + i, jnp.asarray(0), n, 5))
    assert int(run(3)) == 3 + 4


def test_a_single_turn_has_a_plain_index() -> None:
    indices = []
    LOOPS.fold(lambda i, t: indices.append(i) or t, jnp.asarray(0), 3, 4)
    assert indices == [3] and isinstance(indices[0], int)


@pytest.mark.parametrize(("i", "tile"), [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (2, [8, 9])])
def test_a_plain_index_cuts_a_tile(i: int, tile: list[int]) -> None:
    assert LOOPS.tile(jnp.arange(10), i, 4).tolist() == tile


def test_arrays_of_a_tuple_are_put_together() -> None:
    a, b = jnp.zeros((6, 2)), jnp.zeros((6, 1))
    put = jax.jit(lambda i: LOOPS.put((a, b), i, 2, 0, (jnp.ones((2, 2)), jnp.ones((2, 1)))))
    np.testing.assert_array_equal(put(1)[0][:, 0], [0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(put(1)[1][:, 0], [0, 0, 1, 1, 0, 0])


def test_nothing_is_traced_or_cut_for_nothing() -> None:
    def never(i: Any, carry: Any) -> Any:
        raise AssertionError("no turn")

    assert LOOPS.fold(never, 5, 3, 3) == LOOPS.fold(never, 5, 3, 2) == 5
    a = jnp.arange(4)
    assert LOOPS.tile(a, 0, 4) is a and LOOPS.tile(a, 0, 9) is a
    assert LOOPS.put(a, 0, 4, 0, x := jnp.ones(4, a.dtype)) is x
