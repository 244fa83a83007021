"""The paper's experiments, one after the other; what a report holds already is not done again."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mesp_core.compare.curves import Curve, Run, train
from mesp_core.compare.experiments import EXPERIMENTS, Cell, Experiment, Table
from mesp_core.compare.presets import preset_folder, preset_path
from mesp_core.compare.setting import Row, Setting, parse_method
from mesp_core.compare.study import Report, Study
from mesp_core.errors import MespError

#: Trained on text, and small enough for every experiment that needs that.
REAL_MODEL = "smollm2-135m"

CONVERGENCE = "convergence"

NAMES = (*EXPERIMENTS, CONVERGENCE)

#: Optimizer and learning rate of each method; the exact ones share theirs. Ten times as much, and
#: either diverges within 60 steps.
CONVERGENCE_RUNS: Mapping[str, tuple[str, float]] = {
    "mesp": ("sgd", 0.03),
    "mebp": ("sgd", 0.03),
    "mezo": ("sgd", 1e-3),
}

#: Steps and tokens a step of each training run.
STEPS, TOKENS = 300, 128

#: Final losses of the paper, after 100,000 steps.
_PAPER_LOSSES = {"mesp": "2.6", "mebp": "2.6", "mezo": "3.18"}

#: Steps whose mean loss is told at the beginning and the end.
_ENDS = 50

#: Letters in a line of prose.
_WIDTH = 96

_DIFFERENCES = (
    "Ours beside the paper's: random 4-bit weights of the same shapes and random tokens instead of "
    "Qwen2.5 and WikiText-2 (neither changes memory or time), and {memory} on {device} instead of "
    "the footprint of the process on Apple silicon."
)


def chosen(text: str) -> list[str]:
    """The names of experiments in a list such as ``memory,ranks``, or all of them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(NAMES)
    for name in names:
        if name not in NAMES:
            raise MespError(f"no experiment is called {name!r}; choose from {', '.join(NAMES)}")
    return list(dict.fromkeys(names))


def reusable(earlier: Mapping[str, Any], report: Report, path: str) -> Report:
    """rows, ladder and curves of the earlier report that ``path`` holds.

    Raises MespError where it was not made here by the same versions, or is none of ``compare``: it
    would be overwritten.
    """
    same = ("command", "versions", "backend", "device", "machine")
    others = [key for key in same if earlier.get(key) != report[key]]
    if others:
        raise MespError(
            f"{path} was measured with another {', '.join(others)}, so it cannot be gone on with; "
            "give --json another name"
        )
    kept = {key: earlier[key] for key in ("rows", "ladder", "curves") if key in earlier}
    try:
        for row in (*kept.get("rows", []), *kept.get("ladder", [])):
            Setting.from_row(row)
        for curve in kept.get("curves", {}).values():
            _ = curve["run"], curve["error"], len(curve["loss"]), len(curve["step"])
    except (KeyError, TypeError, AttributeError) as error:
        raise MespError(
            f"{path} is no report of this version's mesp compare, so it cannot be gone on with "
            f"({type(error).__name__}: {error}); give --json another name"
        ) from None
    return kept


class Reproduction:
    """base: backend, dtypes, seed and the rest of every setting; names: of the experiments; cache:
    where presets are kept."""

    def __init__(
        self, study: Study, base: Setting, names: Sequence[str], cache: str | None
    ) -> None:
        self._study = study
        self._base = base
        self._names = names
        self._cache = cache

    def work(self) -> None:
        options = self._study.options
        for name in self._names:
            if name == CONVERGENCE:
                self._converge()
                continue
            experiment = EXPERIMENTS[name]
            self._study.rows.options = replace(
                options,
                steps=options.steps if experiment.timed else 0,
                gradients=options.gradients and experiment.compared,
            )
            self._study.tell(f"{experiment.title}:")
            for cell in experiment.cells:
                if cell.preset is not None:
                    preset_folder(cell.preset, self._cache)
                self._study.rows.cell(self._settings(cell))

    def tables(self) -> list[str]:
        """Every experiment as far as it has come."""
        known = {Setting.from_row(row): row for row in self._study.report["rows"]}
        lines: list[str] = []
        for name in self._names:
            if name == CONVERGENCE:
                lines += self._curves()
                continue
            experiment = EXPERIMENTS[name]
            settings = [setting for cell in experiment.cells for setting in self._settings(cell)]
            rows = [known[setting] for setting in settings if setting in known]
            if rows:
                lines += _titled(experiment, rows)
        return [*lines, *self._differences()]

    def _settings(self, cell: Cell) -> list[Setting]:
        own: dict[str, Any] = {"tokens": cell.tokens, "rank": cell.rank}
        if cell.preset is None:
            own |= {"model": REAL_MODEL, "label": REAL_MODEL}
            # What methods differ by is not to be lost in rounding.
            own |= {"dtype": "float32", "lora_dtype": "float32"}
        else:
            own |= {"model": str(preset_path(cell.preset, self._cache)), "label": cell.preset}
        base = replace(self._base, **own)
        return [
            replace(base, method=method, head=head)
            for method, head in map(parse_method, cell.methods)
        ]

    def _runs(self) -> Iterator[Run]:
        for method, (optimizer, rate) in CONVERGENCE_RUNS.items():
            backend, seed = self._base.backend, self._base.seed
            yield Run(REAL_MODEL, backend, method, optimizer, rate, STEPS, TOKENS, seed=seed)

    def _converge(self) -> None:
        curves = self._study.report["curves"]
        for run in self._runs():
            if run.finished(curves.get(run.method)):
                continue
            self._study.tell(f"{run.iterations} steps of {run.method} on {run.model}")
            self._train(run)

    def _train(self, run: Run) -> None:
        """One curve, kept as it grows beyond what there is of it already."""
        curves, curve = self._study.report["curves"], run.curve()

        def keep() -> None:
            known = curves.get(run.method)
            if not run.began(known) or len(curve["loss"]) >= len(known["loss"]):
                curves[run.method] = curve
                self._study.save()

        try:
            train(run, curve, keep=keep)
        except MespError as error:
            curve |= {"error": str(error), "failed": True}
            self._study.tell(f"  {run.method}: {error}")
        finally:
            keep()

    def _curves(self) -> list[str]:
        known = self._study.report["curves"]
        curves = {run.method: known[run.method] for run in self._runs() if run.method in known}
        return _converged(curves) if curves else []

    def _differences(self) -> list[str]:
        rows = self._study.report["rows"]
        if not rows:
            return []
        allocator = any(row["peak_bytes"] is not None for row in rows)
        memory = "the allocator's peak" if allocator else "anonymous memory over the baseline"
        device = f"{self._study.report['backend']} {self._study.report['device']}"
        return textwrap.wrap(_DIFFERENCES.format(memory=memory, device=device), _WIDTH)


def _titled(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    lines = [experiment.title, *_aligned(experiment.table(rows))]
    if experiment.notes:
        lines += textwrap.wrap(
            experiment.notes, _WIDTH, initial_indent="  ", subsequent_indent="  "
        )
    failed = {f"  {row['model']}, {row['method']}: {row['error']}" for row in rows if row["error"]}
    return [*lines, *sorted(failed), ""]


def _aligned(table: Table) -> list[str]:
    """Columns to the right, but for the first."""
    width = max(map(len, table))
    full = [line + [""] * (width - len(line)) for line in table]
    widths = [max(len(line[place]) for line in full) for place in range(width)]
    lines = []
    for first, *others in full:
        cells = (f"{cell:>{size}}" for cell, size in zip(others, widths[1:], strict=True))
        lines.append(f"  {first:<{widths[0]}}  {'  '.join(cells)}".rstrip())
    return lines


def _converged(curves: Mapping[str, Curve]) -> list[str]:
    """The loss at the beginning and the end of each run, and how far the exact methods part."""
    table: Table = [["", "optimizer", "steps", f"first {_ENDS}", f"last {_ENDS}", "paper, 100,000"]]
    for method, curve in curves.items():
        if not curve["loss"]:
            table.append([method, curve["error"] or "no step yet"])
            continue
        run = curve["run"]
        optimizer = f"{run['optimizer']} {run['learning_rate']:g}"
        ends = (np.mean(curve["loss"][:_ENDS]), np.mean(curve["loss"][-_ENDS:]))
        figures = [f"{value:.4f}" for value in ends]
        paper = f"≈ {_PAPER_LOSSES[method]}"
        table.append([method, optimizer, str(len(curve["loss"])), *figures, paper])
    lines = [f"Loss over training steps, {REAL_MODEL}, Python's documentation", *_aligned(table)]
    pair = [curves[method]["loss"] for method in ("mesp", "mebp") if method in curves]
    if len(pair) == 2 and all(pair):
        apart = max(abs(a - b) for a, b in zip(*pair, strict=False))
        lines.append(f"  MeSP and MeBP are never further apart than {apart:.1e}.")
    return [*lines, ""]
