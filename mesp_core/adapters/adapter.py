"""An adapter as both formats give it, and the checks that they share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.errors import MespError, NonFiniteError, UnsupportedError
from mesp_core.files.safetensors_file import SafetensorsFile
from mesp_core.lora import PROJECTIONS, LoraConfig, parameter_name
from mesp_core.stored_matrix import StoredMatrix

#: The settings of an adapter, in its folder, in both formats.
CONFIG_FILE = "adapter_config.json"

FACTORS = ("lora_a", "lora_b")

_NAME = re.compile(
    rf"model\.layers\.(0|[1-9][0-9]{{0,3}})\.({'|'.join(map(re.escape, PROJECTIONS))})"
    rf"\.({'|'.join(FACTORS)})"
)
_DTYPES = {"F32": "float32", "F16": "float32", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True, eq=False)
class Adapter:
    """A saved adapter, whichever format it had.

    config: rank, scale, targets, layers and dtype that it was saved with. tensors: by our (and
    mlx-lm's) names, ``lora_a`` [in, R] and ``lora_b`` [R, out], float32, or float64 where
    ``config.dtype`` is.
    """

    config: LoraConfig
    tensors: dict[str, np.ndarray]


def read_tensors(path: str | Path) -> tuple[dict[str, np.ndarray], str]:
    """The matrices of a safetensors file under its own names, copied, and their dtype's name.

    The dtype is what LoRA parameters with these values should have: that of the file where all
    tensors agree and float16 is not meant, otherwise float32. bfloat16 is widened to float32.
    Raises MespError for a damaged file or a tensor that is not a matrix of floats.
    """
    path = Path(path)
    file = SafetensorsFile(path)
    if not file.entries:
        raise MespError(f"{path} holds no tensors")
    dtypes = set()
    for name, entry in file.entries.items():
        if entry.kind not in _DTYPES:
            raise UnsupportedError(f"{path}: tensor {name} has type {entry.kind}, not a float")
        if len(entry.shape) != 2:
            raise MespError(f"{path}: tensor {name} has shape {entry.shape}, not a matrix's")
        dtypes.add(_DTYPES[entry.kind])
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    wide = np.float64 if dtype == "float64" else np.float32
    tensors = {
        name: StoredMatrix(values=file.view(name)).decode(dtype=wide) for name in file.entries
    }
    return tensors, dtype


def split_name(name: str, path: Path) -> tuple[int, str, str]:
    """(layer, projection, factor) of one of our names. Raises MespError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise MespError(f"{path}: tensor {name} is not a LoRA factor of a projection we know")
    layer, projection, factor = match.groups()
    return int(layer), projection, factor


def adapted_layers(tensors: Iterable[str], path: Path) -> list[int]:
    """The blocks that the tensors belong to, ascending. Raises MespError for an unknown name."""
    return sorted({split_name(name, path)[0] for name in tensors})


def check_complete(tensors: Mapping[str, np.ndarray], config: LoraConfig, path: Path) -> None:
    """Every block has both factors of every target and nothing else, of the right rank, finite.

    Raises MespError (NonFiniteError for the last) naming the tensor.
    """
    rank = config.rank
    for name, tensor in tensors.items():
        _, projection, factor = split_name(name, path)
        if projection not in config.targets:
            raise MespError(f"{path}: tensor {name} is of a projection its configuration lacks")
        rows, columns = tensor.shape
        wanted = (rows, rank) if factor == "lora_a" else (rank, columns)
        if tensor.shape != wanted or not tensor.size:
            raise MespError(
                f"{path}: tensor {name} has shape {tensor.shape}; rank {rank} needs {wanted}"
            )
        if not np.isfinite(tensor).all():
            raise NonFiniteError(f"{path}: tensor {name} holds NaN or infinite values")
    for given in tensors:
        layer = split_name(given, path)[0]
        for projection in config.targets:
            for factor in FACTORS:
                name = parameter_name(layer, projection, factor)
                if name not in tensors:
                    raise MespError(f"{path} lacks the tensor {name}, though it has {given}")


@dataclass(frozen=True)
class Settings:
    """Typed access to an untrusted adapter_config.json; every error names the file and the key."""

    raw: Mapping[str, Any]
    path: Path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
            raise MespError(f"{self.path}: {key} must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        if not valid or abs(value) > 1e30 or not math.isfinite(value):
            raise MespError(f"{self.path}: {key} must be a finite number, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise MespError(f"{self.path}: {key} must be true or false, not {value!r}")
        return bool(value)

    def names(self, key: str) -> list[str] | None:
        """A list of strings, or None where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise MespError(f"{self.path}: {key} must be a list of names, not {value!r}")
        return value
