"""A backend whose attention and MLP are not cut into tiles: a rung of the ladder.

The backward pass is still written by hand and frees early, and frozen weights are still read a tile
at a time; but attention forms its scores [H, N, N], and the MLP the whole of its gate, up and
activation [N, F], as one would write it without the idea of tiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mesp_core.backend import Backend
from mesp_core.formulas.activation import FORMULA, Activations
from mesp_core.formulas.gated_mlp import GatedMlpSaved, MlpPlan
from mesp_core.formulas.lora_linear import LoraGradients, LoraLinearSaved, Projection
from mesp_core.formulas.precision import cast, wide
from mesp_core.operations import Component

Array = Any


def make_untiled(backend: Backend, tokens: int) -> None:
    """Changes a backend that nothing else uses, for batches of ``tokens`` tokens."""
    count = backend.bucket(tokens)
    backend.tiles = replace(backend.tiles, query=count, key=count)
    tiled = backend.ops.gated_mlp
    mlp = UntiledMlp(backend.ops.lora_linear, _activations(tiled), backend.stage, backend.xp)
    component = replace(
        tiled,
        run_forward=mlp.forward,
        run_backward=mlp.backward,
        name="untiled",
        reason="asked for, to show what tiles are worth",
    )
    backend.ops = backend.ops.with_component(component)


def _activations(component: Component) -> Activations:
    """Those that the backend gave its own MLP."""
    function = inspect.unwrap(component.run_forward)
    return getattr(function, "keywords", {}).get("activations", FORMULA)


@dataclass(frozen=True)
class UntiledMlp:
    """The gated MLP made of three linear layers; as ``gated_mlp_forward`` and ``_backward``.

    linear: the component for each; stage: makes arrays real, so that what they came from dies.
    """

    linear: Component
    activations: Activations
    stage: Callable[..., None]
    xp: Any

    def forward(
        self, x: Array, gate: Projection, up: Projection, down: Projection, *, plan: MlpPlan
    ) -> tuple[Array, GatedMlpSaved]:
        inputs = wide(x, self.xp)
        g = self._project(inputs, gate, plan, 0)
        u = self._project(inputs, up, plan, 1)
        a = self.activations.value(g, plan.activation, xp=self.xp) * u
        self.stage(a)
        del g, u
        return cast(self._project(a, down, plan, 2), x.dtype, self.xp), GatedMlpSaved(x)

    def backward(
        self,
        dy: Array,
        saved: GatedMlpSaved,
        gate: Projection,
        up: Projection,
        down: Projection,
        *,
        plan: MlpPlan,
    ) -> tuple[Array, LoraGradients | None, LoraGradients | None, LoraGradients | None]:
        x = wide(saved.x, self.xp)
        g = self._project(x, gate, plan, 0)
        u = self._project(x, up, plan, 1)
        act, slope = self.activations.with_slope(g, plan.activation, xp=self.xp)
        self.stage(act, slope)
        del g
        da, ddown = self._back(dy, act * u, down, plan, 2)
        dg, du = da * u * slope, da * act
        self.stage(dg, du)
        del u, act, slope, da
        dx_gate, dgate = self._back(dg, x, gate, plan, 0)
        del dg
        dx_up, dup = self._back(du, x, up, plan, 1)
        return dx_gate + dx_up, dgate, dup, ddown

    def _project(self, x: Array, projection: Projection, plan: MlpPlan, place: int) -> Array:
        y, _ = self.linear.forward(x, projection, dropout=plan.dropouts[place])
        self.stage(y)
        return y

    def _back(
        self, dy: Array, x: Array, projection: Projection, plan: MlpPlan, place: int
    ) -> tuple[Array, LoraGradients | None]:
        dx, gradients = self.linear.backward(
            dy, LoraLinearSaved(x), projection, dropout=plan.dropouts[place]
        )
        self.stage(dx, gradients)
        return dx, gradients
