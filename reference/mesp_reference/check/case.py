"""What a case is: inputs, the backend's results of them, and what they should be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mesp_reference.check.compare import assert_close, relative_error
from mesp_reference.check.naive import rounded
from mesp_reference.check.rig import Rig
from mesp_reference.check.tolerances import TOLERANCES, bound

Array = Any

DTYPES = ("float64", "float32", "bfloat16", "float16")

#: Where options are checked one by one. A 16-bit dtype differs in casts and kernels, not in them,
#: so it has one small and one large case: every case costs a compiling backend seconds.
WIDE_DTYPES = ("float64", "float32")

#: A bound from here on would hold nothing: the case, not the kernel, is wrong.
LARGEST_BOUND = 0.2


@dataclass(frozen=True)
class Problem:
    """inputs: float64 values, exactly those the backend saw; reference(**inputs): the right
    results, None where one must be absent; run(): the backend's.

    wide: results in the accumulation dtype, the others being in the rig's. after_narrow: wide
    results that depend on values rounded to the rig's dtype on the way, so that naive code in
    that dtype is what they are measured by. exact: results that must be equal bit for bit.
    """

    inputs: Mapping[str, np.ndarray]
    reference: Callable[..., Mapping[str, Any]]
    run: Callable[[], Mapping[str, Any]]
    wide: Collection[str] = ()
    after_narrow: Collection[str] = ()
    exact: Collection[str] = ()
    table: Mapping[str, float] = field(default_factory=lambda: TOLERANCES)


@dataclass(frozen=True)
class Case:
    """make: draws a problem for a backend in a dtype; dtypes: those in which it can be put."""

    component: str
    name: str
    make: Callable[[Rig], Problem]
    dtypes: tuple[str, ...] = DTYPES


@dataclass(frozen=True)
class Measurement:
    """One result. error, bound: None where nothing could be compared; reason: why not ok."""

    tensor: str
    error: float | None
    bound: float | None
    reason: str | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None

    @property
    def severity(self) -> float:
        """How close to its bound: 1 is at it, infinity where nothing could be compared."""
        if self.error is None or self.bound is None:
            return 0.0 if self.ok else float("inf")
        return self.error / self.bound if self.bound else self.error


def measure(case: Case, rig: Rig) -> list[Measurement]:
    """Every result of one case. Whatever the backend raises is a result that is missing."""
    try:
        problem = case.make(rig)
        exact = problem.reference(**problem.inputs)
        rig.poison({name: np.shape(value) for name, value in exact.items() if value is not None})
        outputs = problem.run()
        rig.check_unchanged()
        names = sorted(exact.keys() | outputs.keys(), key=[*exact, *outputs].index)
        naive = _Naive(problem)
        return [_compare(name, rig, problem, exact, outputs, naive) for name in names]
    except Exception as error:
        return [Measurement("", None, None, one_line(error))]


def one_line(error: BaseException) -> str:
    """An exception as the first line of its text, with its type unless that is a failed check."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, AssertionError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Naive:
    """The reference run naively in a dtype, once for each dtype that is asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._results: dict[str, Mapping[str, Any]] = {}

    def error(self, dtype: str, name: str, exact: Any) -> float:
        if dtype == "float64":
            # Naive float64 code is the reference itself.
            return 0.0
        if dtype not in self._results:
            inputs = {
                key: rounded(value, dtype, in_order=True)
                for key, value in self._problem.inputs.items()
            }
            self._results[dtype] = self._problem.reference(**inputs)
        return relative_error(np.array(self._results[dtype][name]), exact)


def _compare(
    name: str,
    rig: Rig,
    problem: Problem,
    exact: Mapping[str, Any],
    outputs: Mapping[str, Any],
    naive: _Naive,
) -> Measurement:
    expected, actual = exact.get(name), outputs.get(name)
    if expected is None or actual is None:
        if expected is None and actual is None:
            return Measurement(name, None, None)
        return Measurement(name, None, None, "is missing" if actual is None else "should be absent")
    dtype = rig.wide if name in problem.wide else rig.dtype
    rule = rig.dtype if name in problem.after_narrow else dtype
    allowed = error = None
    try:
        if name in problem.exact:
            allowed = 0.0
        else:
            allowed = bound(rule, naive.error(rule, name, expected), problem.table)
            assert allowed < LARGEST_BOUND, f"a bound of {allowed:.1e} holds nothing"
            found = dtype if isinstance(actual, float) else rig.backend.dtype_name(actual)
            assert found == dtype, f"is {found}, not {dtype}"
        values = np.array(actual) if isinstance(actual, float) else rig.backend.to_numpy(actual)
        error = relative_error(values, expected)
        assert_close(values, expected, allowed, name=name)
    except AssertionError as problem_found:
        return Measurement(name, error, allowed, one_line(problem_found))
    return Measurement(name, error, allowed)
