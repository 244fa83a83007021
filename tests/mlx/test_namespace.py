"""MLX's names on a CPU: what NumPy computes on MLX's memory, and what it cannot."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mesp_mlx.namespace import CpuNamespace


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("computed by the wrong library")


def draw(*shape: int, dtype: Any = mx.float32) -> mx.array:
    values = np.random.default_rng(len(shape)).standard_normal(shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize(
    ("products", "dtypes", "numpy"),
    [
        (True, (mx.float32, mx.float32), True),
        (True, (mx.float64, mx.float64), True),
        (True, (mx.bfloat16, mx.bfloat16), False),
        (True, (mx.float32, mx.bfloat16), False),
        (True, (mx.bfloat16, mx.float32), False),
        (False, (mx.float32, mx.float32), False),
    ],
)
def test_who_multiplies(
    products: bool, dtypes: tuple[Any, Any], numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mx.stream(mx.cpu):
        a, b = draw(2, 3, 4).astype(dtypes[0]), draw(4, 5).astype(dtypes[1])
        mx.eval(a, b)
        expected = np.array(a.astype(mx.float32)) @ np.array(b.astype(mx.float32))
        monkeypatch.setattr(mx, "matmul", forbidden if numpy else mx.matmul)
        monkeypatch.setattr(np, "matmul", np.matmul if numpy else forbidden)
        made = CpuNamespace(products=products).matmul(a, b)
        monkeypatch.undo()
        assert made.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else mx.float32)
        tolerance = 0.05 if dtypes == (mx.bfloat16, mx.bfloat16) else 1e-5
        np.testing.assert_allclose(np.array(made.astype(mx.float32)), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("dtypes", "numpy"),
    [
        ((mx.float32, mx.float32), True),
        ((mx.int32, mx.int32), True),
        ((mx.bfloat16, mx.bfloat16), False),
        ((mx.float32, mx.bfloat16), False),
        ((mx.bfloat16, mx.float32), False),
    ],
)
def test_who_chooses(dtypes: tuple[Any, Any], numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = mx.array([[True], [False]])
    a, b = mx.array([1, 2, 3]).astype(dtypes[0]), mx.array([[7], [9]]).astype(dtypes[1])
    monkeypatch.setattr(mx, "where", forbidden if numpy else mx.where)
    monkeypatch.setattr(np, "where", np.where if numpy else forbidden)
    made = CpuNamespace(products=True).where(condition, a, b)
    monkeypatch.undo()
    assert made.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else mx.float32)
    assert made.tolist() == [[1, 2, 3], [9, 9, 9]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", ["sum", "mean", "max"])
def test_reductions(name: str, dtype: Any) -> None:
    xp: Any = CpuNamespace(products=True)
    x = draw(2, 3, 4, dtype=dtype)
    values = np.array(x.astype(mx.float32))
    for options in ({}, {"axis": 1}, {"axis": -1, "keepdims": True}):
        made = getattr(xp, name)(x, **options)
        expected = getattr(np, name)(values, **options)
        assert made.dtype == dtype and made.shape == expected.shape
        np.testing.assert_allclose(np.array(made.astype(mx.float32)), expected, atol=0.05)
