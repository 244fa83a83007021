"""RMS norm and RoPE."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mesp_reference import rms_norm, rope
from mesp_reference.check.case import Case, Problem
from mesp_reference.check.rig import Rig

EPS, THETA = 1e-5, 1e4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def _rms_norm(
    rig: Rig, *, rest: tuple[int, ...], tokens: int, plus_one: bool, weight_gradient: bool
) -> Problem:
    shape = (rig.ragged(tokens).tokens, *rest)
    values = rig.draw(x=shape, dout=shape, weight=shape[-1:])

    def reference(x: Any, dout: Any, weight: Any) -> dict[str, Any]:
        out, saved = rms_norm.rms_norm_forward(x, weight, EPS, plus_one=plus_one)
        dx, dweight = rms_norm.rms_norm_backward(dout, saved)
        return {"out": out, "dx": dx, "dweight": dweight if weight_gradient else None}

    x, dout = rig.array(values["x"]), rig.array(values["dout"])
    weight = rig.array(values["weight"], rig.wide)
    op = rig.backend.ops.rms_norm

    def run() -> dict[str, Any]:
        out, saved = op.forward(x, weight, eps=EPS, plus_one=plus_one)
        dx, dweight = op.backward(
            dout, saved, weight, plus_one=plus_one, weight_gradient=weight_gradient
        )
        return {"out": out, "dx": dx, "dweight": dweight}

    return Problem(values, reference, run, wide=("dweight",))


def _rope(
    rig: Rig,
    *,
    lengths: tuple[int, ...],
    heads: int,
    width: int,
    share: float = 1.0,
    interleaved: bool = False,
    scaling: dict[str, Any] | None = None,
) -> Problem:
    batch = rig.ragged(*lengths)
    shape = (batch.tokens, heads, width)
    values = rig.draw(x=shape, dout=shape)
    frequencies, amplitude = rope.rope_frequencies(width, THETA, scaling, share)

    def reference(x: Any, dout: Any) -> dict[str, Any]:
        out, saved = rope.rope_forward(
            x, batch.position, frequencies, amplitude=amplitude, interleaved=interleaved
        )
        return {"out": out, "dx": rope.rope_backward(dout, saved)}

    angle = batch.position[:, None] * frequencies
    cos = rig.array(np.cos(angle) * amplitude, rig.wide)
    sin = rig.array(np.sin(angle) * amplitude, rig.wide)
    x, dout = rig.array(values["x"]), rig.array(values["dout"])
    op = rig.backend.ops.rope

    def run() -> dict[str, Any]:
        out, saved = op.forward(x, cos, sin, interleaved=interleaved)
        return {"out": out, "dx": op.backward(dout, saved, cos, sin, interleaved=interleaved)}

    return Problem(values, reference, run)


def _norm_case(name: str, **options: Any) -> Case:
    return Case("rms_norm", name, partial(_rms_norm, **options))


def _rope_case(name: str, **options: Any) -> Case:
    return Case("rope", name, partial(_rope, **options))


CASES = (
    _norm_case("plain", rest=(19,), tokens=7, plus_one=False, weight_gradient=False),
    _norm_case("1+w by head", rest=(3, 8), tokens=7, plus_one=True, weight_gradient=True),
    _norm_case("256x576", rest=(576,), tokens=256, plus_one=False, weight_gradient=True),
    _rope_case("halves", lengths=(4, 3), heads=3, width=12),
    _rope_case("interleaved", lengths=(4, 3), heads=3, width=12, interleaved=True),
    _rope_case("partial", lengths=(4, 3), heads=3, width=12, share=0.5),
    _rope_case("256 tokens, llama3", lengths=(256,), heads=9, width=64, scaling=LLAMA3),
)
