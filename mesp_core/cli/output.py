"""Where results go: targets checked before any work, lines for people, an object for machines."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import mesp_core
from mesp_core.backend import Backend
from mesp_core.callbacks import finite
from mesp_core.errors import MespError
from mesp_core.files.mapped_file import read_json
from mesp_core.files.safetensors_writer import check_targets, json_writer, replace_files

#: Exit statuses, beside 0: a mistake in the input; stopped by a signal, as shells have Ctrl-C.
MISTAKE = 2
INTERRUPTED = 130


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


def check_report(path: str | None) -> None:
    """Raises MespError when no report can be written to ``path``.

    Nothing but an earlier report, or an empty file, is ever overwritten: not a model's
    configuration, and not the data.
    """
    if path is None:
        return
    file = Path(path)
    if file.is_dir():
        raise MespError(f"cannot write {path}: it is a folder")
    if not file.parent.is_dir():
        raise MespError(f"cannot write {path}: no folder {file.parent}")
    check_targets(file.parent, [file.name])
    prepare_folder(file.parent)
    if file.exists() and file.stat().st_size and not _is_report(file):
        raise MespError(f"{path} is there and is not a report of mesp; name another file")


def _is_report(file: Path) -> bool:
    try:
        return {"command", "versions"} <= read_json(file).keys()
    except MespError:
        return False


def write_report(path: str | None, content: Mapping[str, Any]) -> None:
    """Writes one JSON object, whole or not at all; does nothing without a path."""
    if path is not None:
        file = Path(path)
        replace_files(file.parent, {file.name: json_writer(finite(content))})


def say(text: str, *, error: bool = False) -> None:
    """Prints to stdout, or stderr with ``error``, at once. A reader that has left, or a full
    disk, does not end the work: from then on this stream leads nowhere."""
    stream = sys.stderr if error else sys.stdout
    with surviving(stream):
        print(text, file=stream, flush=True)


@contextmanager
def surviving(stream: TextIO) -> Iterator[None]:
    """Lets go of ``stream`` when writing to it fails."""
    try:
        yield
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


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
