"""Results as asv stored them, read for the report, for comparisons and for checks."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asv.results import iter_results

#: The benchmark that tells which source was measured.
HASH = "source.Source.track_source_hash"


@dataclass(frozen=True)
class Value:
    """One cell's result, and the samples it is the median of, where they were recorded."""

    value: float
    samples: tuple[float, ...] = ()

    @property
    def least(self) -> float:
        """The smallest sample: what the machine's other work has disturbed least."""
        return min(self.samples, default=self.value)


@dataclass(frozen=True)
class Run:
    """The results of one commit in one environment. date: milliseconds since 1970; values: by the
    cell's name; failed: cells that ended in an error; skipped: that do not exist there, or that
    nobody asked for."""

    commit: str
    date: int
    machine: str
    environment: str
    values: Mapping[str, Value]
    failed: frozenset[str]
    skipped: frozenset[str]

    def value(self, cell: str) -> float | None:
        found = self.values.get(cell)
        return None if found is None else found.value

    @property
    def source_hash(self) -> int | None:
        found = self.value(HASH)
        return None if found is None else int(found)


def load_runs(results: Path) -> list[Run]:
    """Every stored result, oldest commit first."""
    # asv prints what it cannot read, which must not mix with what we print.
    with redirect_stdout(sys.stderr):
        runs = [_run(result) for result in iter_results(str(results))]
    return sorted(runs, key=lambda run: (run.date, run.commit))


def _run(result: Any) -> Run:
    values: dict[str, Value] = {}
    failed: set[str] = set()
    skipped: set[str] = set()
    for name in result.get_all_result_keys():
        params = result.get_result_params(name)
        found = result.get_result_value(name, params)
        samples = result.get_result_samples(name, params)
        for cell, value, taken in zip(cells(name, params), found, samples, strict=True):
            if value is None:
                failed.add(cell)
            elif math.isnan(value):
                skipped.add(cell)
            else:
                values[cell] = Value(float(value), tuple(taken or ()))
    return Run(
        commit=result.commit_hash,
        date=int(result.date),
        machine=result.params["machine"],
        environment=result.env_name,
        values=values,
        failed=frozenset(failed),
        skipped=frozenset(skipped),
    )


def cells(name: str, params: Iterable[Iterable[str]]) -> list[str]:
    """The names of a benchmark's cells, as asv writes them. params: the choices, as written."""
    choices = [list(each) for each in params]
    if not choices:
        return [name]
    return [f"{name}({', '.join(chosen)})" for chosen in itertools.product(*choices)]


def cell(name: str, *params: object) -> str:
    """One cell's name: ``cell("step.Step.time_step", "mlx", 256, 8, "float32")``."""
    return f"{name}({', '.join(map(repr, params))})"


def latest(runs: Iterable[Run], keep: Callable[[Run], bool] = lambda run: True) -> Run | None:
    """The newest run that ``keep`` allows."""
    allowed = [run for run in runs if keep(run)]
    return allowed[-1] if allowed else None
