"""One entry for every method: the loss of a batch and the gradients of the LoRA parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mesp_core.backend import Backend
from mesp_core.batch import Batch
from mesp_core.decoder import MESP, Stages
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.methods.autodiff import autodiff_gradients
from mesp_core.methods.checkpointed import checkpointed_gradients
from mesp_core.methods.mezo import mezo_gradients
from mesp_core.methods.request import OnBlock, Request
from mesp_core.model import Model
from mesp_core.plain_block import plain_block_backward, plain_block_forward, plain_head_loss

Array = Any

METHODS: Mapping[str, Callable[[Request], float]] = {
    "mesp": checkpointed_gradients,
    "mesp-store-h": partial(checkpointed_gradients, store_h=True),
    "mebp": checkpointed_gradients,
    "mezo": mezo_gradients,
    "autodiff": autodiff_gradients,
}

#: Whether the loss head works in tiles or makes all logits [N, V].
HEADS = ("tiled", "dense")

#: Methods that differentiate by the framework; their head is dense unless asked otherwise.
_DIFFERENTIATED = ("mebp", "autodiff")

#: How far MeZO steps along its direction, as in its paper.
EPSILON = 1e-3


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
    head: str | None = None,
    epsilon: float = EPSILON,
    on_block: OnBlock | None = None,
    on_phase: Callable[[str], None] | None = None,
    normalizer: float | None = None,
) -> Result:
    """The loss of a batch and its gradients with respect to ``model.parameters``.

    method: ``mesp``, hand-written and exact; ``mesp-store-h``, the same keeping h = xA of a block
        instead of recomputing it; ``mebp`` and ``autodiff``, the framework's differentiation of one
        block at a time and of the whole model; ``mezo``, an estimate from two forward passes.
    head: ``tiled`` or ``dense`` (all logits); dense for ``mebp`` and ``autodiff`` by default.
    epsilon: how far MeZO steps.
    on_block: called once for each adapted block, last block first, with its gradients, which are
        then dropped. A block's parameters may be updated in the call: the gradients of blocks
        below no longer depend on them.
    on_phase: called when a phase begins: ``forward``, ``head``, ``backward``; MeZO's are two of
        the first two and ``update``. The dense head of ``autodiff`` is no phase of its own.
    normalizer: what the weighted sum is divided by; the batch's sum of weights by default. Give
        the joint sum to accumulate over micro-batches. A batch whose every target is masked
        gives loss 0 and zero gradients.
    Raises MespError for an unknown method, one the backend cannot run, a model with nothing to
    train, or token ids beyond the vocabulary; NonFiniteError when frozen weights are NaN.
    """
    stages = _stages(model.backend, method, head)
    if not model.parameters:
        raise MespError("the model has no LoRA parameters; pass lora=LoraConfig() to load_model")
    if normalizer is None:
        normalizer = float(batch.weights.sum()) or 1.0
    if not normalizer > 0.0:
        raise MespError(f"the normalizer must be positive, not {normalizer}")
    if not 0.0 < epsilon < math.inf:
        raise MespError(f"MeZO's epsilon must be above 0, not {epsilon}")
    gradients: dict[str, Array] = {}

    def keep(layer: int, block: dict[str, Array]) -> None:
        gradients.update(block)

    request = Request(
        model=model,
        batch=batch,
        stages=stages,
        on_block=on_block or keep,
        on_phase=on_phase or (lambda phase: None),
        normalizer=normalizer,
        epsilon=epsilon,
    )
    loss = METHODS[method](request)
    if not math.isfinite(loss):
        model.check_weights()
    return Result(loss, batch.target_count, gradients)


def reason_against(backend: Backend, method: str, head: str | None = None) -> str | None:
    """Why ``backend`` cannot run a method with a head; None when it can.

    Raises MespError for a name that does not exist.
    """
    try:
        _stages(backend, method, head)
    except UnsupportedError as error:
        return str(error)
    return None


def default_head(method: str) -> str:
    """The head of a method unless another is asked for: what its users would have."""
    return "dense" if method in _DIFFERENTIATED else "tiled"


def _stages(backend: Backend, method: str, head: str | None) -> Stages:
    """What a pass of the method runs."""
    if method not in METHODS:
        raise MespError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    head = head or default_head(method)
    if head not in HEADS:
        raise MespError(f"unknown head {head!r}; choose from {', '.join(HEADS)}")
    stages = MESP
    if method in _DIFFERENTIATED:
        stages = Stages(plain_block_forward, plain_block_backward, masked=True)
    if head == "dense":
        stages = replace(stages, head=plain_head_loss)
    if method in _DIFFERENTIATED or head == "dense":
        _check_autodiff(backend, method, head)
    return stages


def _check_autodiff(backend: Backend, method: str, head: str) -> None:
    try:
        backend.autodiff()
    except UnsupportedError as error:
        what = method if method in _DIFFERENTIATED else f"the {head} head"
        raise UnsupportedError(f"{what} cannot run here: {error}") from None
