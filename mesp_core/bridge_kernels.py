"""The kernels of the bridge: each component's passes over a flat list of arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesp_core.backend import Backend
from mesp_core.formulas.attention import AttentionPlan, AttentionSaved
from mesp_core.formulas.cross_entropy import CrossEntropySaved
from mesp_core.formulas.dropout import Dropout
from mesp_core.formulas.frozen_matrix import (
    DenseMatrix,
    FrozenMatrix,
    QuantizedMatrix,
    rows_per_tile,
)
from mesp_core.formulas.gated_mlp import GatedMlpSaved, MlpPlan
from mesp_core.formulas.lora_linear import LoraGradients, LoraLinearSaved, Projection
from mesp_core.formulas.precision import cast
from mesp_core.formulas.rms_norm import RmsNormSaved

Array = Any
Gradients = tuple[Array | None, ...]


class Kernel(ABC):
    """One component with its options: frozen and hashable, so that it can be a static argument."""

    @property
    @abstractmethod
    def differentiable(self) -> tuple[bool, ...]:
        """For each input, whether it has a gradient. The others are data, or frozen."""

    @abstractmethod
    def forward(
        self, backend: Backend, *inputs: Any, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        """(out, saved): saved is what ``backward`` needs beside the inputs; it may be empty
        without ``gradient``, which says that no backward pass will follow."""

    @abstractmethod
    def backward(
        self, backend: Backend, dout: Array, saved: tuple[Array, ...], *inputs: Any
    ) -> Gradients:
        """A gradient for each input, in that input's dtype and shape; None where it has none."""


@dataclass(frozen=True)
class Quantized:
    """A group-quantised weight W [out, in] = codes · scales + biases, for the bridge.

    codes: uint8 [out, in · bits / 8], one little-endian bit stream a row (MLX's words viewed as
    bytes); scales, biases: [out, in / group] in any float dtype.
    """

    codes: Array
    scales: Array
    biases: Array
    bits: int
    group: int


@dataclass(frozen=True)
class MatrixForm:
    """How a frozen matrix lies in arrays: dense in one, or quantised in codes, scales, biases."""

    bits: int = 0
    group: int = 0

    @property
    def count(self) -> int:
        return 3 if self.bits else 1

    def width(self, arrays: Sequence[Array]) -> int:
        """Its columns."""
        return arrays[1].shape[1] * self.group if self.bits else arrays[0].shape[1]

    def build(self, arrays: Sequence[Array], backend: Backend) -> FrozenMatrix:
        if not self.bits:
            return DenseMatrix(arrays[0], backend.xp, backend.loops)
        codes, scales, biases = arrays
        return QuantizedMatrix(
            codes, scales, biases, self.bits, self.group, backend.xp, backend.loops
        )


@dataclass(frozen=True)
class ProjectionForm:
    """How a projection lies in arrays: the matrix's, then bias, lora_a, lora_b where present."""

    matrix: MatrixForm
    biased: bool
    adapted: bool
    scale: float

    @property
    def count(self) -> int:
        return self.matrix.count + self.biased + 2 * self.adapted

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (False,) * (self.matrix.count + self.biased) + (True, True) * self.adapted

    def build(self, arrays: Sequence[Array], backend: Backend) -> Projection:
        rest = list(arrays[self.matrix.count :])
        weight = self.matrix.build(arrays[: self.matrix.count], backend)
        bias = rest.pop(0) if self.biased else None
        lora_a, lora_b = rest if self.adapted else (None, None)
        return Projection(weight, bias, lora_a, lora_b, self.scale)

    def gradients(
        self, gradients: LoraGradients | None, projection: Projection, xp: Any
    ) -> Gradients:
        """For each of the projection's arrays."""
        frozen = (None,) * (self.matrix.count + self.biased)
        if gradients is None:
            return frozen
        a: Any = projection.lora_a
        b: Any = projection.lora_b
        return (*frozen, cast(gradients.da, a.dtype, xp), cast(gradients.db, b.dtype, xp))


@dataclass(frozen=True)
class EmbeddingKernel(Kernel):
    @property
    def differentiable(self) -> tuple[bool, ...]:
        return False, True

    def forward(
        self, backend: Backend, tokens: Array, table: Array, *, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        matrix = DenseMatrix(table, backend.xp, backend.loops)
        out, _ = backend.ops.embedding.forward(tokens, matrix, dtype=table.dtype)
        return out, ()

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, tokens: Array, table: Array
    ) -> Gradients:
        dtable = backend.ops.embedding.backward(dout, None, tokens, table.shape[0])
        return None, cast(dtable, table.dtype, backend.xp)


@dataclass(frozen=True)
class RmsNormKernel(Kernel):
    eps: float
    plus_one: bool

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return True, True

    def forward(
        self, backend: Backend, x: Array, weight: Array, *, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        out, saved = backend.ops.rms_norm.forward(x, weight, eps=self.eps, plus_one=self.plus_one)
        return out, (saved.rstd,)

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, x: Array, weight: Array
    ) -> Gradients:
        dx, dweight = backend.ops.rms_norm.backward(
            dout, RmsNormSaved(x, *saved), weight, plus_one=self.plus_one, weight_gradient=True
        )
        return cast(dx, x.dtype, backend.xp), cast(dweight, weight.dtype, backend.xp)


@dataclass(frozen=True)
class RopeKernel(Kernel):
    interleaved: bool

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return True, False, False

    def forward(
        self, backend: Backend, x: Array, cos: Array, sin: Array, *, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        out, _ = backend.ops.rope.forward(x, cos, sin, interleaved=self.interleaved)
        return out, ()

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, x: Array, cos: Array, sin: Array
    ) -> Gradients:
        dx = backend.ops.rope.backward(dout, None, cos, sin, interleaved=self.interleaved)
        return cast(dx, x.dtype, backend.xp), None, None


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    scale: float
    window: int | None
    softcap: float | None
    segmented: bool

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True, True, True) + (False,) * self.segmented

    def forward(
        self, backend: Backend, q: Array, k: Array, v: Array, *segment: Array, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        o, saved = backend.ops.attention.forward(q, k, v, plan=self._plan(backend, q, segment))
        return o, (o, saved.lse)

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, q: Array, k: Array, v: Array,
        *segment: Array,
    ) -> Gradients:  # fmt: skip
        o, lse = saved
        gradients = backend.ops.attention.backward(
            dout, AttentionSaved(lse), q, k, v, o, plan=self._plan(backend, q, segment)
        )
        pairs = zip(gradients, (q, k, v), strict=True)
        narrow = tuple(cast(d, a.dtype, backend.xp) for d, a in pairs)
        return narrow + (None,) * self.segmented

    def _plan(self, backend: Backend, q: Array, segment: tuple[Array, ...]) -> AttentionPlan:
        if segment:
            ids = cast(segment[0], backend.dtype("int32"), backend.xp)
        else:
            ids = backend.xp.zeros((q.shape[0],), dtype=backend.dtype("int32"))
        return AttentionPlan(
            segment=ids,
            first_key_tile=backend.first_key_tiles(ids, self.window),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            query_tile=backend.tiles.query,
            key_tile=backend.tiles.key,
        )


@dataclass(frozen=True)
class FrozenLinearKernel(Kernel):
    form: ProjectionForm

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True, *self.form.differentiable)

    def forward(
        self, backend: Backend, x: Array, *arrays: Array, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        p = self.form.build(arrays, backend)
        y, _ = backend.ops.frozen_linear.forward(_rows(x, backend), p.weight, p.bias)
        return _like(y, x, backend), ()

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, x: Array, *arrays: Array
    ) -> Gradients:
        weight = self.form.build(arrays, backend).weight
        dx = backend.ops.frozen_linear.backward(_rows(dout, backend), None, weight)
        dx = cast(_like(dx, x, backend), x.dtype, backend.xp)
        return (dx, *(None for _ in arrays))


@dataclass(frozen=True)
class LoraLinearKernel(Kernel):
    """key: of the dropout mask (two words), unused where ``rate`` is 0."""

    form: ProjectionForm
    rate: float
    key: tuple[int, int]

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True, *self.form.differentiable)

    def forward(
        self, backend: Backend, x: Array, *arrays: Array, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        rows = _rows(x, backend)
        projection = self.form.build(arrays, backend)
        dropout = self._dropout(rows.shape[0], backend)
        y, _ = backend.ops.lora_linear.forward(rows, projection, dropout=dropout)
        return _like(y, x, backend), ()

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, x: Array, *arrays: Array
    ) -> Gradients:
        projection, rows = self.form.build(arrays, backend), _rows(x, backend)
        dx, gradients = backend.ops.lora_linear.backward(
            _rows(dout, backend),
            LoraLinearSaved(rows),
            projection,
            dropout=self._dropout(rows.shape[0], backend),
        )
        dx = cast(_like(dx, x, backend), x.dtype, backend.xp)
        return (dx, *self.form.gradients(gradients, projection, backend.xp))

    def _dropout(self, tokens: int, backend: Backend) -> Dropout | None:
        """Row n is token n of sequence 0."""
        if not self.rate:
            return None
        words, xp = backend.words, backend.xp
        position = xp.astype(xp.arange(tokens, dtype=xp.int32), words.dtype)
        return Dropout(self.rate, self.key, xp.zeros_like(position), position, words)


@dataclass(frozen=True)
class GatedMlpKernel(Kernel):
    gate: ProjectionForm
    up: ProjectionForm
    down: ProjectionForm
    activation: str

    @property
    def _forms(self) -> tuple[ProjectionForm, ...]:
        return self.gate, self.up, self.down

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True, *(flag for form in self._forms for flag in form.differentiable))

    def forward(
        self, backend: Backend, x: Array, *arrays: Array, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        rows = _rows(x, backend)
        y, _ = backend.ops.gated_mlp.forward(
            rows, *self._projections(arrays, backend), plan=self._plan(rows, backend)
        )
        return _like(y, x, backend), ()

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, x: Array, *arrays: Array
    ) -> Gradients:
        rows, projections = _rows(x, backend), self._projections(arrays, backend)
        dx, *gradients = backend.ops.gated_mlp.backward(
            _rows(dout, backend), GatedMlpSaved(rows), *projections, plan=self._plan(rows, backend)
        )
        dx = cast(_like(dx, x, backend), x.dtype, backend.xp)
        by_projection = zip(self._forms, gradients, projections, strict=True)
        parts = (form.gradients(d, p, backend.xp) for form, d, p in by_projection)
        return (dx, *(gradient for part in parts for gradient in part))

    def _projections(self, arrays: Sequence[Array], backend: Backend) -> list[Projection]:
        projections, at = [], 0
        for form in self._forms:
            projections.append(form.build(arrays[at : at + form.count], backend))
            at += form.count
        return projections

    def _plan(self, rows: Array, backend: Backend) -> MlpPlan:
        feature_tile = rows_per_tile(3 * rows.shape[1], backend.tiles.weights)
        return MlpPlan(self.activation, feature_tile, backend.tiles.tokens)


@dataclass(frozen=True)
class CrossEntropyKernel(Kernel):
    matrix: MatrixForm
    weighted: bool
    normalizer: float | None

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (True,) + (False,) * (1 + self.weighted + self.matrix.count)

    def forward(
        self, backend: Backend, x: Array, targets: Array, *rest: Array, gradient: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        xp = backend.xp
        if self.weighted:
            weights, arrays = rest[0], rest[1:]
            normalizer = xp.sum(weights) if self.normalizer is None else self.normalizer
        else:
            weights, arrays = xp.ones(targets.shape, dtype=xp.float32), rest
            normalizer = float(targets.shape[0]) if self.normalizer is None else self.normalizer
        loss, saved = backend.ops.linear_cross_entropy.forward(
            x,
            self.matrix.build(arrays, backend),
            targets,
            weights,
            normalizer=normalizer,
            gradient=gradient,
            vocabulary_tile=rows_per_tile(x.shape[1], backend.tiles.weights),
            token_tile=backend.tiles.tokens,
        )
        return loss, (saved.dx,) if gradient else ()

    def backward(
        self, backend: Backend, dout: Array, saved: tuple, x: Array, *rest: Array
    ) -> Gradients:
        dx = backend.ops.linear_cross_entropy.backward(dout, CrossEntropySaved(*saved))
        return (cast(dx, x.dtype, backend.xp), *(None for _ in rest))


def _rows(x: Array, backend: Backend) -> Array:
    """[..., D] as [N, D]."""
    return x if x.ndim == 2 else backend.xp.reshape(x, (-1, x.shape[-1]))


def _like(y: Array, x: Array, backend: Backend) -> Array:
    """[N, D] with the leading axes of ``x``."""
    return y if x.ndim == 2 else backend.xp.reshape(y, (*x.shape[:-1], y.shape[-1]))
