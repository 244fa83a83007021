"""Causal attention by torch's native flash pair, where it computes what the formula defines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mesp_core.formulas.attention import AttentionPlan, AttentionSaved
from mesp_core.formulas.precision import accumulation_dtype
from mesp_core.operations import Component, Implementation

_NAME = "_scaled_dot_product_flash_attention_for_cpu"

#: The operators are private to torch, so they are used only while they look like this.
SCHEMAS = {
    _NAME: (
        f"aten::{_NAME}(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> "
        "(Tensor output, Tensor logsumexp)"
    ),
    f"{_NAME}_backward": (
        f"aten::{_NAME}_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, "
        "Tensor? attn_mask=None, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


def unusable(device: torch.device) -> str | None:
    """Why the native pair cannot serve ``device``; None when it can."""
    if device.type != "cpu":
        return "the native pair that gives the log-sum-exp is torch's for CPUs"
    for name, expected in SCHEMAS.items():
        operator = getattr(torch.ops.aten, name, None)
        found = None if operator is None else str(operator.default._schema)
        if found != expected:
            return f"torch {torch.__version__} has changed aten::{name}"
    return None


@dataclass
class FlashAttention(Component):
    """The native pair for plain causal cells; the formula's tiles under a window or soft-cap.

    Grouped queries go in as they are (the kernel shares key heads itself), 16-bit inputs as
    float32. Like the tiles, the pair never forms [T, T].
    """

    by_tiles: dict[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def instead_of(cls, formula: Component) -> FlashAttention:
        return cls(formula.component, formula.run_forward, formula.run_backward)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plan: AttentionPlan
    ) -> tuple[torch.Tensor, AttentionSaved]:
        self._enter((q, k, v))
        if not self._plain(plan):
            return self.run_forward(q, k, v, plan=plan)
        with torch.no_grad():
            return flash_forward(q, k, v, plan)

    def backward(
        self, do: torch.Tensor, saved: AttentionSaved, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, o: torch.Tensor, *, plan: AttentionPlan,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        self._enter((do, saved, q, k, v, o))
        if not self._plain(plan):
            return self.run_backward(do, saved, q, k, v, o, plan=plan)
        with torch.no_grad():
            return flash_backward(do, saved, q, k, v, o, plan)

    def _plain(self, plan: AttentionPlan) -> bool:
        reason = None
        if plan.window is not None:
            reason = "a window"
        elif plan.softcap is not None:
            reason = "a soft-cap"
        elif bool((plan.segment[1:] < plan.segment[:-1]).any()):
            reason = "sequences that are not in one piece"
        if reason is not None:
            self.by_tiles[reason] = self.by_tiles.get(reason, 0) + 1
        return reason is None

    def explain(self) -> Implementation:
        tiles = sum(self.by_tiles.values())
        why = "a native forward and backward pair that gives and takes the log-sum-exp"
        if tiles:
            cases = ", ".join(f"{count} for {reason}" for reason, count in self.by_tiles.items())
            why += f"; of the calls {tiles} by the formula's tiles: {cases}"
        name = "formula" if tiles and tiles == self.calls else f"aten::{_NAME}"
        return Implementation(self.component, name, why, self.calls)


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, AttentionSaved]:
    """``attention_forward`` of the formulas, one sequence after another.

    Live memory beside the output: a tile of scores a thread.
    """
    q_wide, k, v = (_heads_first(a) for a in (q, k, v))
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_wide[:, :, lo:hi], k[:, :, lo:hi], v[:, :, lo:hi], 0.0, True, scale=plan.scale
        )
        for lo, hi in _sequences(plan.segment)
    ]
    o = _joined([_tokens_first(o) for o, _ in parts])
    lse = _joined([_tokens_first(lse) for _, lse in parts])
    return o.to(q.dtype), AttentionSaved(lse)


def flash_backward(
    do: torch.Tensor, saved: AttentionSaved, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, plan: AttentionPlan,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``attention_backward`` of the formulas, one sequence after another."""
    do, q, k, v, o = (_heads_first(a) for a in (do, q, k, v, o))
    lse = saved.lse.unsqueeze(0).transpose(1, 2)
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(a[:, :, lo:hi] for a in (do, q, k, v, o, lse)), 0.0, True, scale=plan.scale
        )
        for lo, hi in _sequences(plan.segment)
    ]
    dq, dk, dv = (_joined([_tokens_first(d) for d in each]) for each in zip(*parts, strict=True))
    return dq, dk, dv


def _sequences(segment: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First token and end of each sequence."""
    _, lengths = torch.unique_consecutive(segment, return_counts=True)
    lo = 0
    for length in lengths.tolist():
        yield lo, lo + length
        lo += length


def _heads_first(a: torch.Tensor) -> torch.Tensor:
    """[N, H, E] as the [1, H, N, E] of the operators, in the accumulation dtype: a view of a
    float32 or float64 array whose features lie side by side, as the operators want them."""
    a = a.to(accumulation_dtype(a.dtype, torch))
    if a.stride(-1) != 1:
        a = a.contiguous()
    return a.unsqueeze(0).transpose(1, 2)


def _tokens_first(a: torch.Tensor) -> torch.Tensor:
    """[1, H, N, …] -> [N, H, …]: how the operators lay their results out in any case."""
    return a.squeeze(0).transpose(0, 1)


def _joined(parts: list[Any]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
