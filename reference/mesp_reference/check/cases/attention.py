"""Attention, in the backend's own tiles: lengths lie across, at and between their borders."""

from __future__ import annotations

from functools import partial
from typing import Any

from mesp_core.formulas.attention import AttentionPlan
from mesp_reference import attention
from mesp_reference.check.case import DTYPES, WIDE_DTYPES, Case, Problem
from mesp_reference.check.rig import Rig

#: 289 tokens each: three tiles of 128, the last one short.
RAGGED = (131, 1, 97, 60)
AT_BORDERS = (128, 128, 33)
ONE = (289,)


def _attention(
    rig: Rig,
    *,
    lengths: tuple[int, ...] = RAGGED,
    heads: tuple[int, int, int] = (6, 2, 20),
    window: int | None = None,
    softcap: float | None = None,
) -> Problem:
    """heads: (H, K, E)."""
    batch = rig.ragged(*lengths)
    n, (h, k, e) = batch.tokens, heads
    values = rig.draw(q=(n, h, e), k=(n, k, e), v=(n, k, e), do=(n, h, e))
    scale = 0.9 * e**-0.5

    def reference(q: Any, k: Any, v: Any, do: Any) -> dict[str, Any]:
        o, saved = attention.attention_forward(
            q, k, v, batch.segment, batch.position, scale=scale, window=window, softcap=softcap
        )
        dq, dk, dv = attention.attention_backward(do, saved)
        return {"o": o, "lse": saved.log_sum_exp, "dq": dq, "dk": dk, "dv": dv}

    backend = rig.backend
    plan = AttentionPlan(
        segment=rig.integers(batch.segment),
        first_key_tile=backend.first_key_tiles(batch.segment, window),
        scale=scale,
        window=window,
        softcap=softcap,
        query_tile=backend.tiles.query,
        key_tile=backend.tiles.key,
    )
    arrays = [rig.array(values[name]) for name in ("q", "k", "v")]
    do = rig.array(values["do"])

    def run() -> dict[str, Any]:
        o, saved = backend.ops.attention.forward(*arrays, plan=plan)
        dq, dk, dv = backend.ops.attention.backward(do, saved, *arrays, o, plan=plan)
        return {"o": o, "lse": saved.lse, "dq": dq, "dk": dk, "dv": dv}

    # The backward pass is given the output as it was rounded to the activations' dtype.
    gradients = ("dq", "dk", "dv")
    return Problem(values, reference, run, wide=("lse", *gradients), after_narrow=gradients)


def _case(name: str, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> Case:
    return Case("attention", name, partial(_attention, **options), dtypes)


CASES = (
    _case("ragged", WIDE_DTYPES),
    _case("at tile borders", WIDE_DTYPES, lengths=AT_BORDERS),
    _case("window", WIDE_DTYPES, window=70),
    _case("soft-cap", WIDE_DTYPES, softcap=0.8),
    _case("window and soft-cap", (*WIDE_DTYPES, "bfloat16"), window=130, softcap=1.5),
    _case("one sequence, 9 heads of 64", lengths=ONE, heads=(9, 3, 64)),
)
