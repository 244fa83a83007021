"""Pictures of a compare report, from the report alone: what was measured is never asked again.

Every picture comes four times: ``name.svg`` and ``name.png`` for a light page, ``name-dark.svg``
and ``name-dark.png`` for a dark one. One set of colours for both pages would have to lie in so
narrow a band of lightness that readers with a colour vision deficiency could not tell the methods
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mesp_core.compare import plot_bars, plot_data, plot_lines, plot_timeline
from mesp_core.compare.plot_data import Row
from mesp_core.compare.plot_style import (
    DARK,
    LIGHT,
    Sheet,
    Theme,
    default_style,
    require_matplotlib,
)
from mesp_core.errors import MespError
from mesp_core.files.safetensors_writer import replace_files


@dataclass(frozen=True)
class Picture:
    """One picture: the stem of its files' names, and what paints it for a theme."""

    name: str
    paint: Callable[[Theme], Sheet]


def draw(report: Row, folder: Path) -> list[Path]:
    """Writes every picture the report has data for into ``folder``; returns the files' paths.

    ``report``: the object of ``mesp compare --json``. All pictures are written, or none. Raises
    MespError when matplotlib is missing, when there is nothing to draw, or when the folder cannot
    be written.
    """
    require_matplotlib()
    chosen = pictures(report)
    if not chosen:
        raise MespError(
            "nothing to draw: the report has no two rows with a memory figure, no timeline and no "
            "loss curve; measure at least two methods, or look at the rows' errors"
        )
    content: dict[str, bytes] = {}
    with default_style():
        for picture in chosen:
            for theme, ending in ((LIGHT, ""), (DARK, "-dark")):
                for kind, data in picture.paint(theme).files().items():
                    content[f"{picture.name}{ending}.{kind}"] = data
    replace_files(folder, {name: _writer(data) for name, data in content.items()})
    return [folder / name for name in content]


def pictures(report: Row) -> list[Picture]:
    """The pictures the report has data for, each under a name of its own."""
    rows: list[Row] = [row for row in report.get("rows") or () if isinstance(row, Mapping)]
    found = [
        *_methods(rows, report),
        *_sweeps(rows, report, "tokens"),
        *_sweeps(rows, report, "rank"),
        *_ladders(report),
        *_timelines(rows, report),
        *_curves(report),
    ]
    names: set[str] = set()
    for index, picture in enumerate(found):
        name, count = picture.name, 1
        while name in names:
            count += 1
            name = f"{picture.name}-{count}"
        names.add(name)
        found[index] = Picture(name, picture.paint)
    return found


def _writer(data: bytes) -> Callable[[BinaryIO], None]:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def _methods(rows: list[Row], report: Row) -> Iterator[Picture]:
    """Memory and time of each method. Of a sweep, only the (tokens, rank) with the most rows."""

    def comparable(members: list[Row]) -> bool:
        return bool(plot_data.figures(members))

    largest: dict[tuple[Any, ...], plot_data.Group] = {}
    for group in plot_data.groups(rows, ("model",), comparable):
        first = group.rows[0]
        key = tuple(first.get(f) for f in plot_data.SETTING if f not in ("model", "tokens", "rank"))
        if key not in largest or len(group.rows) > len(largest[key].rows):
            largest[key] = group
    chosen = [row for group in largest.values() for row in group.rows]
    for group in plot_data.groups(chosen, ("model",)):
        yield Picture(f"methods{group.suffix}", _bind(plot_bars.methods, group.rows, report))


def _sweeps(rows: list[Row], report: Row, field: str) -> Iterator[Picture]:
    def rises(members: list[Row]) -> bool:
        return any(
            len(line.points) > 1
            for figure in plot_data.figures(members)
            for line in plot_data.sweep(members, field, figure)
        )

    for group in plot_data.groups(rows, (field,), rises):
        name = f"memory-by-{field}{group.suffix}"
        yield Picture(name, _bind(plot_lines.sweep, group.rows, report, field))


def _ladders(report: Row) -> Iterator[Picture]:
    rows: list[Row] = [row for row in report.get("ladder") or () if isinstance(row, Mapping)]
    varied = ("residency", "apply", "tiled")
    for group in plot_data.groups(rows, varied, lambda members: bool(plot_data.figures(members))):
        yield Picture(f"ladder{group.suffix}", _bind(plot_bars.ladder, group.rows, report))


def _timelines(rows: list[Row], report: Row) -> Iterator[Picture]:
    timed = [row for row in rows if plot_data.timeline(row)]
    for group in plot_data.groups(timed):
        yield Picture(f"timeline{group.suffix}", _bind(plot_timeline.timelines, group.rows, report))


def _curves(report: Row) -> Iterator[Picture]:
    curves = plot_data.curves(report)
    if curves:
        yield Picture("loss", _bind(plot_lines.losses, curves, report))


def _bind(paint: Callable[..., Sheet], *what: Any) -> Callable[[Theme], Sheet]:
    return lambda theme: paint(theme, *what)
