"""Pictures with bars: memory and time of each method, and the ladder rung by rung."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from mesp_core.compare import plot_data
from mesp_core.compare.plot_data import FIGURES, Row, megabytes, number
from mesp_core.compare.plot_style import MARGIN, WIDTH, Sheet, Theme, header_height, identifier

#: Inches: the height of a bar, and from one bar to the next.
BAR, LINE = 0.17, 0.26


@dataclass(frozen=True)
class Bar:
    """One bar at ``y`` inches, ``words`` behind its end; without a value only the words."""

    y: float
    value: float | None
    words: str
    colour: str
    gid: str


def methods(theme: Theme, rows: Sequence[Row], report: Row) -> Sheet:
    """Memory and step time of each method, model by model: a column for each figure."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(str(row.get("model")), []).append(row)
    several = len(models) > 1
    setting = plot_data.setting_words(rows[0], report, ("model",) if several else ())
    columns = {figure: FIGURES[figure] for figure in plot_data.figures(rows)}
    title = "Peak memory of each method"
    if any(number(row.get("step_seconds")) for row in rows):
        columns["step_seconds"], title = "one step", "Peak memory and step time of each method"
    if any(number(row.get("step_ratio")) for row in rows):
        setting += "; ×: time over that of the first method of the same run"
    top = header_height(setting) + 0.35
    height = top + LINE * len(rows) + (0.36 * len(models) if several else 0.0) + 0.15
    sheet = Sheet(theme, height, title, setting)
    names = [plot_data.series_name(row, members) for members in models.values() for row in members]
    widths = [sheet.width_of(name) for name in names]
    if several:
        heads = [plot_data.model_name(members[0]) for members in models.values()]
        widths += [sheet.width_of(head, weight="bold") for head in heads]
    left, y = MARGIN + 0.1 + max(widths), top
    placed: list[tuple[float, Row, str]] = []
    for members in models.values():
        if several:
            sheet.text(MARGIN, y + 0.16, plot_data.model_name(members[0]), weight="bold")
            y += 0.32
        for row in plot_data.in_order(members):
            name = plot_data.series_name(row, members)
            colour = theme.colour(str(row.get("method")))
            sheet.text(left - 0.1, y + LINE / 2, name, colour=colour, ha="right")
            placed.append((y + LINE / 2, row, name))
            y += LINE
        y += 0.04 if several else 0.0
    across = (WIDTH - left - MARGIN) / len(columns)
    for index, (field, heading) in enumerate(columns.items()):
        if sheet.width_of(heading, weight="bold") > across - 0.1:
            heading = heading.replace(" ", "\n")
        sheet.text(left + index * across, top - 0.07, heading, weight="bold", va="bottom")
        bars = [_method_bar(theme, y, row, name, field) for y, row, name in placed]
        _bars(sheet, bars, left + index * across, across - 0.15, (top, y))
    return sheet


def _method_bar(theme: Theme, y: float, row: Row, name: str, field: str) -> Bar:
    value, gid = number(row.get(field)), identifier(field, plot_data.model_name(row), name)
    if value is None:
        return Bar(y, None, plot_data.why_missing(row), theme.muted, gid)
    words = _time_words(row) if field == "step_seconds" else megabytes(value)
    return Bar(y, value, words, theme.colour(str(row.get("method"))), gid)


def _time_words(row: Row) -> str:
    time, ratio = number(row.get("step_seconds")), number(row.get("step_ratio"))
    words = "" if time is None else plot_data.seconds(time)
    return words if ratio is None else f"{words} ({ratio:.2f}×)"


def _bars(
    sheet: Sheet, bars: Sequence[Bar], left: float, across: float, reach: tuple[float, float]
) -> None:
    """Horizontal bars from ``left``, the longest with its words ``across`` inches wide."""
    theme, (top, bottom) = sheet.theme, reach
    room = across - max(sheet.width_of(bar.words) for bar in bars) - 0.1
    longest = max([1e-9, *(bar.value for bar in bars if bar.value is not None)])
    axes = sheet.axes(left, top, room, bottom - top)
    axes.set_xlim(0, longest)
    axes.set_ylim(bottom, top)
    axes.xaxis.set_ticks([])
    axes.yaxis.set_ticks([])
    sheet.rule((left, top), (left, bottom), color=theme.muted)
    for bar in bars:
        # A footprint may end a little below its baseline.
        length = max(bar.value or 0.0, 0.0)
        if bar.value is not None:
            axes.barh(bar.y, length, BAR, color=bar.colour, linewidth=0, gid=bar.gid)
        known = bar.value is not None
        colour = theme.ink if known else theme.muted
        sheet.text(left + length / longest * room + 0.07, bar.y, bar.words, colour=colour)


def ladder(theme: Theme, rows: Sequence[Row], report: Row) -> Sheet:
    """The rungs from top to bottom: a panel for each memory figure, the saving on each bar."""
    varied = ("residency", "apply", "tiled")
    setting = plot_data.setting_words(rows[0], report, varied)
    setting += "; behind each bar: peak, change from the rung above"
    setting += ", time of a step" if any(number(row.get("step_seconds")) for row in rows) else ""
    figures = plot_data.figures(rows)
    top, step = header_height(setting), 0.44
    panel = 0.3 + step * len(rows) + 0.15
    title = "The ladder: peak memory rung by rung"
    sheet = Sheet(theme, top + panel * len(figures), title, setting)
    for figure in figures:
        sheet.text(MARGIN, top + 0.13, plot_data.figure_title(figure), weight="bold")
        bars = _rungs(theme, rows, figure, top + 0.3, step)
        for index, (row, bar) in enumerate(zip(rows, bars, strict=True)):
            words = textwrap.shorten(f"{index + 1}. {rung_name(row)}", 95)
            sheet.text(MARGIN + 0.06, bar.y - 0.19, words, colour=theme.ink)
        end = top + 0.3 + step * len(rows)
        _bars(sheet, bars, MARGIN, WIDTH - 2 * MARGIN, (top + 0.3, end))
        top += panel
    return sheet


def rung_name(row: Row) -> str:
    """What a rung is called: its ``rung``, else its label, else its method."""
    for field in ("rung", "label", "method"):
        if isinstance(row.get(field), str) and row[field]:
            return str(row[field])
    return "rung"


def _rungs(theme: Theme, rows: Sequence[Row], figure: str, top: float, step: float) -> list[Bar]:
    """The bars of one panel; each says what it saves against the last rung measured above."""
    bars: list[Bar] = []
    known: list[float] = []
    for index, row in enumerate(rows):
        value, y = number(row.get(figure)), top + step * index + 0.3
        gid, time = f"ladder.{figure}.{index + 1}", number(row.get("step_seconds"))
        if value is None:
            bars.append(Bar(y, None, plot_data.why_missing(row), theme.muted, gid))
            continue
        words = megabytes(value)
        if known:
            words += f" · {_change(value, known[-1])}"
        if index == len(rows) - 1 and len(known) > 1:
            words += f" · in all {_change(value, known[0], share_only=True)}"
        if time is not None:
            words += f" · {plot_data.seconds(time)}"
        bars.append(Bar(y, value, words, theme.colour(str(row.get("method"))), gid))
        known.append(value)
    return bars


def _change(value: float, before: float, *, share_only: bool = False) -> str:
    """The change from ``before``: "−12 MB (−8 %)", or the share alone."""
    sign = "−" if value < before else "+"
    share = f"{sign}{abs(value - before) / before * 100 if before else 0:.0f} %"
    return share if share_only else f"{sign}{megabytes(abs(value - before))} ({share})"
