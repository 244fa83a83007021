"""MeZO: an estimate of the gradients from two forward passes (arXiv 2305.17333).

z ~ N(0, 1) for every parameter; g = (loss(p + εz) − loss(p − εz)) / 2ε · z. On average over z that
is the gradient (but for terms in ε²), with a variance that grows with the number of parameters. The
direction z is drawn anew from its seed wherever it is needed, and p ± εz is formed block by block:
neither is ever held for the whole model, and the parameters are never disturbed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mesp_core.decoder import Pass
from mesp_core.methods.request import Request
from mesp_core.model import Model

Array = Any

#: Sets these generators apart from those of the first values of the parameters.
_PURPOSE = 0x4D655A4F


def mezo_gradients(request: Request) -> float:
    """Hands on the estimate block by block; returns the mean of the two losses."""
    model = request.model
    run = Pass(model, request.batch, training=True, stages=request.stages)
    losses = [_loss(run, request, step) for step in (request.epsilon, -request.epsilon)]
    slope = (losses[0] - losses[1]) / (2.0 * request.epsilon)
    request.on_phase("update")
    for layer in reversed(range(model.lowest_adapted_layer(), model.config.layers)):
        gradients = {
            name: model.backend.from_numpy(slope * z, model.wide_dtype)
            for name, z in directions(model, layer).items()
        }
        request.on_block(layer, gradients)
    return (losses[0] + losses[1]) / 2.0


def _loss(run: Pass, request: Request, step: float) -> float:
    """The loss with every parameter moved ``step`` along its direction."""
    model = request.model
    request.on_phase("forward")
    x = run.embed()
    for layer in range(model.config.layers):
        x = run.forward(x, layer, _moved(model, layer, step))
    request.on_phase("head")
    return run.loss(x, normalizer=request.normalizer, gradient=False)[0]


def _moved(model: Model, layer: int, step: float) -> dict[str, Array]:
    """One block's parameters p + step · z, in float32 or wider: 16 bits would lose the step."""
    backend, moved = model.backend, {}
    for name, z in directions(model, layer).items():
        p = backend.xp.astype(model.parameters[name], backend.dtype(model.wide_dtype))
        moved[name] = p + backend.from_numpy(step * z, model.wide_dtype)
    backend.stage(moved)
    return moved


def directions(model: Model, layer: int) -> dict[str, np.ndarray]:
    """z of one block's parameters, float32, from (seed, step, layer, place) and nothing else: the
    same on every backend, whatever the order and however often they are drawn."""
    drawn = {}
    for place, name in enumerate(model.parameter_names(layer)):
        key = (model.seed % 2**64, model.step, layer, place, _PURPOSE)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        shape = tuple(model.parameters[name].shape)
        drawn[name] = generator.standard_normal(shape, dtype=np.float32)
    return drawn
