"""torch's autograd and an idiomatic block, for the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as nn

from mesp_core.autodiff import Autodiff
from mesp_core.block import BlockPlan
from mesp_core.formulas.dropout import Dropout, dropout_multiplier
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.lora_linear import Projection
from mesp_core.formulas.rope import rope_forward


class TorchAutodiff(Autodiff):
    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def gradients(
        self,
        function: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        cotangent: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [array.detach().requires_grad_() for array in inputs]
        with torch.enable_grad():
            out = function(*leaves)
        value = out.detach()
        dout = cotangent(value).to(out.dtype)
        return value, list(torch.autograd.grad(out, leaves, dout))

    def frozen_linear(self, x: torch.Tensor, weight: FrozenMatrix) -> torch.Tensor:
        return _FrozenLinear.apply(x, weight)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, plus_one: bool
    ) -> torch.Tensor:
        gain = 1.0 + weight if plus_one else weight
        return nn.rms_norm(x, (x.shape[-1],), gain.to(x.dtype), eps)

    def rope(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
    ) -> torch.Tensor:
        return rope_forward(x, cos, sin, interleaved=interleaved, xp=self._xp)[0]

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan
    ) -> torch.Tensor:
        q, k, v = (a.transpose(0, 1).unsqueeze(0) for a in (q, k, v))
        scale, softcap = plan.attention.scale, plan.attention.softcap
        if softcap is not None:
            o = _capped(q, k, v, scale, softcap, plan.mask)
        else:
            o = nn.scaled_dot_product_attention(
                q, k, v, plan.mask, is_causal=plan.mask is None, scale=scale, enable_gqa=True
            )
        return o.squeeze(0).transpose(0, 1)

    def lora_linear(
        self, x: torch.Tensor, projection: Projection, dropout: Dropout | None
    ) -> torch.Tensor:
        y = self.frozen_linear(x, projection.weight).to(x.dtype)
        if projection.bias is not None:
            y = y + projection.bias.to(x.dtype)
        if projection.lora_a is None or projection.lora_b is None:
            return y
        if dropout is not None:
            x = x * dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=self._xp)
        low = x @ projection.lora_a.to(x.dtype)
        return torch.addmm(y, low, projection.lora_b.to(x.dtype), alpha=projection.scale)

    def activation(self, gate: torch.Tensor, kind: str) -> torch.Tensor:
        return nn.silu(gate) if kind == "silu" else nn.gelu(gate, approximate="tanh")

    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return (nn.cross_entropy(logits, targets.long(), reduction="none") * weights).sum()


class _FrozenLinear(torch.autograd.Function):
    """x Wᵀ; nothing but W is kept, which is there anyway."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: FrozenMatrix) -> torch.Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        return weight.matmul(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return ctx.weight.matmul_t(dy).to(ctx.dtype), None


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention with soft-capped scores, which ``scaled_dot_product_attention`` does not have."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = softcap * torch.tanh(scale / softcap * (q @ k.transpose(-1, -2)))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ v
