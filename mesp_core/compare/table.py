"""Rows of a comparison as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mesp_core.compare.setting import Setting

Row = Mapping[str, Any]

_REFERENCE = "reference"

#: Letters in a line of prose.
_WIDTH = 96


def megabytes(size: float | None) -> str:
    """Of 10⁶ bytes; empty where there is no figure."""
    if size is None:
        return ""
    return f"{size / 1e6:,.1f}" if abs(size) >= 1e6 or not size else f"{size / 1e6:.2f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _number(form: str) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else format(value, form)


#: Field, heading and text of each column. A column that no row has a figure for is left out.
_COLUMNS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("peak_bytes", "allocator", megabytes),
    ("footprint_bytes", "footprint", megabytes),
    ("compiled_bytes", "compiled", megabytes),
    ("step_seconds", "step", _seconds),
    ("step_ratio", "ratio", _seconds),
    ("loss", "loss", _number(".4f")),
    ("gradient_cosine", "cosine", _number(".5f")),
    ("gradient_sign_agreement", "signs", _number(".2%")),
    ("gradient_relative_error", "error", _number(".1e")),
)

#: What each column says, in the order of the columns.
_MEANINGS = {
    "peak_bytes": "allocator: the most the backend's allocator held in a step, MB of 10⁶ bytes",
    "footprint_bytes": "footprint: the most anonymous memory of the process in a step over what it "
    "had before the model was opened, MB",
    "compiled_bytes": "compiled: temporaries and results of the largest compiled program, MB",
    "step_seconds": "step: median seconds of a step with its updates, the methods taken in turn in "
    "one process; ratio: to the first of them, turn by turn",
    "gradient_cosine": "cosine, signs, error: gradients of the first step beside those of the "
    "reference, over all parameters (lora_b small random numbers, so that none is 0 for want of "
    "it); signs leaves out entries whose true gradient is 0",
}


def table(rows: Iterable[Row]) -> list[str]:
    """The lines of all rows, a block for each model, length and rank, and what the columns mean."""
    rows = list(rows)
    columns = [column for column in _COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    lines: list[str] = []
    for _, members in groupby(
        rows, key=lambda row: [row.get(f) for f in ("model", "tokens", "rank")]
    ):
        block = list(members)
        lines += [heading(block), *_block(block, columns), ""]
    shown = {field for field, _, _ in columns}
    for field, text in _MEANINGS.items():
        if field in shown:
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
    return lines


def heading(rows: Sequence[Row]) -> str:
    """What the rows share."""
    row = rows[0]
    stored = row.get("stored_bytes")
    shared = (
        f"{row['model']} on {row['backend']}, {row['tokens']} tokens, {row['dtype']}, LoRA "
        f"{row['lora_dtype']} rank {row['rank']}"
    )
    # The rungs of a ladder differ in where the weights are.
    where = f" {row['residency']}" if len({row["residency"] for row in rows}) == 1 else ""
    weights = "" if stored is None else f"{megabytes(stored)} MB of weights"
    return ", ".join(filter(None, (shared, f"{weights}{where}".strip())))


def _block(
    rows: Sequence[Row], columns: Sequence[tuple[str, str, Callable[[Any], str]]]
) -> list[str]:
    texts = [["method", *(name for _, name, _ in columns)]]
    for row in rows:
        cells = [text(row.get(field)) for field, _, text in columns]
        texts.append([Setting.from_row(row).title, *_with_reference(row, cells, columns)])
    widths = [max(len(cells[place]) for cells in texts) for place in range(len(columns) + 1)]
    lines = []
    for place, cells in enumerate(texts):
        row = rows[place - 1] if place else None
        if row is not None and row.get("error") is not None:
            lines.append(f"  {cells[0]:<{widths[0]}}  {_failure(row)}")
            continue
        padded = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        lines.append(f"  {cells[0]:<{widths[0]}}  {'  '.join(padded)}".rstrip())
        if row is not None and row.get("time_error"):
            lines.append(f"  {'':<{widths[0]}}  not timed: {row['time_error']}")
    return lines


def _with_reference(row: Row, cells: list[str], columns: Sequence[Any]) -> list[str]:
    """The row of the true gradients says so instead of comparing them with themselves."""
    if row.get("gradient_reference") != row["method"]:
        return cells
    names = [field for field, _, _ in columns]
    return [
        {"gradient_cosine": _REFERENCE}.get(name, "" if name.startswith("gradient") else cell)
        for name, cell in zip(names, cells, strict=True)
    ]


def _failure(row: Row) -> str:
    return row["error"] if row.get("unavailable") else f"failed: {row['error']}"
