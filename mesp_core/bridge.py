"""The bridge: every component as an ordinary differentiable function of a framework.

A ``Kernel`` is a component's forward and backward pass over a flat list of arrays. Each backend
package turns one into a node of its own autodiff (``apply``), and offers the functions of
``Bridge`` under its own name: ``mesp_torch.lora_linear``, ``mesp_jax.attention``, …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesp_core.bridge_kernels import (
    AttentionKernel,
    CrossEntropyKernel,
    EmbeddingKernel,
    FrozenLinearKernel,
    GatedMlpKernel,
    Kernel,
    LoraLinearKernel,
    MatrixForm,
    ProjectionForm,
    Quantized,
    RmsNormKernel,
    RopeKernel,
)
from mesp_core.errors import MespError
from mesp_core.formulas.activation import ACTIVATIONS
from mesp_core.formulas.dropout import dropout_key
from mesp_core.formulas.lora_linear import Projection

Array = Any


#: Runs a kernel on arrays of one framework as a node of its autodiff.
Apply = Callable[..., Array]


class Bridge:
    """Differentiable functions with MeSP's hand-written backward passes inside.

    load: imports the framework and returns its ``apply``; called at the first use. Arrays are
    the framework's, of any float dtype it has; gradients come in the dtype of what they belong
    to. Weights are frozen: they have no gradient. Arrays of two libraries raise MespError.
    """

    def __init__(self, load: Callable[[], Apply]) -> None:
        self._load = load
        self._loaded: Apply | None = None

    def _apply(self, kernel: Kernel, *inputs: Array) -> Array:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded(kernel, *inputs)

    def embedding(self, tokens: Array, table: Array) -> Array:
        """table[tokens]: tokens [N] integers, table [V, D] -> [N, D]; differentiable in the
        table."""
        return self._apply(EmbeddingKernel(), tokens, table)

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float = 1e-6, plus_one: bool = False
    ) -> Array:
        """x / √(mean x² + eps) · w, w = weight or 1 + weight: x [..., D], weight [D].

        Differentiable in both.
        """
        return self._apply(RmsNormKernel(float(eps), bool(plus_one)), x, weight)

    def rope(self, x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
        """Rotary embedding of x [N, H, E] by tables [N, E'/2], E' ≤ E; differentiable in x."""
        return self._apply(RopeKernel(bool(interleaved)), x, cos, sin)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        segment: Array | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Array:
        """Causal attention in tiles; the scores [N, N] never exist. Differentiable in q, k, v.

        q: [N, H, E]; k, v: [N, K, E], K a divisor of H; out: [N, H, E]. segment: [N] integers
        that never fall, the sequence each token belongs to (one sequence without it); tokens see
        their own sequence only. scale: 1/√E by default. window: keys a query sees at most.
        softcap: c of c · tanh(score / c).
        """
        if q.ndim != 3 or k.ndim != 3 or tuple(k.shape) != tuple(v.shape):
            raise MespError("attention takes q [N, H, E] and k, v [N, K, E]")
        if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            raise MespError(
                f"attention: q {tuple(q.shape)} does not go with k {tuple(k.shape)}; tokens and "
                "widths must be equal, and the query heads a multiple of the key heads"
            )
        if window is not None and window < 1:
            raise MespError(f"attention: a window of {window} keys sees nothing")
        factor = float(q.shape[2]) ** -0.5 if scale is None else float(scale)
        kernel = AttentionKernel(factor, window, softcap, segment is not None)
        return self._apply(kernel, q, k, v, *([] if segment is None else [segment]))

    def frozen_linear(
        self, x: Array, weight: Array | Quantized, bias: Array | None = None
    ) -> Array:
        """x Wᵀ + b: x [..., in], weight [out, in] dense or quantised, bias [out] -> [..., out].

        Differentiable in x; weight and bias are frozen.
        """
        form, arrays = _flat(weight, bias)
        _check_width("frozen_linear", x, form.matrix.width(arrays))
        return self._apply(FrozenLinearKernel(form), x, *arrays)

    def lora_linear(
        self,
        x: Array,
        weight: Array | Quantized,
        lora_a: Array,
        lora_b: Array,
        *,
        bias: Array | None = None,
        scale: float = 1.0,
        dropout: float = 0.0,
        seed: int = 0,
        step: int = 0,
    ) -> Array:
        """x Wᵀ + b + scale · (m ∘ x) A B; h = xA is recomputed in the backward pass.

        x: [..., in]; weight: W [out, in], dense or quantised, and bias [out]: frozen;
        lora_a: [in, R]; lora_b: [R, out]; out: [..., out]. Differentiable in x, lora_a, lora_b.
        dropout: probability of a zero in the mask m of the adapter's input, which is drawn from
        (seed, step, row, feature): give each layer its own seed and each update its own step.
        """
        if not 0.0 <= dropout < 1.0:
            raise MespError(f"dropout must be in [0, 1), not {dropout}")
        form, arrays = _flat(weight, bias, lora_a, lora_b, scale)
        _check_width("lora_linear", x, form.matrix.width(arrays))
        key = dropout_key(seed, step, 0, 0) if dropout else (0, 0)
        return self._apply(LoraLinearKernel(form, float(dropout), key), x, *arrays)

    def gated_mlp(
        self,
        x: Array,
        gate: Projection,
        up: Projection,
        down: Projection,
        *,
        activation: str = "silu",
    ) -> Array:
        """down(act(gate(x)) ∘ up(x)) in tiles of features: x [..., D] -> [..., D].

        gate, up: projections D -> F, down: F -> D, each ``mesp_core.formulas.Projection`` with
        weight an array or ``Quantized``, with or without bias and adapter. activation: ``silu``
        or ``gelu_tanh``. Differentiable in x and every lora_a and lora_b.
        """
        if activation not in ACTIVATIONS:
            raise MespError(f"unknown activation {activation!r}; choose from {ACTIVATIONS}")
        flat = [_flat(p.weight, p.bias, p.lora_a, p.lora_b, p.scale) for p in (gate, up, down)]
        _check_width("gated_mlp", x, flat[0][0].matrix.width(flat[0][1]))
        kernel = GatedMlpKernel(flat[0][0], flat[1][0], flat[2][0], activation)
        return self._apply(kernel, x, *(array for _, arrays in flat for array in arrays))

    def linear_cross_entropy(
        self,
        x: Array,
        weight: Array | Quantized,
        targets: Array,
        weights: Array | None = None,
        *,
        normalizer: float | None = None,
    ) -> Array:
        """Σ weights · cross-entropy(x Wᵀ, targets) / normalizer; the logits never exist.

        x: [N, D]; weight: [V, D] dense or quantised, frozen; targets: [N] integers; weights: [N]
        or None for ones. normalizer: the sum of the weights by default. Differentiable in x.
        """
        form, arrays = _flat(weight)
        _check_width("linear_cross_entropy", x, form.matrix.width(arrays))
        kernel = CrossEntropyKernel(
            form.matrix, weights is not None, None if normalizer is None else float(normalizer)
        )
        given = [] if weights is None else [weights]
        return self._apply(kernel, x, targets, *given, *arrays)


def _flat(
    weight: Any,
    bias: Array | None = None,
    lora_a: Array | None = None,
    lora_b: Array | None = None,
    scale: float = 1.0,
) -> tuple[ProjectionForm, tuple[Array, ...]]:
    """What is known of a projection without its arrays, and the arrays."""
    if (lora_a is None) != (lora_b is None):
        raise MespError("an adapter needs both lora_a and lora_b")
    if isinstance(weight, Quantized):
        matrix = MatrixForm(weight.bits, weight.group)
        arrays = (weight.codes, weight.scales, weight.biases)
    else:
        matrix, arrays = MatrixForm(), (weight,)
    present = tuple(array for array in (bias, lora_a, lora_b) if array is not None)
    form = ProjectionForm(matrix, bias is not None, lora_a is not None, float(scale))
    return form, (*arrays, *present)


def _check_width(what: str, x: Array, width: int) -> None:
    if x.shape[-1] != width:
        raise MespError(f"{what}: x {tuple(x.shape)} does not end in the weight's width {width}")
