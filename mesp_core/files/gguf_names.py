"""What GGUF calls things, under Hugging Face's names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mesp_core.config import positive_number
from mesp_core.errors import UnsupportedError

#: GGUF architecture to family; Mistral models are stored under the name llama.
FAMILIES: Mapping[str, str] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

#: Architectures whose q and k rows are stored permuted, for interleaved RoPE.
PERMUTED = ("llama",)

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def huggingface_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name comes back as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)", stem)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{suffix}"
    return name


def huggingface_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF metadata as a config.json. Raises UnsupportedError for what we lack."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"GGUF architecture {arch!r} is not supported; known: {known}")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    if get("expert_count", 0):
        raise UnsupportedError("a mixture of experts is not supported; use a dense model")
    heads, tokens = get("attention.head_count"), metadata.get("tokenizer.ggml.tokens")
    raw: dict[str, Any] = {
        "model_type": FAMILIES[arch],
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "vocab_size": get("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "rope_scaling": _rope_scaling(get),
    }
    if get("attention.sliding_window"):
        if arch != "llama":
            raise UnsupportedError(f"a sliding window in a GGUF file of {arch} is not supported")
        raw |= {"model_type": "mistral", "sliding_window": get("attention.sliding_window")}
    raw |= _head_sizes(get, raw["hidden_size"], heads)
    for key in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            raw[f"{key}_token_id"] = token
    return raw


def row_order(heads: int, head_dim: int) -> np.ndarray:
    """The stored row of each logical row of a permuted q or k.

    The file interleaves the two halves of a head: stored row 2j + p is logical row p · E/2 + j.
    """
    stored = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


def llama3_scaling(factors: np.ndarray, theta: float, dim: int) -> dict[str, Any]:
    """The llama3 RoPE scaling of which ``rope_freqs`` [dim / 2] keeps only the outcome.

    A GGUF file stores by how much each frequency is divided, not the parameters. Those of every
    published Llama are tried; raises UnsupportedError when they do not give these factors.
    """
    largest = float(factors.max(initial=0.0))
    scaling = {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 * theta ** (-2.0 * np.arange(dim // 2) / dim) / (2.0 * math.pi)
    keep = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    if factors.shape != keep.shape or not largest >= 1.0:
        raise UnsupportedError("the RoPE factors in rope_freqs.weight are not those of llama3")
    if not np.allclose(factors, 1.0 / ((1.0 - keep) / largest + keep), rtol=1e-4, atol=0.0):
        raise UnsupportedError("the RoPE factors in rope_freqs.weight are not those of llama3")
    return scaling


def _head_sizes(get: Callable[..., Any], hidden: Any, heads: Any) -> dict[str, Any]:
    key_length = get("attention.key_length")
    if get("attention.value_length", key_length) != key_length:
        raise UnsupportedError("value heads wider or narrower than key heads are not supported")
    sizes: dict[str, Any] = {} if key_length is None else {"head_dim": key_length}
    known = all(isinstance(size, int) and size > 0 for size in (hidden, heads))
    head_dim = hidden // heads if key_length is None and known else key_length
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedError(f"RoPE on {rotated} of {head_dim} features in GGUF is not supported")
    return sizes


def _rope_scaling(get: Callable[..., Any]) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = _shortest(get("rope.scaling.factor"))
    scaling = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return scaling
    if get("rope.scaling.yarn_log_multiplier") is not None:
        raise UnsupportedError("YaRN with a log multiplier in GGUF is not supported")
    names = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    scaling |= {name: _shortest(get(f"rope.scaling.{key}")) for name, key in names.items()}
    extra = _shortest(get("rope.scaling.attn_factor", 1.0))
    if extra != 1.0:
        # GGUF's factor multiplies YaRN's own, Hugging Face's replaces it.
        growth = math.log(positive_number("rope.scaling.factor", factor))
        scaling["attention_factor"] = positive_number("attn_factor", extra) * (0.1 * growth + 1.0)
    return scaling


def _shortest(value: Any) -> Any:
    """A float32 of the file as the number that was meant: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
