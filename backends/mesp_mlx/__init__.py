"""The MLX backend: Apple GPUs through Metal, and CPUs.

The components (``lora_linear``, ``attention``, …) are ordinary differentiable functions of MLX
arrays with MeSP's backward passes inside. Importing this package imports no framework; making
a backend or calling a function does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesp_core.bridge import Bridge

if TYPE_CHECKING:
    from mesp_mlx.mlx_backend import MlxBackend

__all__ = [
    "attention",
    "backend",
    "embedding",
    "frozen_linear",
    "gated_mlp",
    "linear_cross_entropy",
    "lora_linear",
    "rms_norm",
    "rope",
]


def backend(device: str | None = None) -> MlxBackend:
    """The factory registered under ``mesp.backends``. device: ``gpu``, ``cpu``, or None for the
    GPU where Metal is there. Raises BackendUnavailableError with the reason and the remedy."""
    from mesp_mlx.mlx_backend import MlxBackend

    return MlxBackend.on(device)


def _load_apply() -> Callable[..., Any]:
    from mesp_mlx.bridge import apply

    return apply


_bridge = Bridge(_load_apply)
attention = _bridge.attention
embedding = _bridge.embedding
frozen_linear = _bridge.frozen_linear
gated_mlp = _bridge.gated_mlp
linear_cross_entropy = _bridge.linear_cross_entropy
lora_linear = _bridge.lora_linear
rms_norm = _bridge.rms_norm
rope = _bridge.rope
