"""``python -m mesp_core.compare.child``: one measurement in a process of its own.

A JSON object with ``task`` comes in on stdin, one goes out on stdout: ``describe`` (what runs
here), ``memory`` (one setting) or ``time`` (several in turn, see ``timing``).
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.backend import Backend, get_backend
from mesp_core.callbacks import finite
from mesp_core.cli.output import environment
from mesp_core.compare.gradients import GradientWriter
from mesp_core.compare.sampler import Sampler
from mesp_core.compare.setting import Setting
from mesp_core.compare.timing import time_settings
from mesp_core.compare.workload import Workload, open_backend, open_model
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.footprint import process_footprint
from mesp_core.host_memory import return_free_memory
from mesp_core.methods import reason_against

Answer = dict[str, Any]

#: Seconds after which a thread of Python lets another one run.
_SWITCH = 2e-4


def describe(backend: str, dtype: str, lora_dtype: str, stored: str) -> Answer:
    """versions, backend, device and machine, and dtype, which is known where ``auto`` was asked for
    a checkpoint of dtype ``stored``. Raises MespError where the backend cannot run, or lacks a
    dtype."""
    found = get_backend(backend)
    dtype = found.default_dtype(stored) if dtype == "auto" else dtype
    for name in (dtype, lora_dtype):
        found.dtype(name)
    return environment(found) | {"dtype": dtype}


def measure_memory(
    setting: Setting, ids: Sequence[int], *, gradients: Path | None = None, timeline: bool = False
) -> Answer:
    """Memory, loss and gradients of one setting: a step to warm up, whose loss and gradients are
    taken, then one that is measured, or two where there are only samples. All update the
    parameters.

    gradients: a file to write them to. timeline: also memory over time in the measured step.
    """
    backend = open_backend(setting)
    reason = reason_against(backend, setting.method, setting.head)
    if reason is not None:
        return {"unavailable": reason}
    _start(backend)
    _tidy(backend)
    baseline = process_footprint() or 0
    work = Workload(setting, open_model(setting, backend), ids)
    writer = None if gradients is None else GradientWriter(gradients, work.model)
    result = work.step(on_block=None if writer is None else writer.write)
    answer: Answer = {
        "loss": result.loss,
        "trained": sum(math.prod(array.shape) for array in work.model.parameters.values()),
        "gradients": None if writer is None else writer.close(),
    }
    sampler = _sampled_step(work, timeline)
    peak, most = backend.memory().peak, sampler.peak
    if peak is None and most is not None:
        # Samples are all there is, and a second step has another chance to show its peak.
        most = max(most, _sampled_step(work, False).peak or 0)
    return answer | {
        "peak_bytes": peak,
        "footprint_bytes": None if most is None else most - baseline,
        # Plain autodiff is many small programs of the framework's own, of which nothing is known.
        "compiled_bytes": None if setting.method == "autodiff" else backend.compiled_bytes(),
        "timeline": sampler.timeline(baseline),
    }


def _sampled_step(work: Workload, timeline: bool) -> Sampler:
    _tidy(work.model.backend)
    with Sampler(_active(work.model.backend) if timeline else None) as sampler:
        work.step(on_phase=sampler.phase)
    return sampler


def _active(backend: Backend) -> Callable[[], int | None]:
    return lambda: backend.memory().active


def _start(backend: Backend) -> None:
    """One product large enough for threads, differentiated where that is possible: buffers and
    modules that come with the first one belong to the library, not to a step."""
    ones = backend.from_numpy(np.ones((512, 512), np.float32), "float32")
    product = backend.xp.matmul(ones, ones)
    backend.stage(product)
    with suppress(UnsupportedError):
        gradients = backend.autodiff().gradients(
            lambda factor: backend.xp.matmul(ones, factor), [ones], backend.xp.ones_like
        )
        backend.stage(gradients)


def _tidy(backend: Backend) -> None:
    """Gives back what is free or left in reference cycles: it is none of what comes next."""
    gc.collect()
    backend.reset_peak()
    return_free_memory()


def answer(request: Mapping[str, Any]) -> Answer:
    """What the parent gets for a request. Raises MespError as its task does."""
    if request["task"] == "describe":
        names = ("backend", "dtype", "lora_dtype", "stored")
        return describe(*(request[name] for name in names))
    settings = [Setting.from_json(value) for value in request["settings"]]
    if request["task"] == "time":
        return time_settings(settings, request["ids"], request["steps"])
    path = request["gradients"]
    return measure_memory(
        settings[0],
        request["ids"],
        gradients=None if path is None else Path(path),
        timeline=request["timeline"],
    )


def main() -> int:
    # What a framework prints must not mix with the answer.
    # The thread that samples memory must not wait for long.
    sys.setswitchinterval(_SWITCH)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.load(sys.stdin)
    try:
        with np.errstate(all="ignore"):
            found = answer(request)
    except MespError as error:
        found = {"error": str(error)}
    except MemoryError as error:
        found = {"error": f"out of memory: {error}".rstrip(": ")}
    with out:
        json.dump(finite(found), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
