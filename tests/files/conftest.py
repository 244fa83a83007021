"""Tiny models to write in each file format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mesp_core.config import ModelConfig
from mesp_core.files.checkpoint import expected_shapes

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 70,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}


@pytest.fixture
def config() -> dict[str, Any]:
    """A config.json that a test may change."""
    return dict(CONFIG)


@pytest.fixture
def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32 tensors of the unchanged configuration."""
    generator = np.random.default_rng(7)
    shapes = expected_shapes(ModelConfig.from_huggingface(config))
    return {n: generator.normal(size=s).astype(np.float32) for n, s in shapes.items()}


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write (config, tensors) as a folder of one file, or sharded when given {shard: names}."""

    def write(
        config: dict[str, Any],
        tensors: dict[str, np.ndarray],
        shards: dict[str, list[str]] | None = None,
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if shards is None:
            save_file(tensors, folder / "model.safetensors")
            return folder
        for shard, names in shards.items():
            save_file({name: tensors[name] for name in names}, folder / shard)
        weight_map = {name: shard for shard, names in shards.items() for name in names}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write
