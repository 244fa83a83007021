"""Ctrl-C, SIGTERM and a closed terminal as a wish to stop, honoured between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

#: The last one is of POSIX only.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class StopRequest:
    """While open, the first SIGINT, SIGTERM or SIGHUP only sets ``requested``; the second acts as
    ever.

    announce: called with the signal's name when the first one arrives. A signal that is ignored
    (SIGHUP under ``nohup``) stays ignored.
    Signals reach the main thread only, so in any other thread this does nothing.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.requested = False
        self._announce = announce
        self._previous: dict[int, Any] = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        self._announce(signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
