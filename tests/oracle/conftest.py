"""The models and sequences of the whole-model comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracle.tiny_models import CASES, VOCABULARY, save_random_model

#: Lengths and prompts of the ragged batch: masked in part, all but the last, and not at all.
LENGTHS_AND_PROMPTS = ((5, 2), (11, 10), (2, 0), (8, 1))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Models this small are slowed tenfold by threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sequences() -> list[list[int]]:
    generator = np.random.default_rng(22)
    return [generator.integers(0, VOCABULARY, n).tolist() for n, _ in LENGTHS_AND_PROMPTS]


@pytest.fixture(scope="session")
def prompts() -> list[int]:
    return [prompt for _, prompt in LENGTHS_AND_PROMPTS]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of one of CASES in one dtype, written once."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(case: str, dtype: str = "float32") -> Path:
        if (case, dtype) not in folders:
            path = tmp_path_factory.mktemp(f"{case}-{dtype}")
            folders[case, dtype] = save_random_model(CASES[case], path, dtype)
        return folders[case, dtype]

    return folder
