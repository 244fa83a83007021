"""A small random model, written the same for every commit that is measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, FFN, VOCABULARY = 4, 256, 768, 8192
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
BITS, GROUP = 4, 64
EPS = 1e-6

#: Standard deviation of a code that is uniform on 0 … 15.
_CODE_DEVIATION = math.sqrt((2 ** (2 * BITS) - 1) / 12)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "quantization": {"group_size": GROUP, "bits": BITS},
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name, as [out, in] or [D]."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return found | {"model.norm.weight": (HIDDEN,)}


def write_model(folder: Path) -> dict[str, np.ndarray]:
    """Writes config.json and model.safetensors, matrices in 4 bits; returns the same weights in
    float64. A matrix has mean 0 and standard deviation 1 / √in."""
    generator = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
            values[name] = np.ones(shape)
            continue
        rows, width = shape
        codes = generator.integers(0, 2**BITS, (rows, width), np.uint8)
        scale = np.float32(1.0 / (math.sqrt(width) * _CODE_DEVIATION))
        bias = np.float32(-(2**BITS - 1) / 2 * scale)
        groups, stem = (rows, width // GROUP), name.removesuffix(".weight")
        # The first of two codes is in the low half of a byte.
        tensors[name] = (codes[:, ::2] | codes[:, 1::2] << BITS).view("<u4")
        tensors[f"{stem}.scales"] = np.full(groups, scale, np.float32)
        tensors[f"{stem}.biases"] = np.full(groups, bias, np.float32)
        values[name] = codes * np.float64(scale) + np.float64(bias)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return values
