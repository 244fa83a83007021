"""A step by each of the other methods, which MeSP is compared with."""

from __future__ import annotations

from typing import Any

from benchmarks.common import BACKENDS, Case, MemoryCase
from benchmarks.work import Setting

_PARAMS = (BACKENDS, (256,), (8,), ("float32",), ("mesp-store-h", "mebp", "mezo", "autodiff"))
_NAMES = ("backend", "tokens", "rank", "dtype", "method")


class Method(Case):
    params = _PARAMS
    param_names = _NAMES

    def setting(self, backend: str, tokens: int, rank: int, dtype: str, *rest: Any) -> Setting:
        return Setting(backend, tokens, rank, dtype, "step", method=rest[0])

    def time_method(self, *params: object) -> None:
        self.work.run()

    time_method.pretty_name = "Other methods' step: time"


class MethodMemory(MemoryCase):
    params = _PARAMS
    param_names = _NAMES
    setting = Method.setting

    def track_peak_bytes_method(self, *params: object) -> int:
        return self.peak_bytes

    track_peak_bytes_method.unit = "bytes"
    track_peak_bytes_method.pretty_name = "Other methods' step: peak memory"
