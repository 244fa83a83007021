"""The PyTorch backend: CPUs, CUDA and Apple's MPS.

The components (``lora_linear``, ``attention``, …) are ordinary differentiable functions of torch
tensors with MeSP's backward passes inside. Importing this package imports no framework; making
a backend or calling a function does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mesp_core.bridge import Bridge
from mesp_core.errors import BackendUnavailableError

if TYPE_CHECKING:
    from mesp_torch.torch_backend import TorchBackend

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


def backend(device: str | None = None) -> TorchBackend:
    """The factory registered under ``mesp.backends``. device: ``cpu``, ``cuda``, ``cuda:1``,
    ``mps``, or None for the best of what is there. Raises BackendUnavailableError with the reason
    and the remedy."""
    _require_torch()
    from mesp_torch.torch_backend import TorchBackend

    return TorchBackend.on(device)


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise BackendUnavailableError("PyTorch is not installed; pip install 'mesp[torch]'")


def _load_apply() -> Callable[..., Any]:
    _require_torch()
    from mesp_torch.bridge import apply

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
