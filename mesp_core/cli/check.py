"""``mesp check``: the essential part of the conformance matrix, on the user's own device."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from mesp_core.backend import Backend, get_backend
from mesp_core.cli.arguments import add_json_argument
from mesp_core.cli.output import check_report, environment, say, write_report
from mesp_core.errors import BackendUnavailableError, MespError

#: Where the check is registered, and its name there: what it compares with is no part of the core.
GROUP, NAME = "mesp.checks", "reference"

#: Exit status of a check that found something.
MISSED = 1

_COMPONENT, _CELL = 22, 21


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="compare every component on this device with the reference",
        description="Forward and backward of every component, a block and whole models in every "
        "dtype of this device, against the float64 reference. Status 1 when anything misses.",
    )
    parser.add_argument(
        "--backend",
        default="auto",
        help="auto (the default), mlx, torch, jax, numpy, ...; a device can follow: torch:cuda",
    )
    parser.add_argument("--dtypes", type=_names, help="of these alone, e.g. float32,bfloat16")
    parser.add_argument("--components", type=_names, help="these alone, e.g. attention,block")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs (default 0)")
    parser.add_argument("--verbose", action="store_true", help="also print every single result")
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table as it grows, then what ran, what cannot exist, and every miss."""
    check_report(options.json)
    if options.seed < 0:
        raise MespError(f"--seed must not be negative, and is {options.seed}")
    check = _registered_check()
    backend = _backend(options.backend)
    start = environment(backend)
    say("Versions: " + ", ".join(f"{name} {value}" for name, value in start["versions"].items()))
    say(f"Machine:  {start['machine']}")
    say(f"Backend:  {backend.name} on {backend.device}\n")
    table = _Table()
    report = check(
        backend,
        dtypes=options.dtypes,
        components=options.components,
        seed=options.seed,
        on_case=_tell_case if options.verbose else None,
        on_cell=table.add,
    )
    table.end()
    _conclude(report, backend)
    operations = [vars(implementation) for implementation in backend.explain()]
    content = {"command": "check", **start, "operations": operations, **report.as_json()}
    write_report(options.json, content)
    return 0 if report.ok else MISSED


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _registered_check() -> Callable[..., Any]:
    """run(backend, dtypes=, components=, seed=, on_case=, on_cell=) of the installed check."""
    for point in entry_points(group=GROUP, name=NAME):
        return point.load()
    raise MespError(f"no check is registered under {GROUP}: install mesp again (pip install .)")


def _backend(name: str) -> Backend:
    """The backend asked for. Whatever a third party's raises is told as the reason."""
    try:
        return get_backend(name)
    except MespError:
        raise
    except Exception as error:
        text = f"backend {name} failed to start: {type(error).__name__}: {error}"
        raise BackendUnavailableError(text) from error


class _Table:
    """Component × dtype, a line as soon as a component is through with its dtypes."""

    def __init__(self) -> None:
        self._dtypes = ("float64", "float32", "bfloat16", "float16")
        self._component = "component"
        self._cells = {dtype: dtype for dtype in self._dtypes}

    def add(self, cell: Any) -> None:
        if cell.component != self._component:
            self.end()
            self._component = cell.component
        self._cells[cell.dtype] = _cell(cell)

    def end(self) -> None:
        columns = "".join(f"{self._cells.get(dtype, ''):<{_CELL}}" for dtype in self._dtypes)
        say(f"{self._component:<{_COMPONENT}}{columns}".rstrip())
        self._cells = {}


def _cell(cell: Any) -> str:
    """The worst error and its bound; n/a where the cell cannot exist."""
    if not hasattr(cell, "ok"):
        return "n/a"
    if cell.error is None:
        return "n/a" if cell.ok else "FAILED"
    if cell.bound == 0.0:
        return "equal" if cell.ok else "DIFFERS"
    if cell.ok:
        return f"{cell.error:.1e} ≤ {cell.bound:.1e}"
    return f"{cell.error:.1e} > {cell.bound:.1e} !!"


def _tell_case(case: Any, dtype: str, results: Sequence[Any]) -> None:
    for result in results:
        if result.error is None:
            told = result.reason or "absent, as it should be"
        else:
            told = f"{result.error:.2e}, bound {result.bound:.2e}"
            told += "" if result.ok else ": MISS"
        say(f"  {case.component} {dtype} ({case.name}) {result.tensor}: {told}")


def _conclude(report: Any, backend: Backend) -> None:
    """What ran and why, the cells that cannot exist, every miss, and the totals."""
    say("\nWhat ran:")
    for item in backend.explain():
        if item.calls:
            say(f"  {item.component}: {item.name} ({item.reason}), {item.calls} calls")
    reasons = Counter(cell.reason for cell in report.not_applicable)
    for reason, cells in reasons.items():
        say(f"Not applicable: {reason} ({cells} cells)")
    for miss in report.misses:
        where = f"{miss['component']} {miss['dtype']} ({miss['case']}) {miss['tensor']}".rstrip()
        say(f"MISS {where}: {miss['reason'].removeprefix(miss['tensor'] + ': ')}")
    totals = report.totals()
    held = totals["cells"] - totals["missed"]
    say(
        f"\n{held} of {totals['cells']} cells hold, {totals['missed']} miss, "
        f"{totals['not_applicable']} cannot exist; {totals['tensors']} results of "
        f"{totals['cases']} cases, seed {report.seed}, {totals['seconds']} s"
    )
