"""Tiny random models as Hugging Face folders, with the same weights at hand for the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mesp_reference.check.tiny_models import huggingface_config
from mesp_reference.config import DecoderConfig
from mesp_reference.quantization import dequantize, quantize
from mesp_reference.random_decoder import random_frozen

SIZES: dict[str, Any] = {
    "hidden": 13, "layers": 2, "ffn": 22, "heads": 6, "kv_heads": 2, "head_dim": 8, "vocab": 37,
    "eps": 1e-5,
}  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3")


def tiny_config(family: str = "llama", **changes: Any) -> DecoderConfig:
    """The sizes of a tiny model. changes: fields of ``DecoderConfig``."""
    assert family in FAMILIES
    return DecoderConfig(**{**SIZES, "qk_norm": family == "qwen3", **changes})


def tiny_frozen(
    family: str = "llama", *, seed: int = 0, bits: int = 0, group: int = 32, **changes: Any
) -> dict[str, np.ndarray]:
    """The base weights of ``tiny_checkpoint`` with the same arguments, exactly, in float64."""
    config = tiny_config(family, **changes)
    frozen = random_frozen(config, np.random.default_rng(seed), biases=family == "qwen2")
    frozen = {name: _float32(value) for name, value in frozen.items()}
    for name, value in frozen.items():
        if bits and value.ndim == 2:
            packed, scales, biases = quantize(value, group, bits)
            frozen[name] = dequantize(packed, _float32(scales), _float32(biases), group, bits)
    return frozen


def tiny_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    bits: int = 0,
    group: int = 32,
    **changes: Any,
) -> Path:
    """Writes a random model as ``config.json`` and ``model.safetensors``; returns ``folder``.

    bits: 0 for float32 weights; otherwise every matrix is quantised as MLX stores it, and its
    columns must be a multiple of ``group``. changes: fields of ``DecoderConfig``.
    """
    config = tiny_config(family, **changes)
    frozen = random_frozen(config, np.random.default_rng(seed), biases=family == "qwen2")
    tensors: dict[str, np.ndarray] = {}
    for name, value in frozen.items():
        if not bits or value.ndim == 1:
            tensors[name] = value.astype(np.float32)
            continue
        packed, scales, biases = quantize(_float32(value), group, bits)
        stem = name.removesuffix(".weight")
        tensors[name] = packed
        tensors[f"{stem}.scales"] = scales.astype(np.float32)
        tensors[f"{stem}.biases"] = biases.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = _huggingface(family, config)
    if bits:
        settings["quantization"] = {"group_size": group, "bits": bits}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def _huggingface(family: str, config: DecoderConfig) -> dict[str, Any]:
    return huggingface_config(family, config) | {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "torch_dtype": "float32",
    }


def _float32(values: np.ndarray) -> np.ndarray:
    """Rounded to float32, as the file holds them."""
    return values.astype(np.float32).astype(np.float64)
