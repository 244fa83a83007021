"""Pictures with lines: memory against a swept number, and loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesp_core.compare import plot_data
from mesp_core.compare.plot_data import Curve, Row, Series, megabytes, number
from mesp_core.compare.plot_style import (
    MARKS,
    OTHER_MARK,
    WIDTH,
    Sheet,
    Theme,
    header_height,
    identifier,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches: the height of a line of text, and of a panel's axes.
LINE, HIGH = 0.19, 2.3

#: A range of values wider than this is drawn on a logarithmic axis.
LINEAR_RANGE = 12


@dataclass(frozen=True)
class Frame:
    """A panel's axes and where they lie on the sheet, in inches."""

    axes: Axes
    left: float
    top: float
    across: float
    high: float

    @property
    def right(self) -> float:
        return self.left + self.across

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where the data (x, y) lies on the sheet; the axes' limits must not change any more."""
        across, up = self.axes.transLimits.transform(self.axes.transScale.transform((x, y)))
        return self.left + across * self.across, self.top + (1 - up) * self.high


def sweep(theme: Theme, rows: Sequence[Row], report: Row, field: str) -> Sheet:
    """Memory against ``field`` (tokens or rank): a panel for each memory figure, its values in a
    table below."""
    words = {"tokens": "sequence length", "rank": "LoRA rank"}[field]
    setting = plot_data.setting_words(rows[0], report, (field,))
    panels = {figure: plot_data.sweep(rows, field, figure) for figure in plot_data.figures(rows)}
    lines = next(iter(panels.values()))
    table = 0.3 + LINE * len(lines)
    top = header_height(setting) + 0.3
    step = HIGH + table + 0.45
    sheet = Sheet(theme, top + step * len(panels) - 0.3, f"Peak memory against {words}", setting)
    left = 0.45 + max(sheet.width_of(name) for name in (field, *(line.name for line in lines)))
    right = 0.4 + max(sheet.width_of(line.name, weight="bold") for line in lines)
    values = sorted({float(row[field]) for row in rows if number(row.get(field)) is not None})
    for figure, lines in panels.items():
        across = WIDTH - left - right
        frame = Frame(sheet.axes(left, top, across, HIGH), left, top, across, HIGH)
        note = ", logarithmic" if _memory_axis(frame.axes, theme, lines) else ""
        title = f"{plot_data.figure_title(figure)} (MB{note})"
        sheet.text(left, top - 0.17, title, weight="bold")
        _number_axis(frame.axes, values)
        for line in reversed(lines):
            _line(frame.axes, theme, line, identifier(figure, line.name))
        _end_labels(sheet, frame, lines)
        _table(sheet, frame, lines, field, values)
        top += step
    return sheet


def _memory_axis(axes: Axes, theme: Theme, lines: Sequence[Series]) -> bool:
    """Limits and grid of a memory axis in MB; returns whether it is logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    values = [y / 1e6 for line in lines for _, y in line.points]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > LINEAR_RANGE
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, high * 1.08 or 1)
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(axis="y", color=theme.grid, linewidth=0.7)
    return logarithmic


def _number_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis of the swept number; the table below has its ticks."""
    low, high = values[0], values[-1]
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / (high / low) ** 0.06, high * (high / low) ** 0.06)
    axes.xaxis.set_ticks([])
    axes.xaxis.set_ticks([], minor=True)


def _line(axes: Axes, theme: Theme, line: Series, gid: str) -> None:
    marker, dashes = MARKS.get(line.method, OTHER_MARK)
    # Wider below, narrower on top: two lines in one place are both seen.
    width = 3.0 if line.method == "mesp-store-h" else 1.8
    axes.plot(
        [x for x, _ in line.points],
        [y / 1e6 for _, y in line.points],
        color=theme.colour(line.method),
        linestyle=dashes,
        linewidth=width,
        marker=marker,
        markersize=width + 3.7,
        markeredgecolor=theme.page,
        markeredgewidth=0.8,
        clip_on=False,
        gid=gid,
    )


def _end_labels(sheet: Sheet, frame: Frame, lines: Sequence[Series]) -> None:
    """The name of each line right of its last point, joined to it by a thin line."""
    lines = [line for line in lines if line.points]
    ends = [frame.place(x, y / 1e6) for x, y in (line.points[-1] for line in lines)]
    low, high = frame.top - 0.1, frame.top + frame.high + 0.1
    places = spread([y for _, y in ends], [LINE] * len(lines), low, high)
    for line, end, y in zip(lines, ends, places, strict=True):
        colour = sheet.theme.colour(line.method)
        # Dotted where a line ends early, so that nobody takes it for more of the line.
        dashes = "solid" if frame.right - end[0] < 0.6 else (0, (1, 3))
        how = {"color": colour, "linewidth": 0.7, "linestyle": dashes}
        sheet.rule((end[0] + 0.07, end[1]), (frame.right + 0.17, y), **how)
        sheet.text(frame.right + 0.22, y, line.name, colour=colour, weight="bold")


def _table(
    sheet: Sheet, frame: Frame, lines: Sequence[Series], field: str, values: Sequence[float]
) -> None:
    """Below the axes, under each swept number, the memory in MB."""
    columns: list[tuple[float, float]] = []
    for x in reversed(values):
        # A column that would touch the one to its right is left out; its point stays.
        across = frame.place(x, frame.axes.get_ylim()[1])[0]
        if not columns or columns[-1][1] - across > 0.6:
            columns.append((x, across))
    theme, y = sheet.theme, frame.top + frame.high + 0.16
    names = frame.left - 0.3
    sheet.text(names, y, field, colour=theme.muted, ha="right")
    for x, across in columns:
        sheet.text(across, y, f"{x:g}", colour=theme.muted, ha="center")
    for line in lines:
        y, colour = y + LINE, theme.colour(line.method)
        sheet.text(names, y, line.name, colour=colour, ha="right")
        sizes = dict(line.points)
        for x, across in columns:
            known = megabytes(sizes[x]).removesuffix(" MB") if x in sizes else None
            words = known or line.missing.get(x, "–")
            sheet.text(across, y, words, ha="center", colour=colour)


def losses(theme: Theme, curves: Sequence[Curve], report: Row) -> Sheet:
    """Loss against step: each step thin, the running median thick, how far apart in words. The
    axis is the medians'."""
    width = max(1, max(len(curve.steps) for curve in curves) // 15)
    words = [plot_data.setting_words(plot_data.curve_setting(report), report)]
    if width > 1:
        words.append(f"thick: median of {width} steps, thin: each step, cut off at the edges")
    setting = "; ".join(filter(None, words))
    top, high, left = header_height(setting) + 0.1, 3.0, 0.75
    sheet = Sheet(theme, top + high + 0.55, "Training loss", setting)
    medians = [plot_data.running_median(curve.losses, width) for curve in curves]
    labels = [
        (f"{curve.method} {line[-1]:.3f}", _apart(curve, curves[0]))
        for curve, line in zip(curves, medians, strict=True)
    ]
    right = 0.4 + max(
        max(sheet.width_of(name, weight="bold"), sheet.width_of(note)) for name, note in labels
    )
    across = WIDTH - left - right
    frame = Frame(sheet.axes(left, top, across, high), left, top, across, high)
    _loss_axes(frame.axes, theme, curves, medians)
    for curve, line in zip(curves, medians, strict=True):
        _curve(frame.axes, theme, curve, line, width)
    _loss_labels(sheet, frame, curves, [line[-1] for line in medians], labels)
    middle = left + across / 2
    sheet.text(middle, sheet.height - 0.17, "step", colour=theme.muted, ha="center")
    return sheet


def _loss_axes(
    axes: Axes, theme: Theme, curves: Sequence[Curve], medians: Sequence[Sequence[float]]
) -> None:
    values = [loss for line in medians for loss in line]
    steps = [step for curve in curves for step in curve.steps]
    room = (max(values) - min(values)) * 0.1 or 0.1
    axes.set_ylim(min(values) - room, max(values) + room)
    axes.set_xlim(min(steps), max(steps))
    axes.grid(axis="y", color=theme.grid, linewidth=0.7)


def _curve(axes: Axes, theme: Theme, curve: Curve, line: Sequence[float], width: int) -> None:
    colour, dashes = theme.colour(curve.method), MARKS.get(curve.method, OTHER_MARK)[1]
    if width > 1:
        x, y = zip(*plot_data.thinned(curve.steps, curve.losses), strict=True)
        axes.plot(
            x, y, color=colour, linewidth=0.6, alpha=0.3, gid=identifier("each", curve.method)
        )
    x, y = zip(*plot_data.thinned(curve.steps, line), strict=True)
    # A wide line below a narrow one shows where two methods have the same loss.
    thick, order = (4.5, 2) if curve.method == "mebp" else (1.8, 3)
    how = {"color": colour, "linewidth": thick, "linestyle": dashes, "zorder": order}
    axes.plot(x, y, gid=identifier("loss", curve.method), **how)


def _loss_labels(
    sheet: Sheet,
    frame: Frame,
    curves: Sequence[Curve],
    last: Sequence[float],
    labels: Sequence[tuple[str, str]],
) -> None:
    """The method and its last loss right of each curve; below, how far it is from the first."""
    ends = [frame.place(curve.steps[-1], loss) for curve, loss in zip(curves, last, strict=True)]
    sizes = [0.42 if note else 0.24 for _, note in labels]
    places = spread([y for _, y in ends], sizes, frame.top, frame.top + frame.high)
    for curve, (name, note), end, y in zip(curves, labels, ends, places, strict=True):
        colour = sheet.theme.colour(curve.method)
        how = {"color": colour, "linewidth": 0.7}
        sheet.rule((end[0] + 0.05, end[1]), (frame.right + 0.2, y), **how)
        first = y - 0.09 if note else y
        sheet.text(frame.right + 0.25, first, name, colour=colour, weight="bold")
        if note:
            sheet.text(frame.right + 0.25, first + 0.17, note, colour=sheet.theme.muted)


def _apart(curve: Curve, first: Curve) -> str:
    """How far apart the losses are at most, where two curves over the same steps nearly agree."""
    if curve is first or curve.steps != first.steps:
        return ""
    apart = max(abs(a - b) for a, b in zip(curve.losses, first.losses, strict=True))
    if apart > 0.05:
        return ""
    return f"at most {apart:.2g} from {first.method}" if apart else f"equal to {first.method}"
