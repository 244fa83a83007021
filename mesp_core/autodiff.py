"""What the baselines need of a framework: its own differentiation, and idiomatic pieces of a block.

``mebp`` and ``autodiff`` (``mesp_core.methods``) differentiate a block as one would write it in the
framework, with its own attention, norm and activation. Only the product with a frozen matrix is
shared with MeSP, so that all methods read the same weights in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesp_core.block import Block, BlockPlan
    from mesp_core.formulas.dropout import Dropout
    from mesp_core.formulas.frozen_matrix import FrozenMatrix
    from mesp_core.formulas.lora_linear import Projection
    from mesp_core.head import Head, HeadPlan

Array = Any


class Autodiff(ABC):
    """A framework's differentiation. All functions are differentiable in it."""

    @abstractmethod
    def gradients(
        self,
        function: Callable[..., Array],
        inputs: Sequence[Array],
        cotangent: Callable[[Array], Array],
    ) -> tuple[Array, list[Array]]:
        """(value, gradients): function(*inputs), and ∂⟨value, dout⟩ / ∂input for each input, with
        dout = cotangent(value). A lazy framework may evaluate the value anew when the cotangent
        looks at more than its shape."""

    @abstractmethod
    def frozen_linear(self, x: Array, weight: FrozenMatrix) -> Array:
        """x Wᵀ: [N, in] -> [N, out] in the accumulation dtype; differentiable in x."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, *, eps: float, plus_one: bool) -> Array:
        """RMS norm over the last axis, in the dtype of x."""

    @abstractmethod
    def rope(self, x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
        """Rotary embedding of x [N, H, E]."""

    @abstractmethod
    def attention(self, q: Array, k: Array, v: Array, plan: BlockPlan) -> Array:
        """softmax(scale · q kᵀ) v over the keys of ``plan.mask``: [N, H, E] -> [N, H, E]."""

    @abstractmethod
    def lora_linear(self, x: Array, projection: Projection, dropout: Dropout | None) -> Array:
        """x Wᵀ + b + s · ((m ∘ x) A) B: [N, in] -> [N, out], in the dtype of x."""

    @abstractmethod
    def activation(self, gate: Array, kind: str) -> Array:
        """``silu`` or ``gelu_tanh``, elementwise."""

    @abstractmethod
    def cross_entropy(self, logits: Array, targets: Array, weights: Array) -> Array:
        """Σ weights · cross-entropy(logits, targets), a scalar: [N, V], [N], [N]."""

    def block(self, x: Array, block: Block, plan: BlockPlan) -> Array:
        """``plain_block``, compiled where the framework would."""
        from mesp_core.plain_block import plain_block

        return plain_block(x, block, plan, autodiff=self)

    def head_loss(
        self, x: Array, head: Head, targets: Array, weights: Array, normalizer: float,
        plan: HeadPlan,
    ) -> Array:  # fmt: skip
        """``plain_head``, compiled where the framework would."""
        from mesp_core.plain_block import plain_head

        return plain_head(x, head, targets, weights, normalizer, plan=plan, autodiff=self)
