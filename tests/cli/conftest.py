"""Commands run in this process on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesp_core.cli.main import main
from tests.tiny import counting, write_data, write_model


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_data(
        folder, train=counting(7), valid=counting(3, seed=6), test=counting(2, seed=7)
    )


@pytest.fixture
def mesp(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs ``mesp`` with these arguments."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capfd.readouterr())

    return run


@pytest.fixture
def finetune(
    mesp: Callable[..., Outcome], tiny: Path, data: Path, tmp_path: Path
) -> Callable[..., Outcome]:
    """Runs ``mesp finetune`` on the tiny model and data, by NumPy, unless told otherwise."""

    def run(*arguments: object, **flags: object) -> Outcome:
        chosen = {
            "model": tiny,
            "data": data,
            "backend": "numpy",
            "adapter_path": tmp_path / "adapters",
            "iters": 6,
            "batch_size": 2,
            "steps_per_report": 2,
            "learning_rate": 0.01,
        } | flags
        words: list[object] = []
        for name, value in chosen.items():
            if value is not None:
                words += ["--" + name.replace("_", "-"), value]
        return mesp("finetune", *words, *arguments)

    return run
