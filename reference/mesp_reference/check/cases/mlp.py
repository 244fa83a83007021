"""The gated MLP in tiles of features and of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mesp_core.formulas.frozen_matrix import rows_per_tile
from mesp_core.formulas.gated_mlp import MlpPlan
from mesp_core.formulas.lora_linear import Projection
from mesp_reference import gated_mlp, lora_linear
from mesp_reference.check.case import DTYPES, WIDE_DTYPES, Case, Problem
from mesp_reference.check.rig import Mask, Packing, Rig

SCALE = 1.3
NAMES = ("gate", "up", "down")


def _gated_mlp(
    rig: Rig,
    *,
    sizes: tuple[int, int] = (13, 22),
    rank: int = 3,
    activation: str = "silu",
    tiles: tuple[int, int] | None = (8, 3),
    packing: Packing = None,
    lengths: tuple[int, ...] = (4, 3),
    adapted: tuple[str, ...] = NAMES,
    bias: bool = False,
    dropout: bool = False,
) -> Problem:
    """sizes: (D, F). tiles: features and tokens; None for those of a model."""
    d, f = sizes
    batch = rig.ragged(*lengths)
    inputs = rig.draw(x=(batch.tokens, d), dy=(batch.tokens, d))
    masks = {name: Mask(projection=4 + place) for place, name in enumerate(NAMES)}
    projections, drops = [], []
    for name in NAMES:
        shape = (d, f) if name == "down" else (f, d)
        made, matrix = _draw(rig, name, shape, packing, rank if name in adapted else 0, bias)
        if dropout:
            made[f"{name}_m"] = masks[name].multiplier(batch, shape[1])
        inputs |= made
        bias_array, a, b = (
            rig.array(made[key], rig.wide) if (key := f"{name}_{part}") in made else None
            for part in ("bias", "a", "b")
        )
        projections.append(Projection(matrix, bias_array, a, b, SCALE))
        drops.append(rig.dropout(masks[name], batch) if dropout else None)
    backend = rig.backend
    features, tokens = tiles or (
        rows_per_tile(3 * d, backend.tiles.weights),
        backend.tiles.tokens,
    )
    plan = MlpPlan(activation, features, tokens, (drops[0], drops[1], drops[2]))
    x, dy = rig.array(inputs["x"]), rig.array(inputs["dy"])

    def run() -> dict[str, Any]:
        op = backend.ops.gated_mlp
        y, saved = op.forward(x, *projections, plan=plan)
        dx, *pairs = op.backward(dy, saved, *projections, plan=plan)
        outputs = {"y": y, "dx": dx}
        for name, pair in zip(NAMES, pairs, strict=True):
            outputs[f"{name}_da"], outputs[f"{name}_db"] = (
                (None, None) if pair is None else (pair.da, pair.db)
            )
        return outputs

    gradients = ["dx", *(f"{name}_{part}" for name in NAMES for part in ("da", "db"))]
    # Every gradient passes through a product dy W.
    narrow = gradients if backend.rounds_input_gradients(rig.dtype) else ()
    reference = partial(_reference, activation)
    return Problem(inputs, reference, run, wide=gradients, after_narrow=narrow)


def _draw(
    rig: Rig, name: str, shape: tuple[int, int], packing: Packing, rank: int, bias: bool
) -> tuple[dict[str, Any], Any]:
    """The values of one projection by name, and its frozen matrix."""
    out, width = shape
    # Gates of order one lie where the activations bend.
    matrix, values = rig.frozen(rig.generator.standard_normal(shape) * width**-0.5, packing)
    made = {f"{name}_w": values}
    if bias:
        made |= rig.draw(**{f"{name}_bias": (out,)})
    if rank:
        lora_a = rig.generator.standard_normal((width, rank)) * width**-0.5
        made |= {f"{name}_a": rig.round(lora_a), **rig.draw(**{f"{name}_b": (rank, out)})}
    return made, matrix


def _reference(activation: str, x: Any, dy: Any, **parts: Any) -> Mapping[str, Any]:
    gate, up, down = (
        lora_linear.Projection(
            parts[f"{name}_w"],
            parts.get(f"{name}_bias"),
            parts.get(f"{name}_a"),
            parts.get(f"{name}_b"),
            SCALE,
            parts.get(f"{name}_m"),
        )
        for name in NAMES
    )
    y, saved = gated_mlp.gated_mlp_forward(x, gate, up, down, activation)
    dx, *pairs = gated_mlp.gated_mlp_backward(dy, saved)
    outputs = {"y": y, "dx": dx}
    for name, (da, db) in zip(NAMES, pairs, strict=True):
        outputs |= {f"{name}_da": da, f"{name}_db": db}
    return outputs


def _case(name: str, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> Case:
    return Case("gated_mlp", name, partial(_gated_mlp, **options), dtypes)


CASES = (
    _case("silu, bias", WIDE_DTYPES, bias=True),
    _case("gelu, down alone adapted", WIDE_DTYPES, activation="gelu_tanh", adapted=("down",)),
    _case(
        "dropout, 4 bits by 32",
        WIDE_DTYPES,
        sizes=(64, 96),
        tiles=(32, 512),
        packing=(4, 32),
        dropout=True,
    ),
    _case(
        "189 tokens, 576 by 1536, 4 bits",
        sizes=(576, 1536),
        rank=8,
        tiles=None,
        packing=(4, 64),
        lengths=(189,),
    ),
)
