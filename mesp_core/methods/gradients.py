"""One entry for every method: the loss of a batch and the gradients of the LoRA parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mesp_core.batch import Batch
from mesp_core.errors import MespError
from mesp_core.methods.mesp import mesp_gradients
from mesp_core.model import Model

Array = Any

#: Called with a layer and its gradients by full name, when they are complete.
OnBlock = Callable[[int, dict[str, Array]], None]

METHODS: Mapping[str, Callable[..., float]] = {"mesp": mesp_gradients}


@dataclass(frozen=True)
class Result:
    """loss: Σ weight · cross-entropy / normalizer; tokens: targets that count; gradients: by
    parameter name, empty when ``on_block`` took them."""

    loss: float
    tokens: int
    gradients: dict[str, Array]


def loss_and_gradients(
    model: Model,
    batch: Batch,
    *,
    method: str = "mesp",
    on_block: OnBlock | None = None,
    normalizer: float | None = None,
) -> Result:
    """The loss of a batch and its exact gradients with respect to ``model.parameters``.

    on_block: called once for each adapted block, last block first, with its gradients, which are
        then dropped. A block's parameters may be updated in the call: the gradients of blocks
        below no longer depend on them.
    normalizer: what the weighted sum is divided by; the batch's sum of weights by default. Give
        the joint sum to accumulate over micro-batches. A batch whose every target is masked
        gives loss 0 and zero gradients.
    Raises MespError for an unknown method, a model with nothing to train, or token ids beyond
    the vocabulary; NonFiniteError when frozen weights are NaN.
    """
    if method not in METHODS:
        raise MespError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    if not model.parameters:
        raise MespError("the model has no LoRA parameters; pass lora=LoraConfig() to load_model")
    if normalizer is None:
        normalizer = float(batch.weights.sum()) or 1.0
    if not normalizer > 0.0:
        raise MespError(f"the normalizer must be positive, not {normalizer}")
    gradients: dict[str, Array] = {}

    def keep(layer: int, block: dict[str, Array]) -> None:
        gradients.update(block)

    loss = METHODS[method](model, batch, on_block or keep, normalizer)
    if not math.isfinite(loss):
        model.check_weights()
    return Result(loss, batch.target_count, gradients)
