"""Bases and saved adapters shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mesp_core import LoraConfig, save_adapter
from mesp_core.export import export_base
from tests.adapters.tiny_llama import adapted, write_llama


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes are pairwise distinct, with grouped queries: D 20, H · E 24, K · E 12, F 26."""
    folder = tmp_path_factory.mktemp("llama") / "original"
    sizes = {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    return write_llama(folder, **sizes)


@pytest.fixture(scope="session")
def base(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original, exported."""
    return export_base(original, tmp_path_factory.mktemp("exported") / "base")


@pytest.fixture(scope="session")
def square_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q_proj and o_proj are 12 × 12."""
    folder = tmp_path_factory.mktemp("square") / "original"
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4}
    return export_base(write_llama(folder, **sizes), folder.parent / "base")


@pytest.fixture
def lora() -> LoraConfig:
    return LoraConfig(rank=5, alpha=7.0)


@pytest.fixture
def saved(base: Path, lora: LoraConfig, tmp_path: Path) -> Callable[[str], Path]:
    """Save an adapter of random factors in a format, in a folder of its own."""

    def save(format: str) -> Path:
        folder = tmp_path / f"saved-{format}"
        save_adapter(adapted(base, lora), folder, format=format)
        return folder

    return save
