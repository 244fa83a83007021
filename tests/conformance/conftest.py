"""The subjects of the formula tests, and how many cells of the matrix cannot exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.subjects import (
    CELLS,
    ONE_CASE_IN,
    WITHOUT,
    Subject,
    cells,
    runs,
    settings_of,
)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each cell in turn; afterwards no input and nothing saved may have been written into."""
    made = Subject(*request.param)
    with settings_of(*request.param):
        yield made
        made.check_unchanged()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every cell, or those that ``--subjects`` names, for each test of a subject that does not
    say itself which it takes."""
    own = any("subject" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "subject" in metafunc.fixturenames and not own:
        wanted = metafunc.config.getoption("--subjects").split(",")
        chosen = [c for c in cells() if not wanted[0] or c[0] in wanted or "-".join(c) in wanted]
        metafunc.parametrize("subject", chosen, ids="-".join, indirect=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--subjects", default="", help="only these, as torch or numpy-float64, comma between"
    )
    parser.addoption(
        "--every-case", action="store_true", help="every case of every cell, JAX's too (slow)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what ``subjects.runs`` says; how much is told at the end."""
    if config.getoption("--every-case", default=False):
        return
    seen: Counter[tuple[str, tuple[str, str]]] = Counter()
    left_out: list[pytest.Item] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        cell = callspec.params.get("subject") if callspec is not None else None
        if cell in ONE_CASE_IN:
            test = f"{item.path}:{item.originalname}"  # type: ignore[attr-defined]
            if not runs(cell, seen[test, cell]):
                left_out.append(item)
            seen[test, cell] += 1
    chosen = set(left_out)
    items[:] = [item for item in items if item not in chosen]
    config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    # NumPy's matmul of small float32 matrices now and then reports an invalid value for finite
    # operands and a right, finite result (it depends on what lies behind them in memory). Every
    # result here is compared, and the comparison refuses what is not finite.
    config.addinivalue_line(
        "filterwarnings", "ignore:invalid value encountered in matmul:RuntimeWarning"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [(*cell, reason) for cell, reason in CELLS.items() if reason is not None]
    reasons += [(*cell, reason) for cell, reason in WITHOUT.items()]
    terminalreporter.write_line(
        f"formulas: {len(cells())} cells of namespace and dtype tested, {len(reasons)} cannot exist"
    )
    for *cell, reason in reasons:
        terminalreporter.write_line(f"  {' '.join(cell)}: {reason}")
