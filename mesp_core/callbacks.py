"""What a training run tells: to a progress bar, to a file, to whoever asks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mesp_core.errors import MespError

#: One report; the names are those of mlx-lm's callbacks.
Info = Mapping[str, Any]


class TrainingCallback:
    """Override what is of interest; every method does nothing here."""

    def on_iteration(self, info: Info) -> None:
        """After every update: iteration, iterations (batches in it), loss, tokens,
        tokens_per_second, peak_memory and footprint as below."""

    def on_train_loss_report(self, info: Info) -> None:
        """Now and then: iteration, train_loss (mean over the tokens since the last report),
        learning_rate, iterations_per_second, tokens_per_second, trained_tokens (since the start),
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

    append: go on with the file of an earlier run. Raises MespError where it cannot be written.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        try:
            self._file: TextIO = open(path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise MespError(f"cannot write {path}: {error.strerror}") from None

    def on_train_loss_report(self, info: Info) -> None:
        self._write(info)

    def on_val_loss_report(self, info: Info) -> None:
        self._write(info)

    def on_event(self, info: Info) -> None:
        self._write(info)

    def _write(self, info: Info) -> None:
        self._file.write(json.dumps(finite(info), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def finite(info: Info) -> dict[str, Any]:
    """The report with None for numbers that JSON cannot say (NaN, infinities)."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in info.items()
    }
