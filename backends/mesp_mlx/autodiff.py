"""MLX's function transformations and an idiomatic block, for the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.nn import losses

from mesp_core.autodiff import Autodiff
from mesp_core.block import BlockPlan
from mesp_core.formulas.dropout import Dropout, dropout_multiplier
from mesp_core.formulas.frozen_matrix import FrozenMatrix, rows_per_tile
from mesp_core.formulas.loops import tile_count
from mesp_core.formulas.lora_linear import Projection
from mesp_core.formulas.rope import rope_forward
from mesp_core.host_matrix import HostMatrix
from mesp_mlx.matrices import NativeDense, NativeQuantized, load_native, wide


class MlxAutodiff(Autodiff):
    """Everything is lazy, so that an array lives from its first to its last use, as in any MLX
    program. native: frozen products are MLX's own. Otherwise, on a CPU, where its quantised product
    is slow, they are products with dequantised tiles, which the backward pass makes anew. (The host
    products of MeSP would have to evaluate inside the transformation, and MLX keeps what is
    evaluated there until its end.)
    """

    def __init__(self, xp: Any, *, native: bool, tile_weights: int) -> None:
        self._xp = xp
        self._native = native
        self._tile_weights = tile_weights

    def gradients(
        self,
        function: Callable[..., mx.array],
        inputs: Sequence[mx.array],
        cotangent: Callable[[mx.array], mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        # Nothing may be evaluated inside of mx.vjp, so the cotangent gets a value from outside.
        value = function(*inputs)
        dout = cotangent(value).astype(value.dtype)
        del value
        values, gradients = mx.vjp(function, list(inputs), [dout])
        return values[0], list(gradients)

    def frozen_linear(self, x: mx.array, weight: FrozenMatrix) -> mx.array:
        if self._native:
            return weight.matmul(x)
        assert isinstance(weight, HostMatrix)
        return _tiled_product(load_native(weight.stored), self._tile_weights)(x)

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
        y = self.frozen_linear(x, projection.weight).astype(x.dtype)
        if projection.bias is not None:
            y = y + projection.bias.astype(x.dtype)
        if projection.lora_a is None or projection.lora_b is None:
            return y
        if dropout is not None:
            x = x * dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=self._xp)
        low = x @ projection.lora_a.astype(x.dtype)
        return mx.addmm(y, low, projection.lora_b.astype(x.dtype), alpha=projection.scale)

    def activation(self, gate: mx.array, kind: str) -> mx.array:
        return nn.silu(gate) if kind == "silu" else nn.gelu_approx(gate)

    def cross_entropy(self, logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return (losses.cross_entropy(logits, targets).astype(weights.dtype) * weights).sum()


def _tiled_product(matrix: NativeDense | NativeQuantized, tile_weights: int) -> Any:
    """x -> x Wᵀ, lazily, W dense a tile of rows at a time."""
    rows, width = matrix.shape
    size = rows_per_tile(width, tile_weights)
    tiles = range(tile_count(rows, size))

    def dense(i: int, dtype: Any, done: mx.array) -> mx.array:
        return _after(matrix.tile(i, size, 0), done).dense().astype(dtype)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        x = wide(x)
        # Written tile by tile into one array: joined at the end, all would be there twice.
        y = mx.zeros((x.shape[0], rows), dtype=x.dtype)
        for i in tiles:
            y[:, i * size : (i + 1) * size] = x @ dense(i, x.dtype, y).T
        return y

    @product.vjp
    def product_vjp(x: mx.array, dy: mx.array, y: mx.array) -> mx.array:
        dx = mx.zeros(x.shape, dtype=dy.dtype)
        for i in tiles:
            dx = dx + dy[:, i * size : (i + 1) * size] @ dense(i, dy.dtype, dx)
        return dx.astype(x.dtype)

    return product


def _after(tile: NativeDense | NativeQuantized, done: mx.array) -> NativeDense | NativeQuantized:
    """The tile, to be looked at when ``done`` is there: MLX would dequantise all tiles first."""
    if isinstance(tile, NativeDense):
        return replace(tile, values=mx.depends(tile.values, done))
    return replace(tile, words=mx.depends(tile.words, done))


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
