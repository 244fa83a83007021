"""Results as asv would have stored them, with values that we choose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asv.machine import Machine
from asv.results import Results
from asv.runner import BenchmarkResult

MACHINE = "somewhere"
HASH = "source.Source.track_source_hash"

#: The value of a benchmark's cell; NaN is skipped, None failed.
Choose = Callable[[str, tuple[str, ...]], float | None]


def store(
    folder: Path,
    benchmarks: Mapping[str, Mapping[str, Any]],
    commit: str,
    source: int | None,
    choose: Choose,
    *,
    date: int = 0,
) -> None:
    """Results of one commit. source: its hash, left out when None; date: in seconds."""
    describe_machine(folder)
    parameters = {"machine": MACHINE, "python": "3", "os": "o", "arch": "a", "cpu": "c"}
    parameters |= {"num_cpu": "2", "ram": "1"}
    result = Results(parameters, {}, commit, date * 1000, "3", "made", {})
    for name, benchmark in benchmarks.items():
        chosen = list(itertools.product(*benchmark["params"]))
        values = [choose(name, cell) for cell in chosen]
        if name == HASH:
            values = [math.nan if source is None else float(source)]
        stored = BenchmarkResult(values, [None] * len(values), [None] * len(values), 0, "", None)
        result.add_result(dict(benchmark), stored)
    result.save(str(folder))


def describe_machine(folder: Path) -> None:
    """What asv wants to know of a machine before it reads results."""
    machine = Machine()
    machine.__dict__.update(
        {"machine": MACHINE, "os": "o", "arch": "a", "cpu": "c", "num_cpu": "2", "ram": "1"}
    )
    machine.save(str(folder))


def benchmark(name: str, params: list[list[str]], unit: str = "unit") -> dict[str, Any]:
    """What asv knows of a benchmark after discovery, as far as results need it."""
    return {"name": name, "params": params, "version": "1", "unit": unit, "type": "track"}
