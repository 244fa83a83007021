"""The ladder's rungs, their savings, and the arithmetic of what they should save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesp_core.compare.ladder import RUNGS, Shapes, climb, ladder_table
from mesp_core.compare.measure import Options
from mesp_core.compare.setting import Setting
from mesp_core.compare.study import Study
from mesp_core.files.checkpoint import open_checkpoint
from tests.compare.conftest import Invented, in_process


def study_with(runner: Any, saved: list[Any] | None = None, **options: Any) -> Study:
    kept = [] if saved is None else saved
    return Study({}, Options(run=runner, **options), tell=lambda line: None, write=kept.append)


def test_every_rung_has_one_new_idea(setting: Setting) -> None:
    study = study_with(Invented())
    climb(study, setting)
    rows = study.report["ladder"]
    assert [(row["method"], row["head"], row["residency"], row["tiled"]) for row in rows] == [
        ("autodiff", "dense", "resident", True),
        ("mebp", "dense", "resident", True),
        ("mebp", "dense", "streamed", True),
        ("mebp", "tiled", "streamed", True),
        ("mesp-store-h", "tiled", "streamed", False),
        ("mesp", "tiled", "streamed", False),
        ("mesp", "tiled", "streamed", True),
    ]
    savings = [None, *(mb * 1e6 for mb in (400, 30, 7, 270, 20, 10))]
    assert [row["saving_bytes"] for row in rows] == savings
    assert [row["rung"] for row in rows] == [rung.name for rung in RUNGS]
    assert study.report["rows"] == []


def test_the_table_has_savings_and_arithmetic(setting: Setting) -> None:
    study = study_with(Invented())
    climb(study, setting)
    lines = ladder_table(study.report["ladder"])
    assert lines[2].startswith("  2. a checkpoint a block")
    assert lines[2].split()[5:8] == ["537.0", "400.0", "0.02–0.04"]
    assert sum(line.startswith("  2. ") for line in lines) == 2
    assert any("the stored weights lie in the mapped file" in line for line in lines)


def test_a_rung_that_fails_is_told_and_the_next_is_measured_from_the_last(
    setting: Setting,
) -> None:
    def change(request: Any, found: dict[str, Any]) -> dict[str, Any]:
        settings = request["settings"]
        bad = len(settings) == 1 and settings[0]["residency"] == "resident"
        return {"error": "ended by SIGKILL"} if bad else found

    study = study_with(Invented(change), steps=0)
    climb(study, setting)
    rows = study.report["ladder"]
    assert [row["saving_bytes"] for row in rows[:4]] == [None, None, None, 7e6]
    assert ladder_table(rows)[1].endswith("weights in memory  ended by SIGKILL")
    assert study.failed


def test_an_interrupted_ladder_can_be_printed(setting: Setting) -> None:
    def change(request: Any, found: dict[str, Any]) -> dict[str, Any]:
        if request["settings"][0]["head"] == "tiled" and request["settings"][0]["method"] == "mebp":
            raise KeyboardInterrupt
        return found

    saved: list[Any] = []
    study = study_with(Invented(change), saved)
    with pytest.raises(KeyboardInterrupt):
        climb(study, setting)
    # MeSP would be the reference only where autodiff cannot run.
    assert [row["method"] for row in saved[-1]["ladder"]] == ["autodiff", "mebp", "mebp"]
    assert len(ladder_table(study.report["ladder"])) == 7


def test_estimates_are_counts_of_arrays(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    shapes = Shapes(config, tokens=11, rank=3, kept=2, wide=4, stored=12345)
    found = {rung.name: rung.estimate(shapes) for rung in RUNGS if rung.estimate is not None}
    # D 20, q 24, k and v 12, o 24, F 26; two of three blocks keep only their input.
    kept = 11 * (4 * 20 + 72 + 4 * 26 + 7 * 3) * 2
    most = kept + 11 * (2 * 20 * 4 + 2 * 26 * 2) + 4 * 11 * 11 * (2 * 4 + 2 + 1)
    checkpoints = found["a checkpoint a block"]
    assert checkpoints.low == 2 * (kept - 11 * 20 * 2)
    assert checkpoints.high == 2 * (most - 11 * 20 * 2)
    # Two gradients of F in the dtype of the block; at most wide, and with those of the scores.
    # In attention, here: q, k, v, o and their gradients, three of D, two arrays of scores.
    ours = (11 * (2 * 72 + 3 * 20) + 2 * 4 * 11 * 11) * 4
    by_hand = found["hand-written passes, freeing early"]
    assert by_hand.low == max(0, kept + 2 * 11 * 26 * 2 - ours)
    assert by_hand.high == most + (2 * 11 * 26 + 4 * 11 * 11) * 4 - ours
    assert found["weights streamed from the file"].low == 12345
    # 31 logits are fewer than what a block of this model keeps.
    assert found["the head in tiles"].low == 0
    assert found["h recomputed"].high == 4 * 11 * 3 * 4
    # The whole MLP fits into one tile here.
    assert found["attention and MLP in tiles"].high == 0
    assert all(0 <= estimate.low <= estimate.high for estimate in found.values())


def test_tiles_pay_where_the_mlp_is_larger_than_one(tiny: Path) -> None:
    config = open_checkpoint(tiny).config
    wide = type(config)(**vars(config) | {"hidden": 2048, "ffn": 11008})
    shapes = Shapes(wide, tokens=256, rank=8, kept=4, wide=4, stored=0)
    by_name = {rung.name: rung.estimate for rung in RUNGS}
    estimate = by_name["attention and MLP in tiles"]
    assert estimate is not None
    # Five arrays of 11008 − 128 features in float32.
    assert estimate(shapes).high == 2 * 256 * 5 * (11008 - 128) * 4
    assert "tiles of 128 of F = 11008" in estimate(shapes).words


def test_rungs_agree_in_loss_and_gradients(setting: Setting) -> None:
    base = Setting(**setting.as_json() | {"backend": "torch:cpu"})
    study = study_with(in_process, steps=0)
    climb(study, base)
    rows = study.report["ladder"]
    assert [row["error"] for row in rows] == [None] * len(RUNGS)
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
        assert row["gradient_relative_error"] < 1e-4
