"""MLX's function transformations and an idiomatic block, for the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.nn import losses

from mesp_core.autodiff import Autodiff
from mesp_core.block import BlockPlan
from mesp_core.formulas.dropout import Dropout, dropout_multiplier
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.lora_linear import Projection
from mesp_core.formulas.rope import rope_forward


class MlxAutodiff(Autodiff):
    """native: frozen products are MLX's own, lazy and differentiated by it. Otherwise they are
    computed at once on the host, as nodes whose derivative is the product with Wᵀ.

    What MLX evaluates inside a transformation stays until its end. So on a host the linear layer
    is one node, which keeps x and h = xA, as autodiff would; as several nodes it would keep three
    more arrays of the size of its output, which no derivative needs.
    """

    def __init__(self, xp: Any, *, native: bool) -> None:
        self._xp = xp
        self._native = native

    def gradients(
        self,
        function: Callable[..., mx.array],
        inputs: Sequence[mx.array],
        cotangent: Callable[[mx.array], mx.array],
    ) -> list[mx.array]:
        def product(*given: mx.array) -> mx.array:
            out = function(*given)
            dout = mx.stop_gradient(cotangent(mx.stop_gradient(out)))
            return mx.sum(out * dout.astype(out.dtype))

        _, gradients = mx.vjp(product, list(inputs), [mx.array(1.0)])
        return list(gradients)

    def frozen_linear(self, x: mx.array, weight: FrozenMatrix) -> mx.array:
        if self._native:
            return weight.matmul(x)

        @mx.custom_function
        def node(x: mx.array) -> mx.array:
            return weight.matmul(x)

        @node.vjp
        def node_vjp(x: mx.array, dy: mx.array, y: mx.array) -> mx.array:
            return weight.matmul_t(dy).astype(x.dtype)

        y: Any = node(x)
        return y

    def rms_norm(self, x: mx.array, weight: mx.array, *, eps: float, plus_one: bool) -> mx.array:
        gain = 1.0 + weight if plus_one else weight
        return mx.fast.rms_norm(x, gain.astype(x.dtype), eps)

    def rope(self, x: mx.array, cos: mx.array, sin: mx.array, *, interleaved: bool) -> mx.array:
        return rope_forward(x, cos, sin, interleaved=interleaved, xp=self._xp)[0]

    def attention(self, q: mx.array, k: mx.array, v: mx.array, plan: BlockPlan) -> mx.array:
        q, k, v = (a.swapaxes(0, 1)[None] for a in (q, k, v))
        scale, softcap = plan.attention.scale, plan.attention.softcap
        if softcap is not None:
            o = _capped(q, k, v, scale, softcap, plan.mask)
        else:
            mask = "causal" if plan.mask is None else plan.mask
            o = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        return o[0].swapaxes(0, 1)

    def lora_linear(self, x: mx.array, projection: Projection, dropout: Dropout | None) -> mx.array:
        mask = None
        if dropout is not None:
            mask = dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=self._xp)
        if self._native or projection.lora_a is None:
            return self._linear(x, projection, mask)
        return _node(projection, mask)(x, projection.lora_a, projection.lora_b)[0]

    def _linear(self, x: mx.array, projection: Projection, mask: mx.array | None) -> mx.array:
        y = self.frozen_linear(x, projection.weight).astype(x.dtype)
        if projection.bias is not None:
            y = y + projection.bias.astype(x.dtype)
        if projection.lora_a is None or projection.lora_b is None:
            return y
        low = (x if mask is None else x * mask) @ projection.lora_a.astype(x.dtype)
        return y + projection.scale * (low @ projection.lora_b.astype(x.dtype))

    def activation(self, gate: mx.array, kind: str) -> mx.array:
        return nn.silu(gate) if kind == "silu" else nn.gelu_approx(gate)

    def cross_entropy(self, logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return (losses.cross_entropy(logits, targets) * weights).sum()


def _node(projection: Projection, mask: mx.array | None) -> Any:
    """The linear layer with its adapter: (x, A, B) -> [y, h], h as an output that nothing else
    reads, so that the derivative finds it."""
    weight, scale = projection.weight, projection.scale

    @mx.custom_function
    def node(x: mx.array, a: mx.array, b: mx.array) -> list[mx.array]:
        y = weight.matmul(x).astype(x.dtype)
        if projection.bias is not None:
            y = y + projection.bias.astype(x.dtype)
        h = (x if mask is None else x * mask) @ a.astype(x.dtype)
        y = mx.addmm(y, h, b.astype(x.dtype), alpha=scale)
        mx.eval(y, h)
        return [y, h]

    @node.vjp
    def node_vjp(
        inputs: tuple[mx.array, ...], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> list[mx.array]:
        x, a, b = inputs
        dy, h = cotangents[0], outputs[1]
        t = scale * (dy @ b.astype(dy.dtype).T)
        through = t @ a.astype(dy.dtype).T
        dropped = x if mask is None else x * mask
        dx = weight.matmul_t(dy).astype(x.dtype) + (through if mask is None else through * mask)
        da, db = dropped.T @ t, scale * (h.T @ dy)
        mx.eval(dx, da, db)
        return [dx, da.astype(a.dtype), db.astype(b.dtype)]

    return node


def _capped(
    q: mx.array, k: mx.array, v: mx.array, scale: float, softcap: float, mask: mx.array | None
) -> mx.array:
    """Attention with soft-capped scores, which ``mx.fast`` does not have."""
    repeats = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    scores = softcap * mx.tanh(scale / softcap * (q @ k.swapaxes(-1, -2)))
    if mask is None:
        mask = mx.tri(scores.shape[-2], dtype=mx.bool_)
    scores = mx.where(mask, scores, mx.array(-mx.inf, dtype=scores.dtype))
    return mx.softmax(scores, axis=-1) @ v
