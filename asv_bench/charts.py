"""Small line charts as SVG in a page. Colours are the page's own, so they follow its light or dark
theme; series differ by marker, too, and are named where they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 74, 12, 30

#: Room for a name at the end of a line, in pixels.
_LINE = 15


@dataclass(frozen=True)
class Series:
    """name: also the class that gives it its colour; values: one for each commit, None where there
    is none; notes: what a pointer over a value is told."""

    name: str
    values: Sequence[float | None]
    notes: Sequence[str]


@dataclass(frozen=True)
class Limit:
    """A bound, drawn as a line across."""

    value: float
    label: str


def chart(
    title: str,
    series: Sequence[Series],
    commits: Sequence[str],
    form: Callable[[float], str],
    limit: Limit | None = None,
) -> str:
    """An ``<svg>``. title: read out instead of it; commits: names, oldest first; form: writes a
    value of the axis."""
    known = [value for each in series for value in each.values if value is not None]
    if not known:
        return '<p class="none">nothing measured</p>'
    top = max([*known, limit.value if limit else 0.0]) * 1.08 or 1.0
    frame = _Frame(len(commits), top)
    parts = [*_axes(frame, commits, form)]
    for each, place in zip(series, _ends(frame, series), strict=True):
        parts += _line(frame, each, place)
    if limit is not None:
        y = frame.y(limit.value)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="limit" x="{LEFT + 4}" y="{y - 4}">{escape(limit.label)}</text>')
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
    )


@dataclass(frozen=True)
class _Frame:
    """Where values lie. count: of commits; top: the largest value that fits."""

    count: int
    top: float

    def x(self, place: int) -> float:
        width = WIDTH - LEFT - RIGHT
        share = place / (self.count - 1) if self.count > 1 else 0.5
        return round(LEFT + 8 + share * (width - 16), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM), 1)


def _axes(frame: _Frame, commits: Sequence[str], form: Callable[[float], str]) -> list[str]:
    parts = []
    for value in ticks(frame.top):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        text = escape(form(value)) if value else "0"
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}">{text}</text>')
    ends = sorted({0, len(commits) - 1})
    for place in ends:
        anchor = "middle" if len(ends) == 1 else ("start", "end")[place > 0]
        x = frame.x(place)
        parts.append(
            f'<text class="commit" text-anchor="{anchor}" x="{x}" y="{HEIGHT - 8}">'
            f"{escape(commits[place])}</text>"
        )
    return parts


def ticks(top: float) -> list[float]:
    """Three to six round values from 0 up to ``top``."""
    power = 10.0 ** math.floor(math.log10(top))
    step = next(size * power for size in (0.2, 0.5, 1.0, 2.0) if top / (size * power) <= 5.0)
    return [place * step for place in range(int(top / step) + 1)]


def _line(frame: _Frame, series: Series, label: float | None) -> list[str]:
    """The line, broken where a value is missing, its points, and its name at the end."""
    parts, stretch = [], []
    for place, value in enumerate([*series.values, None]):
        if value is not None:
            stretch.append(f"{frame.x(place)},{frame.y(value)}")
        elif stretch:
            parts.append(f'<polyline points="{" ".join(stretch)}"/>')
            stretch = []
    for place, (value, note) in enumerate(zip(series.values, series.notes, strict=True)):
        if value is not None:
            mark = _mark(series.name, frame.x(place), frame.y(value))
            parts.append(f"<g>{mark}<title>{escape(note)}</title></g>")
    if label is not None:
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{label + 4}">{escape(series.name)}</text>')
    return [f'<g class="series {series.name}">', *parts, "</g>"]


def _mark(name: str, x: float, y: float) -> str:
    """A circle, a square or a triangle, so that colour is never the only difference."""
    if name == "mlx":
        return f'<circle cx="{x}" cy="{y}" r="3.5"/>'
    if name == "jax":
        return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"/>'
    return f'<path d="M{x},{y - 4.2:.1f} l4.2,7.4 h-8.4 z"/>'


def _ends(frame: _Frame, series: Sequence[Series]) -> list[float | None]:
    """How high each series' name stands: where it ends, moved so that none covers another."""
    last = [next((v for v in reversed(each.values) if v is not None), None) for each in series]
    places: list[float | None] = [None if value is None else frame.y(value) for value in last]
    order = sorted((y, at) for at, y in enumerate(places) if y is not None)
    # From above, each a line below the one before; but the last ones have to stay inside.
    ceiling = float(TOP)
    for left, (y, at) in zip(range(len(order), 0, -1), order, strict=True):
        ceiling = min(max(y, ceiling), HEIGHT - BOTTOM - _LINE * (left - 1))
        places[at] = ceiling
        ceiling += _LINE
    return places
