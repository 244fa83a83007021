"""Token embedding. Mathematics: docs/embedding.md."""

from __future__ import annotations

from typing import Any

from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.loops import Loops
from mesp_core.formulas.precision import cast, wide

Array = Any


def embedding_forward(
    tokens: Array, table: FrozenMatrix, *, dtype: Any, xp: Any
) -> tuple[Array, None]:
    """out[n] = table[tokens[n]].

    tokens: [N] integers; table: [V, D]; out: [N, D] in ``dtype``. Only the rows named are read.
    """
    return cast(table.take(tokens), dtype, xp), None


def embedding_backward(
    dout: Array, saved: None, tokens: Array, rows: int, *, tile: int = 1024, loops: Loops, xp: Any
) -> Array:
    """dtable[v] = Σ dout[n] over the n with tokens[n] = v, for whoever trains the table.

    dout: [N, D]; rows: V; dtable: [V, D] in the accumulation dtype, built ``tile`` rows at a
    time as a product with the tile's one-hot matrix. A frozen table needs no call.
    """
    dout = wide(dout, xp)
    index = xp.arange(rows, dtype=tokens.dtype)

    def body(i: Any, dtable: Array) -> Array:
        rows_here = xp.expand_dims(loops.tile(index, i, tile, 0), axis=1)
        hits = xp.astype(rows_here == xp.expand_dims(tokens, axis=0), dout.dtype)
        return loops.put(dtable, i, tile, 0, xp.matmul(hits, dout))

    dtable = xp.zeros((rows, dout.shape[1]), dtype=dout.dtype)
    return loops.fold_tiles(body, dtable, rows, tile)
