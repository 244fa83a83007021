"""``python -m asv_bench.compare BASE``: two commits measured in turn; fails when the later one is
worse beyond a factor."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asv_bench import provenance, running, suites
from asv_bench.measured import HASH, Run, Value, load_runs
from asv_bench.units import human

FACTOR = 1.25

#: An error of rounding is as likely to change by this much as not to.
_ERROR_FACTOR = 2.0


@dataclass(frozen=True)
class Change:
    """One cell of two commits. ratio: how many times worse the later is (below 1: better); factor:
    the ratio from which that counts."""

    cell: str
    before: Value | None
    after: Value | None
    ratio: float
    factor: float

    @property
    def worse(self) -> bool:
        return self.ratio > self.factor

    @property
    def better(self) -> bool:
        return self.ratio * self.factor < 1.0


def changes(before: Run, after: Run, factor: float = FACTOR) -> list[Change]:
    """Every cell that either has, the worst first. A cell that no longer works is infinitely
    worse; what is skipped in either is left out."""
    found = []
    for cell in sorted(set(before.values) | set(after.values)):
        old, new = before.values.get(cell), after.values.get(cell)
        if cell == HASH or cell in before.skipped or cell in after.skipped:
            continue
        limit = max(factor, _ERROR_FACTOR) if "track_gradient_error" in cell else factor
        if old is None or new is None:
            if cell in after.failed or cell in before.failed:
                ratio = float("inf") if new is None else 0.0
                found.append(Change(cell, old, new, ratio, limit))
            continue
        found.append(Change(cell, old, new, _ratio(cell, old, new), limit))
    return sorted(found, key=lambda change: -change.ratio)


def _ratio(cell: str, before: Value, after: Value) -> float:
    """How many times worse. Of times both the median and the least must have grown: what else the
    machine does moves the one, hardly the other."""
    if "track_gemm_share" in cell:
        return _quotient(before.value, after.value)
    median = _quotient(after.value, before.value)
    if not before.samples or not after.samples:
        return median
    least = _quotient(after.least, before.least)
    return min(median, least) if median > 1.0 else max(median, least)


def _quotient(value: float, by: float) -> float:
    if by:
        return value / by
    return float("inf") if value else 1.0


def table(found: Sequence[Change]) -> list[str]:
    """The lines to print: changes for the worse, for the better, then the rest."""
    lines = [f"{'':11} {'before':>10} {'after':>10} {'ratio':>6}  benchmark"]
    for change in found:
        word = "WORSE" if change.worse else "better" if change.better else ""
        before, after = (
            "failed" if value is None else human(change.cell, value.value)
            for value in (change.before, change.after)
        )
        lines.append(f"{word:11} {before:>10} {after:>10} {change.ratio:6.2f}  {change.cell}")
    return lines


def working_tree() -> str:
    """A commit of the working tree as it is, or HEAD when nothing has changed."""
    untracked = running.git("ls-files", "--others", "--exclude-standard", "*.py")
    if untracked:
        print(f"not measured, as git does not know them: {untracked.split()}", file=sys.stderr)
    return running.git("stash", "create") or running.git("rev-parse", "HEAD")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asv_bench.compare", description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument(
        "--factor", type=float, default=FACTOR, help="worse from here (%(default)s)"
    )
    parser.add_argument("--suite", default="compare", help="a suite's name, or a pattern of cells")
    options = parser.parse_args(arguments)
    try:
        base = running.git("rev-parse", "--verify", "--quiet", f"{options.base}^{{commit}}")
    except subprocess.CalledProcessError:
        print(f"there is no commit {options.base}", file=sys.stderr)
        return 2
    head = working_tree()
    print(f"comparing {base[:8]} with {head[:8]}, in turn, in an environment made for it")
    with tempfile.TemporaryDirectory(prefix="mesp-compare-") as folder:
        runs = measure([base, head], options.suite, Path(folder))
    if runs is None:
        return 2
    found = changes(runs[base], runs[head], options.factor)
    print(*table(found), sep="\n")
    count = sum(change.worse for change in found)
    print(f"{count} of {len(found)} are worse beyond a factor of {options.factor}")
    return 1 if count else 0


def measure(commits: Sequence[str], suite: str, folder: Path) -> dict[str, Run] | None:
    """The results of each commit; None, with a reason printed, when there are none to trust."""
    results, hashes = folder / "results", folder / "commits"
    hashes.write_text("\n".join(dict.fromkeys(commits)) + "\n")
    with running.configuration(results, folder / "html") as config:
        options = ["--interleave-rounds", "--record-samples", f"HASHFILE:{hashes}"]
        if running.run(config, suites.patterns(suite), options) not in (0, 2):
            return None
    runs = {run.commit: run for run in load_runs(results)}
    faults = provenance.problems(runs.values(), running.ROOT)
    faults += [f"{commit[:8]} has no results" for commit in commits if commit not in runs]
    if faults:
        print(*faults, sep="\n", file=sys.stderr)
        return None
    return runs


if __name__ == "__main__":
    sys.exit(main())
