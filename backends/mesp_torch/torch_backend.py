"""The PyTorch backend on one device. Only ``mesp_torch.backend(device)`` imports this module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property, wraps
from typing import Any

import numpy as np
import torch

from mesp_core.backend import Backend, MemoryReport, TileSizes
from mesp_core.errors import BackendUnavailableError, MespError
from mesp_core.formulas.dropout import words_of
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import EagerLoops, arrays_in
from mesp_core.host_matrix import HostRuntime
from mesp_core.host_words import HostWords
from mesp_core.operations import (
    Component,
    Implementation,
    Operations,
    formula_operations,
)
from mesp_core.stored_matrix import StoredMatrix
from mesp_torch import fast
from mesp_torch.activations import native_activations
from mesp_torch.autodiff import TorchAutodiff
from mesp_torch.decoding import TorchHostMatrix
from mesp_torch.flash import FlashAttention, unusable
from mesp_torch.matrices import Native, NativeStreamed
from mesp_torch.namespace import TorchNamespace

_DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")

_WITH_WEIGHTS = ("frozen_linear", "gated_mlp", "linear_cross_entropy", "lora_linear")

#: What a CPU that multiplies bfloat16 in hardware has, by torch's names.
_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "arm_bf16", "bf16")


class TorchBackend(Backend):
    """native: weights are multiplied by torch in their stored form on the device, as GPUs want
    it; otherwise they are decoded tile by tile on the host, as CPUs want it. Chosen by the device.

    bf16_products: whether a CPU multiplies dense bfloat16 weights of a bfloat16 model in
    bfloat16 for input gradients; None where it has instructions for that. (Not by timing: the
    same run must give the same bits.)
    """

    name = "torch"

    def __init__(
        self,
        device: str,
        *,
        native: bool,
        bf16_products: bool | None = None,
        tiles: TileSizes | None = None,
    ) -> None:
        self.device = device
        self.native = native
        self.tiles = tiles or TileSizes()
        self.xp: Any = TorchNamespace(torch.device(device))
        self.loops = EagerLoops()
        self.words = words_of(self.xp, masked=True)
        if device == "cpu":
            self.words = HostWords(torch.int64, True, self.xp, _to_words, _from_words)
        self.ops = self._operations().only_arrays(torch.Tensor)
        self._device = torch.device(device)
        self._bf16_products = bf16_products
        self._weights_met: set[str] = set()
        self._runtime = HostRuntime(self.xp, self.loops, _new_buffer, self.tiles.weights)

    @classmethod
    def on(cls, device: str | None) -> TorchBackend:
        """The backend for a device by torch's name, or None for the best of what is there."""
        if device is None:
            device = next((kind for kind in ("cuda", "mps") if _absence(kind) is None), "cpu")
        reason = _absence(device)
        if reason is not None:
            raise BackendUnavailableError(reason)
        return cls(device, native=device != "cpu")

    def _operations(self) -> Operations:
        ops = formula_operations(self.xp, self.loops, native_activations())
        for component in self._in_place():
            ops = ops.with_component(component)
        ops = Operations(
            **{item.name: _plain(getattr(ops, item.name), self.device) for item in fields(ops)}
        )
        reason = unusable(torch.device(self.device))
        if reason is None:
            ops = ops.with_component(FlashAttention.instead_of(ops.attention))
        else:
            ops.attention.reason = f"tiles: {reason}"
        for name in ("frozen_linear", "linear_cross_entropy"):
            getattr(ops, name).reason = "products by torch.matmul"
        ops.gated_mlp.reason = "products by torch.matmul, SiLU and its slope by torch's kernels"
        ops.rope.reason = "torch has no kernel for it; written in place it saves 0.6 % of a step"
        ops.embedding.reason = "the rows named are read from the file, no others"
        return ops

    def _in_place(self) -> list[Component]:
        linear, name = fast.LoraLinear(self.xp), "in place"
        return [
            Component(
                "rms_norm",
                fast.rms_norm_forward,
                fast.rms_norm_backward,
                name,
                "half the passes of the formula; torch has no fused backward pass on a CPU, and "
                "its fused forward pass is no faster than this",
            ),
            Component(
                "lora_linear",
                linear.forward,
                linear.backward,
                name,
                "products by torch.matmul, the adapter's added in place by addmm_",
            ),
        ]

    def run(self, stage: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        with torch.no_grad():
            return super().run(stage, *arguments, **static)

    def autodiff(self) -> TorchAutodiff:
        return TorchAutodiff(self.xp)

    def stage(self, *trees: Any) -> None:
        """torch computes at once. What was computed from a tensor that requires gradients, such
        as a parameter of the caller's, is cut off from its graph."""
        for array in arrays_in(list(trees)):
            if array.grad_fn is not None:
                array.detach_()

    def to_numpy(self, array: torch.Tensor) -> np.ndarray:
        array = array.detach()
        if array.dtype in (torch.bfloat16, torch.float16):
            array = array.float()
        return np.array(array.cpu().numpy())

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
        name = array.dtype.name if dtype is None else dtype
        return torch.tensor(array).to(device=self._device, dtype=self.dtype(name))

    def dtype(self, name: str) -> Any:
        if name not in _DTYPES or (name == "float64" and self.device == "mps"):
            raise MespError(f"torch on {self.device} has no {name}")
        return getattr(torch, name)

    def dtype_name(self, array: torch.Tensor) -> str:
        return str(array.dtype).removeprefix("torch.")

    def default_dtype(self, stored: str) -> str:
        if self.device == "cpu":
            return "float64" if stored == "float64" else "float32"
        return "float32" if stored == "float64" and self.device == "mps" else stored

    def frozen(self, stored: StoredMatrix, dtype: str, residency: str) -> FrozenMatrix:
        wide = "float64" if dtype == "float64" else "float32"
        if self.native:
            how = self._how(wide, torch.bfloat16 if dtype == "bfloat16" else None)
            self._weights_met.add("multiplied on the device in their stored form")
            return NativeStreamed(stored, how) if residency == "streamed" else how.load(stored)
        if residency == "resident":
            stored = stored.resident(np.empty)
        if not stored.quantized and stored.row_order is None:
            if stored.dtype == wide:
                self._weights_met.add(f"{wide} ones multiplied where they lie")
                return self._how(wide).load(stored)
            if stored.dtype == dtype == "bfloat16" and self.multiplies_bf16:
                self._weights_met.add(
                    "bfloat16 ones multiplied in bfloat16 for input gradients, which is faster"
                )
                return self._how(wide, torch.bfloat16).load(stored)
        kind = f"{stored.bits}-bit" if stored.quantized else stored.dtype
        self._weights_met.add(f"{kind} ones decoded to {wide} by tile")
        return TorchHostMatrix(stored, getattr(np, wide), self._runtime)

    def _how(self, wide: str, product: torch.dtype | None = None) -> Native:
        """Forward products of 16-bit factors only on CUDA, which gives the sum in float32. A
        result rounded to 16 bits in each recomputed activation took some gradients of tiny models
        beyond the error of an all-bfloat16 model; one rounded in input gradients alone does not.
        """
        forward = product if self._device.type == "cuda" else None
        tiles = self.tiles.weights
        return Native(self._device, wide, forward, product, tiles, self.xp, self.loops)

    def explain(self) -> list[Implementation]:
        weights = "; ".join(sorted(self._weights_met)) or "none met yet"
        return [
            replace(row, reason=f"{row.reason}; weights: {weights}")
            if row.component in _WITH_WEIGHTS
            else row
            for row in self.ops.explain()
        ]

    @cached_property
    def multiplies_bf16(self) -> bool:
        """Whether this CPU multiplies bfloat16 in hardware, some 2.5 times as fast as float32."""
        if self._bf16_products is not None:
            return self._bf16_products
        has = torch.cpu.get_capabilities()
        return any(has.get(name, False) for name in _BF16_INSTRUCTIONS)

    def rounds_input_gradients(self, dtype: str) -> bool:
        on_cuda = self._device.type == "cuda"
        return dtype == "bfloat16" and not on_cuda and (self.native or self.multiplies_bf16)

    def memory(self) -> MemoryReport:
        if self._device.type == "cuda":
            active = torch.cuda.memory_allocated(self._device)
            cache = torch.cuda.memory_reserved(self._device) - active
            return MemoryReport(active, cache, torch.cuda.max_memory_allocated(self._device))
        if self._device.type == "mps":
            active = torch.mps.current_allocated_memory()
            return MemoryReport(active, torch.mps.driver_allocated_memory() - active, None)
        return MemoryReport(None, None, None)

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "mps":
            torch.mps.empty_cache()

    def round_stochastic(self, x: torch.Tensor, words: torch.Tensor, dtype: str) -> torch.Tensor:
        if dtype != "bfloat16":
            raise MespError(f"stochastic rounding to {dtype} is not supported, only to bfloat16")
        bits = x.detach().to(torch.float32).view(torch.int32).to(torch.int64)
        cut = (bits + (words & 0xFFFF)) & 0xFFFF0000
        # The same 32 bits as a signed number.
        cut = (cut ^ 0x80000000) - 0x80000000
        return cut.to(torch.int32).view(torch.float32).to(torch.bfloat16)

    def versions(self) -> dict[str, str]:
        blas = "MKL" if torch.backends.mkl.is_available() else "torch's own"
        found = {"torch": torch.__version__, "numpy": np.__version__, "blas": blas}
        if self._device.type == "cuda":
            found["cuda"] = str(torch.version.cuda)
            found["gpu"] = torch.cuda.get_device_name(self._device)
        return found


def _absence(device: str) -> str | None:
    """Why ``device`` cannot be used; None when it can."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdecimal())):
        return f"torch has no device {device!r} here; choose cpu, cuda, cuda:N or mps"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA GPU; use torch:cpu, or a CUDA build"
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        return f"there is no {device}: torch finds {torch.cuda.device_count()} CUDA GPUs"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "torch finds no MPS device, which needs macOS on Apple silicon; use torch:cpu"
    return None


def _plain(component: Component, device: str) -> Component:
    return replace(
        component,
        run_forward=_computing(component.run_forward, device),
        run_backward=_computing(component.run_backward, device),
    )


def _computing(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """``function`` with autograd off, and autocast, whose casts the formulas do not know."""
    kind = device.partition(":")[0]

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            return function(*args, **options)

    return call


def _to_words(array: torch.Tensor) -> np.ndarray:
    return array.numpy().astype(np.uint32)


def _from_words(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.int64))


def _new_buffer(shape: tuple[int, int], dtype: Any) -> tuple[torch.Tensor, np.ndarray]:
    view = np.empty(shape, dtype)
    return torch.from_numpy(view), view
