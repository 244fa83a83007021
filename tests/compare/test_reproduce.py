"""The paper's experiments: what is measured for each, and the tables beside the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesp_core import MespError
from mesp_core.compare import curves as module_of_curves
from mesp_core.compare import presets, reproduce
from mesp_core.compare.curves import Run, train
from mesp_core.compare.experiments import EXPERIMENTS, SIZES
from mesp_core.compare.measure import Options
from mesp_core.compare.presets import Preset
from mesp_core.compare.reproduce import NAMES, Reproduction, chosen, reusable
from mesp_core.compare.setting import Setting
from mesp_core.compare.study import Study
from tests.compare.conftest import Invented
from tests.tiny import write_model

HEAD = {"command": "compare", "backend": "numpy", "device": "cpu", "versions": {}, "machine": "m"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models of the right names that take no time to write, and few steps of training."""
    tiny = Preset(hidden=64, layers=1, ffn=64, heads=2, kv_heads=1, vocab=67)
    monkeypatch.setattr(presets, "PRESETS", dict.fromkeys(SIZES, tiny))
    monkeypatch.setattr(reproduce, "REAL_MODEL", str(write_model(tmp_path / "real", words=40)))
    monkeypatch.setattr(reproduce, "STEPS", 4)
    monkeypatch.setattr(reproduce, "TOKENS", 7)


@pytest.fixture
def base() -> Setting:
    return Setting("", "", "torch:cpu", dtype="float32")


def study_with(runner: Any, **report: Any) -> Study:
    options = Options(run=runner)
    return Study(HEAD | report, options, tell=lambda line: None, write=lambda report: None)


def run(names: list[str], study: Study, base: Setting, cache: Path) -> list[str]:
    reproduction = Reproduction(study, base, names, str(cache))
    reproduction.work()
    return reproduction.tables()


def words(lines: list[str], start: str) -> list[list[str]]:
    """The words of the lines that begin like this."""
    return [line.split() for line in lines if line.strip().startswith(start)]


def test_names_of_experiments() -> None:
    assert chosen("all") == list(NAMES) == [*EXPERIMENTS, "convergence"]
    assert chosen(" ranks,memory,ranks") == ["ranks", "memory"]
    with pytest.raises(MespError, match="no experiment is called 'speed'; choose from memory"):
        chosen("speed")


def test_memory_and_time_stand_beside_the_papers(base: Setting, tmp_path: Path) -> None:
    study = study_with(Invented())
    lines = run(["memory"], study, base, tmp_path)
    memory, seconds, savings = words(lines, "qwen2.5-0.5b")
    assert memory[1:] == ["200.0", "507.0", "500.0", "100.0", "360.8", "136.2", "−62%"]
    assert seconds[1:] == ["2.00", "3.00", "4.00", "5.00", "0.68", "0.86", "+26%"]
    assert savings[1:] == ["−61%", "−60%"]
    assert words(lines, "qwen2.5-1.5b")[0][-1] == "−49%"
    assert words(lines, "qwen2.5-3b")[0][-1] == "−42%"
    assert "the allocator's peak on numpy cpu" in " ".join(lines)
    asked = study.options.run.asked
    assert asked[:4] == ["memory mesp", "memory mebp", "memory mebp:tiled", "memory mezo"]
    assert asked[4] == "time mesp, mebp, mebp:tiled, mezo"
    assert len(asked) == 15


def test_lengths_and_ranks_are_not_timed(base: Setting, tmp_path: Path) -> None:
    study = study_with(Invented())
    lines = run(["lengths", "ranks"], study, base, tmp_path)
    figures = ["200.0", "507.0", "500.0", "100.0", "−61%", "−60%"]
    assert words(lines, "128")[0] == ["128", *figures, "253.0"]
    assert words(lines, "1024")[0][-1] == "1,050.0"
    # Under the heading of the ranks, and in a note.
    assert words(lines, "32")[0][:4] == ["32", *figures[:3]]
    asked = study.options.run.asked
    # Seven cells of four, as rank 8 at 256 tokens is in both.
    assert len(asked) == 28 and not any(line.startswith("time") for line in asked)


def test_h_stored_or_recomputed(base: Setting, tmp_path: Path) -> None:
    study = study_with(Invented())
    lines = run(["store-h"], study, base, tmp_path)
    assert words(lines, "h stored") == [["h", "stored", "220.0", "2.00", "398.5", "3.85"]]
    assert words(lines, "h recomputed") == [["h", "recomputed", "200.0", "3.00", "368.4", "4.09"]]
    assert words(lines, "change") == [["change", "−9%", "+50%", "−7.6%", "+6.2%"]]


def test_the_quality_of_gradients(base: Setting, tmp_path: Path) -> None:
    study = study_with(Invented())
    lines = run(["mezo"], study, base, tmp_path)
    assert {row["dtype"] for row in study.report["rows"]} == {"float32"}
    # All gradients that are made up are 0, which have no direction.
    assert [line[0] for line in words(lines, "me")] == ["mesp", "mebp", "mezo"]


def test_a_cosine_stands_beside_what_chance_allows() -> None:
    figures = {"gradient_sign_agreement": 0.5, "gradient_relative_error": 12.0}
    row = {"method": "mezo", "gradient_cosine": 0.01, "trained": 1600} | figures
    table = EXPERIMENTS["mezo"].table([row])
    assert table[1] == ["mezo", "0.01000", "50.00%", "1.2e+01", "0.10000"]
    assert EXPERIMENTS["mezo"].table([row | {"method": "mebp"}])[1][-1] == ""


def test_what_is_in_the_report_is_not_measured_again(base: Setting, tmp_path: Path) -> None:
    first = study_with(Invented())
    lines = run(["memory", "lengths", "store-h"], first, base, tmp_path)
    second = study_with(Invented(), rows=first.report["rows"])
    assert run(["memory", "lengths", "store-h"], second, base, tmp_path) == lines
    assert second.options.run.asked == []


def test_a_report_of_other_versions_or_another_machine_is_refused(base: Setting) -> None:
    rows = [replace(base, method="mesp").row()]
    assert reusable(HEAD | {"rows": rows}, dict(HEAD), "paper.json") == {"rows": rows}
    for key in HEAD:
        with pytest.raises(
            MespError, match=rf"paper\.json was measured with another {key}, .*name"
        ):
            reusable(HEAD | {"rows": rows}, HEAD | {key: "other"}, "paper.json")


def test_what_there_is_after_an_interruption_is_printed(base: Setting, tmp_path: Path) -> None:
    def change(request: Any, found: Any) -> Any:
        if request["settings"][0]["label"] == "qwen2.5-1.5b":
            raise KeyboardInterrupt
        return found

    study = study_with(Invented(change))
    reproduction = Reproduction(study, base, ["memory", "ranks", "convergence"], str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        reproduction.work()
    lines = reproduction.tables()
    assert len(words(lines, "qwen2.5-0.5b")) == 3 and not words(lines, "qwen2.5-1.5b")
    # Nothing is written for what was not come to.
    assert not (tmp_path / "presets" / "qwen2.5-3b").exists()
    # The cell at rank 8 is known from the first experiment.
    assert [line[0] for line in words(lines, "8")] == ["8"]


def test_exact_methods_follow_one_curve_and_finished_ones_are_kept(
    base: Setting, tmp_path: Path
) -> None:
    study = study_with(Invented())
    lines = run(["convergence"], study, base, tmp_path)
    curves = study.report["curves"]
    assert list(curves) == ["mesp", "mebp", "mezo"]
    assert all(curve["step"] == [1, 2, 3, 4] for curve in curves.values())
    assert curves["mesp"]["loss"] == pytest.approx(curves["mebp"]["loss"], rel=1e-5)
    assert len(set(curves["mesp"]["loss"])) > 1
    assert words(lines, "mezo")[0][-2:] == ["≈", "3.18"]
    pairs = zip(curves["mesp"]["loss"], curves["mebp"]["loss"], strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    assert any(f"never further apart than {apart:.1e}" in line for line in lines)

    marked = {"mesp": curves["mesp"] | {"loss": [9.0] * 4}, "mebp": curves["mebp"] | {"step": [1]}}
    again = study_with(Invented(), curves=marked)
    run(["convergence"], again, base, tmp_path)
    assert again.report["curves"]["mesp"]["loss"] == [9.0] * 4
    assert again.report["curves"]["mebp"]["loss"] == curves["mebp"]["loss"]


def test_the_longer_part_of_an_interrupted_curve_is_kept(
    base: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Run, curve: Any, keep: Any) -> None:
        curve["step"], curve["loss"] = [1, 2], [5.0, 4.0]
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "train", interrupted)
    study = study_with(Invented())
    with pytest.raises(KeyboardInterrupt):
        run(["convergence"], study, base, tmp_path)
    assert study.report["curves"]["mesp"]["loss"] == [5.0, 4.0]
    longer = study.report["curves"]["mesp"] | {"step": [1, 2, 3], "loss": [5.0, 4.0, 3.0]}
    again = study_with(Invented(), curves={"mesp": longer})
    with pytest.raises(KeyboardInterrupt):
        run(["convergence"], again, base, tmp_path)
    assert again.report["curves"]["mesp"]["loss"] == [5.0, 4.0, 3.0]


def test_a_run_that_diverges_is_told_and_the_next_one_trained(
    base: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(run: Run, curve: Any, keep: Any) -> None:
        curve["step"], curve["loss"] = [1], [9.0]
        raise MespError("the loss is not finite")

    monkeypatch.setattr(reproduce, "train", diverging)
    study = study_with(Invented())
    run(["convergence"], study, base, tmp_path)
    curves = study.report["curves"]
    assert list(curves) == ["mesp", "mebp", "mezo"] and study.failed
    assert curves["mebp"]["error"] == "the loss is not finite" and curves["mebp"]["loss"] == [9.0]


def test_a_curve_is_kept_every_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_curves, "_KEPT", 2)
    run, kept = Run(reproduce.REAL_MODEL, "torch:cpu", "mesp", "sgd", 0.03, 4, 7), []
    curve = run.curve()
    train(run, curve, keep=lambda: kept.append(len(curve["loss"])))
    assert kept == [2, 4]


@pytest.mark.parametrize(
    "spoiled",
    [{"rows": [{"a": 1}]}, {"rows": "x"}, {"ladder": 3}, {"curves": {"mesp": {"loss": 5}}}],
    ids=str,
)
def test_a_report_of_another_form_is_refused_by_name(spoiled: dict[str, Any]) -> None:
    with pytest.raises(MespError, match=r"paper\.json is no report of this version's"):
        reusable(HEAD | spoiled, dict(HEAD), "paper.json")


def test_a_method_that_cannot_run_has_no_curve_but_a_reason() -> None:
    run = Run(reproduce.REAL_MODEL, "numpy", "mebp", "sgd", 0.1, 3, 7)
    curve = run.curve()
    train(run, curve)
    assert "no automatic differentiation" in curve["error"] and curve["loss"] == []
    assert run.finished(curve)
