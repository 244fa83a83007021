"""Runs the cases on one backend, and sums them up by component and dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mesp_core.backend import Backend
from mesp_core.errors import MespError
from mesp_reference.check.case import DTYPES, Case, Measurement, measure
from mesp_reference.check.cases import CASES, COMPONENTS
from mesp_reference.check.rig import Rig

#: What runs for the components that are no operation of a backend.
_ELSEWHERE = {
    "dropout": "formula",
    "lora_init": "mesp_core.lora",
    "stochastic_rounding": "backend.round_stochastic",
}


@dataclass(frozen=True)
class Row:
    """One component in one dtype.

    error, bound: of the result closest to its bound, or furthest beyond it, which ``case`` and
    ``tensor`` name; None where a result could not be compared, and ``reason`` says why.
    implementation: what ran. cases, tensors: how many were compared.
    """

    component: str
    dtype: str
    error: float | None
    bound: float | None
    implementation: str
    ok: bool
    case: str
    tensor: str
    reason: str | None
    cases: int
    tensors: int


@dataclass(frozen=True)
class NotApplicable:
    """A cell that cannot exist on this device."""

    component: str
    dtype: str
    reason: str


@dataclass
class Report:
    """rows: the cells that were checked; misses: every result beyond its bound."""

    seed: int
    rows: list[Row] = field(default_factory=list)
    not_applicable: list[NotApplicable] = field(default_factory=list)
    misses: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def totals(self) -> dict[str, Any]:
        return {
            "cells": len(self.rows),
            "missed": sum(not row.ok for row in self.rows),
            "not_applicable": len(self.not_applicable),
            "cases": sum(row.cases for row in self.rows),
            "tensors": sum(row.tensors for row in self.rows),
            "seconds": round(self.seconds, 1),
        }

    def as_json(self) -> dict[str, Any]:
        """rows, not_applicable, misses, totals and seed, of plain values."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "rows": [asdict(row) for row in self.rows],
            "not_applicable": [asdict(cell) for cell in self.not_applicable],
            "misses": self.misses,
            "totals": self.totals(),
        }


#: Called with each case's results as they are there.
OnCase = Callable[[Case, str, list[Measurement]], None]
#: Called with each cell when it is settled.
OnCell = Callable[[Row | NotApplicable], None]


def run(
    backend: Backend,
    *,
    dtypes: Sequence[str] | None = None,
    components: Sequence[str] | None = None,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    on_case: OnCase | None = None,
    on_cell: OnCell | None = None,
) -> Report:
    """Checks ``backend`` against the reference.

    dtypes, components: None for all. cases: what is run; all of them but in a test.
    A cell that misses is reported and the rest goes on. Raises MespError for a dtype or component
    that does not exist, and where none of the cells asked for can exist.
    """
    dtypes = _chosen("dtype", dtypes, DTYPES)
    components = _chosen("component", components, COMPONENTS)
    report, start = Report(seed), time.perf_counter()
    absent = {dtype: _absence(backend, dtype) for dtype in dtypes}
    for component in components:
        for dtype in dtypes:
            own = [c for c in cases if c.component == component and dtype in c.dtypes]
            if not own:
                continue
            reason = absent[dtype]
            if reason is not None:
                cell: Row | NotApplicable = NotApplicable(component, dtype, reason)
                report.not_applicable.append(cell)
            else:
                cell = _row(backend, own, dtype, report, on_case)
                report.rows.append(cell)
            if on_cell is not None:
                on_cell(cell)
    if not report.rows:
        reasons = "; ".join(dict.fromkeys(cell.reason for cell in report.not_applicable))
        raise MespError(f"nothing to check: {reasons or 'no case is in these dtypes'}")
    report.seconds = time.perf_counter() - start
    return report


def _chosen(what: str, asked: Sequence[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if asked is None:
        return known
    for name in asked:
        if name not in known:
            raise MespError(f"no {what} is called {name!r}; choose from {', '.join(known)}")
    return tuple(name for name in known if name in asked)


def _absence(backend: Backend, dtype: str) -> str | None:
    """Why the backend has no such dtype here."""
    try:
        backend.dtype(dtype)
    except MespError as error:
        return str(error)
    return None


def _row(
    backend: Backend, cases: list[Case], dtype: str, report: Report, on_case: OnCase | None
) -> Row:
    before = _calls(backend)
    found: list[tuple[Case, Measurement]] = []
    for case in cases:
        rig = Rig(backend, dtype, report.seed, f"{case.component}/{case.name}")
        # Values that are not finite are refused where results are compared; naive 16-bit code
        # overflows now and then, and NumPy's matmul warns about finite operands.
        with np.errstate(all="ignore"):
            results = measure(case, rig)
        found += [(case, result) for result in results]
        if on_case is not None:
            on_case(case, dtype, results)
        backend.release()
    for case, result in found:
        if not result.ok:
            cell = {"component": case.component, "dtype": dtype, "case": case.name}
            report.misses.append({**cell, **asdict(result)})
    case, worst = max(found, key=lambda pair: (not pair[1].ok, pair[1].severity))
    component = case.component
    return Row(
        component=component,
        dtype=dtype,
        error=worst.error,
        bound=worst.bound,
        implementation=_implementation(component, before, _calls(backend)),
        ok=worst.ok,
        case=case.name,
        tensor=worst.tensor,
        reason=worst.reason,
        cases=len(cases),
        tensors=len(found),
    )


def _calls(backend: Backend) -> dict[tuple[str, str], int]:
    """How often each implementation of each operation has run."""
    return {(item.component, item.name): item.calls for item in backend.explain()}


def _implementation(
    component: str, before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]
) -> str:
    """What ran of an operation, or, of a block or a model, which operations ran by something
    other than the formula."""
    if component in _ELSEWHERE:
        return _ELSEWHERE[component]
    ran = [key for key, calls in after.items() if calls > before.get(key, 0)]
    own = [name for operation, name in ran if operation == component]
    if own:
        return " + ".join(own)
    native = [f"{operation} by {name}" for operation, name in ran if name != "formula"]
    return ", ".join(native) or "formula"
