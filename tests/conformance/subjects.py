"""What is tested: every backend with every dtype it has.

One declaration, ``CELLS``: a cell is tested, or it cannot exist and says why. It drives the tests
and the table in docs/conformance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import array_api_strict
import numpy as np

from mesp_core.backend import Backend
from mesp_core.formulas import DenseMatrix, Loops, QuantizedMatrix, words_of
from mesp_core.formulas.activation import FORMULA, Activations
from mesp_core.formulas.loops import arrays_in
from mesp_core.numpy_backend import NumpyBackend
from mesp_core.operations import Operations, formula_operations

DTYPES = ("float64", "float32", "float16", "bfloat16")

#: What each subject is.
SUBJECTS = {
    "numpy": "the formulas on NumPy",
    "numpy-readonly": "the same on arrays that may not be written",
    "strict": "the formulas on array-api-strict, which has nothing beyond the standard",
    "mlx": "MLX's lazy kernels, as on a GPU",
    "mlx-cpu": "the MLX backend on a CPU",
    "jax": "the JAX backend, operation by operation",
    "jax-jit": "the JAX backend, each component and stage compiled",
    "torch": "the PyTorch backend on a CPU",
}

_STRICT = "array-api-strict has no 16-bit floats"
_NUMPY = "NumPy has no bfloat16"
#: Why a cell cannot exist; None where it is tested.
CELLS: dict[tuple[str, str], str | None] = {
    (subject, dtype): None for subject in SUBJECTS for dtype in DTYPES
}
CELLS |= {
    ("numpy", "bfloat16"): _NUMPY,
    ("numpy-readonly", "bfloat16"): _NUMPY,
    ("strict", "float16"): _STRICT,
    ("strict", "bfloat16"): _STRICT,
    ("mlx", "float64"): "MLX's float64 exp, log, tanh and cos have the accuracy of float32",
}
#: Cells that exist but for one component, and why that one cannot.
WITHOUT: dict[tuple[str, str, str], str] = {
    ("mlx-cpu", "float64", "rope_tables"): (
        "MLX's float64 cos and sin have the accuracy of float32; tables are made on the host"
    ),
}

#: Compiling takes JAX seconds a case, so of the cases of each test these cells run one in so many,
#: each dtype another. The whole matrix: ``pytest tests/conformance --every-case``.
ONE_CASE_IN: dict[tuple[str, str], int] = {
    **{("jax", dtype): 16 for dtype in DTYPES},
    **{("jax-jit", dtype): 24 for dtype in DTYPES},
    ("jax-jit", "float32"): 2,
}


def runs(cell: tuple[str, str], case: int) -> bool:
    """Whether a cell runs the case of this number of a test, unless every case is asked for."""
    share = ONE_CASE_IN.get(cell, 1)
    return case % share == DTYPES.index(cell[1]) * share // len(DTYPES)


def cells(component: str = "") -> list[tuple[str, str]]:
    """The subjects and dtypes that a component is tested on."""
    return [
        cell
        for cell, reason in CELLS.items()
        if reason is None and (*cell, component) not in WITHOUT
    ]


class StrictBackend(NumpyBackend):
    """array-api-strict in NumPy's place."""

    def __init__(self) -> None:
        super().__init__(xp=array_api_strict)
        array_type = type(array_api_strict.zeros(1))
        self.ops = formula_operations(self.xp, self.loops).only_arrays(array_type)
        self.words = words_of(self.xp)

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> Any:
        return array_api_strict.asarray(np.array(array, dtype=dtype))

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def dtype_name(self, array: Any) -> str:
        return np.asarray(array).dtype.name


class ReadOnlyBackend(NumpyBackend):
    """NumPy, its inputs read-only."""

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> np.ndarray:
        made = super().from_numpy(array, dtype)
        made.setflags(write=False)
        return made


@cache
def backend_of(subject: str) -> Backend:
    """The backend behind a subject, on the CPU."""
    if subject in _NUMPY_BACKENDS:
        return _NUMPY_BACKENDS[subject]()
    if subject.startswith("mlx"):
        from mesp_mlx.mlx_backend import BLAS, MlxBackend

        return MlxBackend("cpu", BLAS, native=subject == "mlx")
    if subject.startswith("jax"):
        from mesp_jax.jax_backend import JaxBackend

        return JaxBackend("cpu", compiled_ops=subject == "jax-jit")
    from mesp_torch.torch_backend import TorchBackend

    return TorchBackend.on("cpu")


_NUMPY_BACKENDS: dict[str, Callable[[], Backend]] = {
    "numpy": NumpyBackend,
    "numpy-readonly": ReadOnlyBackend,
    "strict": StrictBackend,
}


def activations_of(subject: str) -> Activations:
    """How the subject's MLP computes its activation."""
    if subject == "torch":
        from mesp_torch.activations import native_activations

        return native_activations()
    if subject in ("mlx", "mlx-cpu"):
        from mesp_mlx.activations import compiled_activations, host_activations

        return compiled_activations() if subject == "mlx" else host_activations()
    return FORMULA


@contextmanager
def settings_of(subject: str, dtype: str) -> Iterator[None]:
    """What the user would have switched on: JAX's 64-bit types; its compiler off for ``jax``."""
    with ExitStack() as stack:
        if subject.startswith("jax"):
            import jax

            stack.enter_context(jax.enable_x64(dtype in ("float64", "int64")))
            if subject == "jax":
                stack.enter_context(jax.disable_jit())
        yield


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
    def backend(self) -> Backend:
        return backend_of(self.namespace)

    @property
    def xp(self) -> Any:
        return self.backend.xp

    @property
    def loops(self) -> Loops:
        return self.backend.loops

    @property
    def ops(self) -> Operations:
        return self.backend.ops

    @property
    def activations(self) -> Activations:
        return activations_of(self.namespace)

    @property
    def words(self) -> Any:
        return self.backend.words

    def run(self, stage: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        """A stage as the backend runs it; operation by operation for ``jax``."""
        if self.namespace == "jax":
            return Backend.run(self.backend, stage, *arguments, **static)
        return self.backend.run(stage, *arguments, **static)

    def array(self, values: np.ndarray, dtype: str | None = None) -> Any:
        """An array of this library, in the cell's dtype unless another is named."""
        array = self.backend.from_numpy(np.asarray(values), dtype or self.dtype)
        self.keep(array)
        return array

    def keep(self, tree: Any) -> None:
        """From now on the arrays in ``tree`` may not change."""
        for array in arrays_in(tree):
            if isinstance(array, np.ndarray) and self.namespace == "numpy-readonly":
                array.setflags(write=False)
            self._made.append((array, np.array(self.numpy(array))))

    def check_unchanged(self) -> None:
        for array, before in self._made:
            np.testing.assert_array_equal(self.numpy(array), before)

    def numpy(self, array: Any) -> np.ndarray:
        return np.asarray(self.backend.to_numpy(array))

    def dtype_name(self, array: Any) -> str:
        return self.backend.dtype_name(array)

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
        elif self.namespace in _NUMPY_BACKENDS:
            array = self.xp.asarray(octets)
        else:
            array = self.backend.from_numpy(octets, "uint8")
        self.keep(array)
        return array


def table() -> str:
    """The matrix as Markdown, for docs/conformance.md."""
    rows = ["| | " + " | ".join(DTYPES) + " |", "| --- " * (1 + len(DTYPES)) + "|"]
    notes: dict[str, int] = {}
    for subject, meaning in SUBJECTS.items():
        entries = []
        for dtype in DTYPES:
            reason = CELLS[subject, dtype]
            without = [
                (part[2], why) for part, why in WITHOUT.items() if part[:2] == (subject, dtype)
            ]
            share = ONE_CASE_IN.get((subject, dtype), 1)
            entry = "n/a" if reason else "every case" if share == 1 else f"1 case in {share}"
            for part, why in without:
                entry += f" but `{part}`"
                reason = why
            if reason:
                entry += f" [{notes.setdefault(reason, len(notes) + 1)}]"
            entries.append(entry)
        rows.append(f"| `{subject}`: {meaning} | " + " | ".join(entries) + " |")
    told = [f"{number}. {reason}." for reason, number in notes.items()]
    return "\n".join([*rows, "", *told])
