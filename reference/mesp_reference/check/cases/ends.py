"""Both ends of a decoder: the embedding, and the head with its loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mesp_core.formulas.frozen_matrix import rows_per_tile
from mesp_reference import cross_entropy, embedding
from mesp_reference.check.case import DTYPES, WIDE_DTYPES, Case, Problem
from mesp_reference.check.rig import Packing, Rig


def _embedding(
    rig: Rig, *, tokens: int, rows: int, width: int, tile: int, packing: Packing = None
) -> Problem:
    n = rig.ragged(tokens).tokens
    table, values = rig.frozen(rig.generator.standard_normal((rows, width)), packing)
    inputs = {"table": values, **rig.draw(dout=(n, width))}
    # Some rows are taken often, most of them never.
    ids = rig.generator.integers(0, rows, n) // 3 * 3

    def reference(table: Any, dout: Any) -> dict[str, Any]:
        out, saved = embedding.embedding_forward(ids, table)
        return {"out": out, "dtable": embedding.embedding_backward(dout, saved)}

    ids_array, dout = rig.integers(ids), rig.array(inputs["dout"])
    op, dtype = rig.backend.ops.embedding, rig.backend.dtype(rig.dtype)

    def run() -> dict[str, Any]:
        out, saved = op.forward(ids_array, table, dtype=dtype)
        dtable = op.backward(dout, saved, ids_array, rows, tile=tile)
        return {"out": out, "dtable": dtable}

    return Problem(inputs, reference, run, wide=("dtable",))


def _linear_cross_entropy(
    rig: Rig,
    *,
    tokens: int,
    vocabulary: int,
    width: int,
    tiles: tuple[int, int] | None = None,
    packing: Packing = None,
    gradient: bool = True,
) -> Problem:
    """tiles: rows of the vocabulary and tokens; None for those of a model."""
    n = rig.ragged(tokens).tokens
    weight = rig.generator.standard_normal((vocabulary, width)) * (width**-0.5 * 2.0)
    matrix, values = rig.frozen(weight, packing, "resident")
    inputs = {"weight": values, **rig.draw(x=(n, width))}
    # Every third target is masked; the others count differently. All are exact in 16 bits.
    inputs["weights"] = np.resize([1.0, 0.0, 0.5, 2.0, 1.0, 0.0, 0.25, 1.5, 0.0], n)
    targets = rig.generator.integers(0, vocabulary, n)
    targets[:2] = vocabulary - 1, 0
    normalizer = 0.37 * n

    def reference(weight: Any, x: Any, weights: Any) -> dict[str, Any]:
        loss, saved = cross_entropy.linear_cross_entropy_forward(
            x, weight, targets, weights, normalizer
        )
        dx, _ = cross_entropy.linear_cross_entropy_backward(0.6, saved)
        return {"loss": loss, "dx": dx if gradient else None}

    x, backend = rig.array(inputs["x"]), rig.backend
    target_ids, weights = rig.integers(targets), rig.array(inputs["weights"], rig.wide)
    rows_tile, token_tile = tiles or (
        rows_per_tile(width, backend.tiles.weights),
        backend.tiles.tokens,
    )

    def run() -> dict[str, Any]:
        op = backend.ops.linear_cross_entropy
        loss, saved = op.forward(
            x,
            matrix,
            target_ids,
            weights,
            normalizer=normalizer,
            gradient=gradient,
            vocabulary_tile=rows_tile,
            token_tile=token_tile,
        )
        return {"loss": loss, "dx": op.backward(0.6, saved) if gradient else saved.dx}

    return Problem(inputs, reference, run, wide=("loss",))


def _loss_case(name: str, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> Case:
    return Case("linear_cross_entropy", name, partial(_linear_cross_entropy, **options), dtypes)


EMBEDDING = (
    Case("embedding", "dense", partial(_embedding, tokens=7, rows=37, width=11, tile=8)),
    Case(
        "embedding",
        "256 rows of 2053x576, 8 bits",
        partial(_embedding, tokens=256, rows=2053, width=576, tile=1024, packing=(8, 64)),
    ),
)
LINEAR_CROSS_ENTROPY = (
    _loss_case("tail tiles", WIDE_DTYPES, tokens=7, vocabulary=37, width=11, tiles=(8, 3)),
    _loss_case(
        "loss only", WIDE_DTYPES, tokens=7, vocabulary=37, width=11, tiles=(8, 3), gradient=False
    ),
    _loss_case(
        "131x576, 2053 rows, 4 bits", tokens=131, vocabulary=2053, width=576, packing=(4, 64)
    ),
)
