"""Packed formats against the libraries that define them."""

import numpy as np
import pytest

from mesp_reference.finite_differences import relative_error
from mesp_reference.quantization import (
    dequantize,
    dequantize_q4_0,
    dequantize_q4_1,
    dequantize_q8_0,
    pack_codes,
    quantize,
    unpack_codes,
)

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
OUT, IN = 7, 384


def matrix(seed):
    weight = np.random.default_rng(seed).standard_normal((OUT, IN)).astype(np.float32)
    weight[1] = np.abs(weight[1])
    weight[2] = -np.abs(weight[2])
    return weight


@pytest.mark.parametrize("bits", BITS)
def test_packing_round_trips_and_is_one_stream_of_bits(bits):
    codes = np.random.default_rng(20).integers(0, 2**bits, (OUT, 32))
    packed = pack_codes(codes, bits)
    assert packed.shape == (OUT, bits)
    assert packed.dtype == np.uint32
    assert np.array_equal(unpack_codes(packed, bits), codes)
    for row in range(OUT):
        stream = sum(int(code) << (bits * i) for i, code in enumerate(codes[row]))
        assert stream == sum(int(word) << (32 * i) for i, word in enumerate(packed[row]))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_mlx_matrices(bits, group_size):
    mx = pytest.importorskip("mlx.core", reason="MLX defines the format")
    theirs = mx.quantize(mx.array(matrix(21)), group_size=group_size, bits=bits)
    expected = np.array(mx.dequantize(*theirs, group_size=group_size, bits=bits))
    ours = dequantize(*(np.array(array) for array in theirs), group_size=group_size, bits=bits)
    assert ours.dtype == np.float64
    assert relative_error(ours, expected) < 1e-7


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_encoder_agrees_with_mlx(bits, group_size):
    mx = pytest.importorskip("mlx.core", reason="MLX defines the format")
    weight = matrix(22)
    packed, scales, biases = quantize(weight.astype(np.float64), group_size, bits)
    theirs = [np.array(a) for a in mx.quantize(mx.array(weight), group_size=group_size, bits=bits)]
    assert relative_error(scales, theirs[1]) < 1e-6
    assert relative_error(biases, theirs[2]) < 1e-6
    # Only a value within rounding error of half a step may get the neighbouring code.
    difference = np.abs(unpack_codes(packed, bits) - unpack_codes(theirs[0], bits))
    assert difference.max() <= 1
    assert difference.mean() < 1e-3
    opened = mx.dequantize(
        mx.array(packed),
        mx.array(scales.astype(np.float32)),
        mx.array(biases.astype(np.float32)),
        group_size=group_size,
        bits=bits,
    )
    mine = dequantize(packed, scales, biases, group_size, bits)
    assert relative_error(np.array(opened), mine) < 1e-6


def test_encoder_is_exact_on_a_grid_and_on_zeros():
    codes = np.tile(np.arange(16), (3, 4))
    grid = np.array([[0.25], [1.0], [3.0]]) * (codes - 8)
    assert relative_error(dequantize(*quantize(grid, 32, 4), 32, 4), grid) < 1e-15
    zeros = np.zeros((3, 64))
    assert np.all(dequantize(*quantize(zeros, 32, 4), 32, 4) == 0.0)


@pytest.mark.parametrize(
    ("name", "decode"),
    [("Q4_0", dequantize_q4_0), ("Q4_1", dequantize_q4_1), ("Q8_0", dequantize_q8_0)],
)
def test_gguf_blocks(name, decode):
    gguf = pytest.importorskip("gguf", reason="the gguf package defines the format")
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quants.quantize(matrix(23), kind)
    decoded = decode(blocks)
    assert decoded.shape == (OUT, IN)
    assert relative_error(decoded, gguf.quants.dequantize(blocks, kind)) < 1e-7
    assert relative_error(decoded, matrix(23)) < 0.2
