"""The subjects of the formula tests, and how many cells of the matrix cannot exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.formulas.subjects import CELLS, Subject

TESTED = [cell for cell, reason in CELLS.items() if reason is None]


@pytest.fixture(params=TESTED, ids="-".join)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each cell in turn; afterwards no input and nothing saved may have been written into."""
    made = Subject(*request.param)
    yield made
    made.check_unchanged()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [(*cell, reason) for cell, reason in CELLS.items() if reason is not None]
    terminalreporter.write_line(
        f"formulas: {len(TESTED)} cells of namespace and dtype tested, {len(reasons)} cannot exist"
    )
    for namespace, dtype, reason in reasons:
        terminalreporter.write_line(f"  {namespace} {dtype}: {reason}")
