"""``mesp compare`` as typed: its table, its report, its mistakes and its endings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mesp_core.cli.compare as command
from mesp_core.cli.main import main
from mesp_core.compare import presets
from mesp_core.compare.presets import Preset
from tests.compare.conftest import in_process


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def compare(tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command on the tiny model by NumPy, measuring in this process by ``runner``."""

    def run(*arguments: object, runner: Any = in_process, model: object = tiny) -> Outcome:
        monkeypatch.setattr(command, "run_child", runner)
        words = ["compare", "--backend", "numpy", *map(str, arguments)]
        if model is not None:
            words += ["--model", str(model)]
        capfd.readouterr()
        return Outcome(main(words), *capfd.readouterr())

    return run


def spoiled(change: Callable[[Any], Any]) -> Any:
    """``in_process``, but for memory: ``change`` may answer or raise, or give None."""

    def runner(request: Any, *, exact: bool = False) -> Any:
        found = None
        if request["task"] == "memory":
            found = change(request["settings"][0])
        return in_process(request, exact=exact) if found is None else found

    return runner


def check(outcome: Outcome, *words: str) -> None:
    """Status 2 and one line on stderr with these words."""
    assert outcome.status == 2, outcome
    assert outcome.err.count("\n") == 1 and outcome.err.startswith("mesp: error: ")
    assert outcome.out == ""
    for word in words:
        assert word in outcome.err


def test_every_length_and_rank_has_its_block_and_the_report_its_rows(
    compare: Run, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    flags = ("--tokens", "7,12,7", "--rank", "2,3", "--methods", "mezo,mesp", "--steps", 2)
    outcome = compare(*flags, "--json", path)
    assert outcome.status == 0
    report = json.loads(path.read_text())
    assert report["command"] == "compare" and report["versions"]["numpy"]
    assert report["backend"] == "numpy" and report["device"] == "cpu"
    assert report["settings"]["rank"] == "2,3"
    where = [(row["tokens"], row["rank"], row["method"]) for row in report["rows"]]
    assert where == [
        (tokens, rank, method)
        for tokens in (7, 12)
        for rank in (2, 3)
        for method in ("mezo", "mesp")
    ]
    mezo, mesp = report["rows"][:2]
    assert mesp["model"] == "tiny" and mesp["dtype"] == "float32" and mesp["timeline"]
    assert mesp["loss"] > 0 and mesp["footprint_bytes"] and mesp["step_seconds"] > 0
    assert mezo["gradient_reference"] == "mesp" and abs(mezo["gradient_cosine"]) < 1
    headings = [line for line in outcome.out.splitlines() if line.startswith("tiny on numpy")]
    assert len(headings) == 4 and "12 tokens" in headings[3] and "rank 3" in headings[3]
    assert "footprint: the most anonymous memory" in outcome.out
    # A line for each measurement, as it ends.
    assert outcome.err.count("tiny, 7 tokens, rank 2, mesp: ") == 1


def test_a_preset_is_written_once_and_measured(
    compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"small": Preset(hidden=64, layers=1, ffn=64, heads=2, kv_heads=1, vocab=67)}
    monkeypatch.setattr(presets, "PRESETS", small)
    flags = ("--preset", "small", "--cache", tmp_path, "--tokens", 5, "--methods", "mesp")
    outcome = compare(*flags, "--no-time", "--no-gradients", model=None)
    assert outcome.status == 0 and "small on numpy, 5 tokens" in outcome.out
    assert outcome.out.splitlines()[1].split() == ["method", "footprint", "loss"]
    assert (tmp_path / "presets" / "small" / "model.safetensors").exists()


def test_the_ladder_takes_the_place_of_the_methods(compare: Run, tmp_path: Path) -> None:
    flags = ("--ladder", "--tokens", 5, "--no-time", "--json", tmp_path / "report.json")
    outcome = compare(*flags)
    report = json.loads((tmp_path / "report.json").read_text())
    assert outcome.status == 0 and report["rows"] == [] and len(report["ladder"]) == 7
    assert "7. attention and MLP in tiles" in outcome.out
    outcome = compare(*flags, "--methods", "mesp")
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rows"]) == 1 and len(report["ladder"]) == 7


def test_one_method_that_fails_leaves_the_others(compare: Run, tmp_path: Path) -> None:
    def change(setting: Any) -> Any:
        return {"error": "ended by SIGKILL"} if setting["method"] == "mezo" else None

    path = tmp_path / "report.json"
    outcome = compare("--methods", "mezo,mesp", "--json", path, runner=spoiled(change))
    assert outcome.status == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row["error"] for row in rows] == ["ended by SIGKILL", None]
    assert "mezo    failed: ended by SIGKILL" in outcome.out


def test_ctrl_c_prints_and_keeps_what_is_there(compare: Run, tmp_path: Path) -> None:
    def change(setting: Any) -> Any:
        if setting["tokens"] == 12:
            raise KeyboardInterrupt
        return None

    path = tmp_path / "report.json"
    flags = ("--tokens", "7,12", "--methods", "mesp,mezo", "--json", path)
    outcome = compare(*flags, runner=spoiled(change))
    assert outcome.status == 130 and "mesp: interrupted" in outcome.err
    assert [row["method"] for row in json.loads(path.read_text())["rows"]] == ["mesp", "mezo"]
    assert "7 tokens" in outcome.out and "12 tokens" not in outcome.out


def test_an_earlier_report_is_not_lost(compare: Run, tmp_path: Path) -> None:
    """Not to an interruption before the first figure, nor to a reproduction that cannot go on."""

    def interrupted(setting: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "report.json"
    assert compare("--methods", "mesp", "--json", path).status == 0
    earlier = path.read_bytes()
    outcome = compare("--methods", "mesp", "--json", path, runner=spoiled(interrupted))
    assert outcome.status == 130 and path.read_bytes() == earlier
    path.write_text(json.dumps(json.loads(earlier) | {"backend": "abacus"}), "utf-8")
    other = path.read_bytes()
    flags = ("--reproduce", "mezo", "--dtype", "float32", "--lora-dtype", "float32")
    outcome = compare(*flags, "--json", path, model=None)
    check(outcome, str(path), "another backend", "give --json another name")
    assert path.read_bytes() == other


def test_a_signal_ends_a_real_run_the_same_way(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ["--model", str(tiny), "--backend", "numpy", "--json", str(path)]
    flags += ["--methods", "mesp,mezo", "--tokens", ",".join(map(str, range(5, 90)))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "mesp_core.cli.main", "compare", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        first, second = process.stderr.readline(), process.stderr.readline()
        assert first.startswith("tiny, 5 tokens, rank 8, mesp: footprint"), first + second
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "mesp: interrupted" in err and "Traceback" not in err
    assert "5 tokens" in out
    assert json.loads(path.read_text())["rows"][0]["method"] == "mesp"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--methods", "mesp,adam"), ["unknown method 'adam'", "mezo"]),
        (("--methods", "mesp:sparse"), ["unknown head 'sparse'"]),
        (("--methods", ","), ["--methods names no method"]),
        (("--tokens", "12,x"), ["--tokens", "12,x"]),
        (("--tokens", "0"), ["--tokens must be at least 1"]),
        (("--rank", "-1"), ["--rank must be at least 1"]),
        (("--rank", "70000"), ["LoRA rank must be at most 65536"]),
        (("--steps", "0"), ["--steps", "--no-time"]),
        (("--dtype", "bfloat16"), ["NumPy has no bfloat16"]),
        (("--dtype", "int7"), ["int7"]),
        (("--lora-dtype", "bfloat16"), ["NumPy has no bfloat16"]),
        (("--preset", "qwen2.5-0.5b"), ["--model or --preset, not both"]),
        (("--reproduce",), ["--reproduce", "leave --model out"]),
        (("--reproduce", "speed"), ["no experiment is called 'speed'"]),
        (("--json", "no/such/folder/report.json"), ["no folder"]),
    ],
)
def test_mistakes_are_one_line(compare: Run, flags: tuple[str, ...], words: list[str]) -> None:
    check(compare(*flags), *words)


def test_unknown_models_backends_and_presets_are_one_line(compare: Run) -> None:
    check(compare(model="nowhere"), "no model at nowhere")
    check(compare("--preset", "gpt-7", model=None), "no preset is called 'gpt-7'", "qwen2.5-3b")
    check(compare("--backend", "tpu"), "no backend is called 'tpu'")
    check(compare("--reproduce", "memory", model=None), "NumPy has no bfloat16")


def test_without_matplotlib_the_remedy_is_told_before_anything_is_measured(
    compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = compare("--plot", tmp_path / "plots", runner=spoiled(pytest.fail))
    check(outcome, "pip install 'mesp[plot]'")


def test_pictures_are_drawn_of_what_was_measured(compare: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    flags = ("--methods", "mesp,mezo", "--tokens", 6, "--steps", 1)
    outcome = compare(*flags, "--plot", tmp_path / "plots")
    assert outcome.status == 0
    assert {"methods.svg", "timeline.png"} <= {p.name for p in (tmp_path / "plots").iterdir()}


def test_an_interruption_before_the_first_figure_draws_nothing(
    compare: Run, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")

    def change(setting: Any) -> Any:
        raise KeyboardInterrupt

    outcome = compare("--plot", tmp_path / "plots", runner=spoiled(change))
    assert outcome.status == 130 and "Traceback" not in outcome.err
