"""Stored weights on torch: decoded as NumPy decodes them, and multiplied in any of their forms."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mesp_core as mesp
from mesp_core.backend import TileSizes
from mesp_core.stored_matrix import StoredMatrix
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import TOLERANCES
from mesp_torch.decoding import TorchHostMatrix, decode, host_tensor
from mesp_torch.matrices import NativeMatrix, NativeStreamed, _product
from mesp_torch.torch_backend import TorchBackend

OUT, IN = 37, 96
ORDER = np.random.default_rng(3).permutation(OUT)


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stored(form: str, rows: np.ndarray | None = None) -> StoredMatrix:
    """A random read-only matrix [37, 96]; a quantised one as its file interleaves it."""
    generator = np.random.default_rng(7)
    values = generator.standard_normal((OUT, IN))
    if form == "bfloat16":
        dense = bfloat16(values)
    elif form.startswith("float"):
        dense = values.astype(form)
    else:
        return quantized(form, generator, rows)
    dense.setflags(write=False)
    return StoredMatrix(values=dense, row_order=rows)


def quantized(form: str, generator: np.random.Generator, rows: np.ndarray | None) -> StoredMatrix:
    """form: bits, order, then ``signed``, ``zero`` or ``biases``, and the dtype of the scales."""
    bits, order, kind, dtype = form.split("-")
    length = 32 * int(bits) // 8
    block = generator.integers(0, 256, (OUT, IN // 32, length + 3), dtype=np.uint8)
    block.setflags(write=False)
    codes = block[:, :, 3:]
    scales = generator.uniform(0.1, 1.0, (2, OUT, 2 * (IN // 32)))
    floats = bfloat16(scales) if dtype == "bfloat16" else scales.astype(dtype)
    return StoredMatrix(
        codes=codes.view(np.int8) if kind == "signed" else codes,
        scales=floats[0, :, ::2],
        biases=floats[1, :, ::2] if kind == "biases" else None,
        bits=int(bits),
        group=32,
        zero=8 if kind == "zero" else 0,
        order=order,
        row_order=rows,
    )


DENSE = ["float64", "float32", "float16", "bfloat16"]
QUANTIZED = [
    "4-halves-zero-float16",
    "4-halves-biases-float16",
    "4-stream-biases-bfloat16",
    "4-stream-biases-float32",
    "8-stream-signed-float16",
    "8-stream-biases-bfloat16",
    "8-stream-zero-float32",
    "3-stream-biases-float32",
    "6-stream-zero-bfloat16",
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [None, ORDER], ids=["in_order", "reordered"])
@pytest.mark.parametrize("form", DENSE + QUANTIZED)
def test_torch_decodes_what_numpy_does_bit_for_bit(
    form: str, rows: np.ndarray | None, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesp_torch.decoding._CHUNK_WEIGHTS", 5 * IN)
    matrix = stored(form, rows)
    for cut in (matrix, matrix.rows(4, 23), matrix.columns(32, 96)):
        expected = cut.decode(dtype=dtype)
        out = torch.full(cut.shape, torch.nan, dtype=torch.from_numpy(expected).dtype)
        decode(cut, out)
        np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize(
    ("bits", "ours"), [(0, True), (4, True), (8, True), (3, False), (5, False)]
)
def test_what_torch_decodes_and_what_numpy_does(
    bits: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(StoredMatrix, "decode", lambda self, out: asked.append(self.bits))
    matrix = stored(f"{bits}-stream-biases-float16" if bits else "float16")
    decode(matrix, torch.empty(matrix.shape))
    assert asked == ([] if ours else [bits])


@pytest.mark.parametrize(
    ("width", "chunk", "steps"),
    [
        (3, 6, [(0, 2), (2, 4), (4, 5)]),
        (3, 2, [(row, row + 1) for row in range(5)]),
        (1, 4, [(0, 4), (4, 5)]),
    ],
)
def test_a_bounded_number_of_weights_is_decoded_at_a_time(
    width: int, chunk: int, steps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []

    def rows(stored: StoredMatrix, part: np.ndarray, lo: int, hi: int) -> np.ndarray:
        taken.append((lo, hi))
        return part[lo:hi]

    monkeypatch.setattr("mesp_torch.decoding._rows", rows)
    monkeypatch.setattr("mesp_torch.decoding._CHUNK_WEIGHTS", chunk)
    decode(StoredMatrix(values=np.ones((5, width), np.float32)), torch.empty(5, width))
    assert taken == steps


def test_a_view_of_a_file_is_not_copied() -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4)[:, ::2]
    values.setflags(write=False)
    tensor = host_tensor(values)
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == values.__array_interface__["data"][0]


def products(matrix: Any, backend: mesp.Backend, dtype: str) -> dict[str, np.ndarray]:
    """Everything a frozen matrix is asked for."""
    generator = np.random.default_rng(8)
    x = backend.from_numpy(generator.standard_normal((5, IN)), dtype)
    dy = backend.from_numpy(generator.standard_normal((5, OUT)), dtype)
    rows = backend.from_numpy(np.array([3, 36, 3, 0]), "int32")
    found = {
        "matmul": matrix.matmul(x),
        "matmul_t": matrix.matmul_t(dy),
        "take": matrix.take(rows),
        "rows": matrix.tile(1, 16, 0).matmul(x),
        "last rows": matrix.tile(2, 16, 0).matmul_t(dy[:, 32:]),
        "columns": matrix.tile(1, 64, 1).matmul(x[:, 64:]),
        "columns_t": matrix.tile(0, 64, 1).matmul_t(dy),
        "tile of a tile": matrix.tile(0, 32, 0).tile(1, 9, 0).matmul(x),
    }
    return {name: backend.to_numpy(array) for name, array in found.items()}


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize("native", [False, True], ids=["host", "native"])
@pytest.mark.parametrize("rows", [None, ORDER], ids=["in_order", "reordered"])
@pytest.mark.parametrize("form", DENSE + QUANTIZED)
def test_products_of_every_form(
    form: str, rows: np.ndarray | None, native: bool, residency: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One tile of rows covers less than the matrix, as of a large one."""
    for module in (
        "mesp_torch.matrices",
        "mesp_core.host_matrix",
        "mesp_core.formulas.frozen_matrix",
    ):
        monkeypatch.setattr(f"{module}.rows_per_tile", lambda *_: 16)
    matrix = stored(form, rows)
    numpy, backend = mesp.get_backend("numpy"), TorchBackend("cpu", native=native)
    truth = products(numpy.frozen(matrix, "float64", "streamed"), numpy, "float64")
    for dtype in ("float64", "float32"):
        frozen = backend.frozen(matrix, dtype, residency)
        kinds = (NativeStreamed, NativeMatrix) if native else (TorchHostMatrix, NativeMatrix)
        assert isinstance(frozen, kinds)
        for name, value in products(frozen, backend, dtype).items():
            assert_close(value, truth[name], TOLERANCES[dtype], name=name)


@pytest.mark.parametrize("native", [False, True], ids=["host", "native"])
@pytest.mark.parametrize("form", ["bfloat16", "float32", "4-stream-biases-bfloat16"])
def test_products_of_a_bfloat16_model(form: str, native: bool) -> None:
    """Only input gradients have rounded factors, and only where products in bfloat16 are fast."""
    backend = TorchBackend("cpu", native=native, bf16_products=True)
    matrix = stored(form)
    frozen = backend.frozen(matrix, "bfloat16", "streamed")
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(5, width, generator=generator) for width in (IN, OUT))
    weights = torch.from_numpy(matrix.decode(dtype=np.float64))
    y, dx = frozen.matmul(x), frozen.matmul_t(dy)
    assert y.dtype == dx.dtype == torch.float32
    assert_close(y.numpy(), (x.double() @ weights.T).numpy(), TOLERANCES["float32"])
    truth = (dy.double() @ weights).numpy()
    naive = (dy.bfloat16() @ weights.bfloat16()).float()
    if native or form == "bfloat16":
        assert torch.equal(dx, naive)
    else:
        assert_close(dx.numpy(), truth, TOLERANCES["float32"])


def test_whether_bfloat16_is_multiplied_is_asked_of_the_cpu_or_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = stored("bfloat16")
    told = TorchBackend("cpu", native=False, bf16_products=False)
    assert isinstance(told.frozen(matrix, "bfloat16", "streamed"), TorchHostMatrix)
    assert not told.rounds_input_gradients("bfloat16")
    for has in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": has})
        asked = TorchBackend("cpu", native=False)
        assert asked.rounds_input_gradients("bfloat16") == has
        assert not asked.rounds_input_gradients("float32")
        made = asked.frozen(matrix, "bfloat16", "streamed")
        assert isinstance(made, NativeMatrix if has else TorchHostMatrix)
    # A float32 model has nothing to gain: its factors would be rounded.
    eager = TorchBackend("cpu", native=False, bf16_products=True)
    assert isinstance(eager.frozen(matrix, "float32", "streamed"), TorchHostMatrix)


def test_results_never_share_memory_with_what_made_them() -> None:
    """A tile's memory may serve the next one; what was computed from it stays."""
    backend = TorchBackend("cpu", native=False)
    matrix = backend.frozen(stored("4-halves-zero-float16"), "float32", "streamed")
    first = products(matrix, backend, "float32")
    kept = {name: value.copy() for name, value in first.items()}
    tiles = [matrix.tile(i, 16, 0) for i in range(2)]
    before = [tile.matmul(torch.eye(IN)) for tile in tiles]
    products(matrix, backend, "float32")
    for tile, value in zip(tiles, before, strict=True):
        assert torch.equal(tile.matmul(torch.eye(IN)), value)
    for name, value in first.items():
        np.testing.assert_array_equal(value, kept[name])


def test_tiles_are_for_large_matrices_that_are_not_in_the_dtype_of_the_product() -> None:
    how = TorchBackend("cpu", native=True, tiles=TileSizes(weights=1))._how("float32")
    for rows, large in ((128, False), (129, True)):
        dense = how.load(StoredMatrix(values=np.ones((rows, 3), np.float32)))
        assert not dense._needs_tiles(torch.float32)
        assert dense._needs_tiles(torch.float64) == large
        codes, scale = np.ones((rows, 1, 16), np.uint8), np.ones((rows, 1), np.float32)
        packed = how.load(StoredMatrix(codes=codes, scales=scale, biases=scale, bits=4, group=32))
        assert packed._needs_tiles(torch.float32) == large


def test_weights_go_to_the_device() -> None:
    backend = TorchBackend("cpu", native=True)
    how = replace(backend._how("float32"), device=torch.device("meta"))
    assert how.load(StoredMatrix(values=np.ones((2, 3)))).matrix.values.device.type == "meta"


@pytest.mark.parametrize(
    ("device", "dtype", "by"),
    [
        ("cuda", torch.bfloat16, "mm"),
        ("cuda", torch.float32, "matmul"),
        ("cpu", torch.bfloat16, "matmul"),
        ("cpu", torch.float32, "matmul"),
    ],
)
def test_only_cuda_is_asked_for_sums_wider_than_the_factors(
    device: str, dtype: torch.dtype, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: ("mm", out_dtype))
    plain = SimpleNamespace(to=lambda result: ("matmul", result))
    monkeypatch.setattr(torch, "matmul", lambda a, b: plain)
    factor: Any = SimpleNamespace(dtype=dtype, device=torch.device(device))
    assert _product(factor, factor, torch.float32) == (by, torch.float32)
