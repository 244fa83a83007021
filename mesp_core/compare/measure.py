"""Cells of a comparison: every method at one length and rank, measured and joined into rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesp_core.compare.gradients import GradientFile, gradient_quality
from mesp_core.compare.process import run_child
from mesp_core.compare.setting import Row, Setting
from mesp_core.compare.timing import step_times
from mesp_core.compare.workload import stored_bytes, token_ids
from mesp_core.files.checkpoint import open_checkpoint

#: Whose gradients are the true ones: MeSP's only where there is no automatic differentiation.
REFERENCES = ("autodiff", "mesp")

#: Fields of a child's answer that are fields of a row.
_MEASURED = ("loss", "trained", "peak_bytes", "footprint_bytes", "compiled_bytes", "timeline")


@dataclass(frozen=True)
class Options:
    """steps: timed ones of each method, 0 for none; gradients: compare them; timeline: memory over
    time, too; run: takes a request to a process and brings its answer."""

    steps: int = 3
    gradients: bool = True
    timeline: bool = False
    run: Callable[..., dict[str, Any]] = run_child


class Comparison:
    """Measures cells one after the other. ``rows`` always holds what is known so far, in the order
    of the settings, so that an interruption loses nothing.

    options: of the next cell; tell: called with a line as each measurement ends; on_rows: whenever
    rows have changed; known: rows of an earlier run: a cell that they hold complete is not measured
    again.
    """

    def __init__(
        self,
        options: Options,
        tell: Callable[[str], None] = lambda line: None,
        on_rows: Callable[[], None] = lambda: None,
        known: Iterable[Row] = (),
    ) -> None:
        self.options = options
        self._tell = tell
        self._on_rows = on_rows
        self._rows = {Setting.from_row(row): row for row in known}
        self._order = dict.fromkeys(self._rows)

    @property
    def rows(self) -> list[Row]:
        return [self._rows[setting] for setting in self._order if setting in self._rows]

    def cell(self, settings: Sequence[Setting]) -> list[Row]:
        """Rows of settings that share model, backend, dtypes, tokens, rank and seed."""
        if not all(self._complete(self._rows.get(setting)) for setting in settings):
            self._order |= dict.fromkeys(settings)
            self._measure_cell(settings)
        return [self._rows[setting] for setting in settings]

    def _complete(self, row: Row | None) -> bool:
        """Whether a row holds all that is asked for."""
        if row is None or row["error"] is not None:
            return row is not None and bool(row.get("unavailable"))
        timed = row["step_seconds"] is not None
        compared = row["gradient_reference"] is not None
        return (timed or not self.options.steps) and (compared or not self.options.gradients)

    def _measure_cell(self, settings: Sequence[Setting]) -> None:
        ids, stored = _inputs(settings[0])
        with tempfile.TemporaryDirectory(prefix="mesp-compare-") as folder:
            for place, found in self._measured(settings, ids, Path(folder)):
                row = settings[place].row() | {"stored_bytes": stored} | found
                self._rows[settings[place]] = row
                self._tell(_line(settings[place], row))
                self._on_rows()
        able = [setting for setting in settings if self._rows[setting]["error"] is None]
        if self.options.steps and able:
            self._time(able, ids)

    def _measured(
        self, settings: Sequence[Setting], ids: Sequence[int], folder: Path
    ) -> Iterator[tuple[int, Row]]:
        """(place, fields) of every setting, those that give the true gradients first. Besides
        theirs, one file of gradients is there at a time."""
        done: set[int] = set()
        true, reference = None, None
        for method in REFERENCES if self.options.gradients else ():
            place = next((p for p, s in enumerate(settings) if s.method == method), None)
            extra = replace(settings[0], method=method, head=None, tiled=True)
            setting = extra if place is None else settings[place]
            answer = self._memory(setting, ids, folder / "true", timeline=place is not None)
            true, reference = _gradients(answer, folder / "true"), method
            if place is not None:
                done.add(place)
                # MeSP's gradients beside themselves would say nothing.
                yield place, _fields(answer, true if method == "autodiff" else None, true, method)
            if true is not None:
                break
        for place, setting in enumerate(settings):
            if place not in done:
                path = None if true is None else folder / "other"
                answer = self._memory(setting, ids, path, timeline=True)
                found = None if path is None else _gradients(answer, path)
                yield place, _fields(answer, found, true, reference)

    def _memory(
        self, setting: Setting, ids: Sequence[int], gradients: Path | None, *, timeline: bool
    ) -> dict[str, Any]:
        return self.options.run(
            {
                "task": "memory",
                "settings": [setting.as_json()],
                "ids": ids,
                "gradients": None if gradients is None else str(gradients),
                "timeline": timeline and self.options.timeline,
            },
            exact=True,
        )

    def _time(self, settings: Sequence[Setting], ids: Sequence[int]) -> None:
        request = {
            "task": "time",
            "settings": [setting.as_json() for setting in settings],
            "ids": ids,
            "steps": self.options.steps,
        }
        answer = self.options.run(request)
        rows = [self._rows[setting] for setting in settings]
        if "error" in answer:
            for row in rows:
                row["time_error"] = answer["error"]
            self._tell(f"  steps in turn: {answer['error']}")
        else:
            times = step_times(answer["seconds"])
            for row, (seconds, ratio), error in zip(rows, times, answer["errors"], strict=True):
                row |= {"step_seconds": seconds, "step_ratio": ratio, "time_error": error}
            told = (f"{s.title} {_seconds(row)}" for s, row in zip(settings, rows, strict=True))
            self._tell(f"  a step, in turn: {', '.join(told)}")
        self._on_rows()


def _inputs(setting: Setting) -> tuple[list[int], int]:
    """The token ids of a cell, and the size of the stored weights."""
    checkpoint = open_checkpoint(setting.model)
    try:
        return token_ids(checkpoint, setting.tokens, setting.seed), stored_bytes(checkpoint)
    finally:
        checkpoint.close()


def _gradients(answer: Mapping[str, Any], path: Path) -> GradientFile | None:
    """The file of gradients that an answer speaks of, when there is one."""
    found = answer.get("gradients")
    return None if found is None else GradientFile(path, found["dtype"], found["entries"])


def _fields(
    answer: Mapping[str, Any],
    found: GradientFile | None,
    true: GradientFile | None,
    reference: str | None,
) -> Row:
    """The measured fields of a row."""
    reason = answer.get("unavailable")
    if reason is not None or "error" in answer:
        return {"error": reason or answer["error"], "unavailable": reason is not None}
    row: Row = {name: answer[name] for name in _MEASURED}
    if true is not None:
        row["gradient_reference"] = reference
        if found is not None:
            row |= gradient_quality(true, found)
    return row


def _line(setting: Setting, row: Row) -> str:
    """What is told when a setting has been measured."""
    where = f"{setting.label}, {setting.tokens} tokens, rank {setting.rank}, {setting.title}"
    if row["error"] is not None:
        return f"{where}: {row['error']}"
    figures = {"allocator": "peak_bytes", "footprint": "footprint_bytes"}
    known = [f"{n} {row[f] / 1e6:.1f} MB" for n, f in figures.items() if row[f] is not None]
    loss = "loss not finite" if row["loss"] is None else f"loss {row['loss']:.4f}"
    return f"{where}: {', '.join([*known, loss])}"


def _seconds(row: Row) -> str:
    return row["time_error"] or f"{row['step_seconds']:.2f} s"
