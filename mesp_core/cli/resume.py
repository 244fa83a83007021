"""Starting from a saved adapter: its configuration, its weights, and the numbers of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.adapters import read_adapter, read_tensors
from mesp_core.adapters.peft import from_peft
from mesp_core.errors import MespError
from mesp_core.lora import LoraConfig
from mesp_core.model import Model

_CONFIG = "adapter_config.json"
_NUMBERED = re.compile(r"(?:(\d{7,})_adapters\.safetensors|checkpoint-(\d+))")


def saved_adapter(path: Path) -> tuple[LoraConfig | None, dict[str, np.ndarray]]:
    """Configuration and weights of an adapter folder, or of one safetensors file.

    A file takes the configuration beside it; without one there is None.
    """
    if path.is_dir():
        adapter = read_adapter(path)
        return adapter.config, adapter.tensors
    if not path.exists():
        raise MespError(f"no adapter at {path}")
    tensors, _ = read_tensors(path)
    if all(name.startswith("base_model.") for name in tensors):
        tensors = from_peft(tensors, path)
    config = read_adapter(path.parent).config if (path.parent / _CONFIG).exists() else None
    return config, tensors


def merged(saved: LoraConfig | None, asked: Mapping[str, Any]) -> LoraConfig:
    """The configuration to go on with: the saved one, with dropout and dtype as asked.

    Raises MespError when rank, alpha, targets or layers were asked for and differ from those of
    the weights.
    """
    if saved is None:
        return LoraConfig(**asked)
    config = replace(saved, **asked)
    for field in ("rank", "alpha", "layers"):
        if getattr(config, field) != getattr(saved, field):
            raise MespError(
                f"{field} {getattr(config, field)} asked for, but the adapter to go on with has "
                f"{getattr(saved, field)}"
            )
    if set(config.targets) != set(saved.targets):
        raise MespError(
            f"the adapter to go on with has the targets {', '.join(saved.targets)}, not "
            f"{', '.join(config.targets)}"
        )
    return config


def assign(model: Model, tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Sets every parameter of the model from ``tensors``, all or none.

    Raises MespError naming a tensor that is missing, unknown, not finite or of another shape.
    """
    assert model.lora is not None
    for name, tensor in tensors.items():
        if name not in model.parameters:
            raise MespError(f"tensor {name} of {path} is not a parameter of this model")
        wanted = tuple(model.parameters[name].shape)
        if tensor.shape != wanted:
            raise MespError(f"tensor {name} of {path} has shape {tensor.shape}, not {wanted}")
        if not np.isfinite(tensor).all():
            raise MespError(f"tensor {name} of {path} holds NaN or infinite values")
    for name in model.parameters:
        if name not in tensors:
            raise MespError(f"{path} lacks the tensor {name}")
    dtype = model.lora.dtype
    model.parameters |= {n: model.backend.from_numpy(t, dtype) for n, t in tensors.items()}


def last_number(folders: Iterable[Path]) -> int:
    """The highest iteration of a numbered checkpoint in the folders, or 0."""
    numbers = [0]
    for folder in folders:
        for entry in folder.iterdir() if folder.is_dir() else ():
            match = _NUMBERED.fullmatch(entry.name)
            if match:
                numbers.append(int(match[1] or match[2]))
    return max(numbers)
