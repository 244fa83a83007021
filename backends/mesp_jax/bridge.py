"""The bridge's kernels as nodes of JAX's autodiff."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax

from mesp_core.bridge_kernels import Kernel
from mesp_core.operations import refuse_foreign
from mesp_jax.jax_backend import JaxBackend


def apply(kernel: Kernel, *inputs: jax.Array) -> jax.Array:
    """``kernel`` on JAX arrays: differentiable in reverse, under ``jax.jit`` and ``lax.scan`` or
    outside of them, where its components are compiled once for each signature."""
    refuse_foreign(type(kernel).__name__, inputs, (jax.Array,))
    return _node(kernel, *inputs)


@cache
def _backend() -> JaxBackend:
    return JaxBackend()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _node(kernel: Kernel, *inputs: Any) -> Any:
    out, _ = kernel.forward(_backend(), *inputs, gradient=False)
    return out


def _forward(kernel: Kernel, *inputs: Any) -> tuple[Any, tuple[Any, Any]]:
    out, saved = kernel.forward(_backend(), *inputs, gradient=True)
    return out, (saved, inputs)


def _backward(kernel: Kernel, residual: tuple[Any, Any], dout: Any) -> tuple[Any, ...]:
    """A gradient for each input; None is JAX's word for one that is zero."""
    saved, inputs = residual
    return kernel.backward(_backend(), dout, saved, *inputs)


_node.defvjp(_forward, _backward)
