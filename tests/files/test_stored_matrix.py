"""Stored matrices against MLX's own quantisation and plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from mesp_core.errors import MespError
from mesp_core.stored_matrix import StoredMatrix

mx = pytest.importorskip("mlx.core", reason="MLX is the reference for its own layout")


def mlx_matrix(bits: int, group: int, rows: int = 37, dtype: str = "float32") -> tuple:
    """(stored, MLX's arrays (words, scales, biases)) of a random matrix."""
    mx.random.seed(bits * group)
    weights = mx.random.normal((rows, 2 * group)).astype(getattr(mx, dtype))
    words, scales, biases = mx.quantize(weights, group_size=group, bits=bits)
    plain = [np.array(scales.view(mx.uint16)), np.array(biases.view(mx.uint16))]
    if dtype != "bfloat16":
        plain = [np.array(scales), np.array(biases)]
    codes = np.array(words).view(np.uint8).reshape(rows, 2, group * bits // 8)
    stored = StoredMatrix(codes=codes, scales=plain[0], biases=plain[1], bits=bits, group=group)
    return stored, (words, scales, biases)


def halves_matrix(zero: int = 0, row_order: np.ndarray | None = None) -> tuple:
    """(stored, dense float64) of random 4-bit codes in GGUF's order."""
    generator = np.random.default_rng(3)
    integers = generator.integers(0, 16, (24, 3, 32))
    codes = (integers[..., :16] | integers[..., 16:] << 4).astype(np.uint8)
    scales = generator.normal(size=(24, 3)).astype(np.float16)
    biases = None if zero else generator.normal(size=(24, 3)).astype(np.float16)
    dense = (integers - zero) * scales[..., None].astype(float)
    if biases is not None:
        dense = dense + biases[..., None].astype(float)
    dense = dense.reshape(24, 96)
    stored = StoredMatrix(
        codes=codes,
        scales=scales,
        biases=biases,
        bits=4,
        group=32,
        zero=zero,
        order="halves",
        row_order=row_order,
    )
    return stored, dense if row_order is None else dense[row_order]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_decode_equals_mlx_dequantize(bits, group):
    stored, (words, scales, biases) = mlx_matrix(bits, group)
    expected = np.array(mx.dequantize(words, scales, biases, group_size=group, bits=bits))
    assert stored.shape == expected.shape
    # MLX may fuse the multiplication and the addition: the last bit can differ.
    np.testing.assert_allclose(stored.decode(), expected, rtol=0, atol=1e-6)
    packed = stored.packed()
    for ours, theirs in zip(packed, (words, scales, biases), strict=True):
        assert np.array_equal(ours, np.array(theirs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_in_16_bits(dtype):
    stored, (words, scales, biases) = mlx_matrix(4, 64, dtype=dtype)
    assert stored.dtype == dtype
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    expected = np.array(mx.dequantize(words, *wide, group_size=64, bits=4))
    np.testing.assert_allclose(stored.decode(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 8])
def test_halves_decode_in_float64_is_exact(zero):
    stored, dense = halves_matrix(zero)
    assert np.array_equal(stored.decode(dtype=np.float64), dense)


@pytest.mark.parametrize("zero", [0, 8])
def test_packed_halves_are_what_mlx_reads(zero):
    order = np.random.default_rng(0).permutation(24)
    stored, dense = halves_matrix(zero, order)
    words, scales, biases = stored.packed()
    assert words.dtype == np.uint32 and words.shape == (24, 12)
    wide = [mx.array(part.astype(np.float32)) for part in (scales, biases)]
    ours = mx.dequantize(mx.array(words), *wide, group_size=32, bits=4)
    np.testing.assert_allclose(np.array(ours), dense, rtol=0, atol=1e-6)


def signed_matrix(scale: float) -> StoredMatrix:
    codes = np.random.default_rng(1).integers(-127, 128, (5, 2, 32)).astype(np.int8)
    scales = np.full((5, 2), scale, np.float16)
    return StoredMatrix(codes=codes, scales=scales, bits=8, group=32)


@pytest.mark.parametrize("scale", [0.01, 1000.0])
def test_signed_codes_pack_without_overflow(scale):
    stored = signed_matrix(scale)
    assert stored.codes is not None
    expected = stored.codes.reshape(5, 64) * np.float32(np.float16(scale))
    assert np.array_equal(stored.decode(), expected)
    words, scales, biases = (mx.array(part) for part in stored.packed())
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    ours = np.array(mx.dequantize(words, *wide, group_size=32, bits=8))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "bfloat16"])
def test_dense(kind):
    values = np.random.default_rng(2).normal(size=(9, 7)).astype(np.float32)
    stored, expected = values, values
    if kind == "bfloat16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    else:
        stored = values.astype(kind)
        expected = stored.astype(np.float32)
    matrix = StoredMatrix(values=stored)
    assert (matrix.dtype, matrix.nbytes) == (kind, stored.nbytes)
    assert np.array_equal(matrix.decode(), expected)
    assert np.array_equal(matrix.rows(2, 5).columns(1, 4).decode(), expected[2:5, 1:4])
    assert np.array_equal(matrix.take(np.array([8, 0])), expected[[8, 0]])


def test_views_copy_nothing_and_chunks_agree(monkeypatch):
    order = np.random.default_rng(5).permutation(24)
    stored, dense = halves_matrix(row_order=order)
    part = stored.rows(3, 17).columns(32, 96)
    assert part.codes is not None and np.shares_memory(part.codes, stored.codes)
    assert np.array_equal(part.decode(dtype=np.float64), dense[3:17, 32:96])
    monkeypatch.setattr("mesp_core.stored_matrix.CHUNK_WEIGHTS", 200)
    target = np.full((24, 100), np.nan)
    stored.decode(out=target[:, :96])
    assert np.array_equal(target[:, :96], dense) and np.isnan(target[:, 96:]).all()


def test_resident_is_the_same_matrix_in_given_memory():
    order = np.random.default_rng(5).permutation(24)
    stored, dense = halves_matrix(row_order=order)
    given = []

    def allocate(shape, dtype):
        given.append(np.zeros(shape, dtype))
        return given[-1]

    copy = stored.rows(2, 20).resident(allocate)
    assert copy.row_order is None and len(given) == 3
    assert copy.codes is given[0]
    assert np.array_equal(copy.decode(dtype=np.float64), dense[2:20])


def test_release_reports_only_the_rows_of_a_view():
    seen = []
    values = np.zeros((10, 4), np.float32)
    matrix = StoredMatrix(values=values, on_release=lambda start, size: seen.append((start, size)))
    matrix.rows(2, 5).release()
    assert seen == [(values.ctypes.data + 32, 48)]


@pytest.mark.parametrize("index", [24, -1])
def test_take_outside_the_matrix(index):
    stored, _ = halves_matrix()
    with pytest.raises(MespError, match=f"row {index} does not exist"):
        stored.take(np.array([0, index]))


def test_mistakes_are_named():
    stored, _ = halves_matrix()
    with pytest.raises(MespError, match="whole groups of 32"):
        stored.columns(0, 40)
    with pytest.raises(MespError, match="cannot decode"):
        stored.decode(out=np.zeros((24, 95), np.float32))
    with pytest.raises(MespError, match="7-bit codes"):
        StoredMatrix(codes=stored.codes, scales=stored.scales, bits=7, group=32)
    with pytest.raises(MespError, match="no packed form"):
        StoredMatrix(values=np.zeros((2, 2), np.float32)).packed()
