"""What the backend chooses: its device, its dtypes and its BLAS, on machines of every kind."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.formulas.activation import FORMULA
from mesp_core.host_words import HostWords
from mesp_core.stored_matrix import StoredMatrix
from mesp_mlx.blas import Blas, choose_blas
from mesp_mlx.matrices import NativeDense, NativeStreamed
from mesp_mlx.mlx_backend import BLAS, MlxBackend


@pytest.mark.parametrize(
    ("asked", "metal", "found"),
    [
        (None, True, "gpu"),
        (None, False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("gpu", True, "gpu"),
        ("gpu", False, None),
    ],
)
def test_the_device(
    asked: str | None, metal: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    if found is None:
        with pytest.raises(mesp.BackendUnavailableError, match="Metal is not available"):
            MlxBackend.on(asked)
        assert not chosen
        return
    backend = MlxBackend.on(asked)
    assert (backend.device, backend.native) == (found, found == "gpu")
    assert chosen == [mx.gpu if found == "gpu" else mx.cpu]
    for stored in ("float32", "bfloat16"):
        assert backend.default_dtype(stored) == (stored if found == "gpu" else "float32")
    assert isinstance(backend.words, HostWords) == (found == "cpu")
    assert not backend.words.masked


def test_dtypes() -> None:
    host, native = (MlxBackend("cpu", BLAS, native) for native in (False, True))
    assert host.dtype("float64") == mx.float64
    for backend in (host, native):
        assert backend.dtype("bfloat16") == mx.bfloat16
        with pytest.raises(mesp.MespError, match="no complex64"):
            backend.dtype("complex64")
    with pytest.raises(mesp.MespError, match="float64 on a GPU"):
        native.dtype("float64")
    integers = host.from_numpy(np.array([2**24 + 1], np.int32), "int32")
    assert integers.dtype == mx.int32 and integers.item() == 2**24 + 1
    assert np.array(host.from_numpy(np.array([1.0 / 3.0])))[0] == 1.0 / 3.0
    assert host.to_numpy(mx.array([1.5], dtype=mx.bfloat16)).dtype == np.float32


@pytest.mark.parametrize("native", [False, True])
def test_what_computes_norms_and_activations(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for kind in ("host_activations", "compiled_activations"):
        monkeypatch.setattr(
            f"mesp_mlx.mlx_backend.{kind}", lambda kind=kind: made.append(kind) or FORMULA
        )
    backend = MlxBackend("cpu", BLAS, native)
    assert made == ["compiled_activations" if native else "host_activations"]
    rows = {row.component: row for row in backend.explain()}
    assert (rows["rms_norm"].name == "mx.fast.rms_norm") == native
    assert ("decoded by tile on the host" in rows["frozen_linear"].reason) != native


def test_stochastic_rounding_adds_sixteen_bits_and_cuts() -> None:
    backend = MlxBackend("cpu", BLAS, native=False)
    generator = np.random.default_rng(1)
    words = generator.integers(0, 2**32, 2000, dtype=np.uint32)
    x = generator.normal(size=2000).astype(np.float32)
    bits = (x.view(np.uint32) + (words & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)
    made = backend.round_stochastic(mx.array(x), mx.array(words), "bfloat16")
    np.testing.assert_array_equal(backend.to_numpy(made), bits.view(np.float32))
    with pytest.raises(mesp.MespError, match="float16"):
        backend.round_stochastic(mx.array(x), mx.array(words), "float16")


def test_residency() -> None:
    """What is streamed is read when it is used; what is resident has bytes of its own."""
    values = np.ones((3, 5), np.float32)
    stored = StoredMatrix(values=values)
    host, native = (MlxBackend("cpu", BLAS, native) for native in (False, True))
    assert isinstance(native.frozen(stored, "float32", "streamed"), NativeStreamed)
    assert isinstance(native.frozen(stored, "float32", "resident"), NativeDense)
    streamed, resident = (host.frozen(stored, "float32", r) for r in ("streamed", "resident"))
    assert streamed.stored.values is values
    values[...] = 2.0
    x = mx.ones((1, 5))
    assert streamed.matmul(x).tolist() == [[10.0] * 3]
    assert resident.matmul(x).tolist() == [[5.0] * 3]
    assert host.frozen(stored, "float64", "streamed").dtype == np.float64


@pytest.mark.parametrize(
    ("platform", "imported", "path", "library", "found"),
    [
        ("darwin", True, None, None, ("Accelerate", False, "own")),
        ("linux", True, "libopenblas.so", "good", ("NumPy's OpenBLAS", True, "imported before")),
        ("linux", False, None, None, ("NumPy's OpenBLAS", True, "no system OpenBLAS")),
        ("linux", False, "libopenblas.so", None, ("NumPy's OpenBLAS", True, "does not load")),
        ("linux", False, "libopenblas.so", "bad", ("NumPy's OpenBLAS", True, "no cblas_sgemm")),
        ("linux", False, "libopenblas.so", "good", ("libopenblas.so", False, "loaded before MLX")),
    ],
)
def test_the_blas(
    platform: str, imported: bool, path: str | None, library: str | None,
    found: tuple[str, bool, str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def load(name: str, mode: int) -> Any:
        assert name == path and mode == ctypes.RTLD_GLOBAL
        if library is None:
            raise OSError("broken")
        return SimpleNamespace(cblas_sgemm=None) if library == "good" else SimpleNamespace()

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: path)
    monkeypatch.setattr(ctypes, "CDLL", load)
    if not imported:
        monkeypatch.delitem(sys.modules, "mlx.core")
    blas = choose_blas()
    assert isinstance(blas, Blas)
    assert (blas.name, blas.through_numpy) == found[:2] and found[2] in blas.reason
