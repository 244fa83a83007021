"""The example of docs/ is installed as a third party's package is, and passes the check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check.conftest import ROOT, Mesp

EXAMPLE = ROOT / "docs" / "examples" / "mesp_example"


@pytest.fixture
def installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path)]
    done = subprocess.run([*command, *options, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("installed")
def test_the_example_passes_the_check(mesp: Mesp, tmp_path: Path) -> None:
    arguments = ["check", "--backend", "example", "--dtypes", "float64,bfloat16"]
    done = mesp(*arguments, "--json", "check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["backend"] == "example" and report["versions"]["example"] == "0.1.0"
    assert report["totals"]["cells"] == 12 and report["totals"]["missed"] == 0
    assert {cell["reason"] for cell in report["not_applicable"]} == {"the example has no bfloat16"}

    other = mesp("check", "--backend", "example:gpu")
    assert other.returncode == 2 and "runs on the CPU" in other.stderr


def test_the_example_is_short() -> None:
    """About 30 statements beside its imports: what a third party has to write is little."""
    lines = (EXAMPLE / "mesp_example.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.startswith(("import", "from", '"'))]
    assert len(code) <= 45
