"""The experiments of the MeSP paper: what is measured, and tables of ours beside the paper's.

Park et al., ACL 2026 Industry Track, arXiv 2602.13069: Qwen2.5 in 4 bits, LoRA bfloat16 of rank 8
on all seven projections, WikiText-2, one sequence of 256 tokens, SGD, MLX on Apple silicon. Its
memory is the peak footprint of the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesp_core.compare.setting import Row, Setting
from mesp_core.compare.table import megabytes

SIZES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")

#: MB and seconds a step.
_MEMORY = {
    ("qwen2.5-0.5b", "mebp"): (360.8, 0.68),
    ("qwen2.5-0.5b", "mesp"): (136.2, 0.86),
    ("qwen2.5-3b", "mebp"): (637.6, 3.21),
    ("qwen2.5-3b", "mesp"): (368.4, 4.09),
    ("qwen2.5-3b", "mesp-store-h"): (398.5, 3.85),
}
_SAVINGS = {"qwen2.5-0.5b": 0.62, "qwen2.5-1.5b": 0.49, "qwen2.5-3b": 0.42}

#: The methods of the paper's tables; MeBP also with MeSP's head, to see what else MeSP saves.
_FOUR = ("mesp", "mebp", "mebp:tiled", "mezo")
_HEADINGS = ("MeSP", "MeBP", "MeBP, tiled head", "MeZO")

Table = list[list[str]]


@dataclass(frozen=True)
class Cell:
    """One call of ``Comparison.cell``: a preset, or None for the real model."""

    preset: str | None
    methods: Sequence[str]
    tokens: int = 256
    rank: int = 8


@dataclass(frozen=True)
class Experiment:
    """timed, compared: whether steps are timed and gradients compared; table: of the rows, beside
    the paper's figures; notes: what differs from the paper."""

    title: str
    cells: Sequence[Cell]
    table: Callable[[Sequence[Row]], Table]
    notes: str = ""
    timed: bool = False
    compared: bool = False


def _memory_table(rows: Sequence[Row]) -> Table:
    lines = [["MB", *_HEADINGS, "", "paper:", "MeBP", "MeSP", "saving"]]
    for model, found in _by(rows, "model"):
        paper = [_MEMORY.get((model, method), (None,))[0] for method in ("mebp", "mesp")]
        saving = f"−{_SAVINGS[model]:.0%}" if model in _SAVINGS else ""
        figures = (megabytes(_memory(found.get(method))) for method in _FOUR)
        lines.append([model, *figures, "", "", *map(_mb, paper), saving])
    lines.append(["seconds", *_HEADINGS, "", "paper:", "MeBP", "MeSP", "change"])
    for model, found in _by(rows, "model"):
        paper = [_MEMORY.get((model, method), (None, None))[1] for method in ("mebp", "mesp")]
        figures = (_s(_field(found.get(method), "step_seconds")) for method in _FOUR)
        lines.append([model, *figures, "", "", *map(_s, paper), _change(*paper)])
    lines.append(["saving of MeSP", "", "over MeBP", "over it tiled", "", "", "", "", "", ""])
    for model, found in _by(rows, "model"):
        lines.append([model, "", *_savings(found)])
    return lines


def _sweep_table(field: str, paper: Mapping[int, str]) -> Callable[[Sequence[Row]], Table]:
    def table(rows: Sequence[Row]) -> Table:
        lines = [[field, *_HEADINGS, "over MeBP", "over it tiled", "", "paper:", "MeBP"]]
        for value, found in _by(rows, field):
            ours = (megabytes(_memory(found.get(method))) for method in _FOUR)
            lines.append([str(value), *ours, *_savings(found), "", "", paper.get(value, "")])
        return lines

    return table


def _savings(found: Mapping[str, Row]) -> list[str]:
    """What MeSP needs less than MeBP, with the head of autodiff frameworks and with its own."""
    ours = _memory(found.get("mesp"))
    return [_change(_memory(found.get(other)), ours) for other in ("mebp", "mebp:tiled")]


def _store_h_table(rows: Sequence[Row]) -> Table:
    lines = [["", "MB", "seconds", "paper: MB", "seconds"]]
    found = {row["method"]: row for row in rows}
    for method, title in (("mesp-store-h", "h stored"), ("mesp", "h recomputed")):
        row = found.get(method)
        paper = _MEMORY["qwen2.5-3b", method]
        ours = (megabytes(_memory(row)), _s(_field(row, "step_seconds")))
        lines.append([title, *ours, _mb(paper[0]), _s(paper[1])])
    stored, ours = found.get("mesp-store-h"), found.get("mesp")
    pairs = [(_memory(row), _field(row, "step_seconds")) for row in (stored, ours)]
    changes = [_change(*values) for values in zip(*pairs, strict=True)]
    lines.append(["change", *changes, "−7.6%", "+6.2%"])
    return lines


def _quality_table(rows: Sequence[Row]) -> Table:
    lines = [["", "cosine", "signs", "error", "largest cosine to expect: 4/√d"]]
    for row in rows:
        if row["gradient_cosine"] is None:
            lines.append([row["method"], row["error"] or "", "", "", ""])
            continue
        bound = ""
        if row["method"] == "mezo" and row.get("trained"):
            bound = f"{4 / math.sqrt(row['trained']):.5f}"
        figures = (f"{row['gradient_cosine']:.5f}", f"{row['gradient_sign_agreement']:.2%}")
        lines.append([row["method"], *figures, f"{row['gradient_relative_error']:.1e}", bound])
    lines.append(["paper, MeZO", "≈ 0.001", "≈ 50%", "", ""])
    return lines


EXPERIMENTS: Mapping[str, Experiment] = {
    "memory": Experiment(
        "Memory and time of three models at 256 tokens, rank 8",
        [Cell(size, _FOUR) for size in SIZES],
        _memory_table,
        timed=True,
    ),
    "lengths": Experiment(
        "Memory over sequence length, qwen2.5-0.5b",
        [Cell("qwen2.5-0.5b", _FOUR, tokens=tokens) for tokens in (128, 256, 512, 1024)],
        _sweep_table("tokens", {128: "253.0", 1024: "1,050.0"}),
        "the paper's MeSP saves 51 to 62% over these lengths",
    ),
    "ranks": Experiment(
        "Memory over LoRA rank, qwen2.5-0.5b, 256 tokens",
        [Cell("qwen2.5-0.5b", _FOUR, rank=rank) for rank in (4, 8, 16, 32)],
        _sweep_table("rank", {8: "360.8"}),
        "the paper's MeSP saves 60 to 63% over these ranks, and its MeZO needs more than MeBP at "
        "rank 32",
    ),
    "store-h": Experiment(
        "h = xA kept or recomputed, qwen2.5-3b, 256 tokens, rank 8",
        [Cell("qwen2.5-3b", ("mesp-store-h", "mesp"))],
        _store_h_table,
        "all of h is 4·N·R values a block, 33 kB: the paper's 30 MB must be what automatic "
        "differentiation keeps around it",
        timed=True,
    ),
    "mezo": Experiment(
        "Gradients beside those of plain autodiff, a real model and real text",
        [Cell(None, ("mesp", "mebp", "mezo", "autodiff"))],
        _quality_table,
        compared=True,
    ),
}


def _by(rows: Sequence[Row], field: str) -> Iterable[tuple[Any, dict[str, Row]]]:
    """The rows by method and head for each value of a field."""
    for value in dict.fromkeys(row[field] for row in rows):
        yield value, {Setting.from_row(row).title: row for row in rows if row[field] == value}


def _field(row: Row | None, field: str) -> float | None:
    return None if row is None else row[field]


def _memory(row: Row | None) -> float | None:
    """The allocator's peak where it is known, the footprint elsewhere."""
    if row is None:
        return None
    return row["footprint_bytes"] if row["peak_bytes"] is None else row["peak_bytes"]


def _mb(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _change(before: float | None, after: float | None) -> str:
    """In percent of ``before``."""
    if not before or after is None:
        return ""
    return f"{(after - before) / before:+.0%}".replace("-", "−")
