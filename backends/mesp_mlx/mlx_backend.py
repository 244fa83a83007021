"""The MLX backend on one device. Only ``mesp_mlx.backend(device)`` imports this module."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import numpy as np

from mesp_core.backend import Backend, MemoryReport, TileSizes
from mesp_core.errors import BackendUnavailableError, MespError
from mesp_core.formulas.dropout import words_of
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import EagerLoops
from mesp_core.host_matrix import HostMatrix, HostRuntime
from mesp_core.host_words import HostWords
from mesp_core.operations import Component, Operations, formula_operations
from mesp_core.stored_matrix import StoredMatrix
from mesp_mlx.blas import Blas, choose_blas

if importlib.util.find_spec("mlx") is None:
    raise BackendUnavailableError(
        "MLX is not installed; pip install 'mesp[mlx]' (or mlx on a Mac, 'mlx[cpu]' on Linux)"
    )
BLAS = choose_blas()

import mlx.core as mx

from mesp_mlx import fast
from mesp_mlx.activations import compiled_activations, host_activations
from mesp_mlx.autodiff import MlxAutodiff
from mesp_mlx.loops import CpuLoops, evaluate
from mesp_mlx.matrices import NativeStreamed, load_native
from mesp_mlx.namespace import CpuNamespace, MlxNamespace, host_view, new_buffer

_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int32",
    "int64",
    "uint32",
    "uint16",
    "bool",
)


class MlxBackend(Backend):
    """native: products by MLX's own (quantised) kernels, lazily, as Apple GPUs want it; otherwise
    weights are decoded tile by tile on the host, as CPUs want it. Chosen by the device."""

    name = "mlx"

    def __init__(
        self, device: str, blas: Blas, native: bool, tiles: TileSizes | None = None
    ) -> None:
        self.device = device
        self.blas = blas
        self.native = native
        self.tiles = tiles or TileSizes()
        if native:
            self.xp: Any = MlxNamespace()
            self.loops = EagerLoops(evaluate)
        else:
            self.xp = CpuNamespace(products=blas.through_numpy)
            self.loops = CpuLoops()
        self.ops = self._operations().only_arrays(mx.array)
        self.words = words_of(self.xp)
        if not native:
            self.words = HostWords(self.words.dtype, False, self.xp, host_view, mx.array)
        self._runtime = HostRuntime(self.xp, self.loops, self._new_buffer, self.tiles.weights)

    @classmethod
    def on(cls, device: str | None) -> MlxBackend:
        """The backend for ``gpu``, ``cpu``, or None for the better of what is there."""
        metal = mx.metal.is_available()
        if device not in (None, "cpu", "gpu"):
            raise BackendUnavailableError(f"MLX has no device {device!r}; choose cpu or gpu")
        if device == "gpu" and not metal:
            raise BackendUnavailableError("MLX has no GPU here: Metal is not available")
        device = device or ("gpu" if metal else "cpu")
        mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)
        return cls(device, BLAS, native=device == "gpu")

    def _operations(self) -> Operations:
        activations = compiled_activations() if self.native else host_activations()
        ops = formula_operations(self.xp, self.loops, activations)
        if not self.native:
            for name in ("lora_linear", "gated_mlp", "linear_cross_entropy", "frozen_linear"):
                getattr(ops, name).reason = (
                    f"the formula, its products by {self.blas.name} ({self.blas.reason}), "
                    "weights decoded by tile on the host"
                )
            ops.attention.reason = (
                "tiles: mx.fast.scaled_dot_product_attention forms [H, T, T] on a CPU and gives "
                "no log-sum-exp"
            )
            ops.rms_norm.reason = "mx.fast.rms_norm is no faster than the formula on a CPU"
            return ops
        ops.attention.reason = (
            "tiles: mx.fast.scaled_dot_product_attention gives no log-sum-exp for the backward pass"
        )
        return ops.with_component(
            Component(
                "rms_norm",
                fast.rms_norm_forward,
                ops.rms_norm.run_backward,
                "mx.fast.rms_norm",
                "one GPU kernel forward; backward by the formula",
            )
        )

    def _new_buffer(self, shape: tuple[int, ...], dtype: Any) -> tuple[mx.array, np.ndarray]:
        return new_buffer(shape, getattr(mx, np.dtype(dtype).name))

    def autodiff(self) -> MlxAutodiff:
        return MlxAutodiff(self.xp, native=self.native, tile_weights=self.tiles.weights)

    def stage(self, *trees: Any) -> None:
        evaluate(*trees)

    def to_numpy(self, array: mx.array) -> np.ndarray:
        if array.dtype in (mx.bfloat16, mx.float16):
            array = array.astype(mx.float32)
        return np.array(array)

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> mx.array:
        name = array.dtype.name if dtype is None else dtype
        target = self.dtype(name)
        if target == mx.float64:
            return mx.array(array, dtype=target)
        if np.issubdtype(array.dtype, np.floating):
            array = array.astype(np.float32, copy=False)
        return mx.array(array).astype(target)

    def dtype(self, name: str) -> Any:
        if name == "float64" and self.native:
            raise MespError("MLX has no float64 on a GPU")
        if name not in _DTYPES:
            raise MespError(f"MLX has no {name}")
        return getattr(mx, "bool_" if name == "bool" else name)

    def dtype_name(self, array: mx.array) -> str:
        return str(array.dtype).removeprefix("mlx.core.")

    def default_dtype(self, stored: str) -> str:
        return stored if self.device == "gpu" else "float32"

    def frozen(self, stored: StoredMatrix, dtype: str, residency: str) -> FrozenMatrix:
        if self.native:
            return NativeStreamed(stored) if residency == "streamed" else load_native(stored)
        if residency == "resident":
            stored = stored.resident(lambda shape, kind: self._new_buffer(shape, kind)[1])
        return HostMatrix(stored, np.float64 if dtype == "float64" else np.float32, self._runtime)

    def memory(self) -> MemoryReport:
        return MemoryReport(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())

    def reset_peak(self) -> None:
        mx.clear_cache()
        mx.reset_peak_memory()

    def release(self) -> None:
        mx.clear_cache()

    def round_stochastic(self, x: mx.array, words: mx.array, dtype: str) -> mx.array:
        if dtype != "bfloat16":
            raise MespError(f"stochastic rounding to {dtype} is not supported, only to bfloat16")
        bits = x.astype(mx.float32).view(mx.uint32)
        noise = mx.bitwise_and(words, mx.array(0xFFFF, dtype=mx.uint32))
        cut = mx.bitwise_and(bits + noise, mx.array(0xFFFF0000, dtype=mx.uint32))
        return cut.view(mx.float32).astype(mx.bfloat16)

    def versions(self) -> dict[str, str]:
        return {"mlx": version("mlx"), "numpy": np.__version__, "blas": self.blas.name}
