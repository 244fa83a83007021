"""The NumPy backend: the formulas as they stand, in float32 or float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from mesp_core.backend import Backend, MemoryReport, TileSizes
from mesp_core.errors import BackendUnavailableError, MespError
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import EagerLoops
from mesp_core.host_matrix import HostMatrix, HostRuntime
from mesp_core.host_words import HostWords
from mesp_core.operations import formula_operations
from mesp_core.stored_matrix import StoredMatrix

_DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


class NumpyBackend(Backend):
    """xp: a namespace with NumPy's functions; another one, such as a recording proxy, can be
    given to watch what the formulas allocate."""

    name = "numpy"
    device = "cpu"

    def __init__(self, xp: Any = np, tiles: TileSizes | None = None) -> None:
        self.xp = xp
        self.tiles = tiles or TileSizes()
        self.loops = EagerLoops()
        self.ops = formula_operations(xp, self.loops).only_arrays(np.ndarray)
        self.words = HostWords(np.uint32, False, np, np.asarray, np.asarray)
        self._runtime = HostRuntime(xp, self.loops, self._new_buffer, self.tiles.weights)

    def _new_buffer(self, shape: tuple[int, int], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        buffer = self.xp.empty(shape, dtype=dtype)
        return buffer, buffer

    def stage(self, *trees: Any) -> None:
        """Nothing to do: NumPy computes at once."""

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32) if array.dtype == np.float16 else array

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> np.ndarray:
        return np.array(array, dtype=None if dtype is None else self.dtype(dtype))

    def dtype(self, name: str) -> Any:
        if name in ("int32", "int64", "uint32"):
            return np.dtype(name)
        if name not in _DTYPES:
            raise MespError(f"NumPy has no {name}; choose from {', '.join(_DTYPES)}")
        return np.dtype(_DTYPES[name])

    def dtype_name(self, array: np.ndarray) -> str:
        return array.dtype.name

    def default_dtype(self, stored: str) -> str:
        return "float64" if stored == "float64" else "float32"

    def frozen(self, stored: StoredMatrix, dtype: str, residency: str) -> FrozenMatrix:
        if residency == "resident":
            stored = stored.resident(np.empty)
        return HostMatrix(stored, np.float64 if dtype == "float64" else np.float32, self._runtime)

    def memory(self) -> MemoryReport:
        return MemoryReport(None, None, None)

    def reset_peak(self) -> None:
        """NumPy keeps no count; the process's footprint is measured instead."""

    def round_stochastic(self, x: np.ndarray, words: np.ndarray, dtype: str) -> np.ndarray:
        raise MespError(f"NumPy has no {dtype} parameters; use --lora-dtype float32")

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}


def backend(device: str | None = None) -> NumpyBackend:
    """The factory registered under ``mesp.backends``."""
    if device not in (None, "cpu"):
        raise BackendUnavailableError(f"NumPy runs on the CPU only, not on {device!r}")
    return NumpyBackend()
