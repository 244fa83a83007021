"""What a backend is, and how one is found.

A backend is one array library on one device. It registers a factory under the entry-point group
``mesp.backends``; ``mesp_core`` itself imports no framework.
"""

from __future__ import annotations

import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.autodiff import Autodiff
from mesp_core.errors import BackendUnavailableError, UnsupportedError
from mesp_core.formulas.attention import first_key_tiles
from mesp_core.formulas.dropout import Words
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import Loops
from mesp_core.operations import Implementation, Operations
from mesp_core.stored_matrix import StoredMatrix

Array = Any

GROUP = "mesp.backends"


@dataclass(frozen=True)
class MemoryReport:
    """Bytes the framework's allocator holds for arrays, keeps for reuse, and held at most since
    ``reset_peak``; None where the framework does not say."""

    active: int | None
    cache: int | None
    peak: int | None


@dataclass(frozen=True)
class TileSizes:
    """How the work is cut. weights: weights in the dense tiles alive at once; query, key: tokens
    in an attention tile; tokens: tokens in an MLP or vocabulary tile; features: of the MLP in a
    tile, as many as ``weights`` allows when None."""

    weights: int = 1 << 20
    query: int = 128
    key: int = 128
    tokens: int = 1024
    features: int | None = None


class Backend(ABC):
    """One array library on one device.

    xp: the array namespace the formulas compute with. loops: how tiles are walked.
    ops: the components. words: the 32-bit arithmetic of dropout. tiles: sizes of tiles.
    """

    name: str
    device: str
    xp: Any
    loops: Loops
    ops: Operations
    words: Words
    tiles: TileSizes = TileSizes()

    @abstractmethod
    def stage(self, *trees: Any) -> None:
        """Makes the arrays in ``trees`` real, so that what they came from can be freed."""

    @abstractmethod
    def to_numpy(self, array: Array) -> np.ndarray:
        """A NumPy array with the same values; 16-bit floats become float32."""

    @abstractmethod
    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> Array:
        """This backend's array with the values of ``array``, in ``dtype`` (by name)."""

    @abstractmethod
    def dtype(self, name: str) -> Any:
        """The dtype called ``name``; raises MespError where this device has none."""

    @abstractmethod
    def dtype_name(self, array: Array) -> str:
        """float32, bfloat16, …"""

    @abstractmethod
    def default_dtype(self, stored: str) -> str:
        """The dtype that ``dtype="auto"`` means for a checkpoint stored in ``stored``."""

    @abstractmethod
    def frozen(self, stored: StoredMatrix, dtype: str, residency: str) -> FrozenMatrix:
        """A frozen matrix for activations in ``dtype``. residency: ``streamed`` reads the file
        whenever a product needs it, ``resident`` holds the stored form in memory."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What the framework's allocator says."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Starts the peak of ``memory`` anew, with the allocator's cache emptied."""

    @abstractmethod
    def round_stochastic(self, x: Array, words: Array, dtype: str) -> Array:
        """float32 ``x`` rounded to ``dtype`` up or down at random, right on average.

        words: random 32-bit words (of ``words.dtype``), one for each value.
        """

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the framework and of what does its arithmetic."""

    def run(self, stage: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        """One stage of the model: ``block_forward``, ``block_backward``, ``head_loss``, …

        arguments: arrays, weights and plans, which a compiling backend traces; static: what it
        compiles for. The gradient and the input given to ``block_backward`` may be overwritten.
        """
        return stage(*arguments, **static, ops=self.ops, backend=self)

    def bucket(self, tokens: int) -> int:
        """The length a batch of ``tokens`` is padded to; only where shapes must repeat."""
        return tokens

    def first_key_tiles(self, segment: Any, window: int | None) -> Any:
        """``AttentionPlan.first_key_tile``, as this backend's loops want it.

        segment: [N] integers, a NumPy array or one of this backend's (perhaps a traced one).
        """
        if not isinstance(segment, np.ndarray):
            segment = self.to_numpy(segment)
        return first_key_tiles(segment.tolist(), self.tiles.query, self.tiles.key, window)

    def rounds_input_gradients(self, dtype: str) -> bool:
        """Whether products dy W in a model of ``dtype`` are rounded to it, because a 16-bit
        product is that much faster here: they then err by that one rounding."""
        return False

    def autodiff(self) -> Autodiff:
        """The framework's own differentiation, which the baselines are made of.

        Raises UnsupportedError where there is none.
        """
        raise UnsupportedError(f"{self.name} has no automatic differentiation")

    def compiled_bytes(self) -> int | None:
        """Temporaries and outputs of the largest program compiled so far, as its compiler planned
        them; None where nothing is compiled ahead."""
        return None

    def release(self) -> None:
        """Gives back memory the allocator keeps for reuse; called after each block."""

    def explain(self) -> list[Implementation]:
        """Every component: the implementation that ran, how often, and why that one."""
        return self.ops.explain()


def available_backends() -> dict[str, str | None]:
    """Every registered backend: None when it can run here, otherwise the reason it cannot."""
    reasons: dict[str, str | None] = {}
    for name in sorted(_factories()):
        try:
            get_backend(name)
            reasons[name] = None
        except BackendUnavailableError as error:
            reasons[name] = str(error)
    return reasons


def get_backend(name: str | Backend = "auto") -> Backend:
    """The backend called ``name``, optionally ``name:device``; ``auto`` picks a fast one.

    Raises BackendUnavailableError, with the reason and the remedy, when it cannot run here.
    """
    if isinstance(name, Backend):
        return name
    if not isinstance(name, str):
        raise BackendUnavailableError(f"a backend is asked for by its name, not by {name!r}")
    if name == "auto":
        return _automatic()
    kind, _, device = name.partition(":")
    factories = _factories()
    if kind not in factories:
        known = ", ".join(sorted(factories)) or "none"
        raise BackendUnavailableError(f"no backend is called {kind!r}; installed: {known}")
    try:
        return factories[kind]()(device or None)
    except ImportError as error:
        raise BackendUnavailableError(f"backend {kind} failed to import: {error}") from error


def _automatic() -> Backend:
    """The first of ``preference`` that can run here."""
    reasons = []
    for name in preference():
        try:
            return get_backend(name)
        except BackendUnavailableError as error:
            reasons.append(f"{name}: {error}")
    raise BackendUnavailableError("no backend can run here: " + "; ".join(reasons))


def preference() -> list[str]:
    """The registered backends in the order in which ``auto`` tries them: what is fast on this
    kind of machine (docs/backends.md has the figures), then a third party's, NumPy last."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        known = ["mlx", "torch", "jax"]
    elif Path("/proc/driver/nvidia/version").exists():
        # JAX's plain wheel and MLX's run on the CPU only; torch's plain wheel finds the GPU.
        known = ["torch", "jax", "mlx"]
    else:
        known = ["jax", "torch", "mlx"]
    registered = set(_factories())
    others = sorted(registered - {*known, "numpy"})
    return [name for name in (*known, *others, "numpy") if name in registered]


def _factories() -> dict[str, Callable[[], Callable[[str | None], Backend]]]:
    found = {point.name: point.load for point in entry_points(group=GROUP)}
    if "numpy" not in found:
        # A source tree that was never installed has no entry points; NumPy needs none.
        found["numpy"] = _numpy_factory
    return found


def _numpy_factory() -> Callable[[str | None], Backend]:
    from mesp_core.numpy_backend import backend

    return backend
