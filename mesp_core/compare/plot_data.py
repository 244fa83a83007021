"""What a compare report holds for each picture: the series, grouped by setting, and their words.

Nothing here draws, so everything here can be tested without matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from statistics import median
from typing import Any

Row = Mapping[str, Any]

#: The memory figures of a row, and what there is to say of them.
FIGURES = {
    "peak_bytes": "allocator peak",
    "footprint_bytes": "anonymous footprint",
    "compiled_bytes": "compiled memory",
}
NOTES = {
    "footprint_bytes": "over the baseline before the model is opened",
    "compiled_bytes": "temporaries and outputs of the largest program",
}

#: The order of methods in every picture; others follow as they come.
METHODS = ("mesp", "mesp-store-h", "mebp", "mezo", "autodiff")

#: What two rows must share to stand in one picture, the varied ones aside.
SETTING = (
    "model",
    "backend",
    "dtype",
    "lora_dtype",
    "tokens",
    "rank",
    "residency",
    "apply",
    "tiled",
)


@dataclass(frozen=True)
class Series:
    """One line: ``points`` are (x, y), x rising; ``method`` chooses its colour.

    ``missing``: what there is to say at each x that was to be measured and has no figure.
    """

    name: str
    method: str
    points: tuple[tuple[float, float], ...]
    missing: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Rows that share a setting. ``suffix`` tells its files from those of its sisters."""

    rows: tuple[Row, ...]
    suffix: str


def number(value: object) -> float | None:
    """``value`` when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if abs(size) < 100e6 else f"{size / 1e6:,.0f} MB"


def seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{time:.3f} s"


def why_missing(row: Row) -> str:
    """What stands in the place of a figure that a row does not have."""
    if row.get("unavailable"):
        return "n/a"
    return "failed" if row.get("error") else "–"


def model_name(row: Row) -> str:
    return PurePath(str(row.get("model") or "model")).name


def groups(
    rows: Iterable[Row],
    varied: Sequence[str] = (),
    wanted: Callable[[list[Row]], bool] = bool,
) -> list[Group]:
    """The rows by setting, ``varied`` and the method aside, in the order they came; only those
    groups that are ``wanted``."""
    fields = [name for name in SETTING if name not in varied]
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in fields), []).append(row)
    found = {key: members for key, members in found.items() if wanted(members)}
    differing = [i for i in range(len(fields)) if len({key[i] for key in found}) > 1]
    suffixes = [
        "".join(f"-{_slug(fields[i], key[i])}" for i in differing if key[i] is not None)
        for key in found
    ]
    return [Group(tuple(found[key]), suffix) for key, suffix in zip(found, suffixes, strict=True)]


def _slug(name: str, value: object) -> str:
    if name == "tiled":
        return "tiled" if value else "untiled"
    text = PurePath(str(value)).name if name == "model" else str(value)
    text = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "other"
    return f"{name}-{text}" if name in ("rank", "tokens") else text


def series_name(row: Row, rows: Sequence[Row]) -> str:
    """The method, with its head where ``rows`` have the same method with another one."""
    method = str(row.get("method"))
    heads = {other.get("head") for other in rows if other.get("method") == row.get("method")}
    return f"{method}, {row.get('head')} head" if len(heads) > 1 else method


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows by method, METHODS first; rows of one method stay as they came."""
    rows = list(rows)
    known = {name: index for index, name in enumerate(METHODS)}
    for row in rows:
        known.setdefault(str(row.get("method")), len(known))
    return sorted(rows, key=lambda row: known[str(row.get("method"))])


def figures(rows: Iterable[Row]) -> list[str]:
    """The memory figures that at least two rows have."""
    rows = list(rows)
    return [
        figure
        for figure in FIGURES
        if sum(number(row.get(figure)) is not None for row in rows) >= 2
    ]


def figure_title(figure: str) -> str:
    return ", ".join(filter(None, (FIGURES[figure], NOTES.get(figure))))


def sweep(rows: Sequence[Row], swept: str, figure: str) -> list[Series]:
    """One series a method: ``figure`` against ``swept``. Of rows alike, the first counts."""
    points: dict[tuple[str, str], dict[float, float]] = {}
    missing: dict[tuple[str, str], dict[float, str]] = {}
    for row in in_order(rows):
        x, y = number(row.get(swept)), number(row.get(figure))
        if x is None:
            continue
        line = (series_name(row, rows), str(row.get("method")))
        points.setdefault(line, {})
        if y is not None:
            points[line].setdefault(x, y)
        else:
            missing.setdefault(line, {})[x] = why_missing(row)
    return [
        Series(*line, tuple(sorted(points[line].items())), missing.get(line, {})) for line in points
    ]


def setting_words(row: Row, report: Row, varied: Sequence[str] = ()) -> str:
    """The setting in one line: what the rows share, the unusual named, the usual left out."""
    words = [model_name(row)] if row.get("model") and "model" not in varied else []
    if row.get("tokens") is not None and "tokens" not in varied:
        words.append(f"{row['tokens']} tokens")
    if row.get("rank") is not None and "rank" not in varied:
        words.append(f"LoRA rank {row['rank']}")
    dtype, lora = row.get("dtype"), row.get("lora_dtype")
    if dtype:
        words.append(f"{dtype} (LoRA {lora})" if lora not in (None, dtype) else str(dtype))
    if row.get("backend"):
        words.append(_where(row, report))
    if "residency" not in varied and row.get("residency") not in (None, "streamed"):
        words.append(f"weights {row['residency']}")
    if "apply" not in varied and row.get("apply") not in (None, "block"):
        words.append(f"update: {row['apply']}")
    if "tiled" not in varied and row.get("tiled") is False:
        words.append("attention and MLP untiled")
    return ", ".join(words)


def _where(row: Row, report: Row) -> str:
    """The backend, with the report's device where the row is of the report's backend."""
    backend, device = str(row["backend"]), report.get("device")
    if device and ":" not in backend and report.get("backend") in (None, backend):
        return f"{backend} on {device}"
    return backend


def thinned(
    x: Sequence[float], y: Sequence[float], limit: int = 120
) -> tuple[tuple[float, float], ...]:
    """At most about ``2 · limit`` of the points: each stretch keeps its lowest and its highest."""
    pairs = list(zip(x, y, strict=True))
    if len(pairs) <= 2 * limit:
        return tuple(pairs)
    kept = {0, len(pairs) - 1}
    for part in range(limit):
        stretch = range(part * len(pairs) // limit, (part + 1) * len(pairs) // limit)
        kept.add(min(stretch, key=lambda index: pairs[index][1]))
        kept.add(max(stretch, key=lambda index: pairs[index][1]))
    return tuple(pairs[index] for index in sorted(kept))


def running_median(values: Sequence[float], width: int) -> list[float]:
    """The median of the ``width`` values around each one, of fewer near the ends: one odd text has
    several times the loss of others, and would carry a mean along."""
    half = width // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


@dataclass(frozen=True)
class Timeline:
    """Memory inside one step: ``points`` are (seconds, bytes), ``phases`` (start, end, name)."""

    points: tuple[tuple[float, float], ...]
    phases: tuple[tuple[float, float, str], ...]
    measure: str | None


def timeline(row: Row) -> Timeline | None:
    """The timeline of a row, times counted from its first phase or sample; None without one."""
    found = row.get("timeline") or {}
    times, sizes = found.get("seconds") or (), found.get("bytes") or ()
    if len(times) != len(sizes) or len(times) < 2:
        return None
    begins = [(float(moment), str(name)) for moment, name in found.get("phases") or ()]
    start = min([times[0], *(moment for moment, _ in begins)])
    ends = [moment for moment, _ in begins[1:]] + [times[-1]]
    phases = tuple(
        (begin - start, max(begin, end) - start, name)
        for (begin, name), end in zip(begins, ends, strict=False)
    )
    points = thinned([moment - start for moment in times], sizes)
    return Timeline(points, phases, found.get("measure"))


@dataclass(frozen=True)
class Curve:
    """The loss of every step of one method, none of them missing or infinite."""

    method: str
    steps: tuple[float, ...]
    losses: tuple[float, ...]


def curves(report: Row) -> list[Curve]:
    """The loss curves of a report that have at least two points."""
    found = []
    for entry in in_order({"method": name, **curve} for name, curve in _curves_of(report)):
        pairs = [
            (float(step), float(loss))
            for step, loss in zip(entry.get("step") or (), entry.get("loss") or (), strict=False)
            if number(step) is not None and number(loss) is not None
        ]
        if len(pairs) > 1:
            steps, losses = zip(*pairs, strict=True)
            found.append(Curve(str(entry["method"]), steps, losses))
    return found


def curve_setting(report: Row) -> Row:
    """What the curves are of, with the names of a row: ``settings.curves`` of the report, else
    what the first curve says of itself. The report's other settings may be of other cells."""
    settings = report.get("settings")
    own = settings.get("curves") if isinstance(settings, Mapping) else None
    if isinstance(own, Mapping):
        return own
    return next((curve for _, curve in _curves_of(report)), {})


def _curves_of(report: Row) -> list[tuple[str, Row]]:
    return [
        (name, curve)
        for name, curve in (report.get("curves") or {}).items()
        if isinstance(curve, Mapping)
    ]
