"""Gated MLP with low-rank adapters on its three projections, in tiles of F and of tokens.

Mathematics: docs/gated_mlp.md. The weights are outermost: each tile of them is read (and
dequantised) once, for the recomputation and for the gradient. Live memory is one tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mesp_core.formulas.activation import FORMULA, Activations
from mesp_core.formulas.dropout import Dropout, dropout_multiplier
from mesp_core.formulas.loops import Loops
from mesp_core.formulas.lora_linear import LoraGradients, Projection, low_rank, project
from mesp_core.formulas.precision import cast, wide

Array = Any


@dataclass(frozen=True)
class MlpPlan:
    """activation: silu or gelu_tanh; feature_tile: features of F in a tile; token_tile: tokens
    in one; dropouts: the masks of the gate, up and down adapters' inputs."""

    activation: str
    feature_tile: int
    token_tile: int
    dropouts: tuple[Dropout | None, Dropout | None, Dropout | None] = (None, None, None)


@dataclass(frozen=True)
class GatedMlpSaved:
    """x: the input [N, D]; gate, up and their product are recomputed a tile of F at a time."""

    x: Array


def gated_mlp_forward(
    x: Array,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    plan: MlpPlan,
    activations: Activations = FORMULA,
    loops: Loops,
    xp: Any,
) -> tuple[Array, GatedMlpSaved]:
    """y = down(act(gate(x)) ∘ up(x)), every projection with its adapter.

    x: [N, D]; gate, up: [F, D]; down: [D, F]; y: [N, D] in the dtype of x.
    """
    tokens = x.shape[0]
    inputs = _Inputs.of(x, gate, up, plan, xp)
    y = xp.zeros((tokens, down.weight.shape[0]), dtype=inputs.dtype)
    h_down = _zeros_low_rank(tokens, down, inputs.dtype, xp)

    def features(i: Any, carry: tuple) -> tuple:
        tile = _FeatureTile.of(i, gate, up, down, plan, loops)

        def rows(j: Any, state: tuple) -> tuple:
            y, h_down = state
            here = inputs.rows(j, plan, loops)
            g, u = tile.gate_up(here, xp)
            a = activations.value(g, plan.activation, xp=xp) * u
            y = _add(y, j, tile.down.weight.matmul(a), plan, loops)
            if h_down is not None:
                h_down = _add(h_down, j, tile.low_rank_down(a, j, plan, loops, xp), plan, loops)
            return y, h_down

        return loops.fold_tiles(rows, carry, tokens, plan.token_tile)

    width = gate.weight.shape[0]
    y, h_down = loops.fold_tiles(features, (y, h_down), width, plan.feature_tile)
    if down.bias is not None:
        y = y + cast(down.bias, y.dtype, xp)
    if h_down is not None:
        y = y + xp.matmul(down.scale * h_down, cast(down.lora_b, y.dtype, xp))
    return cast(y, x.dtype, xp), GatedMlpSaved(x)


def gated_mlp_backward(
    dy: Array,
    saved: GatedMlpSaved,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    plan: MlpPlan,
    activations: Activations = FORMULA,
    loops: Loops,
    xp: Any,
) -> tuple[Array, LoraGradients | None, LoraGradients | None, LoraGradients | None]:
    """With a = act(g) ∘ u: da = dy W_d + m ∘ (t_d A_dᵀ), dg = da ∘ u ∘ act′(g),
    du = da ∘ act(g); then every projection's LoRA backward, its sums collected over tiles of F.

    dy: [N, D]. Returns (dx, dgate, dup, ddown): dx [N, D] in the accumulation dtype, gradients
    None where a projection has no adapter. ``down`` itself is never recomputed.
    """
    tokens, x = dy.shape[0], saved.x
    inputs = _Inputs.of(x, gate, up, plan, xp)
    dy_wide = cast(dy, inputs.dtype, xp)
    t_down = None
    if down.lora_b is not None:
        b_down = xp.matrix_transpose(cast(down.lora_b, dy_wide.dtype, xp))
        t_down = down.scale * xp.matmul(dy_wide, b_down)
    sums = GatedMlpSums.zeros(x, gate, up, down, inputs.dtype, xp)

    def features(i: Any, sums: GatedMlpSums) -> GatedMlpSums:
        tile = _FeatureTile.of(i, gate, up, down, plan, loops)

        def rows(j: Any, sums: GatedMlpSums) -> GatedMlpSums:
            here = inputs.rows(j, plan, loops)
            dy_here = loops.tile(dy_wide, j, plan.token_tile, 0)
            t_here = None if t_down is None else loops.tile(t_down, j, plan.token_tile, 0)
            return _tile_backward(
                dy_here, t_here, here, tile, sums, i, j, plan, activations, loops, xp
            )

        return loops.fold_tiles(rows, sums, tokens, plan.token_tile)

    sums = loops.fold_tiles(features, sums, gate.weight.shape[0], plan.feature_tile)
    dx, dgate = _input_adapter(sums.dx, x, sums.t_gate, gate, sums.db_gate, plan.dropouts[0], xp)
    # Lets go of the sum that has just been added to.
    sums = replace(sums, dx=dx)
    dx, dup = _input_adapter(dx, x, sums.t_up, up, sums.db_up, plan.dropouts[1], xp)
    ddown = None
    if sums.h_down is not None:
        db_down = down.scale * xp.matmul(xp.matrix_transpose(sums.h_down), dy_wide)
        ddown = LoraGradients(sums.da_down, db_down)
    return dx, dgate, dup, ddown


@dataclass(frozen=True)
class _Inputs:
    """The input in its accumulation dtype, with h = (m ∘ x) A of gate and up."""

    x: Array
    h_gate: Array | None
    h_up: Array | None

    @classmethod
    def of(cls, x: Array, gate: Projection, up: Projection, plan: MlpPlan, xp: Any) -> _Inputs:
        x = wide(x, xp)
        h_gate = low_rank(x, gate, plan.dropouts[0], xp=xp)
        return cls(x, h_gate, low_rank(x, up, plan.dropouts[1], xp=xp))

    @property
    def dtype(self) -> Any:
        return self.x.dtype

    def rows(self, j: Any, plan: MlpPlan, loops: Loops) -> _Inputs:
        parts = (self.x, self.h_gate, self.h_up)
        return _Inputs(*(_cut(part, j, plan.token_tile, 0, loops) for part in parts))


@dataclass(frozen=True)
class _FeatureTile:
    """The three projections cut to one tile of F: rows of gate and up, columns of down."""

    index: Any
    gate: Projection
    up: Projection
    down: Projection

    @classmethod
    def of(
        cls, i: Any, gate: Projection, up: Projection, down: Projection, plan: MlpPlan, loops: Loops
    ) -> _FeatureTile:
        size = plan.feature_tile
        down_tile = replace(
            down,
            weight=down.weight.tile(i, size, 1),
            bias=None,
            lora_a=_cut(down.lora_a, i, size, 0, loops),
        )
        gate_tile, up_tile = (
            replace(
                p,
                weight=p.weight.tile(i, size, 0),
                bias=_cut(p.bias, i, size, 0, loops),
                lora_b=_cut(p.lora_b, i, size, 1, loops),
            )
            for p in (gate, up)
        )
        return cls(i, gate_tile, up_tile, down_tile)

    def gate_up(self, here: _Inputs, xp: Any) -> tuple[Array, Array]:
        g = project(self.gate, here.x, here.h_gate, xp=xp)
        return g, project(self.up, here.x, here.h_up, xp=xp)

    def mask(self, a: Array, j: Any, plan: MlpPlan, loops: Loops, xp: Any) -> Array | None:
        """The multiplier of down's dropout for this tile of features and token tile ``j``."""
        dropout = plan.dropouts[2]
        if dropout is None:
            return None
        dropout = replace(
            dropout,
            sequence=loops.tile(dropout.sequence, j, plan.token_tile, 0),
            position=loops.tile(dropout.position, j, plan.token_tile, 0),
        )
        first = self.index * plan.feature_tile
        return dropout_multiplier(dropout, first, a.shape[1], dtype=a.dtype, xp=xp)

    def low_rank_down(self, a: Array, j: Any, plan: MlpPlan, loops: Loops, xp: Any) -> Array:
        mask = self.mask(a, j, plan, loops, xp)
        a = a if mask is None else a * mask
        return xp.matmul(a, cast(self.down.lora_a, a.dtype, xp))


@dataclass(frozen=True)
class GatedMlpSums:
    """What the tiles of the backward pass add up: by token (dx, t_gate, t_up, h_down) and by
    feature (db_gate, db_up, da_down); None where there is no adapter."""

    dx: Array
    t_gate: Array | None
    t_up: Array | None
    h_down: Array | None
    db_gate: Array | None
    db_up: Array | None
    da_down: Array | None

    @classmethod
    def zeros(
        cls, x: Array, gate: Projection, up: Projection, down: Projection, dtype: Any, xp: Any
    ) -> GatedMlpSums:
        by_token = [_zeros_low_rank(x.shape[0], p, dtype, xp) for p in (gate, up, down)]
        by_feature = [
            None if a is None else xp.zeros(a.shape, dtype=dtype)
            for a in (gate.lora_b, up.lora_b, down.lora_a)
        ]
        return cls(xp.zeros(x.shape, dtype=dtype), *by_token, *by_feature)


def _tile_backward(
    dy: Array, t_down: Array | None, here: _Inputs, tile: _FeatureTile, sums: GatedMlpSums, i: Any,
    j: Any, plan: MlpPlan, activations: Activations, loops: Loops, xp: Any,
) -> GatedMlpSums:  # fmt: skip
    """One tile of features and tokens added to the sums."""
    transpose = xp.matrix_transpose
    g, u = tile.gate_up(here, xp)
    act, slope = activations.with_slope(g, plan.activation, xp=xp)
    da = tile.down.weight.matmul_t(dy)
    new: dict[str, Array] = {}
    if t_down is not None:
        mask = tile.mask(da, j, plan, loops, xp)
        a_down = cast(tile.down.lora_a, da.dtype, xp)
        through, a = xp.matmul(t_down, transpose(a_down)), act * u
        if mask is not None:
            through, a = through * mask, a * mask
        da = da + through
        new["h_down"] = _add(sums.h_down, j, xp.matmul(a, a_down), plan, loops)
        share = xp.matmul(transpose(a), t_down)
        new["da_down"] = _add_features(sums.da_down, i, 0, share, plan, loops)
    dg, du = da * u * slope, da * act
    for name, d, p, h in (("gate", dg, tile.gate, here.h_gate), ("up", du, tile.up, here.h_up)):
        if h is None:
            continue
        b = cast(p.lora_b, d.dtype, xp)
        t = p.scale * xp.matmul(d, transpose(b))
        new["t_" + name] = _add(getattr(sums, "t_" + name), j, t, plan, loops)
        db = p.scale * xp.matmul(transpose(h), d)
        new["db_" + name] = _add_features(getattr(sums, "db_" + name), i, 1, db, plan, loops)
    dx = tile.gate.weight.matmul_t(dg) + tile.up.weight.matmul_t(du)
    return replace(sums, dx=_add(sums.dx, j, dx, plan, loops), **new)


def _input_adapter(
    dx: Array, x: Array, t: Array | None, p: Projection, db: Array | None, dropout: Dropout | None,
    xp: Any,
) -> tuple[Array, LoraGradients | None]:  # fmt: skip
    """Adds m ∘ (t Aᵀ) to dx, and completes the adapter's gradients with dA = (m ∘ x)ᵀ t."""
    if t is None:
        return dx, None
    x = cast(x, t.dtype, xp)
    through = xp.matmul(t, xp.matrix_transpose(cast(p.lora_a, t.dtype, xp)))
    if dropout is not None:
        mask = dropout_multiplier(dropout, 0, x.shape[1], dtype=x.dtype, xp=xp)
        x, through = x * mask, through * mask
    da = xp.matmul(xp.matrix_transpose(x), t)
    return dx + through, LoraGradients(da, db)


def _zeros_low_rank(tokens: int, projection: Projection, dtype: Any, xp: Any) -> Array | None:
    if projection.lora_a is None:
        return None
    return xp.zeros((tokens, projection.lora_a.shape[1]), dtype=dtype)


def _cut(a: Array | None, i: Any, size: int, axis: int, loops: Loops) -> Array | None:
    return None if a is None else loops.tile(a, i, size, axis)


def _add(a: Array, j: Any, x: Array, plan: MlpPlan, loops: Loops) -> Array:
    """``x`` added to token tile ``j`` of ``a``."""
    size = plan.token_tile
    return loops.put(a, j, size, 0, loops.tile(a, j, size, 0) + x)


def _add_features(a: Array, i: Any, axis: int, x: Array, plan: MlpPlan, loops: Loops) -> Array:
    """``x`` added to feature tile ``i`` of ``a`` along ``axis``."""
    size = plan.feature_tile
    return loops.put(a, i, size, axis, loops.tile(a, i, size, axis) + x)
