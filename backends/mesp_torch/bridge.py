"""The bridge's kernels as nodes of torch's autograd."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mesp_core.bridge_kernels import Kernel
from mesp_core.errors import MespError
from mesp_core.operations import refuse_foreign
from mesp_torch.torch_backend import TorchBackend


def apply(kernel: Kernel, *inputs: torch.Tensor) -> torch.Tensor:
    """``kernel`` on tensors of one device, differentiable by ``backward`` and ``autograd.grad``.

    Raises MespError for arrays of another library, tensors of two devices, and a frozen input
    that requires a gradient.
    """
    backend = _backend(_device_of(kernel, inputs))
    if not (torch.is_grad_enabled() and any(array.requires_grad for array in inputs)):
        return backend.run(_forward, kernel, *inputs)
    for place, (array, has_gradient) in enumerate(zip(inputs, kernel.differentiable, strict=True)):
        if array.requires_grad and not has_gradient:
            raise MespError(
                f"input {place} of {type(kernel).__name__} requires a gradient, but is frozen; "
                "call requires_grad_(False) on it, or detach it"
            )
    return _Node.apply(kernel, backend, *inputs)


def _forward(kernel: Kernel, *inputs: torch.Tensor, ops: Any, backend: TorchBackend) -> Any:
    return kernel.forward(backend, *inputs, gradient=False)[0]


class _Node(torch.autograd.Function):
    """One kernel. torch runs both passes with autograd off."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, backend: TorchBackend, *inputs: Any) -> Any:
        out, saved = kernel.forward(backend, *inputs, gradient=True)
        ctx.kernel, ctx.backend, ctx.count = kernel, backend, len(inputs)
        ctx.save_for_backward(*inputs, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        inputs, saved = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        gradients = ctx.kernel.backward(ctx.backend, dout, saved, *inputs)
        wanted = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(gradient if needed else None for gradient, needed in wanted))


def _device_of(kernel: Kernel, inputs: tuple[Any, ...]) -> str:
    refuse_foreign(type(kernel).__name__, inputs, (torch.Tensor,))
    devices = {str(array.device) for array in inputs}
    if len(devices) > 1:
        raise MespError(f"the tensors of a kernel lie on {' and '.join(sorted(devices))}")
    return devices.pop()


@cache
def _backend(device: str) -> TorchBackend:
    return TorchBackend.on(device)
