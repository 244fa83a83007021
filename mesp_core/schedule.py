"""The learning rate over a run: constant or cosine, with a linear warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesp_core.errors import MespError

KINDS = ("constant", "cosine")


@dataclass(frozen=True)
class Schedule:
    """Learning rate by update, counted from 0.

    peak: the rate after ``warmup`` updates, reached linearly (update 0 has peak / (warmup + 1)).
    kind: ``constant`` stays there; ``cosine`` falls from there to ``end`` over ``decay`` updates.
    """

    peak: float
    kind: str = "constant"
    warmup: int = 0
    decay: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MespError(f"learning-rate schedule must be one of {KINDS}, not {self.kind!r}")
        if self.warmup < 0 or self.decay < 0:
            raise MespError("a schedule's warm-up and decay are counts of updates, 0 or more")
        for what, rate in (("", self.peak), ("last ", self.end)):
            if not 0.0 <= rate < math.inf:
                raise MespError(f"the {what}learning rate must be 0 or more, not {rate}")

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return self.peak * (update + 1) / (self.warmup + 1)
        if self.kind == "constant" or self.decay == 0:
            return self.peak
        progress = min(1.0, (update - self.warmup) / self.decay)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))
