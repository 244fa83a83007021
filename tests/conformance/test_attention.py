"""Tiled attention against the reference, which forms every score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesp_core.formulas import (
    AttentionPlan,
    EagerLoops,
    attention_backward,
    attention_forward,
    first_key_tiles,
)
from mesp_reference import attention as reference
from mesp_reference.ragged import segment_and_position
from tests.conformance.agreement import check, draw
from tests.conformance.subjects import Subject

H, K, E = 6, 2, 5
SCALE = 0.41
RAGGED = (5, 1, 11, 6)
#: window, soft-cap, lengths of the sequences, (query tile, key tile).
CASES: dict[str, tuple[int | None, float | None, tuple[int, ...], tuple[int, int]]] = {
    "one_sequence": (None, None, (23,), (5, 7)),
    "ragged": (None, None, RAGGED, (7, 5)),
    "one_tile": (None, None, RAGGED, (64, 64)),
    "key_tiles_of_one": (None, None, RAGGED, (4, 1)),
    "window": (4, None, RAGGED, (5, 3)),
    "window_of_one": (1, None, (23,), (6, 4)),
    "window_beyond": (99, None, RAGGED, (5, 7)),
    "softcap": (None, 0.8, RAGGED, (5, 7)),
    "everything": (3, 1.5, RAGGED, (16, 3)),
    "one_token": (None, None, (1,), (5, 7)),
    "one_token_each": (2, 1.0, (1, 1, 1), (2, 2)),
}


def plan_of(
    subject: Subject, segment: np.ndarray, window: int | None, softcap: float | None,
    tiles: tuple[int, int],
) -> AttentionPlan:  # fmt: skip
    return AttentionPlan(
        segment=subject.array(segment.astype(np.int32), "int32"),
        first_key_tile=first_key_tiles(segment.tolist(), *tiles, window),
        scale=SCALE,
        window=window,
        softcap=softcap,
        query_tile=tiles[0],
        key_tile=tiles[1],
    )


def segments(lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    return segment_and_position(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("case", CASES)
def test_attention(subject: Subject, case: str) -> None:
    window, softcap, lengths, tiles = CASES[case]
    segment, position = segments(lengths)
    n = len(segment)
    values = draw(12, subject.dtype, q=(n, H, E), k=(n, K, E), v=(n, K, E), do=(n, H, E))

    def forward(q: Any, k: Any, v: Any, do: Any) -> dict[str, Any]:
        o, saved = reference.attention_forward(
            q, k, v, segment, position, scale=SCALE, window=window, softcap=softcap
        )
        return {"o": o, "lse": saved.log_sum_exp}

    def backward(q: Any, k: Any, v: Any, do: Any) -> dict[str, Any]:
        _, saved = reference.attention_forward(
            q, k, v, segment, position, scale=SCALE, window=window, softcap=softcap
        )
        return dict(zip(("dq", "dk", "dv"), reference.attention_backward(do, saved), strict=True))

    attention = subject.ops.attention
    plan = plan_of(subject, segment, window, softcap, tiles)
    q, k, v, do = (subject.array(values[name]) for name in ("q", "k", "v", "do"))
    o, saved = attention.forward(q, k, v, plan=plan)
    subject.keep((o, saved))
    check(subject, {"o": o, "lse": saved.lse}, forward, values, wide=("lse",))
    gradients = attention.backward(do, saved, q, k, v, o, plan=plan)
    outputs = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    if max(lengths) == 1 or window == 1:
        # One visible key: the probability is 1, and neither q nor k matters.
        for name in ("dq", "dk"):
            size = np.abs(subject.numpy(outputs.pop(name))).max()
            assert size < {"float64": 1e-14, "float32": 1e-5}.get(subject.dtype, 0.05)
        check(
            subject,
            outputs,
            lambda **inputs: {"dv": backward(**inputs)["dv"]},
            values,
            wide=("dv",),
            through_narrow=True,
        )
        return
    # The output that the backward pass is given was rounded to the activations' dtype.
    check(subject, outputs, backward, values, wide=tuple(outputs), through_narrow=True)


@pytest.mark.parametrize("window", [None, 2], ids=["segments", "window"])
def test_a_masked_first_tile_leaves_no_trace(subject: Subject, window: int | None) -> None:
    """A key tile no row of which is seen gives junk that is rescaled to exactly zero, even where
    the values hidden there are huge."""
    lengths, tiles = ((7, 6) if window is None else (13,)), (5, 3)
    segment, position = segments(lengths)
    n = len(segment)
    values = draw(13, subject.dtype, q=(n, H, E), k=(n, K, E), v=(n, K, E), do=(n, H, E))
    plan = plan_of(subject, segment, window, None, tiles)
    seen = reference.visible_keys(segment, position, window)
    lo = plan.first_key_tile[1] * tiles[1]
    rows = seen[tiles[0] : 2 * tiles[0], lo : lo + tiles[1]]
    assert (~rows.any(axis=1)).any(), "no row of the query tile has its first key tile masked"

    hidden = 4 if window is None else 3
    values["v"][:hidden] *= 1e3
    attention = subject.ops.attention
    q, k, v, do = (subject.array(values[name]) for name in ("q", "k", "v", "do"))
    o, saved = attention.forward(q, k, v, plan=plan)
    # From the first tile on, more masked tiles come before the ones that matter.
    early = replace(plan, first_key_tile=[0] * len(plan.first_key_tile))
    o_early, saved_early = attention.forward(q, k, v, plan=early)
    np.testing.assert_array_equal(subject.numpy(o), subject.numpy(o_early))
    np.testing.assert_array_equal(subject.numpy(saved.lse), subject.numpy(saved_early.lse))
    pairs = zip(
        attention.backward(do, saved, q, k, v, o, plan=plan),
        attention.backward(do, saved, q, k, v, o, plan=early),
        strict=True,
    )
    for tight, loose in pairs:
        np.testing.assert_array_equal(subject.numpy(tight), subject.numpy(loose))
    # Rows that see none of the huge values are what they are without them.
    values["v"][:hidden] = 0.0
    plain, _ = attention.forward(q, k, subject.array(values["v"]), plan=plan)
    blind = ~seen[:, :hidden].any(axis=1)
    assert blind.sum() >= 3
    np.testing.assert_array_equal(subject.numpy(plain)[blind], subject.numpy(o)[blind])


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("tiles", [(5, 7), (7, 5), (16, 3), (1, 1)])
def test_first_key_tiles(window: int | None, tiles: tuple[int, int]) -> None:
    """Each query tile starts at the tile of the first key that any of its queries sees."""
    segment, position = segments(RAGGED)
    seen = reference.visible_keys(segment, position, window)
    expected = [
        int(np.flatnonzero(seen[start : start + tiles[0]].any(axis=0))[0]) // tiles[1]
        for start in range(0, len(segment), tiles[0])
    ]
    assert first_key_tiles(segment.tolist(), *tiles, window) == expected


class CountingLoops(EagerLoops):
    """Counts the turns of every loop with bounds of its own, which are those over key tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[tuple[int, int]] = []

    def fold(self, body: Any, carry: Any, lo: int, hi: int) -> Any:
        self.turns.append((lo, hi))
        return super().fold(body, carry, lo, hi)


@pytest.mark.parametrize("tiles", [(5, 7), (7, 5), (6, 6), (4, 1)])
@pytest.mark.parametrize("window", [None, 4])
def test_only_key_tiles_that_matter_are_visited(window: int | None, tiles: tuple[int, int]) -> None:
    """From the tile of the first key seen to the tile of the query tile's own last token: the
    arithmetic of the triangle, not of the square."""
    segment, position = segments(RAGGED)
    n = len(segment)
    values = draw(12, "float64", q=(n, H, E), k=(n, K, E), v=(n, K, E), do=(n, H, E))
    subject = Subject("numpy", "float64")
    plan = plan_of(subject, segment, window, None, tiles)
    seen = reference.visible_keys(segment, position, window)
    expected = []
    for start in range(0, n, tiles[0]):
        keys = np.flatnonzero(seen[start : start + tiles[0]].any(axis=0))
        expected.append((int(keys[0]) // tiles[1], int(keys[-1]) // tiles[1] + 1))
    whole = (0, -(-n // tiles[0]))
    q, k, v, do = values.values()
    forward, backward = CountingLoops(), CountingLoops()
    o, saved = attention_forward(q, k, v, plan=plan, loops=forward, xp=np)
    attention_backward(do, saved, q, k, v, o, plan=plan, loops=backward, xp=np)
    assert forward.turns == backward.turns == [whole, *expected]
