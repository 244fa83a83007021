"""The framework's plain automatic differentiation of the whole model: what MeSP is compared with.

Every intermediate result that some derivative needs is kept until the backward pass reaches it.
"""

from __future__ import annotations

from typing import Any

from mesp_core.block import Block
from mesp_core.decoder import Pass
from mesp_core.head import head_loss
from mesp_core.methods.checkpointed import named
from mesp_core.methods.request import Request
from mesp_core.plain_block import lora_factors, lora_gradients, with_lora_factors

Array = Any


def autodiff_gradients(request: Request) -> float:
    """All gradients in one differentiation, then handed on block by block; returns the loss."""
    model = request.model
    autodiff = model.backend.autodiff()
    run = Pass(model, request.batch, training=True, stages=request.stages)
    lowest = model.lowest_adapted_layer()
    request.on_phase("forward")
    x = run.embed()
    for layer in range(lowest):
        x = run.forward(x, layer)
    blocks = {layer: model.block(layer) for layer in range(lowest, model.config.layers)}
    losses: list[float] = []

    def function(*factors: Array) -> Array:
        out = _outputs(run, x, blocks, factors)
        return out if request.stages.head is head_loss else _dense(run, out, request.normalizer)

    def cotangent(value: Array) -> Array:
        """∂loss/∂value: of the last block's output, by the tiled head, or of the loss itself."""
        if request.stages.head is not head_loss:
            request.on_phase("backward")
            return model.backend.xp.ones_like(value)
        request.on_phase("head")
        loss, dout = run.loss(value, normalizer=request.normalizer, gradient=True)
        losses.append(loss)
        request.on_phase("backward")
        return dout

    factors = [factor for block in blocks.values() for factor in lora_factors(block)]
    value, found = autodiff.gradients(function, factors, cotangent)
    model.backend.stage(value, found)
    loss = losses[0] if losses else float(value)
    del value
    _hand_on(request, blocks, found)
    return loss


def _outputs(run: Pass, x: Array, blocks: dict[int, Block], factors: Any) -> Array:
    """The last block's output, with these factors in the blocks."""
    left, autodiff = list(factors), run.backend.autodiff()
    for layer, block in blocks.items():
        count = len(lora_factors(block))
        block = with_lora_factors(block, left[:count])
        del left[:count]
        x = autodiff.block(x, block, run.block_plan(layer, masked=True))
        run.model.release(layer)
    return x


def _dense(run: Pass, x: Array, normalizer: float) -> Array:
    autodiff, (targets, weights) = run.backend.autodiff(), run.targets()
    return autodiff.head_loss(x, run.model.head, targets, weights, normalizer, run.head_plan())


def _hand_on(request: Request, blocks: dict[int, Block], found: list[Array]) -> None:
    """Each block's gradients, last block first, dropped as they go."""
    for layer in reversed(blocks):
        count = len(lora_factors(blocks[layer]))
        gradients = lora_gradients(blocks[layer], found[len(found) - count :])
        del found[len(found) - count :]
        request.on_block(layer, named(layer, gradients))
    request.model.release(None)
