"""Attention of any number of tokens: padded to whole key tiles, and cut again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesp_core.formulas.attention import (
    AttentionPlan,
    AttentionSaved,
    attention_backward,
    attention_forward,
    first_key_tiles,
)
from mesp_core.formulas.loops import EagerLoops
from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.components import _padded, _padding, padded_backward, padded_forward
from mesp_jax.jax_backend import JaxBackend
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import TOLERANCES

H, K, E = 2, 1, 3


def plan_of(lengths: tuple[int, ...], tiles: tuple[int, int], as_array: Any) -> AttentionPlan:
    segment = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    first = first_key_tiles(segment.tolist(), *tiles, None)
    return AttentionPlan(as_array(segment), first, 0.4, query_tile=tiles[0], key_tile=tiles[1])


def test_as_few_tokens_are_added_as_fill_the_last_of_several_tiles() -> None:
    assert [_padding(tokens, 4) for tokens in (1, 3, 4, 5, 8, 9)] == [0, 0, 0, 3, 0, 3]


def test_the_plan_of_the_padded_tokens() -> None:
    short = plan_of((3,), (4, 7), jnp.asarray)
    assert _padded(short, 0).first_key_tile == [0]
    two_tiles = plan_of((4, 3), (4, 7), jnp.asarray)
    assert _padded(two_tiles, 0) is two_tiles
    longer = _padded(plan_of((5, 4), (3, 4), jnp.asarray), 3)
    assert longer.segment.tolist() == [0] * 5 + [1] * 7
    assert longer.first_key_tile.tolist() == [0, 0, 1, 1]


def test_programs_are_named_after_components_and_passes() -> None:
    backend = JaxBackend("cpu")
    x, weight = jnp.ones((2, 3)), jnp.ones(3)
    y, saved = backend.ops.rms_norm.forward(x, weight, eps=1e-5)
    backend.ops.rms_norm.backward(y, saved, weight)
    assert [p.name for p in backend.compiled()] == ["rms_norm_forward", "rms_norm_backward"]
    assert JaxBackend("cpu", compiled_ops=False).ops.rms_norm.forward(x, weight, eps=1e-5)


def test_rows_of_a_streamed_table_are_read_on_the_host() -> None:
    """A resident one's are read by a program, and a streamed matrix is loaded for a product."""
    backend = JaxBackend("cpu")
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    streamed, resident = (
        backend.frozen(StoredMatrix(values=values), "float32", residency)
        for residency in ("streamed", "resident")
    )
    embedding, rows = backend.ops.embedding, jnp.asarray([3, 0])
    names = []
    for table in (streamed, resident):
        out, _ = embedding.forward(rows, table, dtype=jnp.float32)
        np.testing.assert_array_equal(out, values[[3, 0]])
        names.append([p.name for p in backend.compiled()])
    assert names == [[], ["embedding_forward"]]
    y, _ = backend.ops.frozen_linear.forward(jnp.ones((1, 3)), streamed)
    np.testing.assert_array_equal(y, values.sum(axis=1)[None])
    assert backend.compiled()[-1].name == "frozen_linear_forward"


@pytest.mark.parametrize(
    ("lengths", "tiles", "first"),
    [
        ((4, 3), (4, 7), list),
        ((5, 2, 4), (4, 7), np.asarray),
        ((6, 8), (7, 7), jnp.asarray),
        ((9, 4), (8, 3), list),
    ],
)
def test_attention_is_that_of_a_plain_loop(
    lengths: tuple[int, ...], tiles: tuple[int, int], first: Any
) -> None:
    n = sum(lengths)
    generator = np.random.default_rng(n)
    q, do = generator.standard_normal((2, n, H, E))
    k, v = generator.standard_normal((2, n, K, E))
    tools: dict[str, Any] = {"loops": EagerLoops(), "xp": np}
    plan = plan_of(lengths, tiles, np.asarray)
    o, saved = attention_forward(q, k, v, plan=plan, **tools)
    truth = (o, saved.lse, *attention_backward(do, saved, q, k, v, o, plan=plan, **tools))

    plan = plan_of(lengths, tiles, jnp.asarray)
    plan = replace(plan, first_key_tile=first(plan.first_key_tile))

    @jax.jit
    def both(q: Any, k: Any, v: Any, do: Any, lse: Any, o: Any) -> Any:
        found_o, found = padded_forward(q, k, v, plan=plan)
        gradients = padded_backward(do, AttentionSaved(lse), q, k, v, o, plan=plan)
        return found_o, found.lse, *gradients

    found = both(*(jnp.asarray(a, jnp.float32) for a in (q, k, v, do, saved.lse, o)))
    names = ("o", "lse", "dq", "dk", "dv")
    for name, actual, expected in zip(names, found, truth, strict=True):
        assert actual.shape == expected.shape
        assert_close(np.asarray(actual), expected, TOLERANCES["float32"], name=name)
