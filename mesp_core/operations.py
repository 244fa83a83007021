"""The components a block is made of, as a backend offers them: the formula unless replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
    """One forward/backward pair. Every call is counted, so that ``explain`` tells what ran."""

    component: str
    run_forward: Callable[..., Any]
    run_backward: Callable[..., Any]
    name: str = "formula"
    reason: str = "no faster implementation for this device"
    calls: int = field(default=0, compare=False)

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.run_forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.run_backward(*args, **options)

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

    def explain(self) -> list[Implementation]:
        return [getattr(self, name).explain() for name in self.__dataclass_fields__]


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
