"""The error of a step's gradients against the reference: float64 NumPy, written for itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import synthetic
from benchmarks.work import Step


def gradient_error(step: Step) -> float:
    """‖gradients − true gradients‖ / ‖true gradients‖, all parameters of the synthetic model
    together, as they are now."""
    found = step.gradients()
    true = true_gradients(step)
    if found.keys() != true.keys():
        raise ValueError("these are gradients of other parameters")
    error = sum(float(np.sum((found[name] - true[name]) ** 2)) for name in true)
    return math.sqrt(error / sum(float(np.sum(value**2)) for value in true.values()))


def true_gradients(step: Step) -> dict[str, np.ndarray]:
    """By the reference, from the same weights and parameters."""
    from mesp_reference.config import DecoderConfig
    from mesp_reference.decoder import Lora, loss_and_gradients
    from mesp_reference.ragged import RaggedBatch

    config = DecoderConfig(
        hidden=synthetic.HIDDEN,
        layers=synthetic.LAYERS,
        ffn=synthetic.FFN,
        heads=synthetic.HEADS,
        kv_heads=synthetic.KV_HEADS,
        head_dim=synthetic.HEAD_DIM,
        vocab=synthetic.VOCABULARY,
        eps=synthetic.EPS,
        tied=True,
    )
    model, batch = step.model, step.batch
    parameters: dict[str, Any] = {
        name: step.backend.to_numpy(value).astype(np.float64)
        for name, value in model.parameters.items()
    }
    ragged = RaggedBatch(batch.tokens, batch.targets, batch.weights, batch.starts)
    frozen = synthetic.write_model(Path("reference").absolute())
    _, gradients = loss_and_gradients(ragged, frozen, parameters, config, Lora(model.lora.scale))
    return gradients
