"""JAX's transformations and an idiomatic block, for the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mesp_core.autodiff import Autodiff
from mesp_core.block import Block, BlockPlan
from mesp_core.formulas.dropout import Dropout, dropout_multiplier
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.lora_linear import Projection
from mesp_core.formulas.rope import rope_forward
from mesp_core.head import Head, HeadPlan
from mesp_core.plain_block import plain_block, plain_head
from mesp_jax.namespace import XP
from mesp_jax.streamed import load_streamed


class JaxAutodiff(Autodiff):
    """Equal to any other, so that what was compiled with one is found again."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxAutodiff)

    def __hash__(self) -> int:
        return hash(JaxAutodiff)

    def gradients(
        self,
        function: Callable[..., jax.Array],
        inputs: Sequence[jax.Array],
        cotangent: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, list[jax.Array]]:
        out, pull_back = jax.vjp(function, *inputs)
        return out, list(pull_back(cotangent(out).astype(out.dtype)))

    def block(self, x: jax.Array, block: Block, plan: BlockPlan) -> jax.Array:
        (block, plan), _ = load_streamed((block, plan))
        return _compiled_block(x, block, plan, autodiff=self)

    def head_loss(
        self, x: jax.Array, head: Head, targets: jax.Array, weights: jax.Array,
        normalizer: float, plan: HeadPlan,
    ) -> jax.Array:  # fmt: skip
        head, _ = load_streamed(head)
        return _compiled_head(x, head, targets, weights, normalizer, plan=plan, autodiff=self)

    def frozen_linear(self, x: jax.Array, weight: FrozenMatrix) -> jax.Array:
        return _frozen_linear(x, weight)

    def rms_norm(self, x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (normed * (1.0 + weight if plus_one else weight)).astype(x.dtype)

    def rope(self, x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
        return rope_forward(x, cos, sin, interleaved=interleaved, xp=XP)[0]

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, plan: BlockPlan) -> jax.Array:
        if plan.attention.softcap is not None or q.dtype == jnp.float64:
            return _attention(q, k, v, plan)
        mask = None if plan.mask is None else plan.mask[None, None]
        o = jax.nn.dot_product_attention(
            q[None], k[None], v[None], mask=mask, is_causal=mask is None,
            scale=plan.attention.scale,
        )  # fmt: skip
        return o.squeeze(0)

    def lora_linear(
        self, x: jax.Array, projection: Projection, dropout: Dropout | None
    ) -> jax.Array:
        y = self.frozen_linear(x, projection.weight).astype(x.dtype)
        if projection.bias is not None:
            y = y + projection.bias.astype(x.dtype)
        if projection.lora_a is None or projection.lora_b is None:
            return y
        if dropout is not None:
            x = x * dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=XP)
        low = x @ projection.lora_a.astype(x.dtype)
        return y + (projection.scale * (low @ projection.lora_b.astype(x.dtype))).astype(x.dtype)

    def activation(self, gate: jax.Array, kind: str) -> jax.Array:
        return jax.nn.silu(gate) if kind == "silu" else jax.nn.gelu(gate, approximate=True)

    def cross_entropy(self, logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1).squeeze(1)
        return ((jax.nn.logsumexp(logits, axis=-1) - chosen) * weights).sum()


@partial(jax.jit, static_argnames="autodiff")
def _compiled_block(
    x: jax.Array, block: Block, plan: BlockPlan, *, autodiff: Autodiff
) -> jax.Array:
    return plain_block(x, block, plan, autodiff=autodiff)


@partial(jax.jit, static_argnames=("plan", "autodiff"))
def _compiled_head(
    x: jax.Array, head: Head, targets: jax.Array, weights: jax.Array, normalizer: float,
    *, plan: HeadPlan, autodiff: Autodiff,
) -> jax.Array:  # fmt: skip
    return plain_head(x, head, targets, weights, normalizer, plan=plan, autodiff=autodiff)


@jax.custom_vjp
def _frozen_linear(x: jax.Array, weight: Any) -> jax.Array:
    return weight.matmul(x)


def _forward(x: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
    # Of x nothing but its dtype is needed; an empty array has it.
    return weight.matmul(x), (weight, jnp.zeros((0,), x.dtype))


def _backward(residual: Any, dy: jax.Array) -> tuple[jax.Array, None]:
    weight, like = residual
    return weight.matmul_t(dy).astype(like.dtype), None


_frozen_linear.defvjp(_forward, _backward)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, plan: BlockPlan) -> jax.Array:
    """With soft-capped scores, which ``jax.nn.dot_product_attention`` does not have, or in float64,
    where its softmax is float32."""
    scale, softcap = plan.attention.scale, plan.attention.softcap
    repeats = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1)
    scores = scale * jnp.einsum("ihe,jhe->hij", q, k, precision="highest")
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = jnp.tri(q.shape[0], dtype=bool) if plan.mask is None else plan.mask
    probabilities = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hij,jhe->ihe", probabilities, v, precision="highest")
