"""MeSP: exact gradients from hand-written backward passes, one block recomputed at a time.

Park et al., "Memory-Efficient Structured Backpropagation", ACL 2026 Industry Track,
arXiv 2602.13069. Only block inputs outlive the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesp_core.batch import Batch
from mesp_core.block import block_backward
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
    loss, dx = _head(run, x, normalizer)
    del x
    for layer in reversed(range(lowest, model.config.layers)):
        dx, gradients = block_backward(
            dx,
            checkpoints.pop(),
            model.block(layer),
            run.block_plan(layer),
            input_gradient=layer > lowest,
            ops=run.ops,
            backend=run.backend,
        )
        on_block(layer, _named(layer, gradients))
        del gradients
        model.release(layer)
    return loss


def _head(run: Pass, x: Array, normalizer: float) -> tuple[float, Array]:
    """The loss, and its gradient with respect to the last block's output."""
    normed, norm = run.final_norm(x)
    run.backend.stage(normed, norm.rstd)
    loss, saved = run.loss(normed, normalizer=normalizer, gradient=True)
    del normed
    dx, _ = run.ops.rms_norm.backward(
        run.ops.linear_cross_entropy.backward(1.0, saved),
        norm,
        run.model.final_norm,
        plus_one=run.model.config.norm_plus_one,
    )
    run.backend.stage(dx)
    return float(loss), dx


def _named(layer: int, gradients: dict[str, LoraGradients | None]) -> dict[str, Array]:
    """Gradients by parameter name."""
    named = {}
    for projection in PROJECTIONS:
        block = gradients[projection.rpartition(".")[2].removesuffix("_proj")]
        if block is not None:
            named[parameter_name(layer, projection, "lora_a")] = block.da
            named[parameter_name(layer, projection, "lora_b")] = block.db
    return named
