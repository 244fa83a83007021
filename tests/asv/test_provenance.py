"""Results of another source than their commit's are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks.source import PACKAGES, imported_files, source_hash

from asv_bench import dashboard, running
from asv_bench.measured import load_runs
from asv_bench.provenance import problems, tree_hash
from tests.asv.fabricate import HASH, benchmark, store
from tests.asv.history import commits, git

ROOT = Path(__file__).parents[2]

BENCHMARKS = {
    HASH: benchmark(HASH, []),
    "step.Step.time_step": benchmark("step.Step.time_step", [["'mlx'", "'jax'"]], "seconds"),
}


def results(folder: Path, sources: dict[str, int | None]) -> Path:
    """Stored results of each commit, with these hashes."""
    for date, (name, source) in enumerate(sources.items()):
        store(folder, BENCHMARKS, name, source, lambda *cell: 0.5, date=date)
    return folder


def test_what_is_imported_has_the_hash_of_its_tree(tmp_path: Path) -> None:
    """The two ways of hashing agree: this source, as a commit and as it is imported."""
    names = [name for name in PACKAGES if name != "mesp_core"]
    for source in [ROOT / "mesp_core", *(ROOT / "backends" / name for name in names)]:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, tmp_path / source.relative_to(ROOT), ignore=ignore)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    assert tree_hash(tmp_path, "HEAD") == source_hash(imported_files())


def test_a_hash_is_of_names_and_contents_and_fits_a_float() -> None:
    files = [("mesp_core/a.py", b"1"), ("mesp_core/b.py", b"2")]
    assert source_hash(files) == source_hash(reversed(files))
    assert source_hash(files) != source_hash([("mesp_core/a.py", b"2"), ("mesp_core/b.py", b"1")])
    assert source_hash(files) != source_hash([("mesp_core/a.py", b"1mesp_core/b.py2")])
    assert 0 <= source_hash(files) == int(float(source_hash(files)))


def test_results_of_their_own_source_are_accepted(repository: Path, tmp_path: Path) -> None:
    """The last commit changes no package: it shares its hash with the one before, rightly."""
    sources = {name: tree_hash(repository, name) for name in commits(repository)}
    assert len(set(sources.values())) == 2
    assert problems(load_runs(results(tmp_path / "results", sources)), repository) == []


def test_different_commits_with_one_hash_are_refused(repository: Path, tmp_path: Path) -> None:
    first, second, _ = commits(repository)
    shared = tree_hash(repository, first)
    runs = load_runs(results(tmp_path / "results", {first: shared, second: shared}))
    (problem,) = problems(runs, repository)
    assert problem.startswith(second[:8]) and f"that of {first[:8]}" in problem


def test_a_hash_of_no_commit_is_refused(repository: Path, tmp_path: Path) -> None:
    first = commits(repository)[0]
    (problem,) = problems(load_runs(results(tmp_path / "results", {first: 7})), repository)
    assert "of no commit" in problem


def test_a_result_without_a_hash_is_refused(repository: Path, tmp_path: Path) -> None:
    first = commits(repository)[0]
    (problem,) = problems(load_runs(results(tmp_path / "results", {first: None})), repository)
    assert "does not tell" in problem


def test_a_commit_that_could_not_be_built_is_no_fault(repository: Path, tmp_path: Path) -> None:
    first = commits(repository)[0]
    folder = tmp_path / "results"
    store(folder, BENCHMARKS, first, None, lambda *cell: None)
    (run,) = load_runs(folder)
    assert not run.values and run.failed
    assert problems([run], repository) == []


def test_a_result_of_an_unknown_commit_is_refused(repository: Path, tmp_path: Path) -> None:
    (problem,) = problems(load_runs(results(tmp_path / "results", {"1" * 40: 7})), repository)
    assert "no commit of this repository" in problem


def test_a_dashboard_of_such_results_is_not_published(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    first, second, _ = commits(repository)
    shared = tree_hash(repository, first)
    folder = results(tmp_path / "results", {first: shared, second: shared})
    monkeypatch.setattr(running, "ROOT", repository)
    assert dashboard.publish(folder, tmp_path / "html") == 1
    assert not (tmp_path / "html").exists()
    assert "another source" in capsys.readouterr().err


def test_nothing_measured_is_nothing_published(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "results").mkdir()
    assert dashboard.publish(tmp_path / "results", tmp_path / "html") == 1
    assert "nothing has been measured" in capsys.readouterr().err
