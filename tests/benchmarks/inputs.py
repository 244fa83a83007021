"""The components' inputs, as NumPy arrays that every framework gets the same of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: Tokens, hidden, features, query heads, key heads, head, vocabulary, rank.
N, D, F, H, K, E, V, R = 256, 256, 768, 4, 2, 64, 8192, 8
SCALE = 2.0
EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """by: the arguments of a component's function; wrt: those that have a gradient; dout: what the
    gradient of its result is."""

    by: Mapping[str, np.ndarray]
    wrt: tuple[str, ...]
    dout: np.ndarray


def inputs(component: str) -> Inputs:
    """Of one component, random but always the same."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        width = shape[-1] if len(shape) == 2 and shape[0] != N else 1
        return (generator.standard_normal(shape) / np.sqrt(width)).astype(np.float32)

    def whole(top: int) -> np.ndarray:
        return generator.integers(0, top, N).astype(np.int32)

    angles = np.arange(N)[:, None] / 10000.0 ** (np.arange(E // 2) / (E // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    factors = {"lora_a": normal(D, R), "lora_b": normal(R, D)}
    mlp = {
        f"{name}_{part}": value
        for name, (width, out) in {"gate": (D, F), "up": (D, F), "down": (F, D)}.items()
        for part, value in (
            ("weight", normal(out, width)),
            ("a", normal(width, R)),
            ("b", normal(R, out)),
        )
    }
    trained = tuple(name for name in mlp if not name.endswith("weight"))
    return {
        "embedding": Inputs({"tokens": whole(V), "table": normal(V, D)}, ("table",), normal(N, D)),
        "rms_norm": Inputs({"x": normal(N, D), "weight": normal(D)}, ("x", "weight"), normal(N, D)),
        "rope": Inputs({"x": normal(N, H, E), "cos": cos, "sin": sin}, ("x",), normal(N, H, E)),
        "attention": Inputs(
            {"q": normal(N, H, E), "k": normal(N, K, E), "v": normal(N, K, E)},
            ("q", "k", "v"),
            normal(N, H, E),
        ),
        "frozen_linear": Inputs({"x": normal(N, D), "weight": normal(D, D)}, ("x",), normal(N, D)),
        "lora_linear": Inputs(
            {"x": normal(N, D), "weight": normal(D, D), **factors},
            ("x", "lora_a", "lora_b"),
            normal(N, D),
        ),
        "gated_mlp": Inputs({"x": normal(N, D), **mlp}, ("x", *trained), normal(N, D)),
        "linear_cross_entropy": Inputs(
            {"x": normal(N, D), "weight": normal(V, D), "targets": whole(V)},
            ("x",),
            np.ones((), np.float32),
        ),
    }[component]


COMPONENTS = (
    "embedding",
    "rms_norm",
    "rope",
    "attention",
    "frozen_linear",
    "lora_linear",
    "gated_mlp",
    "linear_cross_entropy",
)
