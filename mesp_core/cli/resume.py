"""Starting from a saved adapter: its configuration, its weights, and the numbers of its files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mesp_core.adapters import read_adapter, read_tensors
from mesp_core.adapters.adapter import CONFIG_FILE
from mesp_core.adapters.peft import from_peft
from mesp_core.errors import MespError
from mesp_core.lora import LoraConfig

#: The reports of the runs in an adapter folder, beside the adapter.
METRICS = "metrics.jsonl"

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
    config = read_adapter(path.parent).config if (path.parent / CONFIG_FILE).exists() else None
    return config, tensors


def configured(
    saved: LoraConfig | None, tensors: Mapping[str, np.ndarray], asked: Mapping[str, Any]
) -> LoraConfig:
    """The configuration to go on with: the saved one, with dropout and dtype as asked.

    asked: fields of LoraConfig, or ``scale``. Raises MespError when rank, alpha, targets or layers
    were asked for and differ from those of the weights.
    """
    if saved is None:
        return changed(LoraConfig(), asked)
    config = changed(saved, asked)
    if config.rank != saved.rank:
        _differs("rank", config.rank, saved.rank)
    if not math.isclose(config.scale, saved.scale, rel_tol=1e-9):
        if "scale" in asked:
            _differs("scale", config.scale, saved.scale)
        _differs("alpha", config.alpha, saved.alpha)
    if set(config.targets) != set(saved.targets):
        _differs("targets", ", ".join(config.targets), ", ".join(saved.targets))
    blocks = len({name.split(".")[2] for name in tensors})
    if "layers" in asked and config.layers != blocks:
        _differs("layers", config.layers, blocks)
    return replace(config, layers=saved.layers)


def changed(config: LoraConfig, asked: Mapping[str, Any]) -> LoraConfig:
    """``config`` with the fields, or the ``scale``, that were asked for."""
    fields = {key: value for key, value in asked.items() if key != "scale"}
    config = replace(config, **fields)
    return config.with_scale(asked["scale"]) if "scale" in asked else config


def _differs(what: str, asked: Any, saved: Any) -> NoReturn:
    raise MespError(f"{what} {asked} asked for, but the adapter to go on with has {saved}")


def last_iteration(folders: Iterable[Path]) -> int:
    """The highest iteration that a numbered checkpoint or a report in the folders tells of, or 0.

    The reports go further where a run ended between two checkpoints.
    """
    numbers = [0]
    for folder in folders:
        for entry in folder.iterdir() if folder.is_dir() else ():
            match = _NUMBERED.fullmatch(entry.name)
            if match:
                numbers.append(int(match[1] or match[2]))
        numbers += _reported(folder / METRICS)
    return max(numbers)


def _reported(path: Path) -> Iterator[int]:
    """The iterations of the reports in a file; whatever else it holds is passed over."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
                number = report.get("iteration") if isinstance(report, dict) else None
                if type(number) is int:
                    yield number
