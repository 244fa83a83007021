"""Cells joined from many processes: order, references, failures, and what was known before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesp_core.compare.measure import Comparison, Options
from mesp_core.compare.setting import Setting
from mesp_core.compare.table import heading, table
from tests.compare.conftest import Invented, in_process, methods

Answer = dict[str, Any]


def failing(*names: str, **answer: Any) -> Invented:
    """Everything works but the memory of these methods."""

    def change(request: Any, found: Answer) -> Answer:
        bad = request["task"] == "memory" and request["settings"][0]["method"] in names
        return answer if bad else found

    return Invented(change)


def test_rows_keep_their_order_whatever_runs_first(setting: Setting) -> None:
    runner, told = Invented(), []
    comparison = Comparison(Options(steps=3, run=runner), told.append)
    rows = comparison.cell(methods(setting, "mesp", "mezo", "autodiff"))
    assert [row["method"] for row in rows] == ["mesp", "mezo", "autodiff"]
    assert runner.asked == [
        "memory autodiff",
        "memory mesp",
        "memory mezo",
        "time mesp, mezo, autodiff",
    ]
    assert [row["step_seconds"] for row in rows] == [2.0, 3.0, 4.0]
    assert [row["step_ratio"] for row in rows] == [1.0, 1.5, 2.0]
    assert {row["gradient_reference"] for row in rows} == {"autodiff"}
    assert rows == comparison.rows and len(told) == 4


def test_the_true_gradients_are_found_even_when_nobody_asked_for_their_row(
    setting: Setting,
) -> None:
    runner = Invented()
    rows = Comparison(Options(steps=0, run=runner)).cell(methods(setting, "mesp", "mezo"))
    assert runner.asked == ["memory autodiff", "memory mesp", "memory mezo"]
    assert [row["method"] for row in rows] == ["mesp", "mezo"]


@pytest.mark.parametrize("answer", [{"unavailable": "no"}, {"error": "killed"}])
def test_where_autodiff_cannot_run_mesp_is_the_reference(setting: Setting, answer: Answer) -> None:
    runner = failing("autodiff", **answer)
    rows = Comparison(Options(run=runner)).cell(methods(setting, "mezo", "mesp", "autodiff"))
    assert runner.asked[:3] == ["memory autodiff", "memory mesp", "memory mezo"]
    assert runner.asked[3:] == ["time mezo, mesp"]
    assert [row["gradient_reference"] for row in rows] == ["mesp", "mesp", None]
    assert rows[2]["error"] in ("no", "killed")
    assert rows[2]["unavailable"] == ("unavailable" in answer)
    # MeSP's gradients beside themselves would look like a proof.
    assert rows[1]["gradient_cosine"] is None


def test_real_gradients_are_compared(setting: Setting) -> None:
    one = replace(setting, backend="torch:cpu")
    comparison = Comparison(Options(steps=1, run=in_process))
    mesp, mebp, mezo = comparison.cell(methods(one, "mesp", "mebp", "mezo"))
    for row in (mesp, mebp):
        assert row["gradient_cosine"] == pytest.approx(1.0, abs=1e-6)
        assert row["gradient_relative_error"] < 1e-4
        assert row["gradient_sign_agreement"] > 0.99
    assert mebp["loss"] == pytest.approx(mesp["loss"], rel=1e-6)
    assert abs(mezo["gradient_cosine"]) < 4 / mezo["trained"] ** 0.5
    assert mezo["gradient_sign_agreement"] == pytest.approx(0.5, abs=0.1)
    assert mezo["step_seconds"] > 0


def test_without_gradients_and_time_nothing_more_is_run(setting: Setting) -> None:
    runner = Invented()
    options = Options(steps=0, gradients=False, run=runner)
    rows = Comparison(options).cell(methods(setting, "mezo", "mesp"))
    assert runner.asked == ["memory mezo", "memory mesp"]
    assert rows[0]["gradient_reference"] is None and rows[0]["step_seconds"] is None


def test_when_the_steps_cannot_be_timed_the_rest_stays(setting: Setting) -> None:
    def change(request: Any, found: Answer) -> Answer:
        return {"error": "ended by SIGKILL"} if request["task"] == "time" else found

    rows = Comparison(Options(run=Invented(change))).cell(methods(setting, "mesp"))
    assert rows[0]["peak_bytes"] == 200_000_000 and rows[0]["step_seconds"] is None
    assert rows[0]["time_error"] == "ended by SIGKILL" and rows[0]["error"] is None
    assert any("not timed: ended by SIGKILL" in line for line in table(rows))
    again = Invented()
    rows = Comparison(Options(run=again), known=rows).cell(methods(setting, "mesp"))
    assert again.asked[-1] == "time mesp" and rows[0]["time_error"] is None


def test_one_method_that_cannot_be_timed_leaves_the_others(setting: Setting) -> None:
    def change(request: Any, found: Answer) -> Answer:
        if request["task"] == "time":
            return {"seconds": [[], [2.0, 2.0]], "errors": ["no memory", None]}
        return found

    rows = Comparison(Options(run=Invented(change))).cell(methods(setting, "mesp", "mebp"))
    assert [row["time_error"] for row in rows] == ["no memory", None]
    assert [row["step_ratio"] for row in rows] == [None, 1.0]


def test_an_interruption_loses_nothing(setting: Setting) -> None:
    def change(request: Any, found: Answer) -> Answer:
        if request["settings"][0]["method"] == "mesp":
            raise KeyboardInterrupt
        return found

    saved: list[int] = []
    options = Options(run=Invented(change))
    comparison = Comparison(options, on_rows=lambda: saved.append(len(comparison.rows)))
    with pytest.raises(KeyboardInterrupt):
        comparison.cell(methods(setting, "mezo", "mesp", "autodiff"))
    assert saved == [1, 2]
    assert [row["method"] for row in comparison.rows] == ["mezo", "autodiff"]
    again = Comparison(Options(run=Invented()), known=comparison.rows)
    rows = again.cell(methods(setting, "mezo", "mesp", "autodiff"))
    assert [row["method"] for row in rows] == ["mezo", "mesp", "autodiff"]
    assert len(again.rows) == 3


def test_a_cell_that_is_known_is_not_measured_again(setting: Setting) -> None:
    cell = methods(setting, "mesp", "mebp")
    known = Comparison(Options(run=Invented())).cell(cell)
    quiet = Invented()
    comparison = Comparison(Options(run=quiet), known=known)
    assert comparison.cell(cell) == known and quiet.asked == []
    comparison.cell([replace(one, rank=4) for one in cell])
    assert len(quiet.asked) == 4 and len(comparison.rows) == 4


@pytest.mark.parametrize(
    ("first", "then", "again"),
    [
        (Options(steps=0), Options(), True),
        (Options(gradients=False), Options(), True),
        (Options(), Options(steps=0, gradients=False), False),
    ],
)
def test_a_known_row_must_hold_what_is_asked_for(
    setting: Setting, first: Options, then: Options, again: bool
) -> None:
    cell = methods(setting, "mesp")
    known = Comparison(replace(first, run=Invented())).cell(cell)
    runner = Invented()
    Comparison(replace(then, run=runner), known=known).cell(cell)
    assert bool(runner.asked) == again


def test_what_failed_is_tried_again_but_not_what_cannot_run(setting: Setting) -> None:
    cell = methods(setting, "mebp", "mesp")
    for answer, again in (({"error": "killed"}, True), ({"unavailable": "no"}, False)):
        known = Comparison(Options(run=failing("mebp", **answer))).cell(cell)
        runner = Invented()
        Comparison(Options(run=runner), known=known).cell(cell)
        assert bool(runner.asked) == again


def test_the_table_says_what_is_which(setting: Setting) -> None:
    runner = failing("mebp", error="ended by SIGKILL")
    comparison = Comparison(Options(run=runner))
    cell = methods(setting, "mesp", "mebp", "autodiff")
    rows = comparison.cell([*cell, replace(cell[1], method="mezo", head="tiled", tiled=False)])
    lines = table(rows)
    assert lines[0] == heading(rows)
    assert "tiny on numpy, 11 tokens, float32, LoRA float32 rank 3" in lines[0]
    assert lines[1].split()[:4] == ["method", "allocator", "footprint", "step"]
    assert "compiled" not in lines[1]
    assert lines[2].split()[:5] == ["mesp", "200.0", "201.0", "2.00", "1.00"]
    assert lines[3].split(maxsplit=1) == ["mebp", "failed: ended by SIGKILL"]
    assert lines[4].split()[0] == "autodiff" and lines[4].endswith("reference")
    assert lines[5].startswith("  mezo untiled ")
    assert any(line.startswith("allocator: ") for line in lines)
    assert not any(line.startswith("compiled: ") for line in lines)
    assert all(line == line.rstrip() for line in lines)
