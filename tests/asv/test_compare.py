"""What counts as worse between two commits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asv_bench import compare, running
from asv_bench.compare import changes, table
from asv_bench.measured import HASH, Run, Value
from tests.asv.history import commit, git

TIME = "step.Step.time_step('mlx', 256)"
MEMORY = "step.StepMemory.track_peak_bytes_step('jax', 256)"
ERROR = "step.Step.track_gradient_error('torch', 256)"
SHARE = "step.Step.track_gemm_share('torch', 256)"


def run(values: dict[str, Value], *, failed: tuple = (), skipped: tuple = ()) -> Run:
    return Run("c" * 40, 0, "m", "e", values, frozenset(failed), frozenset(skipped))


def one(cell: str, before: Value, after: Value, factor: float = 1.25) -> compare.Change:
    (change,) = changes(run({cell: before}), run({cell: after}), factor)
    return change


def timed(*samples: float) -> Value:
    return Value(sorted(samples)[len(samples) // 2], samples)


def test_a_slower_step_is_worse() -> None:
    change = one(TIME, timed(1.0, 1.1, 1.2), timed(1.5, 1.6, 1.7))
    assert change.worse and not change.better
    assert change.ratio == pytest.approx(1.6 / 1.1)


def test_a_disturbed_step_is_not_worse() -> None:
    """Its fastest run is as fast as before."""
    assert not one(TIME, timed(1.0, 1.1, 1.2), timed(1.02, 3.0, 4.0)).worse


def test_a_faster_step_is_better() -> None:
    change = one(TIME, timed(1.0, 1.1, 1.2), timed(0.5, 0.6, 0.7))
    assert change.better and not change.worse
    assert not one(TIME, timed(1.0, 1.1, 1.2), timed(0.99, 0.6, 1.0)).better


def test_more_memory_is_worse_beyond_the_factor_alone() -> None:
    assert one(MEMORY, Value(100.0), Value(130.0)).worse
    assert not one(MEMORY, Value(100.0), Value(120.0)).worse
    assert one(MEMORY, Value(100.0), Value(120.0), factor=1.1).worse
    assert one(MEMORY, Value(0.0), Value(1.0)).ratio == math.inf
    assert not one(MEMORY, Value(0.0), Value(0.0)).worse


def test_an_error_may_double() -> None:
    assert not one(ERROR, Value(1e-6), Value(1.9e-6)).worse
    assert one(ERROR, Value(1e-6), Value(2.1e-6)).worse
    assert not one(ERROR, Value(1e-6), Value(2.1e-6), factor=3.0).worse


def test_a_smaller_share_of_products_is_worse() -> None:
    assert one(SHARE, Value(0.8), Value(0.5)).worse
    assert one(SHARE, Value(0.5), Value(0.8)).better


def test_what_fails_now_is_infinitely_worse() -> None:
    (change,) = changes(run({TIME: Value(1.0)}), run({}, failed=(TIME,)))
    assert change.worse and change.ratio == math.inf and change.after is None
    (change,) = changes(run({}, failed=(TIME,)), run({TIME: Value(1.0)}))
    assert change.better


def test_what_one_commit_lacks_is_left_out_and_so_is_the_hash() -> None:
    here = run({TIME: Value(1.0), HASH: Value(1.0)})
    assert changes(run({HASH: Value(9.0)}, skipped=(TIME,)), here) == []


def test_the_worst_comes_first() -> None:
    before = run({TIME: Value(1.0), MEMORY: Value(1e7), SHARE: Value(0.5)})
    after = run({TIME: Value(1.0), MEMORY: Value(2e7), SHARE: Value(0.9)})
    lines = table(changes(before, after))[1:]
    assert [line.split()[-2].partition("(")[0] for line in lines] == [
        "step.StepMemory.track_peak_bytes_step",
        "step.Step.time_step",
        "step.Step.track_gemm_share",
    ]
    assert lines[0].split()[:6] == ["WORSE", "10", "MB", "20", "MB", "2.00"]
    assert lines[2].split()[0] == "better"


def test_the_working_tree_is_measured_as_a_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(running.git, "__kwdefaults__", {"repository": repository})
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "config", "user.name", "n")
    git(repository, "config", "user.email", "e")
    assert compare.working_tree() == head
    (repository / "mesp_core" / "one.py").write_text("changed")
    (repository / "mesp_core" / "new.py").write_text("unknown")
    found = compare.working_tree()
    assert git(repository, "show", f"{found}:mesp_core/one.py") == "changed"
    assert "mesp_core/new.py" in capsys.readouterr().err
    # Neither the tree nor the list of stashes has changed.
    assert (repository / "mesp_core" / "one.py").read_text() == "changed"
    assert git(repository, "stash", "list") == ""
    assert git(repository, "rev-parse", "HEAD") == head


@pytest.mark.parametrize(("after", "status"), [(1.0, 0), (2.0, 1)])
def test_the_exit_status_tells(
    after: float,
    status: int,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(running.git, "__kwdefaults__", {"repository": repository})
    base = git(repository, "rev-parse", "HEAD")
    head = commit(repository, "mesp_core/one.py", "slow")
    runs = {base: run({MEMORY: Value(1.0)}), head: run({MEMORY: Value(after)})}
    monkeypatch.setattr(compare, "measure", lambda *arguments: runs)
    assert compare.main(["HEAD~1"]) == status
    assert f"{status} of 1 are worse" in capsys.readouterr().out


def test_an_unknown_base_is_an_error(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(running.git, "__kwdefaults__", {"repository": repository})
    assert compare.main(["nonesuch"]) == 2
    assert "there is no commit nonesuch" in capsys.readouterr().err
