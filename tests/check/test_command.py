"""``mesp check`` as a user runs it: the table, the report, the exit status, the mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mesp_core.cli import check
from mesp_core.cli.main import main
from tests.check.conftest import Mesp

WRONG = """
from dataclasses import replace
from mesp_core.numpy_backend import NumpyBackend

def forward(run, x, weight, **options):
    out, saved = run(x, weight, **options)
    return -out, saved

def backend(device):
    made = NumpyBackend()
    norm = made.ops.rms_norm
    changes = {"name": "native", "reason": "it is fast"}
    wrong = replace(norm, run_forward=lambda *a, **o: forward(norm.run_forward, *a, **o), **changes)
    made.ops = made.ops.with_component(wrong)
    return made
"""
ABSENT = """
from mesp_core.errors import BackendUnavailableError

def backend(device):
    raise BackendUnavailableError("no such device here; buy one")
"""
BROKEN = """
def backend(device):
    raise RuntimeError("driver 1.2 is too old")
"""


def test_a_sound_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check.json"
    arguments = ["check", "--backend", "numpy", "--components", "rope,dropout,lora_init"]
    assert main([*arguments, "--json", str(file), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("Versions: mesp ") and "numpy" in lines[0]
    assert lines[1].startswith("Machine:  ") and lines[2] == "Backend:  numpy on cpu"
    (header,) = (line for line in lines if line.startswith("component"))
    assert header.split()[1:] == ["float64", "float32", "bfloat16", "float16"]
    (rope,) = (line for line in lines if line.startswith("rope"))
    assert rope.count("≤") == 3 and rope.split()[7] == "n/a"
    assert any(line.split() == ["dropout", "equal", "equal", "n/a", "equal"] for line in lines)
    assert "  rope: formula (no faster implementation for this device), 24 calls" in lines
    assert any(line.startswith("Not applicable: NumPy has no bfloat16") for line in lines)
    assert lines[-1].startswith("8 of 8 cells hold, 0 miss, 3 cannot exist; ")
    assert "seed 3" in lines[-1]

    report = json.loads(file.read_text())
    assert report["command"] == "check" and report["ok"] is True and report["seed"] == 3
    assert (report["backend"], report["device"]) == ("numpy", "cpu")
    assert {"mesp", "python", "numpy"} <= report["versions"].keys()
    assert [entry["component"] for entry in report["operations"]][:2] == ["embedding", "rms_norm"]
    assert len(report["rows"]) == report["totals"]["cells"] == 8
    for row in report["rows"]:
        assert row["error"] <= row["bound"] and row["ok"] is True and row["reason"] is None
        assert row["implementation"] in ("formula", "mesp_core.lora") and row["case"]
    cells = {(cell["component"], cell["dtype"]) for cell in report["not_applicable"]}
    assert cells == {(name, "bfloat16") for name in ("rope", "dropout", "lora_init")}


def test_a_miss_is_status_1(
    install: Callable[[str, str], None], mesp: Mesp, tmp_path: Path
) -> None:
    install("wrong", WRONG)
    arguments = ["--backend", "wrong", "--components", "rms_norm,rope", "--dtypes", "float32"]
    done = mesp(*arguments, "--json", "check.json", module="mesp_reference.check")
    assert done.returncode == check.MISSED == 1 and done.stderr == ""
    assert re.search(r"^rms_norm +2.0e\+00 > 1.\de-06 !!$", done.stdout, re.MULTILINE)
    assert "  rms_norm: native (it is fast), 6 calls" in done.stdout
    assert "MISS rms_norm float32 (plain) out: relative error 2.000e+00 exceeds" in done.stdout
    assert "\n1 of 2 cells hold, 1 miss, 0 cannot exist" in done.stdout
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["ok"] is False
    assert [(row["component"], row["ok"]) for row in report["rows"]] == [
        ("rms_norm", False),
        ("rope", True),
    ]
    assert report["rows"][0]["implementation"] == "native"
    assert {miss["tensor"] for miss in report["misses"]} == {"out"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ABSENT, "no such device here; buy one"),
        (BROKEN, "backend other failed to start: RuntimeError: driver 1.2 is too old"),
        ("import no_such_library", "backend other failed to import: No module named"),
    ],
    ids=["absent", "broken", "without its library"],
)
def test_a_backend_that_cannot_run_is_a_line_and_status_2(
    text: str, reason: str, install: Callable[[str, str], None], mesp: Mesp
) -> None:
    install("other", text)
    done = mesp("check", "--backend", "other")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"mesp: error: {reason}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "nosuch"], "no backend is called 'nosuch'"),
        (["--backend", "numpy:gpu"], "NumPy runs on the CPU only"),
        (["--backend", "numpy", "--dtypes", "float8"], "no dtype is called 'float8'"),
        (["--backend", "numpy", "--components", "x"], "no component is called 'x'"),
        (["--backend", "numpy", "--dtypes", "bfloat16"], "nothing to check: NumPy has no bfloat16"),
        (["--backend", "numpy", "--seed", "-1"], "--seed must not be negative"),
        (["--backend", "numpy", "--json", "no/such/folder/f.json"], "cannot write"),
    ],
)
def test_a_mistake_is_a_line_and_status_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_verbose_tells_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--components", "rms_norm", "--dtypes", "float32", "--verbose"]
    assert main(["check", "--backend", "numpy", *arguments]) == 0
    out = capsys.readouterr().out
    assert "  rms_norm float32 (plain) dweight: absent, as it should be" in out
    assert "  rms_norm float32 (1+w by head) dweight: 1" in out


def test_without_the_reference_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "entry_points", lambda **names: ())
    assert main(["check", "--backend", "numpy"]) == 2
    assert "install mesp again" in capsys.readouterr().err
