"""Ways to obtain the gradients; see ``loss_and_gradients``."""

from mesp_core.methods.gradients import (
    EPSILON,
    HEADS,
    METHODS,
    Result,
    default_head,
    loss_and_gradients,
    reason_against,
)

__all__ = [
    "EPSILON",
    "HEADS",
    "METHODS",
    "Result",
    "default_head",
    "loss_and_gradients",
    "reason_against",
]
