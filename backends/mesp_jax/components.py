"""The components in JAX: the formulas, compiled once for each signature when called alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from mesp_core.formulas.attention import (
    AttentionPlan,
    AttentionSaved,
    attention_backward,
    attention_forward,
)
from mesp_core.formulas.loops import tile_count
from mesp_core.operations import Component, Operations, formula_operations
from mesp_jax.loops import LOOPS
from mesp_jax.namespace import XP
from mesp_jax.programs import Programs
from mesp_jax.streamed import load_streamed

_REASONS = {
    "attention": "the formula, its tiles in XLA loops; tokens padded to whole key tiles",
    "embedding": "the formula; rows of a streamed table are read on the host",
}


def operations(programs: Programs | None) -> Operations:
    """Every component. programs: compiles those called outside of a stage; None leaves the
    formulas as they are, for JAX to run operation by operation."""
    ops = formula_operations(XP, LOOPS)
    ops = ops.with_component(Component("attention", padded_forward, padded_backward))
    found = {}
    for item in fields(ops):
        component = getattr(ops, item.name)
        component.reason = _REASONS.get(item.name, "the formula, compiled and fused by XLA")
        if programs is not None:
            component = replace(
                component,
                run_forward=_compiled(component.run_forward, programs, item.name + "_forward"),
                run_backward=_compiled(component.run_backward, programs, item.name + "_backward"),
            )
        found[item.name] = component
    return Operations(**found).only_arrays(jax.Array)


def _compiled(formula: Callable[..., Any], programs: Programs, name: str) -> Callable[..., Any]:
    embeds = name == "embedding_forward"

    def run(*args: Any, **options: Any) -> Any:
        if embeds and hasattr(args[1], "load"):
            return formula(*args, **options)
        (args, options), _ = load_streamed((args, options))
        return programs.run(formula, args, options, name=name)

    return run


def padded_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, plan: AttentionPlan
) -> tuple[jax.Array, AttentionSaved]:
    """``attention_forward`` of any number of tokens."""
    tokens, more = q.shape[0], _padding(q.shape[0], plan.key_tile)
    if more:
        q, k, v = (_pad(a, more) for a in (q, k, v))
    o, saved = attention_forward(q, k, v, plan=_padded(plan, more), loops=LOOPS, xp=XP)
    return o[:tokens], AttentionSaved(saved.lse[:tokens])


def padded_backward(
    do: jax.Array, saved: AttentionSaved, q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array,
    *, plan: AttentionPlan,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """``attention_backward`` of any number of tokens: a token without a gradient adds none."""
    tokens, more = q.shape[0], _padding(q.shape[0], plan.key_tile)
    if more:
        do, q, k, v, o = (_pad(a, more) for a in (do, q, k, v, o))
        saved = AttentionSaved(_pad(saved.lse, more))
    dq, dk, dv = attention_backward(
        do, saved, q, k, v, o, plan=_padded(plan, more), loops=LOOPS, xp=XP
    )
    return dq[:tokens], dk[:tokens], dv[:tokens]


def _padding(tokens: int, tile: int) -> int:
    """Tokens missing in the last of several key tiles: a traced tile cannot be a shorter one."""
    return tile_count(tokens, tile) * tile - tokens if tokens > tile else 0


def _pad(a: jax.Array, more: int) -> jax.Array:
    return jnp.pad(a, ((0, more),) + ((0, 0),) * (a.ndim - 1))


def _padded(plan: AttentionPlan, more: int) -> AttentionPlan:
    """The plan with ``more`` tokens at the end, which no other token sees."""
    first: Any = plan.first_key_tile
    first = first if isinstance(first, jax.Array) else jnp.asarray(first, jnp.int32)
    segment = jnp.pad(plan.segment, (0, more), mode="edge") if more else plan.segment
    tiles = tile_count(segment.shape[0], plan.query_tile)
    if plan.segment.shape[0] <= plan.key_tile:
        # One key tile: nothing to look up.
        return replace(plan, segment=segment, first_key_tile=[0]) if tiles == 1 else plan
    if tiles > first.shape[0]:
        first = jnp.pad(first, (0, tiles - first.shape[0]), mode="edge")
    return replace(plan, segment=segment, first_key_tile=first)
