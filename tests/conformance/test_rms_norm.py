"""RMS norm against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from mesp_reference import rms_norm as reference
from tests.conformance.agreement import check, draw
from tests.conformance.subjects import Subject

EPS = 1e-5


@pytest.mark.parametrize("shape", [(7, 19), (5, 3, 8)], ids=["hidden", "heads"])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("weight_gradient", [False, True])
def test_rms_norm(
    subject: Subject, shape: tuple[int, ...], plus_one: bool, weight_gradient: bool
) -> None:
    values = draw(1, subject.dtype, x=shape, dout=shape, weight=shape[-1:])

    def expected(x: np.ndarray, dout: np.ndarray, weight: np.ndarray) -> dict:
        out, saved = reference.rms_norm_forward(x, weight, EPS, plus_one=plus_one)
        dx, dweight = reference.rms_norm_backward(dout, saved)
        return {"out": out, "dx": dx, "dweight": dweight if weight_gradient else None}

    norm, weight = subject.ops.rms_norm, subject.array(values["weight"], subject.wide)
    out, saved = norm.forward(subject.array(values["x"]), weight, eps=EPS, plus_one=plus_one)
    subject.keep(saved)
    dx, dweight = norm.backward(
        subject.array(values["dout"]),
        saved,
        weight,
        plus_one=plus_one,
        weight_gradient=weight_gradient,
    )
    outputs = {"out": out, "dx": dx, "dweight": dweight}
    check(subject, outputs, expected, values, wide=("dweight",))
