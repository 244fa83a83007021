"""A report as it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mesp_core.compare.measure import Comparison, Options

Report = dict[str, Any]


class Study:
    """What is measured, kept after every measurement.

    report: rows, ladder and curves so far, and what else a report holds. rows, ladder: where cells
    are measured. tell: called with a line as each measurement ends; write: keeps the report.
    """

    def __init__(
        self,
        report: Report,
        options: Options,
        *,
        tell: Callable[[str], None],
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.report: Report = dict(report)
        for part, nothing in (("rows", []), ("ladder", []), ("curves", {})):
            self.report.setdefault(part, nothing)
        self.options = options
        self.tell = tell
        self._write = write
        self.rows = self._comparison("rows")
        self.ladder = self._comparison("ladder")

    def _comparison(self, part: str) -> Comparison:
        def keep() -> None:
            self.report[part] = comparison.rows
            self.save()

        comparison = Comparison(self.options, self.tell, keep, self.report[part])
        return comparison

    def save(self) -> None:
        self._write(self.report)

    @property
    def failed(self) -> bool:
        """Whether something that this backend can run did not run to its end."""
        return any(
            row["time_error"] or (row["error"] and not row.get("unavailable"))
            for row in (*self.report["rows"], *self.report["ladder"])
        ) or any(curve.get("failed") for curve in self.report["curves"].values())

    @property
    def empty(self) -> bool:
        """Whether nothing has been measured yet."""
        return not any(self.report[part] for part in ("rows", "ladder", "curves"))
