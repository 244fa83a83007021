"""The frozen product, by the backend's own frozen matrices, and the linear layer with LoRA."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mesp_core.formulas.lora_linear import Projection
from mesp_core.stored_matrix import StoredMatrix
from mesp_reference import linear, lora_linear
from mesp_reference.check.case import DTYPES, WIDE_DTYPES, Case, Problem
from mesp_reference.check.rig import Mask, Packing, Rig
from mesp_reference.quantization import dequantize_q4_0, dequantize_q8_0

SCALE = 0.7


def _frozen_linear(
    rig: Rig,
    *,
    shape: tuple[int, int],
    packing: Packing = None,
    gguf: str | None = None,
    bias: bool = False,
    tokens: int = 7,
    residency: str = "streamed",
) -> Problem:
    """shape: (out, in). gguf: Q4_0 or Q8_0 in place of ``packing``."""
    if gguf is None:
        stored, values = rig.stored(rig.generator.standard_normal(shape), packing)
    else:
        stored, values = _gguf(rig, shape, gguf)
    matrix = rig.backend.frozen(stored, rig.dtype, residency)
    out, width = shape
    n = rig.ragged(tokens).tokens
    inputs = {"weight": values, **rig.draw(x=(n, width), dy=(n, out))}
    if bias:
        inputs |= rig.draw(bias=(out,))

    def reference(weight: Any, x: Any, dy: Any, bias: Any = None) -> dict[str, Any]:
        y, saved = linear.linear_forward(x, weight, bias)
        return {"y": y, "dx": linear.linear_backward(dy, saved)}

    x, dy = rig.array(inputs["x"]), rig.array(inputs["dy"])
    offset = rig.array(inputs["bias"], rig.wide) if bias else None
    op = rig.backend.ops.frozen_linear

    def run() -> dict[str, Any]:
        y, saved = op.forward(x, matrix, offset)
        return {"y": y, "dx": op.backward(dy, saved, matrix)}

    return Problem(inputs, reference, run)


def _gguf(rig: Rig, shape: tuple[int, int], kind: str) -> tuple[StoredMatrix, np.ndarray]:
    """A matrix of GGUF blocks, with float16 scales, and its values."""
    size = {"Q4_0": 16, "Q8_0": 32}[kind]
    blocks = (shape[0], shape[1] // 32)
    scales = rig.generator.uniform(0.01, 0.1, blocks).astype(np.float16)
    codes = rig.generator.integers(0, 256, (*blocks, size), dtype=np.uint8)
    octets = np.concatenate([scales[..., None].view(np.uint8), codes], axis=-1)
    octets = octets.reshape(shape[0], -1)
    if kind == "Q4_0":
        stored = StoredMatrix(codes=codes, scales=scales, bits=4, group=32, zero=8, order="halves")
        return stored, dequantize_q4_0(octets)
    stored = StoredMatrix(codes=codes.view(np.int8), scales=scales, bits=8, group=32)
    return stored, dequantize_q8_0(octets)


def _lora_linear(
    rig: Rig,
    *,
    shape: tuple[int, int] = (11, 19),
    rank: int = 3,
    packing: Packing = None,
    lengths: tuple[int, ...] = (4, 3),
    bias: bool = False,
    dropout: bool = False,
    adapted: bool = True,
    input_gradient: bool = True,
) -> Problem:
    out, width = shape
    batch = rig.ragged(*lengths)
    n = batch.tokens
    matrix, values = rig.frozen(rig.generator.standard_normal(shape), packing)
    inputs = {"weight": values, **rig.draw(x=(n, width), dy=(n, out))}
    if bias:
        inputs |= rig.draw(bias=(out,))
    if adapted:
        inputs |= rig.draw(a=(width, rank), b=(rank, out))
    mask = Mask(projection=2)
    if dropout:
        inputs["m"] = mask.multiplier(batch, width)

    def reference(
        weight: Any, x: Any, dy: Any, bias: Any = None, a: Any = None, b: Any = None, m: Any = None
    ) -> dict[str, Any]:
        y, saved = lora_linear.lora_linear_forward(x, weight, bias, a, b, SCALE, m)
        dx, da, db = lora_linear.lora_linear_backward(dy, saved)
        return {"y": y, "dx": dx if input_gradient else None, "da": da, "db": db}

    x, dy = rig.array(inputs["x"]), rig.array(inputs["dy"])
    offset, lora_a, lora_b = (
        rig.array(inputs[name], rig.wide) if name in inputs else None for name in ("bias", "a", "b")
    )
    projection = Projection(matrix, offset, lora_a, lora_b, SCALE)
    options = {"dropout": rig.dropout(mask, batch) if dropout else None}

    def run() -> dict[str, Any]:
        op = rig.backend.ops.lora_linear
        y, saved = op.forward(x, projection, **options)
        dx, pair = op.backward(dy, saved, projection, input_gradient=input_gradient, **options)
        da, db = (None, None) if pair is None else (pair.da, pair.db)
        return {"y": y, "dx": dx, "da": da, "db": db}

    narrow = ("dx",) if rig.backend.rounds_input_gradients(rig.dtype) else ()
    return Problem(inputs, reference, run, wide=("dx", "da", "db"), after_narrow=narrow)


def _frozen_case(
    name: str, shape: tuple[int, int], dtypes: tuple[str, ...] = DTYPES, **options: Any
) -> Case:
    return Case("frozen_linear", name, partial(_frozen_linear, shape=shape, **options), dtypes)


def _lora_case(name: str, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> Case:
    return Case("lora_linear", name, partial(_lora_linear, **options), dtypes)


CASES = (
    _frozen_case("dense, bias", (37, 19), bias=True),
    _frozen_case("4 bits by 64", (37, 192), packing=(4, 64)),
    _frozen_case("8 bits by 32", (37, 192), WIDE_DTYPES, packing=(8, 32)),
    _frozen_case("3 bits by 64", (37, 192), WIDE_DTYPES, packing=(3, 64)),
    _frozen_case("6 bits by 32", (37, 192), WIDE_DTYPES, packing=(6, 32), bias=True),
    _frozen_case("GGUF Q4_0", (37, 192), WIDE_DTYPES, gguf="Q4_0"),
    _frozen_case("GGUF Q8_0", (37, 192), gguf="Q8_0", residency="resident"),
    _frozen_case("dense 256x576 by 1536", (1536, 576), tokens=256, residency="resident"),
    _frozen_case("4 bits 256x576 by 2053", (2053, 576), packing=(4, 64), tokens=256),
    _lora_case("plain"),
    _lora_case("bias, dropout", WIDE_DTYPES, bias=True, dropout=True),
    _lora_case("no adapter", WIDE_DTYPES, bias=True, adapted=False),
    _lora_case("no input gradient", input_gradient=False),
    _lora_case(
        "4 bits 256x576 by 1536", shape=(1536, 576), rank=8, packing=(4, 64), lengths=(256,)
    ),
)
