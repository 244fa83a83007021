"""Checkpoints in one GGUF file: F32, F16, BF16, Q8_0, Q4_0 and Q4_1 tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mesp_core.config import ModelConfig
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.checkpoint import Checkpoint, check_shapes
from mesp_core.files.gguf_names import PERMUTED, huggingface_name, llama3_scaling, row_order
from mesp_core.files.gguf_reader import GgufTensor, read_header
from mesp_core.files.mapped_file import MappedFile
from mesp_core.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from mesp_core.files.tokenizer import Tokenizer

_DENSE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_GROUP = 32


class GgufCheckpoint(Checkpoint):
    """One GGUF file. Raises MespError when it is damaged, UnsupportedError for what we lack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        header = read_header(self._file)
        self._metadata = header.metadata
        if self._metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedError(
                f"{path} is one of several parts; merge them: gguf-split --merge"
            )
        self._tensors = {huggingface_name(name): t for name, t in header.tensors.items()}
        self.config = self._configuration()
        self._permuted = self._metadata["general.architecture"] in PERMUTED
        check_shapes(self.config, {name: t.shape for name, t in self._tensors.items()}, path)

    def matrix(self, name: str) -> StoredMatrix:
        tensor = self._tensor(name)
        if len(tensor.shape) != 2:
            raise MespError(f"{name} is a vector, not a matrix")
        out, width = tensor.shape
        common: dict[str, Any] = {"row_order": self._row_order(name)}
        common["on_release"] = self._file.release
        if tensor.kind in _DENSE:
            values = self._file.view(tensor.offset, _DENSE[tensor.kind], (out, width), name)
            return StoredMatrix(values=values, **common)
        blocks = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
        shape = (out, width // _GROUP, blocks[tensor.kind])
        block = self._file.view(tensor.offset, np.uint8, shape, name)
        scales = _half(block, 0)
        if tensor.kind == "Q8_0":
            codes = block[:, :, 2:].view(np.int8)
            return StoredMatrix(codes=codes, scales=scales, bits=8, group=_GROUP, **common)
        nibbles = {"bits": 4, "group": _GROUP, "order": "halves", **common}
        if tensor.kind == "Q4_0":
            return StoredMatrix(codes=block[:, :, 2:], scales=scales, zero=8, **nibbles)
        return StoredMatrix(codes=block[:, :, 4:], scales=scales, biases=_half(block, 1), **nibbles)

    def vector(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        if len(tensor.shape) != 1:
            raise MespError(f"{name} is a matrix, not a vector")
        values = self._dense_vector(tensor)
        order = self._row_order(name)
        return values if order is None else values[order]

    def tokenizer(self) -> Tokenizer:
        from mesp_core.files.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._metadata, self.path)

    def close(self) -> None:
        self._tensors = {}

    def _configuration(self) -> ModelConfig:
        factors = self._tensors.pop("rope_freqs.weight", None)
        keywords: dict[str, Any] = {
            "tied": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
        }
        config = ModelConfig.from_gguf(self._metadata, **keywords)
        if factors is None:
            return config
        if config.model_type != "llama" or config.rope.scaling is not None:
            raise UnsupportedError(f"{self.path}: rope_freqs.weight is known for llama only")
        scaling = llama3_scaling(self._dense_vector(factors), config.rope.theta, config.rope.dim)
        return ModelConfig.from_gguf(self._metadata, rope_scaling=scaling, **keywords)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise MespError(f"{self.path} holds no tensor {name}")
        return self._tensors[name]

    def _dense_vector(self, tensor: GgufTensor) -> np.ndarray:
        if tensor.kind not in _DENSE or len(tensor.shape) != 1:
            raise UnsupportedError(f"{self.path}: {tensor.name} should be a vector of floats")
        (size,) = tensor.shape
        values = self._file.view(tensor.offset, _DENSE[tensor.kind], (1, size), tensor.name)
        return StoredMatrix(values=values).decode()[0]

    def _row_order(self, name: str) -> np.ndarray | None:
        if not self._permuted:
            return None
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}
        count = heads.get(name.split(".")[-2])
        return None if count is None else row_order(count, self.config.head_dim)


def _half(block: np.ndarray, index: int) -> np.ndarray:
    """The ``index``-th float16 of each block: [out, groups]."""
    return block[:, :, 2 * index : 2 * index + 2].view("<f2")[:, :, 0]
