"""Running a measurement in a fresh process, and telling why one failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Buffers of glibc's allocator that are this large go back to the system as soon as they are
#: freed, so that the process's anonymous memory is what is in use; by default glibc changes its
#: mind as it goes. NumPy's wish for huge pages would count memory that nothing has touched.
EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "NUMPY_MADVISE_HUGEPAGE": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def run_child(request: Mapping[str, Any], *, exact: bool = False) -> dict[str, Any]:
    """The child's answer, or ``{"error": one line}`` however it ended.

    exact: with settings of the allocators that make memory figures exact, and may cost time.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if exact:
        environment |= EXACT
    # -P: a file of the current folder must not stand for a module.
    command = [sys.executable, "-P", "-m", "mesp_core.compare.child"]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        out, err = process.communicate(json.dumps(request))
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode == 0:
        return json.loads(out)
    return {"error": _ending(process.returncode, err)}


def _ending(status: int, err: str) -> str:
    """How a child ended that gave no answer."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = ": perhaps the system was out of memory" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return f"the process failed: {lines[-1] if lines else f'exit status {status}'}"


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C, so that what was measured is printed and kept."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {name: signal.getsignal(getattr(signal, name)) for name in names}
    for name, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), interrupt)
    try:
        yield
    finally:
        for name, handler in previous.items():
            signal.signal(getattr(signal, name), handler)
