"""torch as a namespace of the array API, on one device."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as standard
import torch


class TorchNamespace:
    """``array_api_compat.torch``, whose new arrays lie on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(standard, name)

    def asarray(self, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A number is filled in on the device, where a copy from the host would wait for it."""
        if isinstance(value, (bool, int, float)):
            return torch.full((), value, dtype=dtype, device=self._device)
        return torch.asarray(value, dtype=dtype, device=self._device)

    def arange(
        self, start: int, stop: int | None = None, step: int = 1, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if stop is None:
            start, stop = 0, start
        return torch.arange(start, stop, step, dtype=dtype, device=self._device)

    def empty(self, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def eye(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.eye(rows, dtype=dtype, device=self._device)

    def full(self, shape: Any, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self._device)

    def ones(self, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self._device)

    def zeros(self, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)
