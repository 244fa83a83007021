"""The gated MLP against the reference: tiles of features and tokens, adapters, dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesp_core.formulas import (
    MlpPlan,
    Projection,
    activation,
    activation_with_slope,
)
from mesp_reference import activation as reference_activation
from mesp_reference import gated_mlp as reference
from mesp_reference import lora_linear as reference_lora
from tests.conformance.agreement import check, draw
from tests.conformance.masks import Mask
from tests.conformance.subjects import Subject

N, D, F, R = 7, 13, 22, 3
SCALE = 1.3
NAMES = ("gate", "up", "down")
#: (out, in) of each projection.
SHAPES = {"gate": (F, D), "up": (F, D), "down": (D, F)}
ALL = frozenset(NAMES)
#: activation, (feature tile, token tile), adapted, with biases, with dropout.
CASES: dict[str, tuple[str, tuple[int, int], frozenset[str], bool, bool]] = {
    "silu": ("silu", (8, 3), ALL, False, False),
    "gelu": ("gelu_tanh", (6, 5), ALL, False, False),
    "one_tile": ("silu", (64, 64), ALL, True, True),
    "bias": ("gelu_tanh", (8, 3), ALL, True, False),
    "dropout": ("silu", (8, 3), ALL, True, True),
    "tokens_one_by_one": ("silu", (10, 1), ALL, False, True),
    "gate_only": ("silu", (8, 3), frozenset({"gate"}), False, True),
    "up_only": ("gelu_tanh", (8, 3), frozenset({"up"}), True, True),
    "down_only": ("silu", (8, 3), frozenset({"down"}), True, True),
    "no_adapter": ("silu", (8, 3), frozenset(), True, False),
}


@pytest.mark.parametrize("case", CASES)
def test_gated_mlp(subject: Subject, case: str) -> None:
    run_case(subject, case, subject.wide)


@pytest.mark.parametrize("case", ["bias", "dropout"])
def test_parameters_in_the_activations_dtype(subject: Subject, case: str) -> None:
    """16-bit factors and biases give the same gradients in the accumulation dtype."""
    run_case(subject, case, subject.dtype)


def run_case(subject: Subject, case: str, dtype: str) -> None:
    """One case with biases and factors in ``dtype``."""
    kind, tiles, adapted, with_bias, dropped = CASES[case]
    values = draw(14, subject.dtype, **_shapes(adapted, with_bias))
    masks = {name: Mask(projection=4 + place) for place, name in enumerate(NAMES)}
    multipliers = {
        f"m_{name}": masks[name].multiplier(SHAPES[name][1]) for name in adapted if dropped
    }

    def expected(x: Any, dy: Any, **parts: Any) -> dict[str, Any]:
        projections = [
            reference_lora.Projection(
                parts[f"w_{name}"],
                parts.get(f"bias_{name}"),
                parts.get(f"a_{name}"),
                parts.get(f"b_{name}"),
                SCALE,
                parts.get(f"m_{name}"),
            )
            for name in NAMES
        ]
        y, saved = reference.gated_mlp_forward(x, *projections, kind)
        dx, *gradients = reference.gated_mlp_backward(dy, saved)
        outputs = {"y": y, "dx": dx}
        for name, (da, db) in zip(NAMES, gradients, strict=True):
            outputs |= {f"da_{name}": da, f"db_{name}": db}
        return outputs

    projections = [_projection(subject, values, name, dtype) for name in NAMES]
    drops = [masks[name].dropout(subject) if dropped else None for name in NAMES]
    plan = MlpPlan(kind, *tiles, (drops[0], drops[1], drops[2]))
    mlp = subject.ops.gated_mlp
    y, saved = mlp.forward(subject.array(values["x"]), *projections, plan=plan)
    subject.keep(saved)
    dx, *gradients = mlp.backward(subject.array(values["dy"]), saved, *projections, plan=plan)
    outputs = {"y": y, "dx": dx}
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert (gradient is None) == (name not in adapted)
        outputs |= {
            f"da_{name}": None if gradient is None else gradient.da,
            f"db_{name}": None if gradient is None else gradient.db,
        }
    wide = [name for name in outputs if name != "y"]
    check(subject, outputs, expected, values | multipliers, wide=wide)


def _shapes(adapted: frozenset[str], with_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"x": (N, D), "dy": (N, D)}
    for name, (out, width) in SHAPES.items():
        shapes[f"w_{name}"] = (out, width)
        if with_bias:
            shapes[f"bias_{name}"] = (out,)
        if name in adapted:
            shapes |= {f"a_{name}": (width, R), f"b_{name}": (R, out)}
    # Activations of order one, where both functions bend.
    return shapes


def _projection(
    subject: Subject, values: dict[str, np.ndarray], name: str, dtype: str
) -> Projection:
    def optional(key: str) -> Any:
        return subject.array(values[key], dtype) if key in values else None

    return Projection(
        subject.dense(values[f"w_{name}"]),
        optional(f"bias_{name}"),
        optional(f"a_{name}"),
        optional(f"b_{name}"),
        SCALE,
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation(subject: Subject, kind: str) -> None:
    """Values and slopes, in the accumulation dtype that the MLP computes in."""
    wide = replace(subject, dtype=subject.wide)
    values = draw(15, wide.dtype, g=(7, 19))
    values["g"] = values["g"] * 4.0

    def expected(g: Any) -> dict[str, Any]:
        act, saved = reference_activation.activation_forward(g, kind)
        slope = reference_activation.activation_backward(np.ones_like(g), saved, kind)
        return {"value": act, "act": act, "slope": slope}

    g = wide.array(values["g"])
    act, slope = activation_with_slope(g, kind, xp=wide.xp)
    outputs = {"value": activation(g, kind, xp=wide.xp), "act": act, "slope": slope}
    check(wide, outputs, expected, values)
    implementation = wide.activations
    act, slope = implementation.with_slope(g, kind, xp=wide.xp)
    outputs = {"value": implementation.value(g, kind, xp=wide.xp), "act": act, "slope": slope}
    check(wide, outputs, expected, values)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_far_from_zero(subject: Subject, kind: str) -> None:
    """Large arguments give 0 or the argument, and slopes 0 or 1: never NaN, and no warning."""
    g = subject.array(np.array([-1e4, -300.0, 300.0, 1e4]), subject.wide)
    implementation = subject.activations
    act, slope = implementation.with_slope(g, kind, xp=subject.xp)
    value = implementation.value(g, kind, xp=subject.xp)
    for values in (act, value):
        np.testing.assert_allclose(subject.numpy(values), [0, 0, 300, 1e4], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(subject.numpy(slope), [0, 0, 1, 1], rtol=1e-6, atol=1e-30)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'relu'"):
        activation(np.ones(3), "relu", xp=np)
