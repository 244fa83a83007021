"""A step on models as large as people train: a real one, and the shapes of the paper's with random
weights, which take seconds to write and some hundred megabytes of disk (``MESP_BENCH_CACHE``)."""

from __future__ import annotations

from typing import Any

from benchmarks.common import BACKENDS, Case, MemoryCase
from benchmarks.work import Setting

_NAMES = ("backend", "tokens", "rank", "dtype", "model")


class RealModel(Case):
    params = (BACKENDS, (256,), (8,), ("float32", "bfloat16"), ("smollm2-135m", "qwen2.5-0.5b"))
    param_names = _NAMES
    timeout = 900
    rounds = 1
    repeat = (3, 5, 20.0)

    def setting(self, backend: str, tokens: int, rank: int, dtype: str, *rest: Any) -> Setting:
        return Setting(backend, tokens, rank, dtype, "step", source=rest[0])

    def time_real_model(self, *params: object) -> None:
        self.work.run()

    time_real_model.pretty_name = "Real model's step: time"


class RealModelMemory(MemoryCase):
    params = (
        BACKENDS,
        (256,),
        (8,),
        ("float32", "bfloat16"),
        ("smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"),
    )
    param_names = _NAMES
    timeout = 900
    setting = RealModel.setting

    def track_peak_bytes_real_model(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_real_model.unit = "bytes"
    track_peak_bytes_real_model.pretty_name = "Real model's step: peak memory"
