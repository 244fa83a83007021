"""One measurement of memory in a process of its own.

Arguments: a setting as JSON, and the seconds after which it gives up and tells where it was. One
line of JSON goes out.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.common import where_it_exists
from benchmarks.work import WORK, Setting, open_backend

#: Seconds between two readings of the footprint.
_INTERVAL = 0.0005

#: What lives shorter can be missed in one run, so where only readings tell there are several.
_RUNS = 3


def peak_bytes(setting: Setting) -> int:
    """The most memory that the work needed at once.

    What the framework's allocator held, where it counts (MLX; devices of JAX and torch); the
    largest temporaries of a compiled program (JAX on a CPU); else anonymous memory of the process
    beyond what it had before the model was opened (torch on a CPU).
    """
    from mesp_core.footprint import FootprintMeter, process_footprint

    backend = open_backend(setting.backend)
    ones = backend.from_numpy(np.ones((512, 512), np.float32), "float32")
    # What a first product brings (threads, buffers) belongs to the library, not to the work.
    backend.stage(backend.xp.matmul(ones, ones))
    gc.collect()
    before = process_footprint() or 0
    work = WORK[setting.what](setting, backend)
    work.run()
    gc.collect()
    backend.reset_peak()
    work.run()
    counted = backend.memory().peak
    if counted is not None:
        return counted
    if hasattr(backend, "compiled"):
        return max(program.temporary_bytes for program in backend.compiled())
    with FootprintMeter(_INTERVAL) as meter:
        for _ in range(_RUNS):
            work.run()
    if meter.peak is None:
        raise NotImplementedError("this system does not tell the memory of a process")
    return meter.peak - before


def main() -> dict[str, Any]:
    setting = Setting(**json.loads(sys.argv[1]))
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    try:
        with where_it_exists():
            return {"peak_bytes": peak_bytes(setting)}
    except NotImplementedError as error:
        return {"skipped": str(error)}


if __name__ == "__main__":
    print(json.dumps(main()))
