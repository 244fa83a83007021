"""The linear layer with an adapter against the reference: every gradient, and the absent ones."""

from __future__ import annotations

from typing import Any

import pytest

from mesp_core.formulas import Projection
from mesp_reference import lora_linear as reference
from tests.conformance.agreement import check, draw
from tests.conformance.masks import Mask
from tests.conformance.subjects import Subject

N, IN, OUT, R = 7, 19, 11, 3
SCALE = 0.7
MASK = Mask(projection=2)


@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("store_h", [False, True], ids=["recompute", "store_h"])
@pytest.mark.parametrize("input_gradient", [False, True], ids=["no_dx", "dx"])
def test_lora_linear(
    subject: Subject, dropped: bool, with_bias: bool, store_h: bool, input_gradient: bool
) -> None:
    shapes = {"x": (N, IN), "dy": (N, OUT), "weight": (OUT, IN), "a": (IN, R), "b": (R, OUT)}
    values = draw(7, subject.dtype, **shapes, **({"bias": (OUT,)} if with_bias else {}))
    multiplier = {"m": MASK.multiplier(IN)} if dropped else {}

    def expected(
        x: Any, dy: Any, weight: Any, a: Any, b: Any, bias: Any = None, m: Any = None
    ) -> dict[str, Any]:
        y, saved = reference.lora_linear_forward(x, weight, bias, a, b, SCALE, m)
        dx, da, db = reference.lora_linear_backward(dy, saved)
        return {"y": y, "dx": dx if input_gradient else None, "da": da, "db": db}

    projection = Projection(
        subject.dense(values["weight"]),
        subject.array(values["bias"], subject.wide) if with_bias else None,
        subject.array(values["a"], subject.wide),
        subject.array(values["b"], subject.wide),
        SCALE,
    )
    dropout = MASK.dropout(subject) if dropped else None
    y, saved = subject.ops.lora_linear.forward(
        subject.array(values["x"]), projection, dropout=dropout, store_h=store_h
    )
    subject.keep(saved)
    assert (saved.h is not None) == store_h
    dx, gradients = subject.ops.lora_linear.backward(
        subject.array(values["dy"]),
        saved,
        projection,
        dropout=dropout,
        input_gradient=input_gradient,
    )
    assert gradients is not None
    outputs = {"y": y, "dx": dx, "da": gradients.da, "db": gradients.db}
    check(subject, outputs, expected, values | multiplier, wide=("dx", "da", "db"))


def test_without_an_adapter(subject: Subject) -> None:
    """Only dx exists, and a dropout given for nothing changes nothing."""
    values = draw(8, subject.dtype, x=(N, IN), dy=(N, OUT), weight=(OUT, IN))

    def expected(x: Any, dy: Any, weight: Any) -> dict[str, Any]:
        y, saved = reference.lora_linear_forward(x, weight)
        dx, da, db = reference.lora_linear_backward(dy, saved)
        assert da is None and db is None
        return {"y": y, "dx": dx, "gradients": None}

    projection = Projection(subject.dense(values["weight"]))
    options = {"dropout": MASK.dropout(subject)}
    y, saved = subject.ops.lora_linear.forward(subject.array(values["x"]), projection, **options)
    assert saved.h is None
    dx, gradients = subject.ops.lora_linear.backward(
        subject.array(values["dy"]), saved, projection, **options
    )
    outputs = {"y": y, "dx": dx, "gradients": gradients}
    check(subject, outputs, expected, values, wide=("dx",))


def test_nothing_to_compute(subject: Subject) -> None:
    values = draw(9, subject.dtype, x=(N, IN), dy=(N, OUT), weight=(OUT, IN))
    projection = Projection(subject.dense(values["weight"]))
    _, saved = subject.ops.lora_linear.forward(subject.array(values["x"]), projection)
    dy = subject.array(values["dy"])
    assert subject.ops.lora_linear.backward(dy, saved, projection, input_gradient=False) == (
        None,
        None,
    )


def test_parameters_in_the_activations_dtype(subject: Subject) -> None:
    """16-bit factors give the same gradients in the accumulation dtype."""
    values = draw(
        10, subject.dtype, x=(N, IN), dy=(N, OUT), weight=(OUT, IN), a=(IN, R), b=(R, OUT)
    )

    def expected(x: Any, dy: Any, weight: Any, a: Any, b: Any) -> dict[str, Any]:
        y, saved = reference.lora_linear_forward(x, weight, None, a, b, SCALE)
        return dict(
            zip(
                ("y", "dx", "da", "db"),
                (y, *reference.lora_linear_backward(dy, saved)),
                strict=True,
            )
        )

    projection = Projection(
        subject.dense(values["weight"]),
        lora_a=subject.array(values["a"]),
        lora_b=subject.array(values["b"]),
        scale=SCALE,
    )
    y, saved = subject.ops.lora_linear.forward(subject.array(values["x"]), projection)
    dx, gradients = subject.ops.lora_linear.backward(subject.array(values["dy"]), saved, projection)
    assert gradients is not None
    outputs = {"y": y, "dx": dx, "da": gradients.da, "db": gradients.db}
    check(subject, outputs, expected, values, wide=("dx", "da", "db"))
