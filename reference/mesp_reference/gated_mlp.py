"""Gated MLP: y = down(act(gate(x)) ∘ up(x)). Derivation: docs/gated_mlp.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mesp_reference.activation import activation_backward, activation_forward
from mesp_reference.lora_linear import (
    LoraGradients,
    LoraLinearSaved,
    Projection,
    lora_linear_backward,
    lora_linear_forward,
)


@dataclass(frozen=True, eq=False)
class GatedMlpSaved:
    """act, up: [N, F], the two factors; gate: [N, F], the activation's argument; the three
    projections' own; activation: its name."""

    gate: np.ndarray
    act: np.ndarray
    up: np.ndarray
    gate_proj: LoraLinearSaved
    up_proj: LoraLinearSaved
    down_proj: LoraLinearSaved
    activation: str


def gated_mlp_forward(
    x: np.ndarray,
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
    activation: str = "silu",
) -> tuple[np.ndarray, GatedMlpSaved]:
    """y = down_proj(act(gate_proj(x)) ∘ up_proj(x)), act "silu" or "gelu_tanh".

    x: [N, D]; gate_proj, up_proj: D → F; down_proj: F → D. Returns y: [N, D].
    """
    gate, gate_saved = lora_linear_forward(x, *gate_proj)
    up, up_saved = lora_linear_forward(x, *up_proj)
    act, argument = activation_forward(gate, activation)
    y, down_saved = lora_linear_forward(act * up, *down_proj)
    return y, GatedMlpSaved(argument, act, up, gate_saved, up_saved, down_saved, activation)


def gated_mlp_backward(
    dy: np.ndarray, saved: GatedMlpSaved
) -> tuple[np.ndarray, LoraGradients, LoraGradients, LoraGradients]:
    """dz = down_projᵀ(dy), dup = dz∘act, dgate = dz∘up∘act′, dx the sum through both.

    dy: [N, D]. Returns dx: [N, D] and the LoRA gradients of gate_proj, up_proj, down_proj.
    """
    dz, *ddown_proj = lora_linear_backward(dy, saved.down_proj)
    dup = dz * saved.act
    dgate = activation_backward(dz * saved.up, saved.gate, saved.activation)
    dx_gate, *dgate_proj = lora_linear_backward(dgate, saved.gate_proj)
    dx_up, *dup_proj = lora_linear_backward(dup, saved.up_proj)
    dx = dx_gate + dx_up
    return dx, LoraGradients(*dgate_proj), LoraGradients(*dup_proj), LoraGradients(*ddown_proj)
