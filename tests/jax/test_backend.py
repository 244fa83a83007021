"""The backend's contract: dtypes, conversions, devices, rounding, what is refused."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesp_core as mesp
from mesp_core import MespError
from mesp_core.block import block_backward, block_forward
from mesp_core.formulas import Dropout, dropout_key, words_of
from mesp_core.formulas.attention import first_key_tiles
from mesp_core.formulas.dropout import dropout_multiplier
from mesp_core.host_memory import return_free_memory
from mesp_core.plain_block import plain_block_backward
from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.jax_backend import JaxBackend, _BoundStage
from mesp_jax.matrices import JaxDense
from mesp_jax.programs import Program
from mesp_jax.streamed import StreamedMatrix


def test_it_is_registered() -> None:
    chosen = mesp.get_backend("jax:cpu")
    assert isinstance(chosen, JaxBackend)
    assert chosen.device == "cpu" and set(chosen.versions()) == {"jax", "jaxlib", "numpy"}


@pytest.mark.parametrize("device", ["cpu:7", "cpu:1", "abacus", "cpu:x", "gpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    if device == "gpu" and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(mesp.BackendUnavailableError, match=device.partition(":")[0]):
        mesp.get_backend(f"jax:{device}")


def test_wide_types_need_x64(backend: JaxBackend) -> None:
    for name in ("float64", "int64"):
        with pytest.raises(MespError, match="JAX_ENABLE_X64"):
            backend.dtype(name)
    with jax.enable_x64(True):
        assert backend.from_numpy(np.ones(3)).dtype == np.float64
        assert backend.dtype("float64") == np.float64
    with pytest.raises(MespError, match="complex64"):
        backend.dtype("complex64")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint32"])
def test_arrays_go_in_and_come_out(backend: JaxBackend, dtype: str) -> None:
    given = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    array = backend.from_numpy(given, dtype)
    assert backend.dtype_name(array) == dtype
    out = backend.to_numpy(array)
    np.testing.assert_array_equal(out, given)
    assert out.dtype == (np.float32 if dtype.endswith("float16") else np.dtype(dtype))
    given[...] = 7.0
    assert backend.to_numpy(array)[1, 2] == 5.0


def test_numpy_is_not_mixed_in(backend: JaxBackend) -> None:
    x, weight = np.ones((3, 5), np.float32), np.ones(5, np.float32)
    norm = backend.ops.rms_norm
    norm.forward(backend.from_numpy(x), backend.from_numpy(weight), eps=1e-6)
    with pytest.raises(MespError, match="cannot be mixed"):
        norm.forward(x, backend.from_numpy(weight), eps=1e-6)
    with pytest.raises(MespError, match="cannot be mixed"):
        norm.forward(backend.from_numpy(x), weight, eps=1e-6)


def test_stochastic_rounding_adds_sixteen_bits_and_cuts(backend: JaxBackend) -> None:
    generator = np.random.default_rng(1)
    words = generator.integers(0, 2**32, 20000, dtype=np.uint32)
    x = generator.normal(size=20000).astype(np.float32)
    bits = (x.view(np.uint32) + (words & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)
    rounded = backend.round_stochastic(backend.from_numpy(x), backend.from_numpy(words), "bfloat16")
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(backend.to_numpy(rounded), bits.view(np.float32))
    with pytest.raises(MespError, match="float16"):
        backend.round_stochastic(backend.from_numpy(x), backend.from_numpy(words), "float16")


@pytest.mark.parametrize("x64", [False, True])
def test_masks_are_numpys_bit_for_bit(backend: JaxBackend, x64: bool) -> None:
    key, n, first, width = dropout_key(2**40 + 17, 5, 3, 1), 7, 6, 11
    sequence, position = np.arange(n, dtype=np.uint32) % 3, np.arange(n, dtype=np.uint32) + 2**31
    expected = dropout_multiplier(
        Dropout(0.3, key, sequence, position, words_of(np)), first, width, dtype=np.float32, xp=np
    )

    def masked(dropout: Dropout, first: jax.Array) -> jax.Array:
        return dropout_multiplier(dropout, first, width, dtype=jnp.float32, xp=backend.xp)

    with jax.enable_x64(x64):
        counters = (backend.from_numpy(part) for part in (sequence, position))
        dropout = Dropout(0.3, key, *counters, backend.words)
        for run in (masked, jax.jit(masked)):
            np.testing.assert_array_equal(np.asarray(run(dropout, jnp.asarray(first))), expected)


def test_first_key_tiles_of_traced_segments_are_the_hosts(backend: JaxBackend) -> None:
    """A sequence that ends at the first token of a tile; windows from a tile on and before."""
    segment = np.repeat([0, 1, 2, 5], [65, 150, 3, 45]).astype(np.int32)
    windows = (None, 5, 65, 66)
    traced = jax.jit(lambda s: [backend.first_key_tiles(s, window) for window in windows])(segment)
    for window, found in zip(windows, traced, strict=True):
        tiles = first_key_tiles(segment.tolist(), backend.tiles.query, backend.tiles.key, window)
        host = backend.first_key_tiles(segment, window)
        np.testing.assert_array_equal(host, tiles)
        np.testing.assert_array_equal(found, tiles)
        assert host.dtype == found.dtype == np.int32


def test_buckets_hold_the_tokens_and_repeat() -> None:
    backend = JaxBackend("cpu")
    buckets = [backend.bucket(n) for n in range(1, 5000)]
    assert all(n <= b <= 1.5 * n + 64 for n, b in enumerate(buckets, start=1))
    assert len(set(buckets)) < 25
    # Above one tile, whole tiles of queries and keys.
    assert all(b % backend.tiles.query == 0 for b in buckets if b > backend.tiles.query)


def test_the_buckets() -> None:
    backend = JaxBackend("cpu")
    steps = {1: 32, 32: 32, 33: 64, 128: 128, 129: 256, 1024: 1024, 1025: 1536, 1537: 2048}
    assert {n: backend.bucket(n) for n in steps} == steps


def test_a_gpu_computes_in_the_stored_dtype() -> None:
    backend = JaxBackend("cpu")
    stored = ("float64", "float32", "bfloat16", "float16")
    assert {backend.default_dtype(name) for name in stored} == {"float32"}
    backend.jax_device = SimpleNamespace(platform="gpu")
    assert [backend.default_dtype(name) for name in stored] == ["float32", *stored[1:]]


def test_what_the_compiler_leaves_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By glibc's own function, keeping nothing, on Linux, and where glibc is the C library."""
    kept: list[int] = []
    libraries = [SimpleNamespace(malloc_trim=kept.append), SimpleNamespace()]
    for platform in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        for library in libraries:
            monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
            return_free_memory()
    assert kept == [0]


def test_memory_is_told_where_the_device_tells_it(backend: JaxBackend) -> None:
    report = backend.memory()
    stats = backend.jax_device.memory_stats()
    assert (report.active is None) == (not stats)
    backend.reset_peak()


def test_a_device_is_called_what_it_was_asked_for_as() -> None:
    assert JaxBackend("cpu:0").device == "cpu:0"
    assert JaxBackend().device == jax.devices()[0].platform


def test_float64_is_rounded_by_way_of_float32(backend: JaxBackend) -> None:
    """As other backends do: beyond half of the last place by too little for float32."""
    above_half = np.array([1.0 + 2.0**-11 + 2.0**-40])
    assert backend.to_numpy(backend.from_numpy(above_half, "float16"))[0] == 1.0
    with jax.enable_x64(True):
        assert backend.to_numpy(backend.from_numpy(above_half, "float64"))[0] == above_half[0]


def test_frozen_matrices_are_wide_and_where_they_were_asked_to_be(backend: JaxBackend) -> None:
    stored = StoredMatrix(values=np.ones((2, 3), np.float32))
    with jax.enable_x64(True):
        matrices = {d: backend.frozen(stored, d, "streamed") for d in ("float64", "bfloat16")}
    assert {d: m.dtype for d, m in matrices.items()} == {
        "float64": "float64",
        "bfloat16": "float32",
    }
    assert all(isinstance(matrix, StreamedMatrix) for matrix in matrices.values())
    assert isinstance(backend.frozen(stored, "float32", "resident"), JaxDense)


def test_streamed_bytes_are_read_where_they_lie() -> None:
    """On a CPU, where they are aligned as XLA wants them."""
    raw = np.zeros(1024 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    values = raw[start : start + 1024].view(np.float32).reshape(16, 16)
    matrix = JaxBackend("cpu").frozen(StoredMatrix(values=values), "float32", "streamed")
    assert isinstance(matrix, StreamedMatrix)
    loaded = matrix.load()
    assert isinstance(loaded, JaxDense)
    assert loaded.values.unsafe_buffer_pointer() == values.ctypes.data


def test_programs_are_listed_by_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = JaxBackend("cpu")
    programs = [Program(name, None, ()) for name in "aba"]
    monkeypatch.setattr(backend._programs, "all", lambda: programs)
    assert backend.compiled() == programs and backend.compiled("b") == programs[1:2]


class Recording:
    """In the place of ``Programs``: writes down what it is asked to run."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], int]] = []
        self.dtypes: list[str] = []

    def run(
        self, function: Any, args: tuple[Any, ...], options: dict[str, Any], *, name: str,
        donate: int = 0,
    ) -> Any:  # fmt: skip
        self.asked.append((name, dict(options), donate))
        self.dtypes.append(str(getattr(args[0], "dtype", "")))
        return "dx", "gradients"


def test_one_program_runs_every_block_backward() -> None:
    """It always computes dx, in the memory of dout; the lowest block drops it."""
    backend = JaxBackend("cpu")
    backend._programs = recording = Recording()  # type: ignore[assignment]
    dout, x = jnp.ones((1, 2), jnp.float32), jnp.ones((1, 2), jnp.bfloat16)
    for stage in (block_backward, plain_block_backward):
        for static, dx in (({}, "dx"), ({"input_gradient": True}, "dx")):
            assert backend.run(stage, dout, x, **static) == (dx, "gradients")
        lowest = {"input_gradient": False, "store_h": True}
        assert backend.run(stage, dout, x, **lowest) == (None, "gradients")
        name = stage.__name__
        # A plain block's dout is as wide as its input; so is the head's then.
        assert recording.dtypes[-1] == ("bfloat16" if stage is plain_block_backward else "float32")
        assert recording.asked[-3:] == [(name, {}, 1), (name, {}, 1), (name, {"store_h": True}, 1)]
    assert backend.run(block_forward, 1, input_gradient=False) == ("dx", "gradients")
    assert recording.asked[-1] == ("block_forward", {"input_gradient": False}, 0)


def test_results_are_waited_for_where_weights_would_pile_up(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = backend.frozen(
        StoredMatrix(values=np.ones((2, 3), np.float32)), "float32", "streamed"
    )
    waited: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for platform, weight, times in (("cpu", 1, 1), ("gpu", 1, 0), ("gpu", streamed, 1)):
        other = JaxBackend("cpu")
        other._programs = Recording()  # type: ignore[assignment]
        other.jax_device = SimpleNamespace(platform=platform)
        other.run(block_forward, weight)
        assert len(waited) == times, (platform, weight)
        waited.clear()


def test_a_stage_is_found_again_by_what_it_is(backend: JaxBackend) -> None:
    forward = _BoundStage(block_forward, backend)
    assert forward == _BoundStage(block_forward, backend) and forward != block_forward
    assert forward != _BoundStage(block_backward, backend)


def test_what_is_staged_is_waited_for_but_inside_a_program(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.ones(2)
    waited: list[Any] = []
    monkeypatch.setattr(type(x), "block_until_ready", lambda array: waited.append(array))
    backend.stage({"x": x}, [x])
    assert len(waited) == 2
    jax.make_jaxpr(lambda x: backend.stage(x))(x)
    assert len(waited) == 2
