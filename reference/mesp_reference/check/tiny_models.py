"""Random models for the decoder's cases: in memory, and written as a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.config import ModelConfig, RopeConfig
from mesp_core.errors import MespError
from mesp_core.files.checkpoint import Checkpoint, expected_shapes
from mesp_core.files.safetensors_writer import (
    KINDS,
    encode,
    json_writer,
    replace_files,
    write_safetensors,
)
from mesp_core.stored_matrix import StoredMatrix
from mesp_reference.check.rig import Packing, Rig
from mesp_reference.config import DecoderConfig
from mesp_reference.random_decoder import random_frozen

Values = dict[str, np.ndarray]


class MemoryCheckpoint(Checkpoint):
    """Weights that lie in memory in any dtype, float64 among them."""

    path = Path("memory")

    def __init__(
        self,
        config: ModelConfig,
        matrices: Mapping[str, StoredMatrix],
        vectors: Mapping[str, np.ndarray],
    ) -> None:
        self.config = config
        self._matrices = matrices
        self._vectors = vectors

    def matrix(self, name: str) -> StoredMatrix:
        return self._matrices[name]

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def tokenizer(self) -> None:
        raise MespError("a model in memory has no tokenizer")

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Biases:
    """Which projections have one."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


NO_BIASES = Biases()


def model_config(config: DecoderConfig, biases: Biases) -> ModelConfig:
    """The reference's configuration as the library has it."""
    return ModelConfig(
        model_type="llama",
        hidden=config.hidden,
        layers=config.layers,
        ffn=config.ffn,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        eps=config.eps,
        activation=config.activation,
        norm_plus_one=config.norm_plus_one,
        rope=RopeConfig(
            theta=config.rope_theta,
            dim=int(config.head_dim * config.partial_rotary),
            interleaved=config.interleaved,
        ),
        windows=(config.window,) * config.layers,
        softcap=config.softcap,
        qk_norm=config.qk_norm,
        qkv_bias=biases.qkv,
        o_bias=biases.o,
        mlp_bias=biases.mlp,
        tied=config.tied,
        max_positions=4096,
        source={},
    )


def in_memory(
    rig: Rig, config: DecoderConfig, biases: Biases, packing: Packing
) -> tuple[MemoryCheckpoint, Values]:
    """A random model, and the values its weights have."""
    core = model_config(config, biases)
    values = _random_values(rig, config, core)
    matrices: dict[str, StoredMatrix] = {}
    vectors: Values = {}
    for name, value in values.items():
        if value.ndim == 2:
            matrices[name], values[name] = rig.stored(value, packing)
        else:
            vectors[name] = values[name] = rig.round(value)
    return MemoryCheckpoint(core, matrices, vectors), values


def write_folder(
    rig: Rig, folder: Path, family: str, config: DecoderConfig, biases: Biases
) -> Values:
    """Writes a random model in the rig's dtype (float32 for float64, which no file here has) as
    ``config.json`` and ``model.safetensors``; returns the values its weights have."""
    stored = "float32" if rig.dtype == "float64" else rig.dtype
    values = _random_values(rig, config, model_config(config, biases))
    values = {name: Rig(rig.backend, stored).round(value) for name, value in values.items()}
    kind = KINDS[stored]
    settings = huggingface_config(family, config) | {"attention_bias": biases.qkv}
    replace_files(
        folder,
        {
            "model.safetensors": lambda file: write_safetensors(
                file,
                {name: value.shape for name, value in values.items()},
                kind,
                lambda name: [encode(values[name], kind)],
                {"format": "pt"},
            ),
            "config.json": json_writer(settings),
        },
    )
    return values


def huggingface_config(family: str, config: DecoderConfig) -> dict[str, Any]:
    """The reference's configuration as ``config.json`` has it."""
    return {
        "model_type": family,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": 4096,
    }


def _random_values(rig: Rig, config: DecoderConfig, core: ModelConfig) -> Values:
    """Every tensor that the library expects, biases where its configuration has them."""
    frozen = random_frozen(config, rig.generator)
    return {
        name: frozen[name] if name in frozen else rig.generator.standard_normal(shape)
        for name, shape in expected_shapes(core).items()
    }
