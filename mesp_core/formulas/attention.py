"""Causal attention over a ragged batch, in tiles; the scores [T, T] never exist.

Online softmax after Milakov & Gimelshein 2018 and Dao et al. 2022. Mathematics:
docs/attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp_core.formulas.loops import Loops, tile_count
from mesp_core.formulas.precision import accumulation_dtype, cast, wide

Array = Any

#: A score no real one reaches, finite so that a row whose keys are all masked in one tile gives
#: junk that later tiles rescale to exactly zero, where −inf would give NaN.
MASKED = -1e30


@dataclass(frozen=True)
class AttentionPlan:
    """Which keys each query sees, and how the work is cut.

    segment: [N] integers, the sequence each token belongs to. A query sees the keys of its own
        sequence at or before it, at most ``window`` of them when a window is set.
    first_key_tile: for each query tile the first key tile that can matter; host integers where
        loops are eager, a traced [tiles] array under jit.
    scale: on q·k, usually 1/√E. softcap: c · tanh(score / c) when set.
    query_tile, key_tile: tokens in a tile.
    """

    segment: Array
    first_key_tile: Any
    scale: float
    window: int | None = None
    softcap: float | None = None
    query_tile: int = 128
    key_tile: int = 128


@dataclass(frozen=True)
class AttentionSaved:
    """lse: log-sum-exp of each query's scores [N, H]: with it a tile of the probabilities is
    recomputed on its own, in any order."""

    lse: Array


def first_key_tiles(
    segment: list[int], query_tile: int, key_tile: int, window: int | None
) -> list[int]:
    """For each query tile, the key tile that holds the first key any of its queries sees."""
    first_of: dict[int, int] = {}
    for index, name in enumerate(segment):
        first_of.setdefault(name, index)
    tiles = []
    for start in range(0, len(segment), query_tile):
        # Both terms grow with the query, so the first query of the tile sees the earliest key.
        earliest = first_of[segment[start]]
        if window is not None:
            earliest = max(earliest, start - window + 1)
        tiles.append(earliest // key_tile)
    return tiles


def attention_forward(
    q: Array, k: Array, v: Array, *, plan: AttentionPlan, loops: Loops, xp: Any
) -> tuple[Array, AttentionSaved]:
    """o = softmax(mask(softcap(scale · q kᵀ))) v, each query head on key head h // (H/K).

    q: [N, H, E]; k: [N, K, E]; v: [N, K, E]; o: [N, H, E] in the dtype of q, computed in
    float32 or wider. Live memory beside the output: one tile of scores.
    """
    tokens, heads, width = q.shape
    dtype = accumulation_dtype(q.dtype, xp)
    size = plan.query_tile

    def query_tile(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        o, lse = carry
        q_tile = loops.tile(q, i, size, 0)
        rows = q_tile.shape[0]
        grouped = _group(wide(q_tile, xp), k.shape[1], xp) * plan.scale
        top = xp.full((*grouped.shape[:2], 1), MASKED, dtype=dtype)
        start = (top, xp.zeros_like(top), xp.zeros_like(grouped))

        def key_tile(j: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return _online_softmax(grouped, k, v, i, j, rows, state, plan, loops, xp)

        lo, hi = _key_range(plan, i, tokens)
        top, total, o_tile = loops.fold(key_tile, start, lo, hi)
        o_tile = _ungroup(o_tile / total, rows, xp)
        lse_tile = _ungroup(top + xp.log(total), rows, xp)[:, :, 0]
        o = loops.put(o, i, size, 0, cast(o_tile, q.dtype, xp))
        return o, loops.put(lse, i, size, 0, lse_tile)

    carry = (
        xp.zeros((tokens, heads, width), dtype=q.dtype),
        xp.zeros((tokens, heads), dtype=dtype),
    )
    o, lse = loops.fold_tiles(query_tile, carry, tokens, size)
    return o, AttentionSaved(lse)


def attention_backward(
    do: Array,
    saved: AttentionSaved,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    *,
    plan: AttentionPlan,
    loops: Loops,
    xp: Any,
) -> tuple[Array, Array, Array]:
    """With p = exp(s − lse), δ = Σ do · o: dv = pᵀ do, ds = p · (do vᵀ − δ), dq = scale · ds k,
    dk = scale · dsᵀ q; under a soft-cap ds is further multiplied by 1 − tanh².

    do, o: [N, H, E]. Returns dq [N, H, E], dk [N, K, E], dv [N, K, E] in the accumulation dtype.
    The probabilities are recomputed tile by tile from q, k and the saved log-sum-exp.
    """
    dtype = saved.lse.dtype
    tokens, size = q.shape[0], plan.query_tile
    zeros = tuple(xp.zeros(a.shape, dtype=dtype) for a in (q, k, v))

    def query_tile(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        q_tile = wide(loops.tile(q, i, size, 0), xp)
        do_tile = wide(loops.tile(do, i, size, 0), xp)
        o_tile = wide(loops.tile(o, i, size, 0), xp)
        rows = q_tile.shape[0]
        delta = xp.sum(do_tile * o_tile, axis=-1, keepdims=True)
        lse = xp.expand_dims(loops.tile(saved.lse, i, size, 0), axis=-1)
        heads = k.shape[1]
        query = _Query(
            _group(q_tile, heads, xp) * plan.scale,
            _group(do_tile, heads, xp),
            _group(delta, heads, xp),
            _group(lse, heads, xp),
        )

        def key_tile(j: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return _key_tile_backward(query, k, v, i, j, rows, state, plan, loops, xp)

        lo, hi = _key_range(plan, i, tokens)
        start = (xp.zeros_like(query.q), dk, dv)
        dq_tile, dk, dv = loops.fold(key_tile, start, lo, hi)
        dq_tile = _ungroup(dq_tile, rows, xp) * plan.scale
        return loops.put(dq, i, size, 0, dq_tile), dk, dv

    return loops.fold_tiles(query_tile, zeros, tokens, size)


@dataclass(frozen=True)
class _Query:
    """One tile of queries, heads grouped by key head: [K, G · rows, E or 1], q times scale."""

    q: Array
    do: Array
    delta: Array
    lse: Array


def _online_softmax(
    q: Array, k: Array, v: Array, i: Any, j: Any, rows: int, state: tuple, plan: Any, loops: Any,
    xp: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One key tile taken into (running maximum, running sum, running p v)."""
    top, total, o = state
    k_tile, v_tile = _keys(k, j, plan, loops, xp), _keys(v, j, plan, loops, xp)
    scores = _capped(xp.matmul(q, xp.matrix_transpose(k_tile)), plan, xp)
    scores = _mask(scores, i, j, rows, plan, loops, xp)
    new_top = xp.maximum(top, xp.max(scores, axis=-1, keepdims=True))
    p = xp.exp(scores - new_top)
    shrink = xp.exp(top - new_top)
    total = total * shrink + xp.sum(p, axis=-1, keepdims=True)
    return new_top, total, o * shrink + xp.matmul(p, v_tile)


def _key_tile_backward(
    query: _Query, k: Array, v: Array, i: Any, j: Any, rows: int, state: tuple, plan: Any,
    loops: Any, xp: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One key tile's share of (dq of this query tile without its scale, dk, dv)."""
    dq, dk, dv = state
    size = plan.key_tile
    k_tile, v_tile = _keys(k, j, plan, loops, xp), _keys(v, j, plan, loops, xp)
    scores = _capped(xp.matmul(query.q, xp.matrix_transpose(k_tile)), plan, xp)
    p = xp.exp(_mask(scores, i, j, rows, plan, loops, xp) - query.lse)
    dp = xp.matmul(query.do, xp.matrix_transpose(v_tile))
    ds = p * (dp - query.delta)
    if plan.softcap is not None:
        ds = ds * (1.0 - (scores / plan.softcap) ** 2)
    dk_tile = xp.permute_dims(xp.matmul(xp.matrix_transpose(ds), query.q), (1, 0, 2))
    dv_tile = xp.permute_dims(xp.matmul(xp.matrix_transpose(p), query.do), (1, 0, 2))
    dk = loops.put(dk, j, size, 0, loops.tile(dk, j, size, 0) + dk_tile)
    dv = loops.put(dv, j, size, 0, loops.tile(dv, j, size, 0) + dv_tile)
    return dq + xp.matmul(ds, k_tile), dk, dv


def _key_range(plan: AttentionPlan, i: Any, tokens: int) -> tuple[Any, Any]:
    """Key tiles from the first that can matter to the one with the tile's last query: the
    diagonal comes last."""
    last = (i + 1) * plan.query_tile + plan.key_tile - 1
    tiles = tile_count(tokens, plan.key_tile)
    hi = last // plan.key_tile
    hi = min(hi, tiles) if isinstance(hi, int) else hi.clip(max=tiles)
    return plan.first_key_tile[i], hi


def _keys(k: Array, j: Any, plan: AttentionPlan, loops: Loops, xp: Any) -> Array:
    """Key (or value) tile ``j`` by head: [K, keys, E]."""
    return xp.permute_dims(wide(loops.tile(k, j, plan.key_tile, 0), xp), (1, 0, 2))


def _group(x: Array, groups: int, xp: Any) -> Array:
    """[rows, H, E] -> [K, G · rows, E]: the query heads that share a key head side by side."""
    rows, heads, width = x.shape
    x = xp.reshape(x, (rows, groups, heads // groups, width))
    x = xp.permute_dims(x, (1, 2, 0, 3))
    return xp.reshape(x, (groups, heads // groups * rows, width))


def _ungroup(x: Array, rows: int, xp: Any) -> Array:
    """[K, G · rows, E] -> [rows, H, E]."""
    groups, stacked, width = x.shape
    x = xp.reshape(x, (groups, stacked // rows, rows, width))
    x = xp.permute_dims(x, (2, 0, 1, 3))
    return xp.reshape(x, (rows, groups * (stacked // rows), width))


def _capped(scores: Array, plan: AttentionPlan, xp: Any) -> Array:
    if plan.softcap is None:
        return scores
    return plan.softcap * xp.tanh(scores / plan.softcap)


def _mask(
    scores: Array, i: Any, j: Any, rows: int, plan: AttentionPlan, loops: Loops, xp: Any
) -> Array:
    """The scores of one tile with every key a query may not see at ``MASKED``."""
    groups, stacked, keys = scores.shape
    index = xp.arange(plan.segment.shape[0], dtype=xp.int32)
    query = xp.expand_dims(loops.tile(index, i, plan.query_tile, 0), axis=1)
    key = xp.expand_dims(loops.tile(index, j, plan.key_tile, 0), axis=0)
    own = xp.expand_dims(loops.tile(plan.segment, i, plan.query_tile, 0), axis=1)
    other = xp.expand_dims(loops.tile(plan.segment, j, plan.key_tile, 0), axis=0)
    seen = (key <= query) & (own == other)
    if plan.window is not None:
        seen = seen & (key > query - plan.window)
    by_row = xp.reshape(scores, (groups, stacked // rows, rows, keys))
    by_row = xp.where(seen, by_row, xp.asarray(MASKED, dtype=scores.dtype))
    return xp.reshape(by_row, (groups, stacked, keys))
