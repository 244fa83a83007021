"""Frozen matrices, dense and quantised, and the frozen linear layer, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesp_core.formulas import DenseMatrix, EagerLoops, FrozenMatrix, QuantizedMatrix
from mesp_core.formulas.frozen_matrix import rows_per_tile, tiled_matmul, tiled_matmul_t
from mesp_core.formulas.loops import arrays_in
from mesp_core.formulas.quantization import BITS, GROUPS, unpack
from mesp_core.formulas.quantization import dequantize as dequantize_codes
from mesp_core.host_matrix import HostMatrix, HostRuntime
from mesp_core.stored_matrix import StoredMatrix
from mesp_reference import linear as reference
from mesp_reference.check.compare import assert_close
from mesp_reference.check.naive import round_to
from mesp_reference.check.tolerances import TOLERANCES
from mesp_reference.quantization import dequantize, quantize
from tests.conformance.agreement import check, draw
from tests.conformance.subjects import Subject

N, OUT = 7, 11
QUANTIZED = [(bits, group) for bits in BITS for group in GROUPS]
KINDS = [None, *QUANTIZED]


def name_of(kind: tuple[int, int] | None) -> str:
    return "dense" if kind is None else "{}bit-group{}".format(*kind)


def frozen(
    subject: Subject, kind: tuple[int, int] | None, out: int = OUT
) -> tuple[FrozenMatrix, np.ndarray]:
    """A frozen matrix of three groups (or 19 columns), and its values in float64."""
    generator = np.random.default_rng(3)
    if kind is None:
        values = draw(3, subject.dtype, weight=(out, 19))["weight"]
        return subject.dense(values), values
    bits, group = kind
    packed, scales, biases = quantize(generator.standard_normal((out, 3 * group)), group, bits)
    scales, biases = (round_to(part, subject.dtype) for part in (scales, biases))
    matrix = subject.quantized(packed, scales, biases, bits, group)
    return matrix, dequantize(packed, scales, biases, group, bits)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_frozen_linear(subject: Subject, kind: tuple[int, int] | None, with_bias: bool) -> None:
    matrix, weight = frozen(subject, kind)
    assert matrix.shape == weight.shape
    shapes = {"x": (N, weight.shape[1]), "dy": (N, OUT)} | ({"bias": (OUT,)} if with_bias else {})
    values = draw(4, subject.dtype, **shapes)

    def expected(x: Any, dy: Any, weight: Any, bias: Any = None) -> dict[str, Any]:
        y, saved = reference.linear_forward(x, weight, bias)
        return {"y": y, "dx": reference.linear_backward(dy, saved)}

    bias = subject.array(values["bias"], subject.wide) if with_bias else None
    y, saved = subject.ops.frozen_linear.forward(subject.array(values["x"]), matrix, bias)
    assert saved is None
    dx = subject.ops.frozen_linear.backward(subject.array(values["dy"]), saved, matrix)
    check(subject, {"y": y, "dx": dx}, expected, values | {"weight": weight})


@pytest.mark.parametrize("kind", [None, (3, 32), (4, 64), (6, 128)], ids=name_of)
def test_tiles_of_a_frozen_matrix(subject: Subject, kind: tuple[int, int] | None) -> None:
    """Tiles that do not divide the matrix are the matrix of their rows or columns."""
    matrix, weight = frozen(subject, kind)
    size = {0: 4, 1: 7 if kind is None else 2 * kind[1]}
    for axis in (0, 1):
        extent = weight.shape[axis]
        for i in range(-(-extent // size[axis])):
            tile = matrix.tile(i, size[axis], axis)
            part = np.take(weight, range(i * size[axis], min((i + 1) * size[axis], extent)), axis)
            assert tile.shape == part.shape
            x, dy = draw(5, subject.dtype, x=(N, part.shape[1]), dy=(N, part.shape[0])).values()
            products = {
                "x Wᵀ": (tile.matmul(subject.array(x)), x @ part.T),
                "dy W": (tile.matmul_t(subject.array(dy)), dy @ part),
            }
            for what, (actual, expected) in products.items():
                assert subject.dtype_name(actual) == subject.wide
                assert_close(subject.numpy(actual), expected, TOLERANCES[subject.wide], name=what)


@pytest.mark.parametrize("kind", [None, (5, 32)], ids=name_of)
def test_rows_taken(subject: Subject, kind: tuple[int, int] | None) -> None:
    matrix, weight = frozen(subject, kind)
    rows = np.array([4, 0, 4, 10, 3], dtype=np.int32)
    taken = matrix.take(subject.array(rows, "int32"))
    assert subject.dtype_name(taken) == subject.wide
    assert_close(subject.numpy(taken), weight[rows], TOLERANCES[subject.wide], name="rows")


@pytest.mark.parametrize("kind", [None, (4, 32)], ids=name_of)
def test_products_by_tiles_of_rows(subject: Subject, kind: tuple[int, int] | None) -> None:
    out = 301
    matrix, weight = frozen(subject, kind, out)
    assert rows_per_tile(weight.shape[1], 1) == 128
    x, dy = draw(6, subject.dtype, x=(N, weight.shape[1]), dy=(N, out)).values()
    tools = (subject.xp, subject.loops, 1)
    y = tiled_matmul(matrix, subject.array(x), *tools)
    dx = tiled_matmul_t(matrix, subject.array(dy), *tools)
    assert_close(subject.numpy(y), x @ weight.T, TOLERANCES[subject.wide], name="x Wᵀ")
    assert_close(subject.numpy(dx), dy @ weight, TOLERANCES[subject.wide], name="dy W")


def test_rows_of_a_tile() -> None:
    """Whole multiples of 128, a million weights or so, and never none."""
    rows = [rows_per_tile(width) for width in (1, 1000, 8192, 8193, 1 << 21)]
    assert rows == [1 << 20, 1024, 128, 128, 128]
    assert [rows_per_tile(4, weights) for weights in (1, 1023, 1024)] == [128, 128, 256]
    assert rows_per_tile(4, 1023, multiple=10) == 250


class CountingLoops(EagerLoops):
    """Counts the turns of every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def fold(self, body: Any, carry: Any, lo: int, hi: int) -> Any:
        self.turns += hi - lo
        return super().fold(body, carry, lo, hi)


@pytest.mark.parametrize("form", ["float32", "float16", "4bit"])
@pytest.mark.parametrize("rows", [128, 129])
def test_a_matrix_is_cut_when_it_is_large_and_has_to_be_converted(rows: int, form: str) -> None:
    width, loops = 8192, CountingLoops()
    if form == "4bit":
        parts = [np.ones((rows, width // group), np.float32) for group in (64, 64)]
        codes = np.ones((rows, width // 2), np.uint8)
        matrix: Any = QuantizedMatrix(codes, *parts, 4, 64, np, loops)
    else:
        matrix = DenseMatrix(np.ones((rows, width), form), np, loops)
    for product, size in ((matrix.matmul, width), (matrix.matmul_t, rows)):
        loops.turns = 0
        product(np.ones((1, size), np.float32))
        assert loops.turns == (2 if rows == 129 and form != "float32" else 0)


@pytest.mark.parametrize(("rows", "width", "turns"), [(128, 5, 0), (129, 5, 2), (128, 300, 0)])
def test_a_matrix_in_host_memory_is_cut_when_it_is_large(rows: int, width: int, turns: int) -> None:
    def new_buffer(shape: tuple[int, int], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        buffer = np.empty(shape, dtype)
        return buffer, buffer

    loops = CountingLoops()
    stored = StoredMatrix(values=np.ones((rows, width), np.float32))
    matrix = HostMatrix(stored, np.float32, HostRuntime(np, loops, new_buffer, 1))
    for product, size in ((matrix.matmul, width), (matrix.matmul_t, rows)):
        loops.turns = 0
        assert (product(np.ones((1, size), np.float32)) == size).all()
        assert loops.turns == turns


class SteadyLoops(EagerLoops):
    """Refuses, as a traced loop does, a carry that changes its shape or dtype."""

    def fold(self, body: Any, carry: Any, lo: int, hi: int) -> Any:
        def steady(i: int, before: Any) -> Any:
            after = body(i, before)
            forms = [[(a.shape, a.dtype) for a in arrays_in(tree)] for tree in (before, after)]
            assert forms[0] == forms[1]
            return after

        return super().fold(steady, carry, lo, hi)


def test_products_by_tiles_can_be_traced() -> None:
    matrix = DenseMatrix(np.ones((300, 4), np.float16), np)
    for product, size in ((tiled_matmul, 4), (tiled_matmul_t, 300)):
        made = product(matrix, np.ones((2, size), np.float16), np, SteadyLoops(), 1)
        assert made.dtype == np.float32 and (made == size).all()


def test_tiles_are_of_rows_unless_columns_are_asked_for() -> None:
    a, loops = np.arange(12).reshape(4, 3), EagerLoops()
    np.testing.assert_array_equal(loops.tile(a, 1, 3), a[3:])
    np.testing.assert_array_equal(loops.tile(a, 1, 2, 1), a[:, 2:])


def test_arrays_in_a_tree() -> None:
    a, b, c, d = (np.full(size, 1.0) for size in (1, 2, 3, 4))
    tree = (a, None, 3, 1.5, "x", True, {"k": [b, ()]}, DenseMatrix(c, None, 0), [d])  # type: ignore[arg-type]
    assert [array.shape for array in arrays_in(tree)] == [(1,), (2,), (3,), (4,)]
    assert arrays_in(None) == arrays_in(1.5) == arrays_in({}) == []
    found: list[Any] = []
    loops = EagerLoops(lambda *arrays: found.append(arrays))
    loops.fold(lambda i, carry: (a, b), (c, d), 0, 2)
    assert [[array.shape for array in arrays] for arrays in found] == [[(1,), (2,)]] * 2


@pytest.mark.parametrize("kind", [None, (2, 32), (8, 64)], ids=name_of)
@pytest.mark.parametrize("namespace", ["numpy", "mlx-cpu"])
def test_host_matrix(namespace: str, kind: tuple[int, int] | None) -> None:
    """The matrix both CPU backends use: decoded by NumPy, multiplied by the backend."""
    subject = Subject(namespace, "float32")
    out = 301
    matrix, weight = frozen(subject, kind, out)
    stored = _stored(weight, kind)

    def new_buffer(shape: tuple[int, int], dtype: Any) -> tuple[Any, np.ndarray]:
        if namespace == "numpy":
            buffer = np.full(shape, np.nan, dtype)
            return buffer, buffer
        from mesp_mlx.namespace import new_buffer

        array, view = new_buffer(shape, subject.xp.float32)
        view[...] = np.nan
        return array, view

    runtime = HostRuntime(subject.xp, subject.loops, new_buffer, 1)
    host = HostMatrix(stored, np.float32, runtime)
    at_once = HostMatrix(stored, np.float32, replace(runtime, tile_weights=1 << 20))
    x, dy = draw(6, "float32", x=(N, weight.shape[1]), dy=(N, out)).values()
    columns = 7 if kind is None else kind[1]
    cases = {
        "x Wᵀ": (host.matmul(subject.array(x)), x @ weight.T),
        "dy W": (host.matmul_t(subject.array(dy)), dy @ weight),
        "x Wᵀ at once": (at_once.matmul(subject.array(x)), x @ weight.T),
        "dy W at once": (at_once.matmul_t(subject.array(dy)), dy @ weight),
        "rows": (host.tile(2, 128, 0).matmul(subject.array(x)), x @ weight[256:].T),
        "columns": (
            host.tile(2, columns, 1).matmul_t(subject.array(dy)),
            dy @ weight[:, 2 * columns :],
        ),
        "take": (host.take(subject.array(np.array([300, 2, 2]), "int32")), weight[[300, 2, 2]]),
    }
    assert host.shape == matrix.shape
    for what, (actual, expected) in cases.items():
        assert_close(subject.numpy(actual), expected, TOLERANCES["float32"], name=what)
    subject.check_unchanged()


def _stored(weight: np.ndarray, kind: tuple[int, int] | None) -> StoredMatrix:
    """What ``frozen`` made, as a file holds it."""
    if kind is None:
        return StoredMatrix(values=weight.astype(np.float32))
    bits, group = kind
    generator = np.random.default_rng(3)
    packed, scales, biases = quantize(
        generator.standard_normal((weight.shape[0], 3 * group)), group, bits
    )
    codes = packed.astype("<u4").view(np.uint8).reshape(weight.shape[0], 3, group * bits // 8)
    return StoredMatrix(
        codes=codes,
        scales=scales.astype(np.float32),
        biases=biases.astype(np.float32),
        bits=bits,
        group=group,
    )


def test_columns_are_cut_at_groups(subject: Subject) -> None:
    matrix, _ = frozen(subject, (4, 32))
    with pytest.raises(ValueError, match="groups of 32"):
        matrix.tile(0, 31, 1)


def test_the_widths_and_groups_are_those_of_mlx() -> None:
    assert BITS == (2, 3, 4, 5, 6, 8) and GROUPS == (32, 64, 128)


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
def test_values_are_computed_in_the_dtype_asked_for(stored: str) -> None:
    """Whatever the scales and biases are in."""
    scales, biases = np.ones((2, 3, 1), stored)
    values = dequantize_codes(
        np.full((3, 16), 0x21, np.uint8), scales, biases, bits=4, dtype=np.float32, xp=np
    )
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.tile([2.0, 3.0], (3, 16)))


def test_an_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match="7-bit"):
        unpack(np.zeros((3, 7), np.uint8), bits=7, xp=np)
