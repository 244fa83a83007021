"""The components a block is made of, as a backend offers them: the formula unless replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mesp_core.errors import MespError
from mesp_core.formulas import (
    attention,
    cross_entropy,
    embedding,
    frozen_linear,
    gated_mlp,
    lora_linear,
    rms_norm,
    rope,
)
from mesp_core.formulas.activation import FORMULA, Activations
from mesp_core.formulas.loops import Loops


@dataclass(frozen=True)
class Implementation:
    """Which code a component runs, and why that one."""

    component: str
    name: str
    reason: str
    calls: int = 0


@dataclass
class Component:
    """One forward/backward pair. Every call is counted, so that ``explain`` tells what ran.

    array_types: what arrays must be instances of (any, when empty); an array of another library
        raises MespError, where some libraries would quietly convert it.
    """

    component: str
    run_forward: Callable[..., Any]
    run_backward: Callable[..., Any]
    name: str = "formula"
    reason: str = "no faster implementation for this device"
    array_types: tuple[type, ...] = ()
    calls: int = field(default=0, compare=False)

    def forward(self, *args: Any, **options: Any) -> Any:
        self._enter(args)
        return self.run_forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        self._enter(args)
        return self.run_backward(*args, **options)

    def _enter(self, args: tuple[Any, ...]) -> None:
        self.calls += 1
        if self.array_types:
            refuse_foreign(self.component, _arrays_of(args), self.array_types)

    def explain(self) -> Implementation:
        return Implementation(self.component, self.name, self.reason, self.calls)


@dataclass(frozen=True)
class Operations:
    """Every component of the decoder, bound to one namespace and one kind of loop."""

    embedding: Component
    rms_norm: Component
    rope: Component
    attention: Component
    frozen_linear: Component
    lora_linear: Component
    gated_mlp: Component
    linear_cross_entropy: Component

    def with_component(self, component: Component) -> Operations:
        """These operations with one component replaced."""
        return replace(self, **{component.component: component})

    def only_arrays(self, *types: type) -> Operations:
        """These operations, each of which refuses arrays of any other type."""
        return Operations(
            **{
                item.name: replace(getattr(self, item.name), array_types=types)
                for item in fields(self)
            }
        )

    def explain(self) -> list[Implementation]:
        return [getattr(self, item.name).explain() for item in fields(self)]


def refuse_foreign(what: str, arrays: Iterable[Any], types: tuple[type, ...]) -> None:
    """Raises MespError, naming ``what``, unless every array is an instance of ``types``."""
    for array in arrays:
        if not isinstance(array, types):
            raise MespError(
                f"{what} got an array of {type(array).__module__}, not of "
                f"{types[0].__module__}; arrays of two libraries cannot be mixed: convert it first"
            )


def _arrays_of(args: tuple[Any, ...]) -> list[Any]:
    """The arrays among ``args`` and in the fields of the dataclasses among them."""
    parts = list(args)
    for value in args:
        if is_dataclass(value):
            parts += [getattr(value, item.name) for item in fields(value)]
    # Modules and types have an ``ndim`` too, which is no number.
    arrays = [part for part in parts if isinstance(getattr(part, "ndim", None), int)]
    return [array for array in arrays if not isinstance(array, np.generic)]


def formula_operations(xp: Any, loops: Loops, activations: Activations = FORMULA) -> Operations:
    """The formulas themselves, on ``xp``, with the MLP's activation as given."""
    plain = {"xp": xp}
    looped = {"xp": xp, "loops": loops}

    def component(name: str, forward: Any, backward: Any, bound: dict[str, Any]) -> Component:
        return Component(name, partial(forward, **bound), partial(backward, **bound))

    return Operations(
        embedding=Component(
            "embedding",
            partial(embedding.embedding_forward, **plain),
            partial(embedding.embedding_backward, **looped),
        ),
        rms_norm=component(
            "rms_norm", rms_norm.rms_norm_forward, rms_norm.rms_norm_backward, plain
        ),
        rope=component("rope", rope.rope_forward, rope.rope_backward, plain),
        attention=component(
            "attention", attention.attention_forward, attention.attention_backward, looped
        ),
        frozen_linear=component(
            "frozen_linear",
            frozen_linear.frozen_linear_forward,
            frozen_linear.frozen_linear_backward,
            plain,
        ),
        lora_linear=component(
            "lora_linear",
            lora_linear.lora_linear_forward,
            lora_linear.lora_linear_backward,
            plain,
        ),
        gated_mlp=component(
            "gated_mlp",
            gated_mlp.gated_mlp_forward,
            gated_mlp.gated_mlp_backward,
            {"activations": activations, **looped},
        ),
        linear_cross_entropy=Component(
            "linear_cross_entropy",
            partial(cross_entropy.linear_cross_entropy_forward, **looped),
            cross_entropy.linear_cross_entropy_backward,
        ),
    )
