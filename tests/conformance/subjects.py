"""What the formulas are tested on: every namespace with every dtype it has.

One declaration, ``CELLS``: a cell is tested, or it cannot exist and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import array_api_strict
import numpy as np

from mesp_core.formulas import DenseMatrix, EagerLoops, Loops, QuantizedMatrix, words_of
from mesp_core.formulas.activation import FORMULA, Activations
from mesp_core.formulas.loops import arrays_in
from mesp_core.operations import Operations, formula_operations

DTYPES = ("float64", "float32", "float16", "bfloat16")

_STRICT = "array-api-strict has no 16-bit floats"
#: Why a cell cannot exist; None where it is tested.
CELLS: dict[tuple[str, str], str | None] = {
    ("numpy", "float64"): None,
    ("numpy", "float32"): None,
    ("numpy", "float16"): None,
    ("numpy", "bfloat16"): "NumPy has no bfloat16",
    ("strict", "float64"): None,
    ("strict", "float32"): None,
    ("strict", "float16"): _STRICT,
    ("strict", "bfloat16"): _STRICT,
    ("mlx", "float64"): "MLX's float64 exp, log, tanh and cos have the accuracy of float32",
    ("mlx", "float32"): None,
    ("mlx", "float16"): None,
    ("mlx", "bfloat16"): None,
    ("mlx-cpu", "float64"): None,
    ("mlx-cpu", "float32"): None,
    ("mlx-cpu", "float16"): None,
    ("mlx-cpu", "bfloat16"): None,
}
#: Cells that exist but for one component, and why that one cannot.
WITHOUT: dict[tuple[str, str, str], str] = {
    ("mlx-cpu", "float64", "rope_tables"): (
        "MLX's float64 cos and sin have the accuracy of float32; tables are made on the host"
    ),
}


def cells(component: str = "") -> list[tuple[str, str]]:
    """The namespaces and dtypes that a component is tested on."""
    return [
        cell
        for cell, reason in CELLS.items()
        if reason is None and (*cell, component) not in WITHOUT
    ]


@dataclass(frozen=True)
class Library:
    """An array library: its namespace and loops, and how arrays get in and out."""

    xp: Any
    loops: Loops
    put_in: Any
    take_out: Any
    dtype_name: Any
    activations: Activations = FORMULA


@cache
def library(namespace: str) -> Library:
    if namespace == "numpy":
        return Library(np, EagerLoops(), _read_only, np.asarray, lambda a: a.dtype.name)
    if namespace == "strict":
        return Library(
            array_api_strict,
            EagerLoops(),
            lambda values, dtype: array_api_strict.asarray(values.astype(dtype)),
            np.asarray,
            lambda a: np.asarray(a).dtype.name,
        )
    from mesp_mlx.mlx_backend import MlxBackend

    backend = MlxBackend.on("cpu")
    conversions = (backend.from_numpy, backend.to_numpy, backend.dtype_name)
    if namespace == "mlx-cpu":
        from mesp_mlx.activations import host_activations

        return Library(backend.xp, backend.loops, *conversions, host_activations())
    from mesp_mlx.loops import evaluate
    from mesp_mlx.namespace import MlxNamespace

    return Library(MlxNamespace(), EagerLoops(evaluate), *conversions)


def _read_only(values: np.ndarray, dtype: str) -> np.ndarray:
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


@dataclass
class Subject:
    """One cell, and the arrays a test made of it, which no formula may change."""

    namespace: str
    dtype: str
    _made: list[tuple[Any, np.ndarray]] = field(default_factory=list)

    @property
    def wide(self) -> str:
        """The accumulation dtype."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def library(self) -> Library:
        return library(self.namespace)

    @property
    def xp(self) -> Any:
        return self.library.xp

    @property
    def loops(self) -> Loops:
        return self.library.loops

    @property
    def operations(self) -> Operations:
        return formula_operations(self.xp, self.loops, self.library.activations)

    @property
    def words(self) -> Any:
        return words_of(self.xp)

    def array(self, values: np.ndarray, dtype: str | None = None) -> Any:
        """An array of this library, in the cell's dtype unless another is named."""
        array = self.library.put_in(np.asarray(values), dtype or self.dtype)
        self.keep(array)
        return array

    def keep(self, tree: Any) -> None:
        """From now on the arrays in ``tree`` may not change."""
        for array in arrays_in(tree):
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
            self._made.append((array, np.array(self.library.take_out(array))))

    def check_unchanged(self) -> None:
        for array, before in self._made:
            np.testing.assert_array_equal(self.library.take_out(array), before)

    def numpy(self, array: Any) -> np.ndarray:
        return np.asarray(self.library.take_out(array))

    def dtype_name(self, array: Any) -> str:
        return self.library.dtype_name(array)

    def native_dtype(self, name: str) -> Any:
        return getattr(self.xp, name)

    def dense(self, values: np.ndarray) -> DenseMatrix:
        return DenseMatrix(self.array(values), self.xp, self.loops)

    def quantized(
        self, packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int
    ) -> QuantizedMatrix:
        codes = self.codes(packed)
        return QuantizedMatrix(
            codes, self.array(scales), self.array(biases), bits, group, self.xp, self.loops
        )

    def codes(self, packed: np.ndarray) -> Any:
        """uint32 words as the bytes of a little-endian stream."""
        octets = np.ascontiguousarray(packed).astype("<u4").view(np.uint8)
        if self.namespace.startswith("mlx"):
            import mlx.core as mx

            array = mx.array(octets)
        else:
            array = self.library.put_in(octets, "uint8")
        self.keep(array)
        return array
