"""Every benchmark once, on this interpreter's own installation: fails on an error or a skipped
cell, never on a time. What was measured is thrown away."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asv_bench import dashboard, running, suites
from asv_bench.measured import Run, cells, load_runs

#: Cells cost some three seconds each.
MOST = 60


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mesp-quick-") as folder:
        # asv writes what it knows of the machine into the home folder.
        os.environ["HOME"] = folder
        # What several cells compile, the first compiles for all.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "jax")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        results, html = Path(folder) / "results", Path(folder) / "html"
        with running.configuration(results, html) as config:
            status = running.run(
                config,
                suites.QUICK,
                ["-E", "existing", "--quick", "--set-commit-hash", "HEAD"],
            )
            if status not in (0, 2):
                return status
        benchmarks = json.loads((results / "benchmarks.json").read_text())
        faults = complaints(benchmarks, load_runs(results))
        if faults:
            print(*faults, sep="\n", file=sys.stderr)
            return 1
        return dashboard.publish(results, html)


def complaints(benchmarks: Mapping[str, Any], runs: Iterable[Run]) -> list[str]:
    """What keeps a quick run from being good, a line each."""
    (run,) = runs
    faults, count = [], 0
    for name, benchmark in benchmarks.items():
        if name == "version":
            continue
        chosen = [
            cell
            for cell in cells(name, benchmark["params"])
            if any(re.search(pattern, cell) for pattern in suites.QUICK)
        ]
        if not chosen:
            faults.append(f"{name} has no cell that a quick run takes: see suites.QUICK")
        count += len(chosen)
        for cell in chosen:
            if cell in run.failed:
                faults.append(f"{cell} failed")
            elif cell not in run.values:
                faults.append(f"{cell} was skipped: what it needs is missing, or was renamed")
    if count > MOST:
        faults.append(f"a quick run takes {count} cells, more than {MOST}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
