"""Causal attention of grouped queries over a ragged batch. Derivation: docs/attention.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class AttentionSaved:
    """q: [N, H, E]; k, v: [N, K, E]; probability: [H, N, N], 0 where hidden.

    log_sum_exp: [N, H], of each query's scores (the tiled backward needs it instead of
    probability); cap_slope: [H, N, N], the derivative of the soft-cap, None without one.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    probability: np.ndarray
    log_sum_exp: np.ndarray
    cap_slope: np.ndarray | None
    scale: float


def visible_keys(
    segment: np.ndarray, position: np.ndarray, window: int | None = None
) -> np.ndarray:
    """[N, N] booleans: query i sees key j of its own sequence with i - window < j ≤ i.

    segment, position: [N] integers.
    """
    distance = position[:, None] - position[None, :]
    visible = (segment[:, None] == segment[None, :]) & (distance >= 0)
    return visible if window is None else visible & (distance < window)


def attention_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segment: np.ndarray,
    position: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[np.ndarray, AttentionSaved]:
    """o_i = Σ_j p_ij v_j, p_i = softmax_j(s_ij) over the visible keys, s_ij = scale q_i·k_j.

    With a soft-cap c the score is c tanh(s_ij/c). Query head h reads key/value head ⌊h K/H⌋.
    q: [N, H, E]; k, v: [N, K, E]; scale: E^(-1/2) when None. Returns o: [N, H, E].
    """
    group = q.shape[1] // k.shape[1]
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    scores = scale * np.einsum("ihe,jhe->hij", q, np.repeat(k, group, axis=1))
    cap_slope = None
    if softcap is not None:
        squashed = np.tanh(scores / softcap)
        scores = softcap * squashed
        cap_slope = 1.0 - squashed * squashed
    scores = np.where(visible_keys(segment, position, window), scores, -np.inf)
    peak = np.max(scores, axis=-1, keepdims=True)
    exponential = np.exp(scores - peak)
    total = np.sum(exponential, axis=-1, keepdims=True)
    probability = exponential / total
    out = np.einsum("hij,jhe->ihe", probability, np.repeat(v, group, axis=1))
    log_sum_exp = (peak + np.log(total))[..., 0].T
    return out, AttentionSaved(q, k, v, probability, log_sum_exp, cap_slope, scale)


def attention_backward(
    dout: np.ndarray, saved: AttentionSaved
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dv_j = Σ_i p_ij do_i, ds_ij = p_ij (do_i·v_j - do_i·o_i), dq, dk from ds.

    Gradients of a key/value head are summed over the query heads that read it.
    dout: [N, H, E]. Returns dq: [N, H, E], dk, dv: [N, K, E].
    """
    kv_heads = saved.k.shape[1]
    group = saved.q.shape[1] // kv_heads
    dprobability = np.einsum("ihe,jhe->hij", dout, np.repeat(saved.v, group, axis=1))
    delta = np.sum(saved.probability * dprobability, axis=-1, keepdims=True)
    dscores = saved.probability * (dprobability - delta)
    if saved.cap_slope is not None:
        dscores = dscores * saved.cap_slope
    dscores = saved.scale * dscores
    dq = np.einsum("hij,jhe->ihe", dscores, np.repeat(saved.k, group, axis=1))
    dk = np.einsum("hij,ihe->jhe", dscores, saved.q)
    dv = np.einsum("hij,ihe->jhe", saved.probability, dout)
    return dq, _sum_groups(dk, kv_heads), _sum_groups(dv, kv_heads)


def _sum_groups(per_query_head: np.ndarray, kv_heads: int) -> np.ndarray:
    """[N, H, E] summed over each group of H/K neighbouring heads: [N, K, E]."""
    tokens, heads, width = per_query_head.shape
    return per_query_head.reshape(tokens, kv_heads, heads // kv_heads, width).sum(axis=2)
