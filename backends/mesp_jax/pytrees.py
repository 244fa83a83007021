"""What is traced and what is compiled for, in each of the core's dataclasses."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

from mesp_core.block import Block, BlockPlan
from mesp_core.formulas.attention import AttentionPlan, AttentionSaved
from mesp_core.formulas.cross_entropy import CrossEntropySaved
from mesp_core.formulas.dropout import Dropout
from mesp_core.formulas.frozen_matrix import DenseMatrix, QuantizedMatrix
from mesp_core.formulas.gated_mlp import GatedMlpSaved, GatedMlpSums, MlpPlan
from mesp_core.formulas.lora_linear import LoraGradients, LoraLinearSaved, Projection
from mesp_core.formulas.rms_norm import RmsNormSaved
from mesp_core.head import Head
from mesp_jax.matrices import JaxDense, JaxQuantized
from mesp_jax.streamed import FetchedMatrix

#: Class: the fields that are traced, the fields that are compiled for.
_FIELDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Block: (
        ("input_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down", "q_norm", "k_norm"),
        (),
    ),
    BlockPlan: (
        ("cos", "sin", "attention", "mlp", "dropouts", "mask"),
        ("heads", "kv_heads", "eps", "norm_plus_one", "interleaved"),
    ),
    Head: (("norm", "weight"), ()),
    MlpPlan: (("dropouts",), ("activation", "feature_tile", "token_tile")),
    Projection: (("weight", "bias", "lora_a", "lora_b"), ("scale",)),
    LoraGradients: (("da", "db"), ()),
    AttentionSaved: (("lse",), ()),
    CrossEntropySaved: (("dx",), ()),
    GatedMlpSaved: (("x",), ()),
    GatedMlpSums: (
        ("dx", "t_gate", "t_up", "h_down", "db_gate", "db_up", "da_down"),
        (),
    ),
    LoraLinearSaved: (("x", "h"), ()),
    RmsNormSaved: (("x", "rstd"), ()),
    DenseMatrix: (("values",), ("xp", "loops")),
    QuantizedMatrix: (("codes", "scales", "biases"), ("bits", "group", "xp", "loops")),
    JaxDense: (("values",), ("dtype", "tile_weights")),
    JaxQuantized: (("arrays",), ("layout", "dtype", "tile_weights")),
    FetchedMatrix: (("number",), ("shape", "layout", "forms", "dtype", "tile_weights")),
}


@cache
def register_pytrees() -> None:
    """Tells JAX of the core's dataclasses, once in a process."""
    for kind, (data, meta) in _FIELDS.items():
        jax.tree_util.register_dataclass(kind, data_fields=data, meta_fields=meta)
    jax.tree_util.register_pytree_node(Dropout, _flatten_dropout, _unflatten_dropout)
    jax.tree_util.register_pytree_node(AttentionPlan, _flatten_plan, _unflatten_plan)


def _flatten_dropout(dropout: Dropout) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    # The key changes with every step, so it is data; as a Python int it would not fit an int32.
    key = tuple(np.asarray(k, np.uint32) if isinstance(k, int) else k for k in dropout.key)
    return (*key, dropout.sequence, dropout.position), (dropout.rate, dropout.words)


def _unflatten_dropout(meta: tuple[Any, ...], data: Any) -> Dropout:
    first, second, sequence, position = data
    return Dropout(meta[0], (first, second), sequence, position, meta[1])


def _flatten_plan(plan: AttentionPlan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    # A list would be a tree of Python ints, each of them compiled for.
    first = plan.first_key_tile
    first = np.asarray(first, np.int32) if isinstance(first, list) else first
    meta = (plan.scale, plan.window, plan.softcap, plan.query_tile, plan.key_tile)
    return (plan.segment, first), meta


def _unflatten_plan(meta: tuple[Any, ...], data: Any) -> AttentionPlan:
    return AttentionPlan(*data, *meta)
