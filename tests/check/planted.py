"""NumPy backends with one error each, as a port could have it, and what the check must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesp_core.formulas import DenseMatrix
from mesp_core.formulas.dropout import Words
from mesp_core.numpy_backend import NumpyBackend
from mesp_core.operations import Component

#: Whoever runs a component: a whole block, a whole model.
BOTH = ("block", "model")


@dataclass(frozen=True)
class Planted:
    """plant: changes a sound backend; rows: the components that must then miss in ``dtype``, and
    no other."""

    plant: Callable[[NumpyBackend], None]
    rows: tuple[str, ...]
    dtype: str = "float64"

    def backend(self) -> NumpyBackend:
        backend = NumpyBackend()
        self.plant(backend)
        return backend


def replaced(name: str, forward: Callable | None = None, backward: Callable | None = None) -> Any:
    """Plants ``forward(run, *args, **options)`` or its like around a component's own."""

    def plant(backend: NumpyBackend) -> None:
        old: Component = getattr(backend.ops, name)
        changes: dict[str, Any] = {"name": "planted"}
        if forward is not None:
            changes["run_forward"] = lambda *a, **o: forward(old.run_forward, *a, **o)
        if backward is not None:
            changes["run_backward"] = lambda *a, **o: backward(old.run_backward, *a, **o)
        backend.ops = backend.ops.with_component(replace(old, **changes))

    return plant


def _missing_row(run: Any, dout: Any, *args: Any, **options: Any) -> Any:
    dtable = run(dout, *args, **options)
    dtable[-1] = 0.0
    return dtable


def _next_row(run: Any, tokens: Any, table: Any, **options: Any) -> Any:
    return run((tokens + 1) % table.shape[0], table, **options)


def _without_mean(run: Any, dout: Any, saved: Any, weight: Any, **options: Any) -> Any:
    _, dweight = run(dout, saved, weight, **options)
    gain = 1.0 + weight if options.get("plus_one") else weight
    return (saved.rstd * dout * gain).astype(dout.dtype), dweight


def _not_transposed(run: Any, dout: Any, saved: Any, cos: Any, sin: Any, **options: Any) -> Any:
    return run(dout, saved, cos, -sin, **options)


def _later_key(run: Any, q: Any, k: Any, v: Any, *, plan: Any) -> Any:
    """The window is one key too wide; without a window, nothing is wrong."""
    return run(q, k, v, plan=replace(plan, window=plan.window and plan.window + 1))


def _across_sequences(run: Any, q: Any, k: Any, v: Any, *, plan: Any) -> Any:
    first = [0] * len(plan.first_key_tile)
    return run(
        q, k, v, plan=replace(plan, segment=np.zeros_like(plan.segment), first_key_tile=first)
    )


def _capped_slope_forgotten(run: Any, *args: Any, plan: Any) -> Any:
    dq, dk, dv = run(*args, plan=plan)
    return (dq, dk, dv) if plan.softcap is None else (dq * 1.01, dk, dv)


def _no_bias(run: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    return run(x, weight)


def _wrong_sign(run: Any, *args: Any) -> Any:
    return -run(*args)


def _without_scale(run: Any, dy: Any, saved: Any, projection: Any, **options: Any) -> Any:
    dx, pair = run(dy, saved, projection, **options)
    return dx, pair and replace(pair, db=pair.db / projection.scale)


def _never_absent(run: Any, dy: Any, saved: Any, projection: Any, **options: Any) -> Any:
    return run(dy, saved, projection, **{**options, "input_gradient": True})


def _one_share(run: Any, dy: Any, saved: Any, gate: Any, up: Any, down: Any, **options: Any) -> Any:
    """dx lacks what passes through ``up``."""
    dx, *pairs = run(dy, saved, gate, up, down, **options)
    nothing = DenseMatrix(np.zeros(up.weight.shape, dx.dtype), np)
    return run(dy, saved, gate, replace(up, weight=nothing), down, **options)[0], *pairs


def _swapped(run: Any, *args: Any, **options: Any) -> Any:
    dx, gate, up, down = run(*args, **options)
    return (dx, gate, up, down) if gate is None else (dx, up, gate, down)


def _unweighted(run: Any, x: Any, weight: Any, targets: Any, weights: Any, **options: Any) -> Any:
    return run(x, weight, targets, np.ones_like(weights), **options)


def _unscaled(run: Any, dloss: Any, saved: Any) -> Any:
    return run(1.0, saved)


class _WrongRotation(Words):
    def rotate(self, a: Any, by: int) -> Any:
        return super().rotate(a, by % 31 + 1 if by == 24 else by)


def _wrong_words(backend: NumpyBackend) -> None:
    words = backend.words
    backend.words = _WrongRotation(words.dtype, words.masked, words.xp)


def _wrong_codes(backend: NumpyBackend) -> None:
    sound = backend.frozen

    def frozen(stored: Any, dtype: str, residency: str) -> Any:
        if stored.bits == 3:
            stored = replace(stored, zero=1)
        return sound(stored, dtype, residency)

    backend.frozen = frozen


def _cut_off(backend: NumpyBackend) -> None:
    """float32 values rounded towards zero: half a unit in the last place, in first values."""
    sound = backend.from_numpy

    def from_numpy(array: Any, dtype: str | None = None) -> Any:
        if dtype != "float32" or array.dtype != np.float64:
            return sound(array, dtype)
        nearest = np.array(array, np.float32)
        too_far = np.abs(nearest) > np.abs(array)
        return np.where(too_far, np.nextafter(nearest, np.float32(0)), nearest)

    backend.from_numpy = from_numpy


PLANTED: dict[str, Planted] = {
    "embedding: next row": Planted(replaced("embedding", _next_row), ("embedding", "model")),
    "embedding: a row forgotten": Planted(
        replaced("embedding", backward=_missing_row), ("embedding",)
    ),
    "rms_norm: dropped term": Planted(
        replaced("rms_norm", backward=_without_mean), ("rms_norm", *BOTH)
    ),
    "rope: wrong sign": Planted(replaced("rope", backward=_not_transposed), ("rope", *BOTH)),
    "attention: window off by one": Planted(
        replaced("attention", _later_key), ("attention", "block")
    ),
    "attention: across sequences": Planted(
        replaced("attention", _across_sequences), ("attention", *BOTH)
    ),
    "attention: soft-cap's slope": Planted(
        replaced("attention", backward=_capped_slope_forgotten), ("attention", "block")
    ),
    "frozen_linear: no bias": Planted(replaced("frozen_linear", _no_bias), ("frozen_linear",)),
    "frozen_linear: wrong sign": Planted(
        replaced("frozen_linear", backward=_wrong_sign), ("frozen_linear",)
    ),
    "frozen matrix: 3-bit codes off by one": Planted(_wrong_codes, ("frozen_linear",)),
    "lora_linear: missing factor": Planted(
        replaced("lora_linear", backward=_without_scale), ("lora_linear", *BOTH)
    ),
    "lora_linear: a gradient too many": Planted(
        replaced("lora_linear", backward=_never_absent), ("lora_linear",)
    ),
    "gated_mlp: dropped term": Planted(
        replaced("gated_mlp", backward=_one_share), ("gated_mlp", *BOTH)
    ),
    "gated_mlp: swapped gradients": Planted(
        replaced("gated_mlp", backward=_swapped), ("gated_mlp", *BOTH)
    ),
    "linear_cross_entropy: unweighted": Planted(
        replaced("linear_cross_entropy", _unweighted), ("linear_cross_entropy", "model")
    ),
    "linear_cross_entropy: upstream gradient ignored": Planted(
        replaced("linear_cross_entropy", backward=_unscaled), ("linear_cross_entropy",)
    ),
    "dropout: wrong rotation": Planted(
        _wrong_words, ("lora_linear", "gated_mlp", "block", "dropout")
    ),
    "lora_init: rounded towards zero": Planted(_cut_off, ("lora_init",), "float32"),
}
