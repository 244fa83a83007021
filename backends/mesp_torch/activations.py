"""The MLP's activation by torch's own kernels; the formula defines it."""

from __future__ import annotations

from typing import Any

import torch

from mesp_core.formulas.activation import Activations, activation, activation_with_slope


def native_activations() -> Activations:
    """SiLU and its slope in one pass each, where the formula takes nine; the rest by the formula.

    Measured on two x86-64 cores in float32, microseconds: [256, 576] 141 against 267,
    [256, 1536] 371 against 1614.
    """
    return Activations(_value, _with_slope)


def _value(g: torch.Tensor, kind: str, *, xp: Any) -> torch.Tensor:
    return torch.nn.functional.silu(g) if kind == "silu" else activation(g, kind, xp=xp)


def _with_slope(g: torch.Tensor, kind: str, *, xp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if kind != "silu":
        return activation_with_slope(g, kind, xp=xp)
    one = torch.ones((), dtype=g.dtype, device=g.device).expand(g.shape)
    return torch.nn.functional.silu(g), torch.ops.aten.silu_backward(one, g)
