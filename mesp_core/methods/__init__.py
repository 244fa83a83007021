"""Ways to obtain the gradients; see ``loss_and_gradients``."""

from mesp_core.methods.gradients import METHODS, Result, loss_and_gradients

__all__ = ["METHODS", "Result", "loss_and_gradients"]
