"""The MLX backend: Apple GPUs through Metal, and CPUs.

Importing this package imports no framework; ``backend(device)`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesp_mlx.mlx_backend import MlxBackend

__all__ = ["backend"]


def backend(device: str | None = None) -> MlxBackend:
    """The factory registered under ``mesp.backends``. device: ``gpu``, ``cpu``, or None for the
    GPU where Metal is there. Raises BackendUnavailableError with the reason and the remedy."""
    from mesp_mlx.mlx_backend import MlxBackend

    return MlxBackend.on(device)
