"""The picture of memory inside one step: a panel a method, its phases marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesp_core.compare import plot_data
from mesp_core.compare.plot_data import Row, Timeline, megabytes
from mesp_core.compare.plot_style import WIDTH, Sheet, Theme, header_height, identifier, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches: where the axes begin, their height, and the room between two panels.
LEFT, HIGH, BETWEEN = 0.75, 1.15, 0.42

#: Peaks further apart than this get an axis each, or the lower ones would be flat lines.
SHARED_RANGE = 4

MEASURES = {
    "peak_bytes": "memory held by the allocator",
    "footprint_bytes": plot_data.figure_title("footprint_bytes"),
}


@dataclass(frozen=True)
class Panel:
    """One method: ``highest`` is (seconds, bytes) of its highest sample, ``peak`` the row's own
    figure, which the samples can miss."""

    name: str
    method: str
    line: Timeline
    highest: tuple[float, float]
    peak: float


def timelines(theme: Theme, rows: Sequence[Row], report: Row) -> Sheet:
    """Memory against time inside one step. In every panel after the first a line shows the peak
    of the first one's method, for panels may have axes of their own."""
    panels = _panels(rows)
    peaks = [panel.peak for panel in panels]
    shared = max(peaks) <= SHARED_RANGE * min(peaks)
    measures = {MEASURES.get(str(panel.line.measure), "memory as sampled") for panel in panels}
    words = [plot_data.setting_words(rows[0], report), *sorted(measures)]
    if len(panels) > 1:
        dashed = f"dashed: peak of {panels[0].name}"
        words.append(dashed if shared else f"every panel has its own scale, {dashed}")
    setting = "; ".join(words)
    top = header_height(setting) + 0.25
    height = top + len(panels) * (HIGH + BETWEEN) + 0.25
    sheet = Sheet(theme, height, "Memory inside one step", setting)
    sheet.text(LEFT - 0.08, top - 0.11, "MB", colour=theme.muted, ha="right")
    names = [sheet.width_of(panel.name, weight="bold") for panel in panels]
    across = WIDTH - LEFT - 0.3 - max(*names, sheet.width_of("sampled 1,000 MB"))
    end = max(panel.line.points[-1][0] for panel in panels)
    for index, panel in enumerate(panels):
        place = top + index * (HIGH + BETWEEN)
        axes = sheet.axes(LEFT, place, across, HIGH)
        axes.set_xlim(0, end)
        axes.set_ylim(0, (max(peaks) if shared else panel.peak) / 1e6 * 1.1 or 1)
        axes.tick_params(axis="x", pad=7, labelbottom=index == len(panels) - 1)
        if index:
            level = panels[0].peak / 1e6
            axes.axhline(level, color=theme.colour(panels[0].method), linestyle=(0, (5, 2)), lw=1)
        _paint(sheet, axes, panel)
        _phases(sheet, panel, place, across / end)
        _words(sheet, panel, LEFT + across + 0.15, place)
    words_below = "seconds since the step began"
    sheet.text(LEFT + across / 2, sheet.height - 0.15, words_below, colour=theme.muted, ha="center")
    return sheet


def _panels(rows: Sequence[Row]) -> list[Panel]:
    """One panel a method; of rows alike, the first counts."""
    found: dict[str, Panel] = {}
    for row in plot_data.in_order(rows):
        line, name = plot_data.timeline(row), plot_data.series_name(row, rows)
        if line is not None:
            highest = max(line.points, key=lambda point: point[1])
            peak = max(plot_data.number(row.get(str(line.measure))) or 0.0, highest[1])
            found.setdefault(name, Panel(name, str(row.get("method")), line, highest, peak))
    return list(found.values())


def _paint(sheet: Sheet, axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    colour = sheet.theme.colour(panel.method)
    seconds = [moment for moment, _ in panel.line.points]
    sizes = [size / 1e6 for _, size in panel.line.points]
    corners = [seconds[-1], seconds[0]], [0.0, 0.0]
    axes.fill(seconds + corners[0], sizes + corners[1], color=colour, alpha=0.18, linewidth=0)
    axes.plot(seconds, sizes, color=colour, linewidth=1.3, gid=identifier("timeline", panel.name))
    moment, size = panel.highest
    how = {"color": colour, "markersize": 5, "clip_on": False}
    axes.plot([moment], [size / 1e6], "o", gid=identifier("peak", panel.name), **how)
    axes.grid(axis="y", color=sheet.theme.grid, linewidth=0.7)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _phases(sheet: Sheet, panel: Panel, top: float, second: float) -> None:
    """A line where each phase begins; its name above, moved aside where phases are short.

    second: its length in inches.
    """
    muted = sheet.theme.muted
    wanted, sizes = [], []
    for index, (start, stop, name) in enumerate(panel.line.phases):
        place = LEFT + start * second
        how = {"color": muted, "linestyle": (0, (2, 2))}
        gid = identifier("phase", panel.name, str(index), name)
        sheet.rule((place, top), (place, top + HIGH), gid=gid, **how)
        wanted.append(LEFT + (start + stop) / 2 * second)
        sizes.append(sheet.width_of(name) + 0.12)
    places = spread(wanted, sizes, LEFT, WIDTH)
    for place, (_, _, name) in zip(places, panel.line.phases, strict=True):
        sheet.text(place, top - 0.11, name, colour=muted, ha="center")


def _words(sheet: Sheet, panel: Panel, place: float, top: float) -> None:
    colour = sheet.theme.colour(panel.method)
    sheet.text(place, top + 0.4, panel.name, colour=colour, weight="bold")
    moment, size = panel.highest
    words, sampled = f"peak {megabytes(panel.peak)}", megabytes(size)
    if sampled not in words:
        words += f"\nsampled {sampled}"
    words += f"\nat {plot_data.seconds(moment)}"
    sheet.text(place, top + 0.52, words, linespacing=1.3, va="top")
