"""The tiny model of the training tests, and models opened on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesp_core import LoraConfig, Model, load_model
from tests.tiny import write_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def open_tiny(tiny: Path) -> Iterator[Callable[..., Model]]:
    """Opens the tiny model with LoRA of rank 3; ``filled`` gives ``lora_b`` random values, too."""
    opened = []

    def open_model(backend: str = "numpy", *, filled: bool = False, **lora: Any) -> Model:
        config = LoraConfig(**({"rank": 3, "alpha": 6.0} | lora))
        dtype = "float64" if config.dtype == "float64" else "float32"
        model = load_model(tiny, backend=backend, lora=config, dtype=dtype)
        if filled:
            generator = np.random.default_rng(11)
            for name, array in model.parameters.items():
                values = generator.normal(scale=0.2, size=array.shape)
                model.parameters[name] = model.backend.from_numpy(values, config.dtype)
        opened.append(model)
        return model

    yield open_model
    for model in opened:
        model.close()
