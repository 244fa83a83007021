"""A whole training step on the synthetic model: time, memory, accuracy, and how much of the time
its bare matrix products would take."""

from __future__ import annotations

from benchmarks.accuracy import gradient_error
from benchmarks.common import BACKENDS, Case, MemoryCase
from benchmarks.products import gemm_share


class Step(Case):
    def time_step(self, *params: object) -> None:
        self.work.run()

    time_step.pretty_name = "Step: time"

    def track_gradient_error(self, *params: object) -> float:
        return gradient_error(self.work)

    track_gradient_error.unit = "relative error"
    track_gradient_error.pretty_name = "Step: error of the gradients"

    def track_gemm_share(self, *params: object) -> float:
        return gemm_share(self.work)

    track_gemm_share.unit = "of the time"
    track_gemm_share.pretty_name = "Step: share of bare products"


class StepMemory(MemoryCase):
    # From 1024 tokens on every tile has its full size, and what grows is one row a token.
    params = (BACKENDS, (256, 1024, 2048), (8,), ("float32", "bfloat16"))

    def track_peak_bytes_step(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_step.unit = "bytes"
    track_peak_bytes_step.pretty_name = "Step: peak memory"
