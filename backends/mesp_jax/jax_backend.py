"""The JAX backend on one device. Only ``mesp_jax.backend(device)`` and the bridge import this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mesp_core.backend import Backend, MemoryReport, TileSizes
from mesp_core.block import block_backward
from mesp_core.errors import BackendUnavailableError, MespError
from mesp_core.formulas.attention import first_key_tiles
from mesp_core.formulas.dropout import words_of
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import arrays_in, tile_count
from mesp_core.plain_block import plain_block_backward
from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.autodiff import JaxAutodiff
from mesp_jax.components import operations
from mesp_jax.loops import LOOPS
from mesp_jax.namespace import XP
from mesp_jax.programs import Program, Programs
from mesp_jax.pytrees import register_pytrees
from mesp_jax.streamed import StreamedMatrix, interruptions, load_streamed

_FLOATS = ("float32", "float16", "bfloat16")
_INTEGERS = ("int32", "uint32", "uint8", "int8", "uint16", "bool")
_WIDE = ("float64", "int64")


class JaxBackend(Backend):
    """device: ``cpu``, ``gpu``, ``tpu``, perhaps with ``:number``; None for JAX's default.

    compiled_ops: whether a component called outside of a stage is compiled for its signature, or
    runs operation by operation. Stages are always compiled, once for each shape.
    Raises BackendUnavailableError where JAX has no such device.
    """

    name = "jax"

    def __init__(
        self,
        device: str | None = None,
        *,
        tiles: TileSizes | None = None,
        compiled_ops: bool = True,
    ) -> None:
        register_pytrees()
        self.jax_device = _find_device(device)
        self.device = device or self.jax_device.platform
        self.tiles = tiles or TileSizes()
        self.xp: Any = XP
        self.loops = LOOPS
        self.words = words_of(XP)
        self._programs = Programs()
        self.ops = operations(self._programs if compiled_ops else None)
        self._programs.components = tuple(
            getattr(self.ops, row.component) for row in self.ops.explain()
        )

    def run(self, stage: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        """Compiles ``stage`` for the shapes of ``arguments`` and for ``static``, once, and runs it.

        Streamed weights are loaded before and freed after. On a CPU, or after loading weights, the
        result is waited for, so that the next stage's weights do not join this one's.
        """
        arguments, streamed = load_streamed(arguments)
        with interruptions():
            if stage in (block_backward, plain_block_backward):
                out = self._block_backward(stage, arguments, static)
            else:
                bound = _BoundStage(stage, self)
                out = self._programs.run(bound, arguments, static, name=stage.__name__)
            if streamed or self.jax_device.platform == "cpu":
                jax.block_until_ready(out)
        return out

    def _block_backward(
        self, stage: Callable[..., Any], arguments: tuple[Any, ...], static: dict[str, Any]
    ) -> Any:
        """One program for every block. Only the lowest needs no dx, and to compile another without
        it costs more than to compute and drop it. dx takes the memory of dout."""
        wanted = static.pop("input_gradient", True)
        if stage is plain_block_backward:
            # The head's gradient is wider than a block's, and would need a program of its own.
            dout, x, *others = arguments
            arguments = (dout.astype(x.dtype), x, *others)
        bound = _BoundStage(stage, self)
        dx, gradients = self._programs.run(bound, arguments, static, name=stage.__name__, donate=1)
        return (dx if wanted else None), gradients

    def compiled(self, stage: str | None = None) -> list[Program]:
        """What has been compiled so far, or only the programs of one stage or component
        (``block_forward``, ``attention_backward``, …): one for each signature."""
        return [p for p in self._programs.all() if stage is None or p.name == stage]

    def compiled_bytes(self) -> int | None:
        return max((program.planned_bytes for program in self._programs.all()), default=None)

    def bucket(self, tokens: int) -> int:
        """Few different shapes, and few tokens wasted: multiples of 32 up to one tile, of 128 up
        to 1024, of 512 above."""
        step = 32 if tokens <= 128 else 128 if tokens <= 1024 else 512
        return tile_count(tokens, step) * step

    def first_key_tiles(self, segment: Any, window: int | None) -> jax.Array | np.ndarray:
        """int32 [query tiles], an array, so that other boundaries are other data and no other
        program. segment: [N], NumPy's or JAX's, traced or not."""
        query, key = self.tiles.query, self.tiles.key
        if isinstance(segment, np.ndarray):
            tiles = first_key_tiles(segment.tolist(), query, key, window)
            return np.asarray(tiles, np.int32)
        start = jnp.arange(0, segment.shape[0], query, dtype=jnp.int32)
        earliest = jnp.searchsorted(segment, segment[start]).astype(jnp.int32)
        if window is not None:
            earliest = jnp.maximum(earliest, start - window + 1)
        return earliest // key

    def autodiff(self) -> JaxAutodiff:
        return JaxAutodiff()

    def stage(self, *trees: Any) -> None:
        """Waits for the arrays in ``trees``; inside a program there is nothing to wait for."""
        for array in arrays_in(trees):
            if isinstance(array, jax.Array) and not isinstance(array, Tracer):
                array.block_until_ready()

    def to_numpy(self, array: jax.Array) -> np.ndarray:
        if array.dtype in (jnp.bfloat16, jnp.float16):
            array = array.astype(jnp.float32)
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray, dtype: str | None = None) -> jax.Array:
        array = np.asarray(array)
        target = self.dtype(array.dtype.name if dtype is None else dtype)
        if target.itemsize == 2 and array.dtype == np.float64:
            # Rounded as other backends do, by way of float32.
            array = array.astype(np.float32)
        # A copy, as JAX may read the memory of what it is given where it lies.
        return jax.device_put(np.array(array, dtype=target), self.jax_device)

    def dtype(self, name: str) -> np.dtype:
        if name in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise MespError(
                f'JAX has no {name} unless 64-bit types are on: jax.config.update("jax_enable_x64",'
                " True) before the first array, or JAX_ENABLE_X64=1 in the environment"
            )
        if name not in (*_FLOATS, *_INTEGERS, *_WIDE):
            raise MespError(f"the JAX backend has no {name}")
        return jnp.dtype(name)

    def dtype_name(self, array: jax.Array) -> str:
        return array.dtype.name

    def default_dtype(self, stored: str) -> str:
        if self.jax_device.platform != "cpu":
            return "float32" if stored == "float64" else stored
        return "float32"

    def frozen(self, stored: StoredMatrix, dtype: str, residency: str) -> FrozenMatrix:
        wide = self.dtype("float64" if dtype == "float64" else "float32").name
        on_host = self.jax_device.platform == "cpu"
        matrix = StreamedMatrix(stored, wide, self.tiles.weights, self._put, fetched=on_host)
        if residency == "streamed":
            return matrix
        # Bytes of its own: JAX may read a mapped file's where they lie.
        return replace(matrix, stored=stored.resident(np.empty)).load()

    def _put(self, arrays: list[np.ndarray]) -> list[Any]:
        """The arrays on the device, in one transfer; on a CPU read in place where they allow."""
        return jax.device_put(arrays, self.jax_device, may_alias=True)

    def memory(self) -> MemoryReport:
        stats = self.jax_device.memory_stats() or {}
        return MemoryReport(stats.get("bytes_in_use"), None, stats.get("peak_bytes_in_use"))

    def reset_peak(self) -> None:
        """JAX cannot start its peak anew."""

    def round_stochastic(self, x: jax.Array, words: jax.Array, dtype: str) -> jax.Array:
        if dtype != "bfloat16":
            raise MespError(f"stochastic rounding to {dtype} is not supported, only to bfloat16")
        return self._programs.run(_round_to_bfloat16, (x, words), {}, name="round_stochastic")

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("jax", "jaxlib", "numpy")}


class _BoundStage:
    """A stage with its backend: equal to another of the same two, so that it is found again."""

    def __init__(self, stage: Callable[..., Any], backend: JaxBackend) -> None:
        self._stage = stage
        self._backend = backend

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        return self._stage(*arguments, **static, ops=self._backend.ops, backend=self._backend)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BoundStage) and self._stage is other._stage

    def __hash__(self) -> int:
        return hash(self._stage)


def _round_to_bfloat16(x: jax.Array, words: jax.Array) -> jax.Array:
    """16 random low bits are added to the float32's, then the low half is cut off."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    cut = (bits + (words & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)


def _find_device(name: str | None) -> Any:
    if name is None:
        try:
            return jax.devices()[0]
        except RuntimeError as error:
            raise BackendUnavailableError(f"JAX finds no device: {error}") from error
    platform, _, number = name.partition(":")
    if platform not in ("cpu", "gpu", "tpu") or (number and not number.isdigit()):
        raise BackendUnavailableError(
            f"JAX has no device {name!r}; choose cpu, gpu or tpu, perhaps with a number (gpu:1)"
        )
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise BackendUnavailableError(f"JAX has no {platform} here: {error}") from error
    if int(number or 0) >= len(devices):
        raise BackendUnavailableError(f"JAX sees {len(devices)} {platform} device(s), not {name}")
    return devices[int(number or 0)]
