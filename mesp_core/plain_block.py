"""The decoder block and the head as one writes them for automatic differentiation.

For the baselines alone: no tiles, no recomputation, no hand-written derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mesp_core.autodiff import Autodiff
from mesp_core.block import Block, BlockPlan
from mesp_core.formulas.lora_linear import LoraGradients
from mesp_core.head import Head, HeadPlan

Array = Any

#: The projections of a block, in the order in which their factors are listed.
NAMES = ("q", "k", "v", "o", "gate", "up", "down")


def plain_block(x: Array, block: Block, plan: BlockPlan, *, autodiff: Autodiff) -> Array:
    """x: [N, D]; out: [N, D] in the dtype of x, in which everything is computed."""
    norm = {"eps": plan.eps, "plus_one": plan.norm_plus_one}
    linear, tokens = autodiff.lora_linear, x.shape[0]
    normed = autodiff.rms_norm(x, block.input_norm, **norm)
    q = linear(normed, block.q, plan.dropouts[0]).reshape(tokens, plan.heads, -1)
    k = linear(normed, block.k, plan.dropouts[1]).reshape(tokens, plan.kv_heads, -1)
    v = linear(normed, block.v, plan.dropouts[2]).reshape(tokens, plan.kv_heads, -1)
    if block.q_norm is not None:
        q = autodiff.rms_norm(q, block.q_norm, **norm)
        k = autodiff.rms_norm(k, block.k_norm, **norm)
    q = autodiff.rope(q, plan.cos, plan.sin, interleaved=plan.interleaved)
    k = autodiff.rope(k, plan.cos, plan.sin, interleaved=plan.interleaved)
    o = autodiff.attention(q, k, v, plan).reshape(tokens, -1)
    x = x + linear(o, block.o, plan.dropouts[3])
    normed = autodiff.rms_norm(x, block.post_norm, **norm)
    gate = linear(normed, block.gate, plan.mlp.dropouts[0])
    up = linear(normed, block.up, plan.mlp.dropouts[1])
    inner = autodiff.activation(gate, plan.mlp.activation) * up
    return x + linear(inner, block.down, plan.mlp.dropouts[2])


def plain_block_forward(
    x: Array, block: Block, plan: BlockPlan, *, ops: Any, backend: Any
) -> Array:
    """``plain_block`` as a stage."""
    out = backend.autodiff().block(x, block, plan)
    backend.stage(out)
    return out


def plain_block_backward(
    dout: Array,
    x: Array,
    block: Block,
    plan: BlockPlan,
    *,
    input_gradient: bool = True,
    ops: Any,
    backend: Any,
) -> tuple[Array | None, dict[str, LoraGradients | None]]:
    """The gradients of one block by the framework's autodiff, from the block's input alone.

    As ``block_backward``, but in the dtypes of x and of the parameters.
    """
    factors = lora_factors(block)
    inputs = [x, *factors] if input_gradient else factors
    autodiff = backend.autodiff()

    def function(*given: Array) -> Array:
        start, changed = (given[0], given[1:]) if input_gradient else (x, given)
        return autodiff.block(start, with_lora_factors(block, changed), plan)

    _, found = autodiff.gradients(function, inputs, lambda out: dout)
    backend.stage(found)
    dx = found.pop(0) if input_gradient else None
    return dx, lora_gradients(block, found)


def plain_head_loss(
    x: Array, head: Head, targets: Array, weights: Array, normalizer: float,
    *, plan: HeadPlan, gradient: bool, ops: Any, backend: Any,
) -> tuple[Array, Array | None]:  # fmt: skip
    """As ``head_loss``, by the framework's autodiff on the logits [N, V]."""
    autodiff = backend.autodiff()

    def function(x: Array) -> Array:
        return autodiff.head_loss(x, head, targets, weights, normalizer, plan)

    if not gradient:
        loss = function(x)
        backend.stage(loss)
        return loss, None
    loss, (dx,) = autodiff.gradients(function, [x], backend.xp.ones_like)
    backend.stage(loss, dx)
    return loss, dx


def plain_head(
    x: Array, head: Head, targets: Array, weights: Array, normalizer: float,
    *, plan: HeadPlan, autodiff: Autodiff,
) -> Array:  # fmt: skip
    """The loss of the last block's output x [N, D], by way of all logits."""
    normed = autodiff.rms_norm(x, head.norm, eps=plan.eps, plus_one=plan.norm_plus_one)
    logits = autodiff.frozen_linear(normed, head.weight)
    return autodiff.cross_entropy(logits, targets, weights) / normalizer


def lora_factors(block: Block) -> list[Array]:
    """A and B of every adapted projection, in the order of ``NAMES``."""
    factors = []
    for name in NAMES:
        projection = getattr(block, name)
        if projection.lora_a is not None:
            factors += [projection.lora_a, projection.lora_b]
    return factors


def with_lora_factors(block: Block, factors: Sequence[Array]) -> Block:
    """The block with these instead of its own ``lora_factors``."""
    left, changed = list(factors), {}
    for name in NAMES:
        projection = getattr(block, name)
        if projection.lora_a is not None:
            a, b = left.pop(0), left.pop(0)
            changed[name] = replace(projection, lora_a=a, lora_b=b)
    return replace(block, **changed)


def lora_gradients(block: Block, found: Sequence[Array]) -> dict[str, LoraGradients | None]:
    """Gradients of ``lora_factors`` by projection; None where there is no adapter."""
    left = list(found)
    gradients: dict[str, LoraGradients | None] = {}
    for name in NAMES:
        adapted = getattr(block, name).lora_a is not None
        gradients[name] = LoraGradients(left.pop(0), left.pop(0)) if adapted else None
    return gradients
