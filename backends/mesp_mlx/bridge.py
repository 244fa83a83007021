"""The bridge's kernels as nodes of MLX's autodiff."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mesp_core.bridge_kernels import Kernel
from mesp_core.errors import MespError
from mesp_core.operations import refuse_foreign
from mesp_mlx.mlx_backend import MlxBackend
from mesp_mlx.untraced import untraced


def apply(kernel: Kernel, *inputs: mx.array) -> mx.array:
    """``kernel`` on MLX arrays, differentiable by ``mx.grad`` and ``mx.vjp``.

    The passes compute at once, tile by tile, so they cannot run inside ``mx.compile`` or
    ``mx.vmap``; there they raise MespError.
    """
    refuse_foreign(type(kernel).__name__, inputs, (mx.array,))
    try:
        return _node(kernel)(*inputs)[0]
    except ValueError as error:
        if "during function transformations" not in str(error):
            raise
        raise MespError(
            "MeSP's kernels compute tile by tile and cannot be traced by mx.compile or mx.vmap; "
            "call them outside"
        ) from error


@cache
def _backend() -> MlxBackend:
    return MlxBackend.on(None)


def _node(kernel: Kernel) -> Any:
    """MLX shows a vjp the primals, cotangents and outputs only, so what is saved is returned as
    further outputs, whose cotangents nothing reads.

    What is computed from a traced array lives until the transformation ends, so the forward pass
    works on copies (not of frozen inputs, which in ordinary code are not traced). In a vjp MLX
    keeps everything, copies or not.
    """
    backend = _backend()

    @mx.custom_function
    def node(*inputs: mx.array) -> list[mx.array]:
        plain = [
            untraced(array) if has_gradient else array
            for array, has_gradient in zip(inputs, kernel.differentiable, strict=True)
        ]
        out, saved = kernel.forward(backend, *plain, gradient=True)
        return [out, *saved]

    @node.vjp
    def node_vjp(
        inputs: tuple[mx.array, ...], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> list[mx.array]:
        gradients = kernel.backward(backend, cotangents[0], tuple(outputs[1:]), *inputs)
        return [
            mx.zeros_like(array) if gradient is None else gradient
            for array, gradient in zip(inputs, gradients, strict=True)
        ]

    return node
