"""What every benchmark shares: its parameters, and what is not measured here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.work import WORK, Setting, open_backend

#: Of every machine: results compare only where parameters are the same, so what is installed
#: must not change them.
BACKENDS = ("mlx", "jax", "torch")

PARAMS = (BACKENDS, (256, 1024), (8,), ("float32", "bfloat16"))
PARAM_NAMES = ("backend", "tokens", "rank", "dtype")

#: Settings of the allocators that make memory figures exact; they are read when a process starts.
_EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}


@contextmanager
def where_it_exists() -> Iterator[None]:
    """What this commit lacks, or this machine, is skipped: asv's word for that is
    NotImplementedError. (The quick run of the checks allows no skip, so an error cannot hide.)"""
    try:
        from mesp_core.errors import MespError
    except ImportError as error:
        raise NotImplementedError(str(error)) from error
    try:
        yield
    except (AttributeError, ImportError, TypeError, MespError) as error:
        raise NotImplementedError(f"{type(error).__name__}: {error}") from error


class Case:
    """A benchmark of one kind of work. asv gives each cell a process of its own.

    what: a name of ``WORK``. version: raised when what is measured changes, so that asv does not
    join old and new points.
    """

    params: tuple[tuple[Any, ...], ...] = PARAMS
    param_names: tuple[str, ...] = PARAM_NAMES
    version = "1"
    timeout = 300
    what = "step"

    # Every sample is one call; two processes, so that one's luck with addresses is not all.
    number = 1
    repeat = (3, 20, 2.0)
    rounds = 2
    warmup_time = 0

    _ready: tuple[Any, ...] | None = None

    def setting(self, backend: str, tokens: int, rank: int, dtype: str, *rest: Any) -> Setting:
        """rest: of parameters that a subclass adds."""
        return Setting(backend, tokens, rank, dtype, self.what)

    def setup(self, *params: Any) -> None:
        """asv calls this before every sample, so what is ready stays."""
        if self._ready != params:
            with where_it_exists():
                self.prepare(self.setting(*params))
            self._ready = params

    def prepare(self, setting: Setting) -> None:
        """Opens what is measured, and runs it once: caches are warm and programs compiled."""
        self.work = WORK[setting.what](setting, open_backend(setting.backend))
        self.work.run()


class MemoryCase(Case):
    """A benchmark of memory, measured in a process that does nothing else (``child``)."""

    def prepare(self, setting: Setting) -> None:
        child = Path(__file__).parent / "child.py"
        # -P: the folder of a script must not stand for a module.
        done = subprocess.run(
            [sys.executable, "-P", str(child), json.dumps(asdict(setting)), str(self.timeout - 30)],
            env=os.environ | _EXACT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the measuring process failed: {done.stderr.strip()}")
        answer = json.loads(done.stdout.splitlines()[-1])
        if "skipped" in answer:
            raise NotImplementedError(answer["skipped"])
        self.peak_bytes = answer["peak_bytes"]
