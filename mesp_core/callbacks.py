"""What a training run tells: to a progress bar, to a file, to whoever asks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mesp_core.errors import MespError

#: One report; the names are those of mlx-lm's callbacks.
Info = Mapping[str, Any]


class TrainingCallback:
    """Override what is of interest; every method does nothing here."""

    def on_iteration(self, info: Info) -> None:
        """After every window of batches, whether it led to an update or was skipped: iteration,
        iterations (batches in it), updates (of the run so far), loss, tokens, tokens_per_second,
        peak_memory and footprint as below."""

    def on_train_loss_report(self, info: Info) -> None:
        """Now and then: iteration, train_loss (mean over the tokens since the last report),
        learning_rate, iterations_per_second, tokens_per_second, trained_tokens (of this run),
        peak_memory (the allocator's, GB of 10⁹ bytes, None where the framework does not say) and
        footprint (the process's peak, GB)."""

    def on_val_loss_report(self, info: Info) -> None:
        """After each validation: iteration, val_loss, val_time in seconds."""

    def on_event(self, info: Info) -> None:
        """Something out of the ordinary: iteration, event (``not_finite``, ``all_masked``,
        ``interrupted``), message."""

    def on_save(self, info: Info) -> None:
        """After each checkpoint: iteration, path."""


class Callbacks(TrainingCallback):
    """Several callbacks as one."""

    def __init__(self, *callbacks: TrainingCallback) -> None:
        self._callbacks = callbacks

    def on_iteration(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.on_iteration(info)

    def on_train_loss_report(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.on_train_loss_report(info)

    def on_val_loss_report(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.on_val_loss_report(info)

    def on_event(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.on_event(info)

    def on_save(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.on_save(info)


class MetricsFile(TrainingCallback):
    """Every report as one JSON object a line, written at once so that a killed run keeps them.

    The file is opened after the first update, and earlier reports are written then: a run that
    trains nothing leaves the file of an earlier one as it was. append: go on with that file.
    Every method raises MespError where it cannot be written.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        self._mode = "a" if append else "w"
        self._file: IO[str] | None = None
        self._waiting: list[str] = []

    def on_iteration(self, info: Info) -> None:
        if self._file is not None or not info["updates"]:
            return
        try:
            self._file = open(self.path, self._mode, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise MespError(f"cannot write {self.path}: {error.strerror}") from None
        self._put("".join(self._waiting))
        self._waiting.clear()

    def on_train_loss_report(self, info: Info) -> None:
        self._write(info)

    def on_val_loss_report(self, info: Info) -> None:
        self._write(info)

    def on_event(self, info: Info) -> None:
        self._write(info)

    def _write(self, info: Info) -> None:
        line = json.dumps(finite(info), allow_nan=False) + "\n"
        if self._file is None:
            self._waiting.append(line)
        else:
            self._put(line)

    def _put(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise MespError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        if self._file is not None:
            # What is left in the buffer could not be written, and was told then.
            with suppress(OSError):
                self._file.close()


def finite(report: Any) -> Any:
    """The report with None for numbers that JSON cannot say (NaN, infinities), at any depth."""
    if isinstance(report, float):
        return report if math.isfinite(report) else None
    if isinstance(report, Mapping):
        return {key: finite(value) for key, value in report.items()}
    if isinstance(report, list | tuple):
        return [finite(value) for value in report]
    return report
