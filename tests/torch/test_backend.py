"""What every backend promises, on torch: devices, dtypes, conversions, and autograd left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mesp_core as mesp
from mesp_core.backend import Backend, MemoryReport
from mesp_core.block import block_forward
from mesp_core.decoder import Pass
from mesp_core.formulas import DenseMatrix
from mesp_core.formulas.dropout import Words, dropout_key, random_words
from mesp_core.formulas.lora_linear import LoraLinearSaved, Projection
from mesp_core.host_words import HostWords
from mesp_core.optimizers import rounding_words
from mesp_core.stored_matrix import StoredMatrix
from mesp_torch.torch_backend import TorchBackend
from tests.tiny_reference import tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend() -> Backend:
    return mesp.get_backend("torch:cpu")


def test_the_default_device_is_the_best_there_is() -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    best = "mps" if torch.backends.mps.is_available() else best
    assert mesp.get_backend("torch").device == best
    assert mesp.available_backends()["torch"] is None


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:0", "cuda:977", "mps:1"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(mesp.BackendUnavailableError, match="cuda|CUDA"):
        mesp.get_backend(f"torch:{device}")


@pytest.mark.parametrize(
    ("device", "gpus", "mps", "problem"),
    [
        ("cpu", 0, False, None),
        ("cuda", 0, True, "finds no CUDA GPU"),
        ("cuda:0", 0, False, "finds no CUDA GPU"),
        ("cuda", 1, False, None),
        ("cuda:1", 2, False, None),
        ("cuda:2", 2, False, "there is no cuda:2: torch finds 2"),
        ("cuda:x", 2, True, "no device 'cuda:x'"),
        ("mps", 1, False, "finds no MPS device"),
        ("mps", 0, True, None),
        ("mps:0", 0, True, "no device 'mps:0'"),
        ("tpu", 1, True, "no device 'tpu'"),
    ],
)
def test_what_is_told_of_a_device(
    device: str, gpus: int, mps: bool, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines with these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if problem is None:
        assert TorchBackend.on(device).device == device
    else:
        with pytest.raises(mesp.BackendUnavailableError, match=problem):
            TorchBackend.on(device)
    best = "cuda" if gpus else "mps" if mps else "cpu"
    assert TorchBackend.on(None).device == best


def test_what_is_chosen_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is computed on the device, which need not be there."""
    monkeypatch.setattr("mesp_torch.torch_backend._absence", lambda device: None)
    cpu, cuda, mps = (TorchBackend.on(device) for device in ("cpu", "cuda:1", "mps"))
    assert (cpu.native, cuda.native, mps.native) == (False, True, True)
    # Words are drawn on the host only where the host computes; torch adds no uint32.
    assert [type(b.words) for b in (cpu, cuda, mps)] == [HostWords, Words, Words]
    assert all(b.words.masked for b in (cpu, cuda, mps))
    for stored in ("float64", "float32", "bfloat16", "float16"):
        chosen = [b.default_dtype(stored) for b in (cpu, cuda, mps)]
        host = "float64" if stored == "float64" else "float32"
        assert chosen == [host, stored, "float32" if stored == "float64" else stored]
    with pytest.raises(mesp.MespError, match="no float64"):
        mps.dtype("float64")
    assert mps.dtype("float32") == torch.float32
    assert cuda.dtype("float64") == torch.float64
    # CUDA alone gives the sum of 16-bit products unrounded.
    rounds = [b.rounds_input_gradients("bfloat16") for b in (cuda, mps)]
    assert rounds == [False, True] and not mps.rounds_input_gradients("float32")
    matrix = StoredMatrix(values=np.zeros((3, 5), np.float32))
    for backend, forward in ((cuda, torch.bfloat16), (mps, None)):
        how = backend.frozen(matrix, "bfloat16", "streamed").how
        assert (how.forward, how.backward) == (forward, torch.bfloat16)
        how = backend.frozen(matrix, "float32", "streamed").how
        assert (how.forward, how.backward) == (None, None)
    rows = {row.component: row for row in cuda.explain()}
    assert rows["attention"].name == "formula"


def test_memory_of_a_gpu_is_told_by_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesp_torch.torch_backend._absence", lambda device: None)
    emptied: list[str] = []
    for name, value in (("memory_allocated", 5), ("memory_reserved", 12),
                        ("max_memory_allocated", 9)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: emptied.append(f"cuda {name}"))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 10)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps empty_cache"))
    cuda, mps, cpu = (TorchBackend.on(device) for device in ("cuda", "mps", "cpu"))
    assert cuda.memory() == MemoryReport(5, 7, 9)
    assert mps.memory() == MemoryReport(3, 7, None)
    assert cpu.memory() == MemoryReport(None, None, None)
    for backend in (cpu, mps, cuda):
        backend.reset_peak()
    assert emptied == ["mps empty_cache", "cuda empty_cache", "cuda reset_peak_memory_stats"]


@pytest.mark.parametrize(("mkl", "name"), [(True, "MKL"), (False, "torch's own")])
def test_the_blas_is_named(mkl: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert TorchBackend.on("cpu").versions()["blas"] == name


def test_without_torch_the_package_imports_and_says_why_it_cannot_run() -> None:
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "backends")!r}]

class WithoutTorch:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutTorch(finder) for finder in sys.meta_path]
import mesp_core, mesp_torch
try:
    mesp_torch.backend("cpu")
except mesp_core.BackendUnavailableError as error:
    print(error)
try:
    mesp_torch.rms_norm(None, None)
except mesp_core.BackendUnavailableError as error:
    print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second, imported = done.stdout.splitlines()
    assert "not installed" in first and "pip install" in first
    assert second == first
    assert imported == "False"


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "int32", "int64"])
def test_arrays_go_in_and_out(backend: Backend, name: str) -> None:
    values = np.arange(-6, 9).reshape(3, 5).astype("int32" if "int" in name else "float64")
    values.setflags(write=False)
    array = backend.from_numpy(values, name)
    assert backend.dtype_name(array) == name
    assert array.dtype == backend.dtype(name)
    out = backend.to_numpy(array)
    assert out.dtype.name == {"float16": "float32", "bfloat16": "float32"}.get(name, name)
    np.testing.assert_array_equal(out, values)


def test_conversions_share_no_memory(backend: Backend) -> None:
    values = np.ones(4, np.float32)
    array = backend.from_numpy(values)
    out = backend.to_numpy(array)
    values[0], out[1] = 7.0, 7.0
    assert array.tolist() == [1.0] * 4


def test_a_dtype_that_torch_lacks_is_named(backend: Backend) -> None:
    with pytest.raises(mesp.MespError, match="uint32"):
        backend.dtype("uint32")
    assert backend.default_dtype("bfloat16") == "float32"
    assert backend.default_dtype("float64") == "float64"


def test_memory_and_versions(backend: Backend) -> None:
    report = backend.memory()
    assert (report.active, report.cache, report.peak) == (None, None, None)
    backend.reset_peak()
    backend.release()
    assert backend.versions()["torch"] == torch.__version__


def packed(bits: int) -> StoredMatrix:
    codes = np.ones((3, 1, 4 * bits), np.uint8)
    scales = np.ones((3, 1), np.float32)
    return StoredMatrix(codes=codes, scales=scales, biases=scales, bits=bits, group=32)


def test_weights_a_cpu_multiplies_where_they_lie_and_others() -> None:
    backend = TorchBackend("cpu", native=False, bf16_products=True)
    values, order = np.ones((3, 32), np.float32), np.array([2, 0, 1])
    narrow = StoredMatrix(values=np.ones((3, 32), np.uint16))
    made = [
        backend.frozen(StoredMatrix(values=values), "float32", "streamed"),
        backend.frozen(StoredMatrix(values=values, row_order=order), "float32", "streamed"),
        backend.frozen(StoredMatrix(values=values), "float64", "streamed"),
        backend.frozen(packed(4), "float32", "streamed"),
        backend.frozen(narrow, "bfloat16", "streamed"),
        backend.frozen(narrow, "float32", "streamed"),
    ]
    kinds = [type(matrix).__name__ for matrix in made]
    host, native = "TorchHostMatrix", "NativeMatrix"
    assert kinds == [native, host, host, host, native, host]
    told = {row.component: row for row in backend.explain()}["frozen_linear"].reason
    for what in (
        "4-bit ones decoded to float32 by tile",
        "bfloat16 ones decoded to float32",
        "float32 ones decoded to float64 by tile",
        "float32 ones multiplied where they lie",
        "bfloat16 ones multiplied in bfloat16",
    ):
        assert what in told


def test_resident_weights_have_bytes_of_their_own() -> None:
    backend, values = TorchBackend("cpu", native=False), np.ones((3, 32), np.float16)
    stored = StoredMatrix(values=values)
    streamed, resident = (
        backend.frozen(stored, "float32", residency) for residency in ("streamed", "resident")
    )
    x = torch.ones(1, 32)
    values[...] = 2.0
    assert streamed.matmul(x).tolist() == [[64.0] * 3]
    assert resident.matmul(x).tolist() == [[32.0] * 3]


def test_arrays_of_another_library_are_refused(backend: Backend) -> None:
    x, weight = np.ones((3, 5), np.float32), torch.ones(5)
    with pytest.raises(mesp.MespError, match="two libraries"):
        backend.ops.rms_norm.forward(x, weight, eps=1e-5)


def test_no_graph_is_built_from_tensors_that_require_gradients(
    backend: Backend, tmp_path: Path
) -> None:
    """Through a component, through a stage, and through an optimizer's update."""
    model = mesp.load_model(
        tiny_checkpoint(tmp_path), backend=backend, lora=mesp.LoraConfig(rank=3)
    )
    projection = Projection(model.matrix("model.layers.0.mlp.down_proj.weight"), None)
    y, _ = backend.ops.frozen_linear.forward(
        torch.randn(7, projection.weight.shape[1], requires_grad=True), projection.weight
    )
    assert not y.requires_grad
    for name in model.parameters:
        model.parameters[name].requires_grad_()
    batch = mesp.Batch.from_sequences([[3, 1, 4, 1, 5]])
    run = Pass(model, batch, training=True)
    hidden = torch.randn(run.tokens, model.config.hidden, requires_grad=True)
    out = backend.run(block_forward, hidden, model.block(0), run.block_plan(0))
    assert not out.requires_grad
    result = mesp.loss_and_gradients(model, batch)
    assert not any(g.requires_grad for g in result.gradients.values())
    mesp.AdamW(0.1).update(model, result.gradients)
    assert not any(p.requires_grad for p in model.parameters.values())


def test_autocast_around_us_changes_nothing(backend: Backend) -> None:
    x, a, b, w, dy = (torch.randn(*s) for s in ((7, 5), (5, 2), (2, 3), (3, 5), (7, 3)))
    projection = Projection(DenseMatrix(w, backend.xp, backend.loops), None, a, b, 0.7)
    plain = backend.ops.lora_linear.backward(dy, LoraLinearSaved(x), projection)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = backend.ops.lora_linear.backward(dy, LoraLinearSaved(x), projection)
    assert torch.equal(plain[0], inside[0])
    assert torch.equal(plain[1].da, inside[1].da)


def test_dropout_draws_the_words_of_numpy(backend: Backend) -> None:
    numpy = mesp.get_backend("numpy")
    key = dropout_key(seed=2**40 + 5, step=3, layer=2, projection=6)
    drawn = []
    for each in (numpy, backend):
        counter = tuple(
            each.xp.astype(each.from_numpy(np.arange(lo, lo + 1001), "int32"), each.words.dtype)
            for lo in (0, 77)
        )
        words = random_words(tuple(each.words.constant(w) for w in key), counter, each.words)
        drawn.append([each.to_numpy(word).astype(np.int64) for word in words])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert max(word.max() for word in drawn[0]) > 2**31


def test_stochastic_rounding_is_that_of_mlx_bit_for_bit(backend: Backend) -> None:
    mlx = mesp.get_backend("mlx:cpu")
    values = np.random.default_rng(1).standard_normal((64, 65)).astype(np.float32)
    values[0, :8] = [0.0, -0.0, 1.5, -2.0, 3e38, -3e38, 1e-40, -1e-40]
    rounded = []
    for each in (mlx, backend):
        words = rounding_words(each, seed=9, count=4, name="x.lora_a", shape=values.shape)
        made = each.round_stochastic(each.from_numpy(values), words, "bfloat16")
        assert each.dtype_name(made) == "bfloat16"
        rounded.append(each.to_numpy(made).view(np.uint32))
    np.testing.assert_array_equal(rounded[0], rounded[1])
    # Both neighbours are met: this is not rounding to the nearest.
    nearest = torch.from_numpy(values).to(torch.bfloat16).float().numpy().view(np.uint32)
    assert 0.2 < (rounded[1] != nearest).mean() < 0.8
    with pytest.raises(mesp.MespError, match="float16"):
        backend.round_stochastic(torch.ones(3), torch.ones(3, dtype=torch.int64), "float16")


def test_explain_tells_what_ran(tmp_path: Path) -> None:
    backend = TorchBackend.on("cpu")
    rows = {row.component: row for row in backend.explain()}
    assert "none met yet" in rows["gated_mlp"].reason
    model = mesp.load_model(
        tiny_checkpoint(tmp_path), backend=backend, lora=mesp.LoraConfig(rank=3)
    )
    mesp.loss_and_gradients(model, mesp.Batch.from_sequences([[3, 1, 4, 1, 5]]))
    rows = {row.component: row for row in backend.explain()}
    assert "flash" in rows["attention"].name
    assert rows["attention"].calls == 3 * model.config.layers
    assert "float32 ones multiplied where they lie" in rows["gated_mlp"].reason
    assert all(row.reason for row in rows.values())
