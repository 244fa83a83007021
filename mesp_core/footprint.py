"""The process's footprint: memory that only this process accounts for.

Pages of mapped files (the streamed weights) can be dropped at any time and are not counted:
anonymous memory on Linux, ``phys_footprint`` on macOS.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from types import TracebackType


def process_footprint() -> int | None:
    """Bytes now; None on a system that does not say."""
    if sys.platform.startswith("linux"):
        return _linux()
    if sys.platform == "darwin":
        return _macos()
    return None


def _linux() -> int | None:
    # A third of the time that reading RssAnon in /proc/self/status takes.
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
    try:
        _, resident, shared, *_ = os.read(file, 256).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class _ResourceUsage(ctypes.Structure):
    """``struct rusage_info_v0`` of macOS."""

    _fields_ = [
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("exit_time", ctypes.c_uint64),
    ]


def _macos() -> int | None:
    usage = _ResourceUsage()
    try:
        status = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, ctypes.byref(usage))
    except (AttributeError, OSError):
        return None
    return int(usage.phys_footprint) if status == 0 else None


class FootprintMeter:
    """Samples the footprint in a thread while it is open; ``peak`` is the most seen, or None.

    The kernel keeps no peak of anonymous memory, so what lives shorter than ``interval`` seconds
    can be missed.
    """

    def __init__(self, interval: float = 0.05) -> None:
        self.peak: int | None = None
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="footprint", daemon=True)

    def sample(self) -> int | None:
        """The footprint now, counted in ``peak``."""
        now = process_footprint()
        if now is not None:
            self.peak = max(now, self.peak or 0)
        return now

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()

    def __enter__(self) -> FootprintMeter:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()
