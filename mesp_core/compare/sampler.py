"""Memory over time, read by a thread."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mesp_core.footprint import process_footprint

#: Seconds between two readings.
INTERVAL = 0.0003

#: The most points of a timeline; each is the largest of the readings it stands for.
POINTS = 1000


class Sampler:
    """Reads the process's footprint while it is open; ``peak`` is the most seen, None where the
    system does not say. What lives shorter than the interval can be missed.

    watch: with it, its readings are kept over time, too, or the footprint's where it answers None.
    """

    def __init__(self, watch: Callable[[], int | None] | None = None) -> None:
        self.peak: int | None = None
        self._watch = watch
        self._begun = 0.0
        self._times = array("d")
        self._values = array("q")
        self._phases: list[tuple[float, str]] = []
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def phase(self, name: str) -> None:
        """Marks the beginning of a phase."""
        self._sample()
        self._phases.append((time.perf_counter() - self._begun, name))

    def timeline(self, baseline: int) -> dict[str, Any] | None:
        """seconds, bytes, and phases as [second, name]; None when nothing was watched.

        baseline: taken off where the readings are of the footprint.
        """
        if not self._times:
            return None
        watched = self._watch is not None and self._watch() is not None
        every = -(-len(self._times) // POINTS)
        starts = range(0, len(self._times), every)
        values = [max(self._values[lo : lo + every]) for lo in starts]
        return {
            "seconds": [round(self._times[lo], 6) for lo in starts],
            "bytes": values if watched else [value - baseline for value in values],
            "measure": "peak_bytes" if watched else "footprint_bytes",
            "phases": [[round(seconds, 6), name] for seconds, name in self._phases],
        }

    def _sample(self) -> None:
        with self._lock:
            now = process_footprint()
            if now is not None:
                self.peak = max(now, self.peak or 0)
            if self._watch is None:
                return
            active = self._watch()
            value = now if active is None else active
            if value is not None:
                self._times.append(time.perf_counter() - self._begun)
                self._values.append(value)

    def _run(self) -> None:
        while not self._stopped:
            self._sample()
            time.sleep(INTERVAL)

    def __enter__(self) -> Sampler:
        self._begun = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._thread.join()
        self._sample()
