"""What is traced, what is compiled for, and what is counted, on programs of a few operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.formulas.attention import AttentionPlan
from mesp_core.formulas.dropout import Dropout, words_of
from mesp_core.operations import Component
from mesp_jax.namespace import XP
from mesp_jax.programs import Program, Programs
from mesp_jax.pytrees import register_pytrees


def counted() -> Component:
    return Component("double", lambda x: 2.0 * x, lambda dy: 2.0 * dy)


def test_a_program_plans_its_temporaries_and_its_results() -> None:
    analysis = SimpleNamespace(temp_size_in_bytes=5, output_size_in_bytes=3)
    program = Program("f", SimpleNamespace(memory_analysis=lambda: analysis), ())
    assert (program.temporary_bytes, program.planned_bytes) == (5, 8)


def test_floats_are_traced_and_integers_compiled_for() -> None:
    programs = Programs()

    def scaled(x: jax.Array, by: float, *, times: int) -> jax.Array:
        return x * by * times

    for by, times in ((1.5, 2), (2.5, 2), (2.5, 3)):
        out = programs.run(scaled, (np.ones(1), by), {"times": times}, name="scaled")
        assert out.tolist() == [by * times]
    assert [program.name for program in programs.all()] == ["scaled"] * 2


def test_components_are_counted_when_a_program_runs() -> None:
    """By as many calls as it makes; tracing it counts for nothing."""
    programs, inner, other = Programs(), counted(), counted()
    programs.components = (inner, other)
    inner.calls, other.calls = 5, 7

    def twice(x: jax.Array) -> jax.Array:
        return inner.forward(inner.forward(x))

    # Not overwritten by the first run.
    x = jnp.ones(1)
    for runs in (1, 2):
        assert programs.run(twice, (x,), {}, name="twice").tolist() == [4.0]
        assert (inner.calls, other.calls) == (5 + 2 * runs, 7)
    assert programs.all()[0].calls == (2, 0)


def test_a_mask_is_data_but_for_its_rate() -> None:
    """Its key too, in 32 bits that no signed integer has."""
    register_pytrees()
    counters = np.arange(3, dtype=np.uint32)
    words = words_of(XP)
    dropout = Dropout(0.25, (2**32 - 1, 7), counters, counters + 1, words)
    leaves, structure = jax.tree.flatten(dropout)
    assert [np.asarray(leaf).dtype for leaf in leaves] == [np.uint32] * 4
    assert [leaf.tolist() for leaf in leaves] == [2**32 - 1, 7, [0, 1, 2], [1, 2, 3]]
    again = jax.tree.unflatten(structure, leaves)
    assert (again.rate, again.words) == (0.25, words)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    # Inside a program the key is an array already.
    assert jax.tree.leaves(jax.eval_shape(lambda mask: mask, dropout))[0].dtype == np.uint32


def test_first_key_tiles_are_data() -> None:
    register_pytrees()
    for first in ([0, 1], np.array([0, 1], np.int32)):
        plan = AttentionPlan(np.zeros(2, np.int32), first, 0.5, window=3, query_tile=4, key_tile=5)
        leaves, structure = jax.tree.flatten(plan)
        assert len(leaves) == 2 and leaves[1].dtype == np.int32 and leaves[1].tolist() == [0, 1]
        again = jax.tree.unflatten(structure, leaves)
        assert (again.scale, again.window, again.softcap) == (0.5, 3, None)
        assert (again.query_tile, again.key_tile) == (4, 5)


def equations(traced: Any) -> list[Any]:
    """Of a traced function, and of the jitted functions in it."""
    found = []
    for equation in traced.eqns:
        inner = equation.params.get("jaxpr")
        found += equations(inner) if inner is not None else [equation]
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_products_are_summed_in_float32_or_wider(dtype: str) -> None:
    with jax.enable_x64(True):
        a, b = jnp.ones((2, 3), dtype), jnp.ones((3, 2), dtype)
        traced = jax.make_jaxpr(XP.matmul)(a, b)
    (product,) = (e for e in equations(traced) if e.primitive.name == "dot_general")
    wide = "float64" if dtype == "float64" else "float32"
    assert product.outvars[0].aval.dtype == wide and traced.out_avals[0].dtype == dtype
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}
