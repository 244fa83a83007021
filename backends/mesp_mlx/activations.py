"""The MLP's activation by NumPy on a CPU and compiled on a GPU; the formula defines both."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mesp_core.formulas.activation import Activations, activation, activation_with_slope
from mesp_mlx.namespace import MlxNamespace, host_view

_PLAIN = MlxNamespace()


def host_activations() -> Activations:
    """SiLU in a few passes over one buffer; the rest by the formula."""
    return Activations(_host_value, _host_with_slope)


def compiled_activations() -> Activations:
    """The formula as one fused kernel for each kind."""
    value = {kind: mx.compile(_bound(activation, kind)) for kind in ("silu", "gelu_tanh")}
    slope = {
        kind: mx.compile(_bound(activation_with_slope, kind)) for kind in ("silu", "gelu_tanh")
    }
    return Activations(lambda g, kind, *, xp: value[kind](g), lambda g, kind, *, xp: slope[kind](g))


def _bound(formula: Any, kind: str) -> Any:
    return lambda g: formula(g, kind, xp=_PLAIN)


def _host_value(g: mx.array, kind: str, *, xp: Any) -> mx.array:
    if kind != "silu" or g.dtype != mx.float32:
        return activation(g, kind, xp=xp)
    view = host_view(g)
    out = _logistic(view)
    out *= view
    return mx.array(out)


def _host_with_slope(g: mx.array, kind: str, *, xp: Any) -> tuple[mx.array, mx.array]:
    if kind != "silu" or g.dtype != mx.float32:
        return activation_with_slope(g, kind, xp=xp)
    view = host_view(g)
    logistic = _logistic(view)
    act = view * logistic
    slope = act * logistic
    np.subtract(act, slope, out=slope)
    slope += logistic
    return mx.array(act), mx.array(slope)


def _logistic(g: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(−g)), with exp kept finite."""
    out = np.negative(g)
    np.minimum(out, np.float32(80.0), out=out)
    np.exp(out, out=out)
    out += np.float32(1.0)
    return np.reciprocal(out, out=out)
