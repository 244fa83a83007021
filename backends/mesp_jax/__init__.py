"""The JAX backend: CPUs, GPUs and TPUs, through XLA.

The components (``lora_linear``, ``attention``, …) are ordinary differentiable functions of JAX
arrays with MeSP's backward passes inside, under ``jax.jit``, ``jax.grad`` and ``jax.lax.scan``.
Importing this package imports no framework; making a backend or calling a function does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesp_core.bridge import Bridge

if TYPE_CHECKING:
    from mesp_jax.jax_backend import JaxBackend

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


def backend(device: str | None = None) -> JaxBackend:
    """The factory registered under ``mesp.backends``. device: ``cpu``, ``gpu``, ``tpu``, each
    perhaps with a number (``gpu:1``), or None for JAX's default. Raises BackendUnavailableError
    with the reason and the remedy."""
    import importlib.util

    from mesp_core.errors import BackendUnavailableError

    if importlib.util.find_spec("jax") is None:
        raise BackendUnavailableError("JAX is not installed; pip install 'mesp[jax]'")
    from mesp_jax.jax_backend import JaxBackend

    return JaxBackend(device)


def _load_apply() -> Callable[..., Any]:
    from mesp_jax.bridge import apply

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
