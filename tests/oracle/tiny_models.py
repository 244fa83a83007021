"""Tiny random models that transformers itself builds and saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from mesp_core.lora import PROJECTIONS

RANK = 3
ALPHA = 7.0
VOCABULARY = 151

#: Heads share key/value heads unevenly with every other size; widths: q 84, k and v 28, D 54.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 54,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
#: qwen2 has no head_dim of its own: D / H.
_QWEN2_SIZES = {k: v for k, v in _SIZES.items() if k != "head_dim"} | {"hidden_size": 60}
#: Every input width a multiple of the group of 32: D 96, q 128, F 160.
_GROUPED_SIZES = _SIZES | {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "head_dim": 32,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}

_FAMILIES: Mapping[str, type[PreTrainedConfig]] = MappingProxyType(
    {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
)

#: By name: the family, and what its configuration is given. Windows are shorter than sequences.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", _SIZES | {"tie_word_embeddings": False}),
        "llama_tied_scaled_rope": (
            "llama",
            _SIZES | {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
        ),
        "llama_every_bias": (
            "llama",
            _SIZES | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        ),
        "qwen2": ("qwen2", _QWEN2_SIZES | {"tie_word_embeddings": False}),
        "qwen2_tied_upper_windows": (
            "qwen2",
            _QWEN2_SIZES
            | {
                "tie_word_embeddings": True,
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 1,
            },
        ),
        "qwen3": ("qwen3", _SIZES | {"tie_word_embeddings": False}),
        "qwen3_tied": ("qwen3", _SIZES | {"tie_word_embeddings": True}),
        "mistral_window": (
            "mistral",
            _SIZES | {"tie_word_embeddings": False, "sliding_window": 4},
        ),
    }
)

#: Families whose matrices divide into groups, for the 4-bit base.
GROUPED_CASES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama_untied": ("llama", _GROUPED_SIZES | {"tie_word_embeddings": False}),
        "qwen3_tied": ("qwen3", _GROUPED_SIZES | {"tie_word_embeddings": True}),
    }
)


def save_random_model(
    case: tuple[str, dict[str, Any]], folder: Path, dtype: str = "float32"
) -> Path:
    """Writes a model with every parameter random: norm weights around 1, biases not zero."""
    family, values = case
    config = _FAMILIES[family](**values)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[1] ** -0.5))
            else:
                parameter.copy_(noise * 0.3 + (0.0 if name.endswith("bias") else 1.0))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def random_adapter(folder: Path, dtype: str = "float64") -> dict[str, np.ndarray]:
    """A and B of every projection, none zero, that ``dtype`` holds exactly; float64 by our names.

    lora_a: [in, R], lora_b: [R, out].
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = np.random.default_rng(21)
    adapter = {}
    for layer in range(model.config.num_hidden_layers):
        for projection in PROJECTIONS:
            name = f"model.layers.{layer}.{projection}"
            out, width = model.get_submodule(name).weight.shape
            adapter[f"{name}.lora_a"] = generator.standard_normal((width, RANK)) / width**0.5
            adapter[f"{name}.lora_b"] = generator.standard_normal((RANK, out)) * 0.2
    return {name: _rounded(value, dtype) for name, value in adapter.items()}


def quantize_folder(dense: Path, quantized: Path, dequantized: Path) -> None:
    """Writes ``dense`` with each matrix as MLX's 4 bits in groups of 32, and the dense copy of it.

    Scales and biases are bfloat16, so that q·scale + bias is a float32 exactly and the copy holds
    the same values.
    """
    packed, copied = {}, {}
    for name, value in mx.load(str(dense / "model.safetensors")).items():
        if value.ndim != 2:
            packed[name] = copied[name] = value
            continue
        stem = name.removesuffix(".weight")
        words, scales, biases = mx.quantize(value.astype(mx.bfloat16), group_size=32, bits=4)
        packed |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
        copied[name] = mx.dequantize(
            words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=4
        )
    config = json.loads((dense / "config.json").read_text("utf-8"))
    marked = config | {"quantization": {"group_size": 32, "bits": 4}}
    for folder, tensors, text in ((quantized, packed, marked), (dequantized, copied, config)):
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(text), "utf-8")


def _rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(value).to(getattr(torch, dtype)).to(torch.float64).numpy()
