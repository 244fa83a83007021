from __future__ import annotations

import json
import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asv_bench import dashboard, provenance, running
from tests.asv.fabricate import store
from tests.asv.history import commit, git

ROOT = Path(__file__).parents[2]

#: Of commits on the dashboard.
COUNT = 4


@dataclass(frozen=True)
class Published:
    """A dashboard of this repository's last commits, with values of our choice."""

    html: Path
    commits: list[str]
    benchmarks: dict[str, Any]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: two that differ in a package, and one that changes something else."""
    folder = tmp_path / "repository"
    (folder / "mesp_core").mkdir(parents=True)
    (folder / "backends" / "mesp_mlx").mkdir(parents=True)
    git(folder, "init", "-q")
    commit(folder, "mesp_core/one.py", "1")
    commit(folder, "backends/mesp_mlx/two.py", "2")
    commit(folder, "README.md", "3")
    return folder


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every benchmark, as asv discovers them."""
    folder = tmp_path_factory.mktemp("discovered")
    with (
        running.configuration(folder, folder / "html") as config,
        pytest.MonkeyPatch.context() as m,
    ):
        # asv writes what it knows of the machine into the home folder; not into the user's.
        m.setenv("HOME", str(folder))
        assert running.run(config, ["just-discover"], ["-E", "existing"]) == 0
    found = json.loads((folder / "benchmarks.json").read_text())
    del found["version"]
    return found


def commits_with_source(count: int) -> list[str]:
    """The last commits that changed the packages, newest first."""
    command = ["rev-list", "--first-parent", f"--max-count={count}", "HEAD", "--", "mesp_core"]
    try:
        found = running.git(*command).split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    if len(found) < count:
        pytest.skip("this copy of the source has no history")
    return found


def invented(name: str, cell: tuple[str, ...], place: int) -> float:
    """A value of the size that is measured, falling from commit to commit; none of a component."""
    if name.startswith("components."):
        return math.nan
    backend = {"'mlx'": 1.3, "'jax'": 1.0, "'torch'": 1.1}.get(cell[0] if cell else "", 1.0)
    fall = 1.0 - 0.08 * place
    if "time_" in name:
        return 0.2 * backend * fall
    if "peak_bytes" in name:
        return 2e7 * backend * fall * (2.5 if cell[1] != "256" else 1.0)
    if "gradient_error" in name:
        return 1.7e-6 * backend
    return 0.5 * backend + 0.03 * place


@pytest.fixture(scope="session")
def published(benchmarks: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Published:
    results, html = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("html")
    commits = commits_with_source(COUNT)
    (results / "benchmarks.json").write_text(json.dumps({"version": 2, **benchmarks}))
    for place, name in enumerate(reversed(commits)):
        source = provenance.tree_hash(ROOT, name)
        date = int(running.git("log", "-1", "--format=%ct", name))
        store(
            results,
            benchmarks,
            name,
            source,
            lambda *cell, place=place: invented(*cell, place),
            date=date,
        )
    assert dashboard.publish(results, html) == 0
    return Published(html, commits, benchmarks)
