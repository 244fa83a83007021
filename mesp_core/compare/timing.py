"""Seconds a step of several settings, taken in turn in one process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from mesp_core.compare.setting import Setting
from mesp_core.compare.workload import Workload, open_backend, open_model
from mesp_core.errors import MespError
from mesp_core.model import Model


def time_settings(settings: Sequence[Setting], ids: Sequence[int], steps: int) -> dict[str, Any]:
    """``seconds``: for each setting the times of ``steps`` steps; ``errors``: the reasons of those
    that could not run, the others None.

    The settings differ in method, head, tiles and residency, and share a model where they can. Each
    runs one step to warm up; then a step of each in turn (A B C A B C …), so that whatever slows
    the machine for a while slows all of them.
    """
    models: dict[tuple[str, bool], Model] = {}
    workloads: list[Workload | None] = []
    errors: list[str | None] = []
    for setting in settings:
        work, error = _warm(setting, models, ids)
        workloads.append(work)
        errors.append(error)
    seconds: list[list[float]] = [[] for _ in settings]
    for _ in range(steps):
        for work, times in zip(workloads, seconds, strict=True):
            if work is not None:
                times.append(_seconds(work))
    return {"seconds": seconds, "errors": errors}


def _warm(
    setting: Setting, models: dict[tuple[str, bool], Model], ids: Sequence[int]
) -> tuple[Workload | None, str | None]:
    key = (setting.residency, setting.tiled)
    try:
        if key not in models:
            models[key] = open_model(setting, open_backend(setting))
        work = Workload(setting, models[key], ids)
        work.step()
    except (MespError, MemoryError) as error:
        return None, str(error) or "out of memory"
    return work, None


def _seconds(work: Workload) -> float:
    """One step. Its end is waited for: an update looks at every parameter it has moved."""
    gc.collect()
    begun = time.perf_counter()
    work.step()
    return time.perf_counter() - begun


def step_times(seconds: Sequence[Sequence[float]]) -> list[tuple[float | None, float | None]]:
    """(median of the steps, median of the ratios to the step of the first setting that ran, turn by
    turn) for each setting; None where there are no steps."""
    first = next((times for times in seconds if times), [])
    found: list[tuple[float | None, float | None]] = []
    for times in seconds:
        ratios = [own / base for own, base in zip(times, first, strict=False)]
        found.append(
            (
                statistics.median(times) if times else None,
                statistics.median(ratios) if ratios else None,
            )
        )
    return found
