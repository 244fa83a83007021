"""Weights that MLX itself multiplies, in every stored form: products, rows and tiles."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mesp_core.stored_matrix import StoredMatrix
from mesp_mlx.matrices import NativeDense, NativeQuantized, NativeStreamed, load_native
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import TOLERANCES

OUT, IN, N, GROUP = 37, 96, 5, 32
FORMS = ["float32", "float16", "bfloat16", *(f"{bits}-bit" for bits in (2, 3, 4, 5, 6, 8))]


def stored(form: str, rows: np.ndarray | None = None) -> StoredMatrix:
    generator = np.random.default_rng(7)
    if form == "bfloat16":
        values = generator.standard_normal((OUT, IN)).astype(np.float32).view(np.uint32) >> 16
        return StoredMatrix(values=values.astype(np.uint16), row_order=rows)
    if form.startswith("float"):
        return StoredMatrix(
            values=generator.standard_normal((OUT, IN)).astype(form), row_order=rows
        )
    bits, groups = int(form.partition("-")[0]), IN // GROUP
    scales, biases = generator.uniform(0.1, 1.0, (2, OUT, groups)).astype(np.float16)
    return StoredMatrix(
        codes=generator.integers(0, 256, (OUT, groups, GROUP * bits // 8), dtype=np.uint8),
        scales=scales,
        biases=biases,
        bits=bits,
        group=GROUP,
        row_order=rows,
    )


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("reordered", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_products_rows_and_tiles(form: str, reordered: bool, streamed: bool) -> None:
    order = np.random.default_rng(3).permutation(OUT) if reordered else None
    source = stored(form, order)
    matrix: Any = NativeStreamed(source) if streamed else load_native(source)
    assert matrix.shape == (OUT, IN)
    kind = NativeQuantized if source.quantized else NativeDense
    assert isinstance(matrix.tile(0, 32, 0), kind)
    w = source.decode(dtype=np.float64)
    generator = np.random.default_rng(8)
    x, dy = (generator.standard_normal((N, size)).astype(np.float32) for size in (IN, OUT))
    middle = mx.array(x[:, 32:64])
    found = {
        "x Wᵀ": (matrix.matmul(mx.array(x)), x @ w.T),
        "dy W": (matrix.matmul_t(mx.array(dy)), dy @ w),
        "rows": (matrix.tile(1, 16, 0).matmul(mx.array(x)), x @ w[16:32].T),
        "last rows": (matrix.tile(2, 16, 0).matmul_t(mx.array(dy[:, 32:])), dy[:, 32:] @ w[32:]),
        "columns": (matrix.tile(1, 32, 1).matmul(middle), x[:, 32:64] @ w[:, 32:64].T),
        "last columns": (matrix.tile(1, 64, 1).matmul_t(mx.array(dy)), dy @ w[:, 64:]),
    }  # fmt: skip
    for name, (actual, expected) in found.items():
        assert_close(np.array(actual), expected, TOLERANCES["float32"], name=name)
    rows = matrix.take(mx.array([3, 36, 3, 0]))
    assert_close(np.array(rows.astype(mx.float32)), w[[3, 36, 3, 0]], TOLERANCES["float32"])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "4-bit"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_products_are_summed_in_float32(form: str, dtype: Any) -> None:
    """Of 16-bit inputs too, whose own rounding is all that is lost."""
    source = stored(form)
    w, matrix = source.decode(dtype=np.float64), load_native(source)
    x = mx.array(np.random.default_rng(8).standard_normal((N, IN)), dtype=mx.float32).astype(dtype)
    y = matrix.matmul(x)
    dx = matrix.matmul_t(x[:, :OUT])
    assert y.dtype == dx.dtype == mx.float32
    plain = np.array(x.astype(mx.float32))
    assert_close(np.array(y), plain @ w.T, TOLERANCES["float32"])
    assert_close(np.array(dx), plain[:, :OUT] @ w, TOLERANCES["float32"])


@pytest.mark.parametrize("form", ["float32", "4-bit"])
def test_what_is_loaded_is_what_is_stored(form: str) -> None:
    matrix = load_native(stored(form))
    if isinstance(matrix, NativeQuantized):
        assert matrix.words.dtype == mx.uint32 and matrix.words.nbytes == OUT * IN // 2
        assert matrix.scales.dtype == matrix.biases.dtype == mx.float16
    else:
        assert matrix.values.nbytes == 4 * OUT * IN
