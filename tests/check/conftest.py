"""Backends of a third party, found through an entry point as an installed one is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Mesp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str, str], None]:
    """Registers the backend ``name``: a module with this text, whose ``backend`` is the factory."""

    def register(name: str, text: str) -> None:
        (tmp_path / f"{name}_module.py").write_text(text)
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(
            f"[mesp.backends]\n{name} = {name}_module:backend\n"
        )

    return register


@pytest.fixture
def mesp(tmp_path: Path) -> Mesp:
    """Runs a command of Python in a process of its own that also sees what is in ``tmp_path``."""

    def run(
        *arguments: str, module: str = "mesp_core.cli.main"
    ) -> subprocess.CompletedProcess[str]:
        paths = [tmp_path, ROOT, ROOT / "backends", ROOT / "reference"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths)}
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
