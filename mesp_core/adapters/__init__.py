"""Saved adapters, in the folders that mlx-lm and PEFT read and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from mesp_core.adapters import mlx_lm, peft
from mesp_core.adapters.adapter import CONFIG_FILE, Adapter, adapted_layers, read_tensors
from mesp_core.errors import MespError, NonFiniteError, UnsupportedError
from mesp_core.files.mapped_file import read_json
from mesp_core.files.safetensors_writer import (
    KINDS,
    encode,
    json_writer,
    replace_files,
    write_safetensors,
)
from mesp_core.lora import LoraConfig

if TYPE_CHECKING:
    from mesp_core.model import Model

__all__ = [
    "FORMATS",
    "Adapter",
    "adapter_files",
    "adapter_tensors",
    "assign",
    "load_adapter",
    "read_adapter",
    "read_tensors",
    "save_adapter",
    "save_tensors",
]

#: The file of the tensors in each format.
_TENSORS = {"mlx-lm": mlx_lm.FILE, "peft": peft.FILE}

FORMATS = tuple(_TENSORS)


def adapter_tensors(model: Model) -> dict[str, np.ndarray]:
    """The LoRA parameters as NumPy: ``lora_a`` [in, R], ``lora_b`` [R, out]; bfloat16 widened."""
    return {name: model.backend.to_numpy(array) for name, array in model.parameters.items()}


def adapter_files(format: str) -> tuple[str, ...]:
    """The names of the files that ``save_adapter`` writes."""
    return (_TENSORS[format], CONFIG_FILE)


def save_adapter(
    model: Model, folder: str | Path, format: str = "mlx-lm", base_name: str | None = None
) -> None:
    """Write the model's LoRA parameters and configuration as an adapter folder.

    format: ``mlx-lm`` or ``peft``. base_name: the base model's name or folder, noted for people and
    for PEFT's Auto classes; by default the folder the model was loaded from, where it was one.
    float32, or bfloat16 where the LoRA dtype is. An adapter already in the folder, of either
    format, is replaced only once the new one is completely written. Raises MespError for a model
    without LoRA, an unknown format or a folder that cannot be written, NonFiniteError for a
    parameter that is not finite.
    """
    lora = _lora_of(model)
    if format not in FORMATS:
        raise MespError(f"adapter format must be one of {', '.join(FORMATS)}, not {format!r}")
    if base_name is None and model.checkpoint.path.is_dir():
        base_name = str(model.checkpoint.path)
    tensors = adapter_tensors(model)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"not saved: parameter {name} holds NaN or infinite values")
    if format == "peft":
        tensors, metadata = peft.to_peft(tensors), peft.METADATA
        config = peft.config_json(lora, model.config.layers, base_name)
    else:
        metadata, config = mlx_lm.METADATA, mlx_lm.config_json(lora, base_name)
    writers = {
        _TENSORS[format]: _tensor_writer(tensors, lora.stored_dtype, metadata),
        CONFIG_FILE: json_writer(config),
    }
    replace_files(Path(folder), writers)
    for name in _TENSORS.values():
        # The new configuration would misdescribe the tensors of the other format.
        if name != _TENSORS[format] and (Path(folder) / name).is_file():
            (Path(folder) / name).unlink()


def save_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Write tensors as one safetensors file, whole or not at all, in ``dtype``.

    For numbered checkpoints, ``{iteration:07d}_adapters.safetensors``, in mlx-lm's naming.
    dtype: float32 or bfloat16 (float16 too). Raises MespError where it cannot be written.
    """
    path = Path(path)
    if dtype not in KINDS:
        raise MespError(f"tensors are saved in one of {', '.join(KINDS)}, not {dtype!r}")
    replace_files(path.parent, {path.name: _tensor_writer(tensors, dtype, mlx_lm.METADATA)})


def read_adapter(folder: str | Path) -> Adapter:
    """The adapter in a folder of mlx-lm's or PEFT's format, told apart by adapter_config.json.

    Raises MespError naming the file, the key or the tensor that is missing or wrong, and
    UnsupportedError naming an option that this library lacks.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MespError(f"no adapter folder at {folder}")
    if not (folder / CONFIG_FILE).exists():
        raise MespError(f"{folder} has no {CONFIG_FILE}; is it an adapter folder?")
    raw = read_json(folder / CONFIG_FILE)
    if "peft_type" in raw:
        return peft.read(folder, raw)
    if "lora_parameters" in raw or "fine_tune_type" in raw:
        return mlx_lm.read(folder, raw)
    raise UnsupportedError(
        f"{folder / CONFIG_FILE} is neither mlx-lm's (lora_parameters) nor PEFT's (peft_type)"
    )


def load_adapter(model: Model, folder: str | Path) -> None:
    """Set the model's LoRA parameters to those of a saved adapter, all of them or none.

    The adapter must have the rank, scale, targets and layers of ``model.lora``: for another, load
    the model with ``load_model(..., adapter=folder)``. Its dropout does not matter here.
    Raises MespError naming the tensor that is missing, unknown or of another shape.
    """
    lora = _lora_of(model)
    adapter = read_adapter(folder)
    _check_blocks(adapter, model.config.layers, Path(folder))
    difference = _difference(lora, adapter.config, model.config.layers)
    if difference is not None:
        what, ours, theirs = difference
        raise MespError(
            f"the adapter in {folder} has {what} {theirs}, the model has {ours}; load the model "
            f"with adapter={str(folder)!r} (its own rank, scale and targets then apply)"
        )
    assign(model, adapter.tensors, Path(folder))


def assign(model: Model, tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Set every LoRA parameter of the model from ``tensors`` of ``path``, all or none.

    Raises MespError naming a tensor that is missing, unknown or of another shape, NonFiniteError
    for one that is not finite.
    """
    lora = _lora_of(model)
    for name, tensor in tensors.items():
        if name not in model.parameters:
            raise MespError(f"tensor {name} of {path} is not a parameter of the model")
        wanted = tuple(model.parameters[name].shape)
        if tensor.shape != wanted:
            raise MespError(
                f"tensor {name} of {path} has shape {tensor.shape}, the model needs {wanted}"
            )
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"tensor {name} of {path} holds NaN or infinite values")
    for name in model.parameters:
        if name not in tensors:
            raise MespError(f"{path} lacks the tensor {name}")
    model.parameters |= {n: model.backend.from_numpy(t, lora.dtype) for n, t in tensors.items()}


def _tensor_writer(
    tensors: Mapping[str, np.ndarray], dtype: str, metadata: Mapping[str, str]
) -> Callable[[BinaryIO], None]:
    kind = KINDS[dtype]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def write(file: BinaryIO) -> None:
        write_safetensors(file, shapes, kind, lambda name: [encode(tensors[name], kind)], metadata)

    return write


def _lora_of(model: Model) -> LoraConfig:
    if model.lora is None:
        raise MespError("the model has no LoRA parameters; load it with lora= or adapter=")
    return model.lora


def _check_blocks(adapter: Adapter, layers: int, folder: Path) -> None:
    """The adapter's blocks are the last ones of a model with ``layers`` blocks."""
    present = adapted_layers(adapter.tensors, folder)
    if present[-1] >= layers:
        name = next(n for n in adapter.tensors if n.startswith(f"model.layers.{present[-1]}."))
        raise MespError(f"tensor {name} of {folder} is of a block beyond the model's {layers}")
    wanted = list(adapter.config.adapted_layers(layers))
    if len(present) == len(wanted) and present != wanted:
        raise UnsupportedError(
            f"the adapter in {folder} adapts blocks {present} of {layers}; only the last blocks of "
            "a model can be adapted"
        )


def _difference(ours: LoraConfig, theirs: LoraConfig, layers: int) -> tuple[str, Any, Any] | None:
    """(what, ours, theirs) of the first thing that makes another function or other parameters."""
    if ours.rank != theirs.rank:
        return "rank", ours.rank, theirs.rank
    if not math.isclose(ours.scale, theirs.scale, rel_tol=1e-9):
        return "scale", ours.scale, theirs.scale
    if set(ours.targets) != set(theirs.targets):
        return "targets", ", ".join(ours.targets), ", ".join(theirs.targets)
    mine, others = (list(config.adapted_layers(layers)) for config in (ours, theirs))
    return None if mine == others else ("adapted blocks", mine, others)
