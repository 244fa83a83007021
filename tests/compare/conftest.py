"""A tiny model to measure, and measurements run in this process or invented."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mesp_core.callbacks import finite
from mesp_core.compare.child import answer
from mesp_core.compare.setting import Setting
from mesp_core.errors import MespError
from tests.tiny import write_model

Answer = dict[str, Any]


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> Iterator[None]:
    """Measurements collect garbage; what pytest and the frameworks hold need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a tokenizer, so that its tokens are random ones."""
    folder = write_model(tmp_path_factory.mktemp("tiny") / "tiny")
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def setting(tiny: Path) -> Setting:
    return Setting(str(tiny), "tiny", "numpy", dtype="float32", tokens=11, rank=3)


def methods(setting: Setting, *names: str) -> list[Setting]:
    """The setting with each of these methods, its own head."""
    return [replace(setting, method=name, head=None) for name in names]


def in_process(request: Mapping[str, Any], *, exact: bool = False) -> Answer:
    """As ``run_child``, in this process: what goes in and comes out is JSON, too."""
    try:
        found = answer(json.loads(json.dumps(request)))
    except MespError as error:
        return {"error": str(error)}
    return json.loads(json.dumps(finite(found), allow_nan=False))


class Invented:
    """Answers with figures made up from the place of a method, and counts what was asked.

    change: looks at a request and its answer, and gives another answer.
    """

    BYTES: ClassVar = {"autodiff": 900, "mebp": 500, "mesp-store-h": 220, "mesp": 200, "mezo": 100}

    def __init__(self, change: Callable[[Mapping[str, Any], Answer], Answer] | None = None) -> None:
        self.change = change or (lambda request, found: found)
        self.asked: list[str] = []

    def __call__(self, request: Mapping[str, Any], *, exact: bool = False) -> Answer:
        settings = [Setting.from_json(value) for value in request["settings"]]
        self.asked.append(f"{request['task']} {', '.join(one.title for one in settings)}")
        if request["task"] == "time":
            seconds = [[1.0 + place, 3.0 + place, 2.0 + place] for place in range(len(settings))]
            return self.change(request, {"seconds": seconds, "errors": [None] * len(settings)})
        return self.change(request, self._memory(settings[0], request["gradients"]))

    def _memory(self, setting: Setting, path: str | None) -> Answer:
        gradients = None
        if path is not None:
            Path(path).write_bytes(bytes(8))
            gradients = {"dtype": "<f4", "entries": {"a": [0, 2]}}
        size = self.BYTES[setting.method] * 1_000_000
        size += 10_000_000 * (not setting.tiled) + 7_000_000 * (setting.head == "dense")
        size += 30_000_000 * (setting.residency == "resident")
        return {
            "loss": 2.5,
            "trained": 1600,
            "gradients": gradients,
            "peak_bytes": size,
            "footprint_bytes": size + 1_000_000,
            "compiled_bytes": None,
            "timeline": None,
        }
