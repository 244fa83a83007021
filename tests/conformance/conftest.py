"""The subjects of the formula tests, and how many cells of the matrix cannot exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.subjects import CELLS, WITHOUT, Subject, cells, settings_of


@pytest.fixture(params=cells(), ids="-".join)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each cell in turn; afterwards no input and nothing saved may have been written into."""
    made = Subject(*request.param)
    with settings_of(*request.param):
        yield made
        made.check_unchanged()


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
