"""Components forward and backward, as stages that any backend runs, compiled or not.

Outputs and gradients are all returned, so that a compiler leaves nothing out.
"""

from __future__ import annotations

from typing import Any

Array = Any


def rms_norm(x: Array, dout: Array, block: Any, plan: Any, *, ops: Any, backend: Any) -> Any:
    options = {"plus_one": plan.norm_plus_one}
    out, saved = ops.rms_norm.forward(x, block.input_norm, eps=plan.eps, **options)
    backend.stage(out)
    dx, _ = ops.rms_norm.backward(dout, saved, block.input_norm, **options)
    backend.stage(dx)
    return out, dx


def rope(x: Array, dout: Array, block: Any, plan: Any, *, ops: Any, backend: Any) -> Any:
    out, _ = ops.rope.forward(x, plan.cos, plan.sin, interleaved=plan.interleaved)
    backend.stage(out)
    dx = ops.rope.backward(dout, None, plan.cos, plan.sin, interleaved=plan.interleaved)
    backend.stage(dx)
    return out, dx


def attention(
    q: Array, k: Array, v: Array, do: Array, block: Any, plan: Any, *, ops: Any, backend: Any
) -> Any:
    o, saved = ops.attention.forward(q, k, v, plan=plan.attention)
    backend.stage(o, saved.lse)
    gradients = ops.attention.backward(do, saved, q, k, v, o, plan=plan.attention)
    backend.stage(*gradients)
    return o, gradients


def lora_linear(x: Array, dy: Array, block: Any, plan: Any, *, ops: Any, backend: Any) -> Any:
    y, saved = ops.lora_linear.forward(x, block.q, dropout=None)
    backend.stage(y)
    dx, gradients = ops.lora_linear.backward(dy, saved, block.q, dropout=None)
    backend.stage(dx, gradients)
    return y, dx, gradients


def gated_mlp(x: Array, dy: Array, block: Any, plan: Any, *, ops: Any, backend: Any) -> Any:
    projections = (block.gate, block.up, block.down)
    y, saved = ops.gated_mlp.forward(x, *projections, plan=plan.mlp)
    backend.stage(y)
    dx, *gradients = ops.gated_mlp.backward(dy, saved, *projections, plan=plan.mlp)
    backend.stage(dx, gradients)
    return y, dx, gradients
