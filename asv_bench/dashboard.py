"""``python -m asv_bench.dashboard``: the last commits measured, each in an environment that asv
makes, and published: asv's pages, and beside them one page that tells it at a glance."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asv_bench import offline, provenance, report, running, suites
from asv_bench.measured import HASH, Run, load_runs

COMMITS = 15


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asv_bench.dashboard", description=__doc__)
    parser.add_argument("--commits", type=int, default=COMMITS, help="how many (%(default)s)")
    parser.add_argument("--suite", default="short", help="a suite's name, or a pattern of cells")
    parser.add_argument("--large", action="store_true", help="large models too, of the newest one")
    parser.add_argument("--again", action="store_true", help="also what has results already")
    parser.add_argument(
        "--publish", action="store_true", help="only publish what has been measured"
    )
    options = parser.parse_args(arguments)
    with running.configuration(running.RESULTS, running.HTML) as config:
        if not options.publish and not measure(config, options):
            return 2
    return publish(running.RESULTS, running.HTML)


def measure(config: Path, options: argparse.Namespace) -> bool:
    """Whether asv ran. That a cell failed is seen on the pages, and is no reason to have none."""
    commits = last_commits(options.commits)
    again = [] if options.again else ["--skip-existing-successful"]
    jobs = [(commits, options.suite)]
    if options.large:
        jobs.append((commits[:1], "large"))
    for chosen, suite in jobs:
        with tempfile.NamedTemporaryFile("w", prefix="mesp-commits-") as file:
            print(*chosen, sep="\n", file=file, flush=True)
            asked = [*again, f"HASHFILE:{file.name}"]
            if running.run(config, suites.patterns(suite), asked) not in (0, 2):
                return False
    return True


def last_commits(count: int) -> list[str]:
    """The newest first."""
    return running.git("rev-list", "--first-parent", f"--max-count={count}", "HEAD").split()


def publish(results: Path, html: Path) -> int:
    """Makes the pages from what has been measured; exit status 1, and no pages, when a result is
    not of its commit's source."""
    runs = load_runs(results)
    faults = provenance.problems(runs, running.ROOT)
    if faults or not runs:
        print(*(faults or ["nothing has been measured"]), sep="\n", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="mesp-publish-") as folder:
        shown = Path(folder) / "results"
        shutil.copytree(results, shown)
        keep_measured(shown / "benchmarks.json", runs)
        with running.configuration(shown, html) as config:
            status = running.asv(config, "publish")
    if status:
        return status
    offline.localise(html)
    (html / "report.html").write_text(report.page(runs, running.ROOT), encoding="utf-8")
    print(f"published: {html / 'report.html'}, and asv's pages {html / 'index.html'}")
    return 0


def keep_measured(file: Path, runs: Sequence[Run]) -> None:
    """Takes from asv's list of benchmarks those without a figure, whose graphs its pages would not
    find, and the hash, which is none."""
    measured = {cell.partition("(")[0] for run in runs for cell in run.values} - {HASH}
    listed = json.loads(file.read_text("utf-8"))
    kept = {name: value for name, value in listed.items() if name in {"version", *measured}}
    file.write_text(json.dumps(kept), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
