"""The shape of a model: one description, read from config.json or from GGUF metadata."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mesp_core.errors import MespError, UnsupportedError

#: No size of a model comes near; what is larger is a damaged or hostile file.
_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 4096

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

#: Parameters of each RoPE scaling: the required ones, then the optional ones.
_ROPE_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}


@dataclass(frozen=True)
class Family:
    """What one architecture fixes, and the values its config.json may leave out.

    A bias field is True, False, or the name of the configuration key that decides.
    sliding: which layers have the window when ``layer_types`` is absent: "none", "all", or
    "upper" (those from ``max_window_layers`` on, if ``use_sliding_window``).
    """

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    norm_plus_one: bool = False
    sliding: str = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        sliding="all",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        qkv_bias=True,
        sliding="upper",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        sliding="upper",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    dim: how many features of a head are rotated. scaling: None, or ``rope_type`` (linear, llama3
    or yarn) with its parameters under Hugging Face's names. interleaved: pairs are (2i, 2i + 1),
    otherwise (i, i + dim / 2).
    """

    theta: float
    dim: int
    scaling: dict[str, Any] | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of one decoder: D ``hidden``, L ``layers``, F ``ffn``, H ``heads``,
    K ``kv_heads``, E ``head_dim``, V ``vocab``.

    activation: "silu" or "gelu_tanh". norm_plus_one: RMS norm multiplies by 1 + w.
    windows: one a layer; a query sees itself and ``window - 1`` tokens before it, or everything.
    softcap: attention logits become softcap · tanh(logit / softcap). tied: the head is the
    embedding. source: the config.json that this was read from, kept for export.
    """

    model_type: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    activation: str
    norm_plus_one: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    softcap: float | None
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    max_positions: int
    source: dict[str, Any] = field(repr=False)

    @classmethod
    def from_huggingface(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json, in the style of transformers 4 or 5.

        Raises UnsupportedError for an architecture, activation, RoPE scaling or logit capping that
        we lack, and MespError for a missing or impossible value, naming the key.
        """
        family = _family(raw)
        if raw.get("final_logit_softcapping") is not None:
            raise UnsupportedError("final_logit_softcapping is not supported; remove it")
        values = _Reader({**family.defaults, **{k: v for k, v in raw.items() if v is not None}})
        # An explicit null means "no window", where a missing key means the family's default.
        if "sliding_window" in raw:
            values.raw["sliding_window"] = raw["sliding_window"]
        heads = values.size("num_attention_heads")
        hidden = values.size("hidden_size")
        kv_heads = values.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise MespError(f"{heads} attention heads cannot share {kv_heads} key/value heads")
        if "head_dim" not in values.raw and hidden % heads:
            raise MespError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
        head_dim = values.size("head_dim", hidden // heads)
        layers = values.size("num_hidden_layers", most=_MOST_LAYERS)
        return cls(
            model_type=raw["model_type"],
            hidden=hidden,
            layers=layers,
            ffn=values.size("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=values.size("vocab_size"),
            eps=values.number("rms_norm_eps", 1e-6),
            activation=_activation(values.raw.get("hidden_act", "silu")),
            norm_plus_one=family.norm_plus_one,
            rope=_rope(values, head_dim),
            windows=_windows(values, family.sliding, layers),
            softcap=values.optional_number("attn_logit_softcapping"),
            qk_norm=family.qk_norm,
            qkv_bias=values.choice(family.qkv_bias),
            o_bias=values.choice(family.o_bias),
            mlp_bias=values.choice(family.mlp_bias),
            tied=values.choice("tie_word_embeddings"),
            max_positions=values.size("max_position_embeddings"),
            source=dict(raw),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tied: bool = True,
        attention_bias: bool = False,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata (plain Python values by key).

        The keywords say what only the tensors of the file show: whether there is a separate head,
        whether q, k, v and o have biases, and the scaling in ``rope_freqs``.
        Raises as :meth:`from_huggingface`.
        """
        from mesp_core.files.gguf_names import huggingface_config

        raw = huggingface_config(metadata)
        raw |= {"tie_word_embeddings": tied, "attention_bias": attention_bias}
        if rope_scaling is not None:
            raw["rope_scaling"] = dict(rope_scaling)
        return cls.from_huggingface(raw)

    def to_huggingface(self) -> dict[str, Any]:
        """A config.json that transformers and mlx-lm read, without any quantization key."""
        stale = ("quantization", "quantization_config", "rope_parameters", "partial_rotary_factor")
        config = {key: value for key, value in self.source.items() if key not in stale}
        config |= {
            "architectures": [FAMILIES[self.model_type].architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu" if self.activation == "silu" else "gelu_pytorch_tanh",
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.scaling is None else dict(self.rope.scaling),
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
        }
        if self.rope.dim != self.head_dim:
            config["partial_rotary_factor"] = self.rope.dim / self.head_dim
        if any(window is not None for window in self.windows):
            config["layer_types"] = [
                "full_attention" if window is None else "sliding_attention"
                for window in self.windows
            ]
        return config


@dataclass
class _Reader:
    """Typed access to untrusted configuration values; every error names the key."""

    raw: dict[str, Any]

    def size(self, key: str, default: int | None = None, most: int = _LARGEST_SIZE) -> int:
        value = self.raw.get(key, default)
        if value is None:
            raise MespError(f"the model configuration lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise MespError(f"{key} must be an integer from 1 to {most}, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        return positive_number(key, self.raw.get(key, default))

    def optional_number(self, key: str) -> float | None:
        value = self.raw.get(key)
        return None if value is None else positive_number(key, value)

    def choice(self, key: bool | str) -> bool:
        """A fixed choice, or the boolean under a key (absent: False)."""
        value = key if isinstance(key, bool) else self.raw.get(key, False)
        if not isinstance(value, bool):
            raise MespError(f"{key} must be true or false, not {value!r}")
        return value


def positive_number(key: str, value: Any) -> float:
    """A finite number above 0 from an untrusted file; raises MespError naming the key."""
    number = not isinstance(value, bool) and isinstance(value, int | float)
    # An integer can be larger than any float.
    if not number or not 0 < value <= sys.float_info.max:
        raise MespError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def _family(raw: Mapping[str, Any]) -> Family:
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise MespError("the model configuration lacks model_type")
    if kind not in FAMILIES:
        raise UnsupportedError(f"architecture {kind!r} is not supported; known: {_known()}")
    return FAMILIES[kind]


def _known() -> str:
    return ", ".join(sorted(FAMILIES))


def _activation(name: Any) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedError(f"activation {name!r} is not supported; known: {known}")
    return _ACTIVATIONS[name]


def _rope(values: _Reader, head_dim: int) -> RopeConfig:
    raw = values.raw
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise MespError(f"rope_scaling must be an object, not {scaling!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedError("RoPE parameters that differ from layer to layer are not supported")
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    share = positive_number("partial_rotary_factor", partial)
    if share > 1.0:
        raise MespError(f"partial_rotary_factor must be at most 1, not {share}")
    dim = int(head_dim * share)
    if dim % 2 or not dim:
        raise MespError(f"RoPE needs an even number of features up to {head_dim}, not {dim}")
    return RopeConfig(
        theta=positive_number("rope_theta", theta),
        dim=dim,
        scaling=_rope_scaling(scaling),
        interleaved=values.choice("rope_traditional"),
    )


def _rope_scaling(given: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _ROPE_PARAMETERS:
        known = ", ".join(_ROPE_PARAMETERS)
        raise UnsupportedError(f"RoPE scaling {kind!r} is not supported; known: {known}")
    required, optional = _ROPE_PARAMETERS[kind]
    scaling: dict[str, Any] = {"rope_type": kind}
    for key in required + optional:
        value = given.get(key)
        if value is None:
            if key in required:
                raise MespError(f"RoPE scaling {kind} needs {key}")
        elif key == "truncate":
            scaling[key] = bool(value)
        elif key in ("mscale", "mscale_all_dim") and value == 0:
            scaling[key] = 0.0
        else:
            number = positive_number(f"rope_scaling.{key}", value)
            scaling[key] = int(number) if key.startswith("original") else number
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise MespError("RoPE scaling llama3 needs low_freq_factor below high_freq_factor")
    return scaling


def _windows(values: _Reader, sliding: str, layers: int) -> tuple[int | None, ...]:
    raw = values.raw
    enabled = sliding != "upper" or values.choice("use_sliding_window")
    some = enabled and raw.get("sliding_window") is not None
    window = values.size("sliding_window") if some else None
    kinds = raw.get("layer_types")
    if kinds is None:
        if window is None:
            return (None,) * layers
        first = {"none": layers, "all": 0, "upper": raw.get("max_window_layers")}[sliding]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise MespError(f"max_window_layers must be a count of layers, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise MespError(f"layer_types must name the attention of each of the {layers} layers")
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedError(f"layer type {kind!r} is not supported; known: {list(known)}")
    if window is None and "sliding_attention" in kinds:
        raise MespError("layer_types has sliding_attention, but no sliding_window is in force")
    return tuple(known[kind] for kind in kinds)
