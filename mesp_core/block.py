"""The decoder block: forward, and the backward pass that recomputes it in the order of its deaths.

Written once against ``Operations``. Schedule and mathematics: docs/block.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp_core.formulas.attention import AttentionPlan
from mesp_core.formulas.dropout import Dropout
from mesp_core.formulas.gated_mlp import GatedMlpSaved, MlpPlan
from mesp_core.formulas.lora_linear import LoraGradients, LoraLinearSaved, Projection
from mesp_core.formulas.precision import cast, wide
from mesp_core.operations import Operations

Array = Any


@dataclass(frozen=True)
class Block:
    """One block's weights. Norm weights: [D], or [E] for q_norm and k_norm (None without)."""

    input_norm: Array
    post_norm: Array
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection
    up: Projection
    down: Projection
    q_norm: Array | None = None
    k_norm: Array | None = None


@dataclass(frozen=True)
class BlockPlan:
    """What a block needs to know of the batch and the model, beside its weights.

    cos, sin: RoPE tables [N, E'/2]; dropouts: masks of the q, k, v and o adapters. mask: [N, N],
    which keys each query sees, for a block that forms the scores (``plain_block``); None where
    that is every key at or before it.
    """

    heads: int
    kv_heads: int
    eps: float
    norm_plus_one: bool
    interleaved: bool
    cos: Array
    sin: Array
    attention: AttentionPlan
    mlp: MlpPlan
    dropouts: tuple[Dropout | None, Dropout | None, Dropout | None, Dropout | None]
    mask: Array | None = None


@dataclass(frozen=True)
class _Heads:
    """Queries, keys and values by head, the saved state of the q/k norm (None without one), and
    h = xA of the three projections, None where it is recomputed."""

    q: Array
    k: Array
    v: Array
    q_norm: Any = None
    k_norm: Any = None
    h: tuple[Array | None, ...] = (None, None, None)


def block_forward(
    x: Array, block: Block, plan: BlockPlan, *, ops: Operations, backend: Any
) -> Array:
    """x_mid = x + o(attention(q, k, v)); out = x_mid + mlp(norm(x_mid)).

    x: [N, D]; out: [N, D] in the dtype of x. In between everything is float32 or wider, so a
    16-bit model rounds once a block. Nothing is kept: the caller holds x, and the backward pass
    recomputes from it.
    """
    xp, stage, dtype = backend.xp, backend.stage, x.dtype
    x = wide(x, xp)
    heads = _heads(x, block, plan, ops, backend)
    o, _ = ops.attention.forward(heads.q, heads.k, heads.v, plan=plan.attention)
    stage(o)
    del heads
    x_mid = _after_attention(x, o, block, plan, ops, xp)[0]
    stage(x_mid)
    del o
    normed, _ = ops.rms_norm.forward(
        x_mid, block.post_norm, eps=plan.eps, plus_one=plan.norm_plus_one
    )
    y, _ = ops.gated_mlp.forward(normed, block.gate, block.up, block.down, plan=plan.mlp)
    out = cast(x_mid + y, dtype, xp)
    stage(out)
    return out


def block_backward(
    dout: Array,
    x: Array,
    block: Block,
    plan: BlockPlan,
    *,
    input_gradient: bool = True,
    store_h: bool = False,
    ops: Operations,
    backend: Any,
) -> tuple[Array | None, dict[str, LoraGradients | None]]:
    """The gradients of one block from its input alone.

    dout: [N, D] in the accumulation dtype; x: [N, D]. Returns (dx, gradients): dx [N, D] in the
    accumulation dtype, or None without ``input_gradient`` (nothing trained lies below);
    gradients by projection: q, k, v, o, gate, up, down. ``down`` and everything after it is never
    recomputed. store_h: keep h = xA of q, k, v and o from the recomputed forward pass, where it
    is recomputed otherwise (the paper's ablation); the MLP makes its own once in either case.
    """
    xp, stage = backend.xp, backend.stage
    x = wide(x, xp)
    heads = _heads(x, block, plan, ops, backend, store_h)
    o, attention = ops.attention.forward(heads.q, heads.k, heads.v, plan=plan.attention)
    stage(o, attention.lse)
    x_mid, saved = _after_attention(x, o, block, plan, ops, xp, store_h)
    stage(x_mid, saved.h)

    gradients: dict[str, LoraGradients | None] = {}
    dx_mid = _mlp_backward(dout, x_mid, block, plan, gradients, ops, backend)
    del x_mid

    do, gradients["o"] = ops.lora_linear.backward(dx_mid, saved, block.o, dropout=plan.dropouts[3])
    do = xp.reshape(do, o.shape)
    stage(do, gradients["o"])
    dq, dk, dv = ops.attention.backward(
        do, attention, heads.q, heads.k, heads.v, o, plan=plan.attention
    )
    stage(dq, dk, dv)
    del do, o, saved, attention
    dq, dk = _heads_backward(dq, dk, heads, block, plan, ops)
    h = heads.h
    del heads
    flat_gradients = {
        name: xp.reshape(d, (d.shape[0], -1)) for name, d in (("q", dq), ("k", dk), ("v", dv))
    }
    stage(*flat_gradients.values())
    del dq, dk, dv
    dx = _inputs_backward(
        flat_gradients, x, h, dx_mid, block, plan, gradients, input_gradient, ops, backend
    )
    return dx, gradients


def _heads(
    x: Array, block: Block, plan: BlockPlan, ops: Operations, backend: Any, store_h: bool = False
) -> _Heads:
    """Norm, the three projections, q/k norm and RoPE."""
    xp, stage = backend.xp, backend.stage
    normed, _ = ops.rms_norm.forward(x, block.input_norm, eps=plan.eps, plus_one=plan.norm_plus_one)
    stage(normed)
    split, h = [], []
    for name, count, dropout in (
        ("q", plan.heads, plan.dropouts[0]),
        ("k", plan.kv_heads, plan.dropouts[1]),
        ("v", plan.kv_heads, plan.dropouts[2]),
    ):
        y, saved = ops.lora_linear.forward(
            normed, getattr(block, name), dropout=dropout, store_h=store_h
        )
        split.append(xp.reshape(y, (y.shape[0], count, -1)))
        h.append(saved.h)
        stage(split[-1], h[-1])
    q, k, v = split
    del normed, split, y, saved
    q_norm = k_norm = None
    if block.q_norm is not None:
        options = {"eps": plan.eps, "plus_one": plan.norm_plus_one}
        q, q_norm = ops.rms_norm.forward(q, block.q_norm, **options)
        k, k_norm = ops.rms_norm.forward(k, block.k_norm, **options)
    q, _ = ops.rope.forward(q, plan.cos, plan.sin, interleaved=plan.interleaved)
    k, _ = ops.rope.forward(k, plan.cos, plan.sin, interleaved=plan.interleaved)
    stage(q, k)
    return _Heads(q, k, v, q_norm, k_norm, tuple(h))


def _after_attention(
    x: Array, o: Array, block: Block, plan: BlockPlan, ops: Operations, xp: Any,
    store_h: bool = False,
) -> tuple[Array, LoraLinearSaved]:  # fmt: skip
    flat = xp.reshape(o, (o.shape[0], -1))
    y, saved = ops.lora_linear.forward(flat, block.o, dropout=plan.dropouts[3], store_h=store_h)
    return x + y, saved


def _mlp_backward(
    dout: Array, x_mid: Array, block: Block, plan: BlockPlan, gradients: dict, ops: Operations,
    backend: Any,
) -> Array:  # fmt: skip
    """∂loss/∂x_mid: through the MLP and its norm, and along the residual."""
    stage = backend.stage
    normed, norm = ops.rms_norm.forward(
        x_mid, block.post_norm, eps=plan.eps, plus_one=plan.norm_plus_one
    )
    saved = GatedMlpSaved(normed)
    del normed
    dnormed, gradients["gate"], gradients["up"], gradients["down"] = ops.gated_mlp.backward(
        dout, saved, block.gate, block.up, block.down, plan=plan.mlp
    )
    del saved
    stage(dnormed, gradients)
    dx, _ = ops.rms_norm.backward(dnormed, norm, block.post_norm, plus_one=plan.norm_plus_one)
    dx_mid = dout + dx
    stage(dx_mid)
    return dx_mid


def _heads_backward(
    dq: Array, dk: Array, heads: _Heads, block: Block, plan: BlockPlan, ops: Operations
) -> tuple[Array, Array]:
    """Back through RoPE and the q/k norm."""
    dq = ops.rope.backward(dq, None, plan.cos, plan.sin, interleaved=plan.interleaved)
    dk = ops.rope.backward(dk, None, plan.cos, plan.sin, interleaved=plan.interleaved)
    if block.q_norm is not None:
        options = {"plus_one": plan.norm_plus_one}
        dq, _ = ops.rms_norm.backward(dq, heads.q_norm, block.q_norm, **options)
        dk, _ = ops.rms_norm.backward(dk, heads.k_norm, block.k_norm, **options)
    return dq, dk


def _inputs_backward(
    flat: dict[str, Array], x: Array, h: tuple[Array | None, ...], dx_mid: Array, block: Block,
    plan: BlockPlan, gradients: dict, input_gradient: bool, ops: Operations, backend: Any,
) -> Array | None:  # fmt: skip
    """Back through q, k, v and the first norm; the norm is recomputed here, not kept."""
    stage = backend.stage
    normed, norm = ops.rms_norm.forward(
        x, block.input_norm, eps=plan.eps, plus_one=plan.norm_plus_one
    )
    stage(normed, norm.rstd)
    dnormed = None
    for place, name in enumerate(("q", "k", "v")):
        part, gradients[name] = ops.lora_linear.backward(
            flat.pop(name),
            LoraLinearSaved(normed, h[place]),
            getattr(block, name),
            dropout=plan.dropouts[place],
            input_gradient=input_gradient,
        )
        dnormed = part if dnormed is None else dnormed + part
        stage(dnormed, gradients[name])
    if not input_gradient:
        return None
    dx, _ = ops.rms_norm.backward(dnormed, norm, block.input_norm, plus_one=plan.norm_plus_one)
    dx = dx_mid + dx
    stage(dx)
    return dx
