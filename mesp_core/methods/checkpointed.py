"""MeSP and MeBP: keep the blocks' inputs, and run one block again at a time for its gradients.

MeSP (Park et al., ACL 2026 Industry Track, arXiv 2602.13069) does so by hand-written backward
passes; MeBP (arXiv 2510.03425) by the framework's automatic differentiation of each block.
"""

from __future__ import annotations

from typing import Any

from mesp_core.decoder import Pass
from mesp_core.formulas.lora_linear import LoraGradients
from mesp_core.lora import PROJECTIONS, parameter_name
from mesp_core.methods.request import Request

Array = Any


def checkpointed_gradients(request: Request, **static: bool) -> float:
    """Runs the batch forward and backward; hands each block's gradients on; returns the loss.

    static: options of the backward stage (``store_h``).
    """
    model = request.model
    run = Pass(model, request.batch, training=True, stages=request.stages)
    lowest = model.lowest_adapted_layer()
    checkpoints: list[Array] = []
    request.on_phase("forward")
    x = run.embed()
    for layer in range(model.config.layers):
        if layer >= lowest:
            checkpoints.append(x)
        x = run.forward(x, layer)
    request.on_phase("head")
    loss, dx = run.loss(x, normalizer=request.normalizer, gradient=True)
    del x
    request.on_phase("backward")
    for layer in reversed(range(lowest, model.config.layers)):
        dx, gradients = run.backward(
            dx, checkpoints.pop(), layer, input_gradient=layer > lowest, **static
        )
        request.on_block(layer, named(layer, gradients))
        del gradients
        model.release(layer)
    return loss


def named(layer: int, gradients: dict[str, LoraGradients | None]) -> dict[str, Array]:
    """Gradients by parameter name."""
    found = {}
    for projection in PROJECTIONS:
        block = gradients[projection.rpartition(".")[2].removesuffix("_proj")]
        if block is not None:
            found[parameter_name(layer, projection, "lora_a")] = block.da
            found[parameter_name(layer, projection, "lora_b")] = block.db
    return found
