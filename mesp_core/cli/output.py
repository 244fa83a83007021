"""Where results go: folders checked before any work, and the JSON object for machines."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import mesp_core
from mesp_core.backend import Backend
from mesp_core.callbacks import finite
from mesp_core.errors import MespError


def prepare_folder(folder: Path) -> bool:
    """Makes ``folder`` and sees that files can be written there; returns whether it is new.

    Raises MespError when not, so that nobody trains for an hour and then cannot save.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return new
    except OSError as error:
        raise MespError(f"cannot write to the folder {folder}: {error.strerror}") from None


def check_file(path: str | None) -> None:
    """Raises MespError when ``path`` is not a file that can be written."""
    if path is None:
        return
    if Path(path).is_dir():
        raise MespError(f"cannot write {path}: it is a folder")
    if not Path(path).parent.is_dir():
        raise MespError(f"cannot write {path}: no folder {Path(path).parent}")
    prepare_folder(Path(path).parent)


def write_json(path: str | None, content: Mapping[str, Any]) -> None:
    """Writes one object; does nothing without a path."""
    if path is None:
        return
    try:
        text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise MespError(f"cannot write {path}: {error.strerror}") from None


def environment(backend: Backend) -> dict[str, Any]:
    """versions, backend, device and machine, as every JSON object starts."""
    return {
        "versions": {
            "mesp": mesp_core.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **backend.versions(),
        },
        "backend": backend.name,
        "device": backend.device,
        "machine": platform.platform(),
    }


def readable_bytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.0f} MB"
