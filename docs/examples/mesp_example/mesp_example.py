"""The smallest backend. Read NumPy as your own array library; docs/check.md explains the parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from mesp_core.backend import Backend, MemoryReport
from mesp_core.errors import BackendUnavailableError, MespError
from mesp_core.formulas import DenseMatrix, EagerLoops, words_of
from mesp_core.operations import formula_operations
from mesp_core.stored_matrix import StoredMatrix

DTYPES = ("float64", "float32", "float16", "int32", "int64", "uint32")


class ExampleBackend(Backend):
    name, device = "example", "cpu"

    def __init__(self) -> None:
        self.xp = np
        self.loops = EagerLoops()
        self.ops = formula_operations(self.xp, self.loops).only_arrays(np.ndarray)
        self.words = words_of(self.xp)

    @classmethod
    def on(cls, device: str | None) -> ExampleBackend:
        if device not in (None, "cpu"):
            raise BackendUnavailableError(f"the example runs on the CPU, not on {device!r}")
        return cls()

    def stage(self, *trees: Any) -> None:
        pass

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32) if array.dtype == np.float16 else array

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> np.ndarray:
        return np.array(array, self.dtype(dtype or array.dtype.name))

    def dtype(self, name: str) -> np.dtype:
        if name not in DTYPES:
            raise MespError(f"the example has no {name}")
        return np.dtype(name)

    def dtype_name(self, array: np.ndarray) -> str:
        return array.dtype.name

    def default_dtype(self, stored: str) -> str:
        return "float32"

    def frozen(self, stored: StoredMatrix, dtype: str, residency: str) -> DenseMatrix:
        wide = np.float64 if dtype == "float64" else np.float32
        return DenseMatrix(self.from_numpy(stored.decode(dtype=wide)), self.xp, self.loops)

    def memory(self) -> MemoryReport:
        return MemoryReport(None, None, None)

    def reset_peak(self) -> None:
        pass

    def round_stochastic(self, x: np.ndarray, words: np.ndarray, dtype: str) -> np.ndarray:
        raise MespError(f"the example has no {dtype} parameters")

    def versions(self) -> dict[str, str]:
        return {"example": "0.1.0"}
