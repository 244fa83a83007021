"""Tiny models whose LoRA parameters are the same, and not zero, on every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import mesp_core as mesp
from mesp_core.backend import Backend
from mesp_core.lora import PROJECTIONS, LoraConfig

QUANTIZED = {"hidden": 64, "ffn": 192, "head_dim": 16, "heads": 4, "kv_heads": 2}
SEQUENCES = [[3, 1, 4, 1, 5, 9], [2, 6, 5], [35, 8, 9, 7, 9, 3, 2, 3]]


def opened(
    folder: Path,
    backend: Backend,
    *,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    targets: tuple[str, ...] = PROJECTIONS,
    **options: Any,
) -> mesp.Model:
    wide = "float64" if options.get("dtype") == "float64" else "float32"
    lora = LoraConfig(rank=3, alpha=7.0, dtype=wide, dropout=dropout, targets=targets)
    model = mesp.load_model(folder, backend=backend, lora=lora, **options)
    windows = (window,) * model.config.layers
    model.config = replace(model.config, windows=windows, softcap=softcap)
    generator = np.random.default_rng(4)
    for name, value in model.parameters.items():
        noise = generator.normal(size=tuple(value.shape)) * (0.1 if name.endswith("_b") else 0.3)
        model.parameters[name] = backend.from_numpy(noise.astype(np.float32), wide)
    return model


def gradients(model: mesp.Model, sequences: list[list[int]] = SEQUENCES) -> dict[str, Any]:
    """Loss and gradients of a batch as NumPy arrays, by name."""
    result = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(sequences))
    arrays = {name: model.backend.to_numpy(g) for name, g in result.gradients.items()}
    return {"loss": np.asarray(result.loss), **arrays}
