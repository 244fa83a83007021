"""What is trained: the LoRA configuration, the names of its tensors, and their first values."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from mesp_core.errors import MespError

#: Block-relative names of the seven projections; the position is the projection's number in
#: the counters of dropout and initialisation.
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)

#: Beyond any use: no model is so wide.
_LARGEST_RANK = 1 << 16


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation W₀ + scale · (A B)ᵀ of the frozen projections.

    rank: R, from 1 to 65536.
    alpha: the contribution is ``scale · (x A) B`` with ``scale = alpha / rank``
        (``alpha / √rank`` with ``rank_stabilized``), as in PEFT. mlx-lm's ``scale`` is this
        ``scale`` itself: use :meth:`from_scale`.
    dropout: probability that an input feature of the low-rank path is zeroed in training.
    targets: block-relative names (``self_attn.q_proj``) or their last part (``q_proj``); a name
        that comes twice counts once.
    layers: how many blocks, counted from the last, are adapted; 0 or less means all.
    dtype: ``float32`` (default), ``bfloat16`` (updated with stochastic rounding), ``float64``.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = PROJECTIONS
    layers: int = 0
    dtype: str = "float32"
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("layers", self.layers)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise MespError(f"LoRA {name} must be an integer, not {value!r}")
        for name, value in (("alpha", self.alpha), ("dropout", self.dropout)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise MespError(f"LoRA {name} must be a number, not {value!r}")
        if not 1 <= self.rank <= _LARGEST_RANK:
            reason = "at least 1" if self.rank < 1 else f"at most {_LARGEST_RANK}"
            raise MespError(f"LoRA rank must be {reason}, not {self.rank}")
        if not abs(self.alpha) <= sys.float_info.max:
            raise MespError(f"LoRA alpha must be a finite number, not {self.alpha}")
        # Masks compare 32-bit words with round(dropout · 2³²), which must be such a word.
        if not 0.0 <= self.dropout < 1.0 or round(self.dropout * 2**32) == 2**32:
            raise MespError(
                f"LoRA dropout must be in [0, 1), and 2⁻³² or more below 1, not {self.dropout}"
            )
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise MespError(f"LoRA dtype must be float32, bfloat16 or float64, not {self.dtype}")
        if not self.targets:
            raise MespError("LoRA needs at least one target projection, e.g. self_attn.q_proj")
        names = tuple(dict.fromkeys(map(_full_name, self.targets)))
        object.__setattr__(self, "targets", names)

    @property
    def scale(self) -> float:
        return self.alpha / self._divisor

    @property
    def _divisor(self) -> float:
        return math.sqrt(self.rank) if self.rank_stabilized else self.rank

    @property
    def stored_dtype(self) -> str:
        """What adapter files hold: bfloat16 where the parameters are, otherwise float32."""
        return "bfloat16" if self.dtype == "bfloat16" else "float32"

    def with_scale(self, scale: float) -> LoraConfig:
        """The same but for ``alpha``, which gives this scale."""
        return replace(self, alpha=scale * self._divisor)

    @classmethod
    def from_scale(cls, rank: int, scale: float, **fields) -> LoraConfig:
        """The configuration whose contribution is ``scale · (x A) B`` (mlx-lm's convention)."""
        return cls(rank=rank, **fields).with_scale(scale)

    def adapted_layers(self, total: int) -> range:
        """The indices of the adapted blocks of a model with ``total`` blocks."""
        if self.layers > total:
            raise MespError(f"LoRA on {self.layers} layers asked for, but the model has {total}")
        return range(0 if self.layers <= 0 else total - self.layers, total)


def _full_name(name: str) -> str:
    if isinstance(name, str) and name in PROJECTIONS:
        return name
    for known in PROJECTIONS:
        if known.rpartition(".")[2] == name:
            return known
    raise MespError(f"LoRA target {name!r} does not exist; choose from {', '.join(PROJECTIONS)}")


def parameter_name(layer: int, projection: str, factor: str) -> str:
    """The name of one LoRA tensor, as mlx-lm writes it (``factor``: lora_a or lora_b)."""
    return f"model.layers.{layer}.{projection}.{factor}"


def initial_factors(
    seed: int, layer: int, projection: str, rank: int, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """First values of one projection's factors: ``lora_a`` ~ U(±1/√in), ``lora_b`` = 0.

    The generator is keyed by (seed, layer, projection), so the values depend on nothing else:
    not on other layers, on the backend, or on any generator used before.

    shape: (out, in) of the frozen matrix. Returns float64 ``[in, R]`` and ``[R, out]``.
    """
    out, width = shape
    key = (seed % 2**64, layer, PROJECTIONS.index(projection))
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    bound = 1.0 / math.sqrt(width)
    return generator.uniform(-bound, bound, (width, rank)), np.zeros((rank, out))
