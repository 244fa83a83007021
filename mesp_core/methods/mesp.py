"""MeSP: exact gradients from hand-written backward passes, one block recomputed at a time.

Park et al., "Memory-Efficient Structured Backpropagation", ACL 2026 Industry Track,
arXiv 2602.13069. Only block inputs outlive the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesp_core.batch import Batch
from mesp_core.decoder import Pass
from mesp_core.formulas.lora_linear import LoraGradients
from mesp_core.lora import PROJECTIONS, parameter_name
from mesp_core.model import Model

Array = Any


def mesp_gradients(
    model: Model,
    batch: Batch,
    on_block: Callable[[int, dict[str, Array]], None],
    normalizer: float,
) -> float:
    """Runs the batch forward and backward; hands each block's gradients on; returns the loss."""
    run = Pass(model, batch, training=True)
    lowest = model.lowest_adapted_layer()
    checkpoints: list[Array] = []
    x = run.embed()
    for layer in range(model.config.layers):
        if layer >= lowest:
            checkpoints.append(x)
        x = run.forward(x, layer)
    loss, dx = run.loss(x, normalizer=normalizer, gradient=True)
    del x
    for layer in reversed(range(lowest, model.config.layers)):
        dx, gradients = run.backward(dx, checkpoints.pop(), layer, input_gradient=layer > lowest)
        on_block(layer, _named(layer, gradients))
        del gradients
        model.release(layer)
    return loss


def _named(layer: int, gradients: dict[str, LoraGradients | None]) -> dict[str, Array]:
    """Gradients by parameter name."""
    named = {}
    for projection in PROJECTIONS:
        block = gradients[projection.rpartition(".")[2].removesuffix("_proj")]
        if block is not None:
            named[parameter_name(layer, projection, "lora_a")] = block.da
            named[parameter_name(layer, projection, "lora_b")] = block.db
    return named
