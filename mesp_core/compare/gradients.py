"""Gradients kept in a file by one process, and compared with another's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.errors import MespError
from mesp_core.model import Model

#: Values compared at a time.
_CHUNK = 1 << 20


class GradientWriter:
    """Writes the gradients of ``model`` to ``path``, block by block, in the order of its
    parameters: float64 where they are float64, float32 otherwise."""

    def __init__(self, path: Path, model: Model) -> None:
        assert model.lora is not None
        self._to_numpy = model.backend.to_numpy
        self._dtype = np.dtype("<f8" if model.lora.dtype == "float64" else "<f4")
        self._entries: dict[str, tuple[int, int]] = {}
        self._written: set[str] = set()
        count = 0
        for name, value in model.parameters.items():
            size = math.prod(value.shape)
            self._entries[name] = (count * self._dtype.itemsize, size)
            count += size
        self._file = open(path, "wb")  # noqa: SIM115

    def write(self, layer: int, gradients: Mapping[str, Any]) -> None:
        """Takes the gradients of one block."""
        for name, gradient in gradients.items():
            offset, size = self._entries[name]
            values = np.ascontiguousarray(self._to_numpy(gradient), self._dtype)
            if values.size != size:
                raise MespError(f"the gradient of {name} has shape {values.shape}")
            self._file.seek(offset)
            self._file.write(values.data)
            self._written.add(name)

    def close(self) -> dict[str, Any]:
        """What ``GradientFile`` needs to know. Raises MespError when a gradient never came."""
        self._file.close()
        missing = sorted(set(self._entries) - self._written)
        if missing:
            raise MespError(f"no gradient came for {missing[0]}")
        return {"dtype": self._dtype.str, "entries": self._entries}


@dataclass(frozen=True)
class GradientFile:
    """The gradients in ``path``: values of type ``dtype``, (offset, count) by parameter name."""

    path: Path
    dtype: str
    entries: Mapping[str, tuple[int, int]]

    def values(self, name: str, lo: int, hi: int) -> np.ndarray:
        """Values [lo, hi) of one gradient as float64."""
        offset = self.entries[name][0] + lo * np.dtype(self.dtype).itemsize
        found = np.fromfile(self.path, self.dtype, hi - lo, offset=offset)
        if found.size != hi - lo:
            raise MespError(f"{self.path} is shorter than the gradients in it")
        return found.astype(np.float64)


def gradient_quality(reference: GradientFile, other: GradientFile) -> dict[str, float]:
    """How ``other`` compares with the true gradients, over all parameters together.

    gradient_cosine; gradient_sign_agreement: the share of entries with the same sign, those whose
    true gradient is exactly 0 left out; gradient_relative_error: ‖other − true‖ / ‖true‖. NaN where
    the gradients do not say. Sums in float64. Raises MespError where they are of other parameters.
    """
    shapes = [
        {name: size for name, (_, size) in file.entries.items()} for file in (reference, other)
    ]
    if shapes[0] != shapes[1]:
        raise MespError("gradients of different parameters cannot be compared")
    dot = true_square = square = error_square = agreeing = counted = 0.0
    for name, size in shapes[0].items():
        for lo in range(0, size, _CHUNK):
            hi = min(lo + _CHUNK, size)
            true, found = reference.values(name, lo, hi), other.values(name, lo, hi)
            dot += float(true @ found)
            true_square += float(true @ true)
            square += float(found @ found)
            error_square += float((found - true) @ (found - true))
            agreeing += int(np.count_nonzero((np.sign(true) == np.sign(found)) & (true != 0)))
            counted += int(np.count_nonzero(true))
    return {
        "gradient_cosine": _quotient(dot, math.sqrt(true_square) * math.sqrt(square)),
        "gradient_sign_agreement": _quotient(agreeing, counted),
        "gradient_relative_error": _quotient(math.sqrt(error_square), math.sqrt(true_square)),
    }


def _quotient(value: float, by: float) -> float:
    return value / by if by else math.nan
