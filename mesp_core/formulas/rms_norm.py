"""Root-mean-square normalisation (Zhang & Sennrich 2019). Mathematics: docs/rms_norm.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp_core.formulas.precision import cast, wide

Array = Any


@dataclass(frozen=True)
class RmsNormSaved:
    """x: the input [..., D] (the caller holds it anyway).
    rstd: 1/√(mean x² + eps) [..., 1]: one number a row, dearer to recompute than to keep."""

    x: Array
    rstd: Array


def rms_norm_forward(
    x: Array, weight: Array, *, eps: float, plus_one: bool = False, xp: Any
) -> tuple[Array, RmsNormSaved]:
    """out = x · rstd · w with rstd = 1/√(mean(x²) + eps), w = weight or 1 + weight.

    x: [..., D]; weight: [D]; out: [..., D] in the dtype of x, computed in float32 or wider.
    """
    x_wide = wide(x, xp)
    rstd = 1.0 / xp.sqrt(xp.mean(x_wide * x_wide, axis=-1, keepdims=True) + eps)
    out = x_wide * rstd * _gain(weight, plus_one, x_wide.dtype, xp)
    return cast(out, x.dtype, xp), RmsNormSaved(x, rstd)


def rms_norm_backward(
    dout: Array,
    saved: RmsNormSaved,
    weight: Array,
    *,
    plus_one: bool = False,
    weight_gradient: bool = False,
    xp: Any,
) -> tuple[Array, Array | None]:
    """dx = rstd · (g − n · mean(g · n)) with n = x · rstd, g = dout · w; dweight = Σ dout · n.

    dout: [..., D]. Returns (dx, dweight): dx [..., D] in the dtype of x; dweight [D] in the
    accumulation dtype, None unless ``weight_gradient`` (the weight is frozen under LoRA).
    """
    dout_wide = wide(dout, xp)
    normed = wide(saved.x, xp) * saved.rstd
    g = dout_wide * _gain(weight, plus_one, dout_wide.dtype, xp)
    dx = saved.rstd * (g - normed * xp.mean(g * normed, axis=-1, keepdims=True))
    dweight = None
    if weight_gradient:
        width = dout.shape[-1]
        dweight = xp.sum(xp.reshape(dout_wide * normed, (-1, width)), axis=0)
    return cast(dx, saved.x.dtype, xp), dweight


def _gain(weight: Array, plus_one: bool, dtype: Any, xp: Any) -> Array:
    weight = cast(weight, dtype, xp)
    return 1.0 + weight if plus_one else weight
