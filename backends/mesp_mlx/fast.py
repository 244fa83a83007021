"""Components for which MLX has a kernel of its own that wins on a GPU."""

from __future__ import annotations

import mlx.core as mx

from mesp_core.formulas.rms_norm import RmsNormSaved


def rms_norm_forward(
    x: mx.array, weight: mx.array, *, eps: float, plus_one: bool = False
) -> tuple[mx.array, RmsNormSaved]:
    """``rms_norm_forward`` of the formulas by ``mx.fast.rms_norm``.

    rstd stays an unevaluated graph: a forward pass that drops ``saved`` never computes it.
    """
    gain = (1.0 + weight if plus_one else weight).astype(x.dtype)
    x_wide = x.astype(mx.float32)
    rstd = mx.rsqrt(mx.mean(x_wide * x_wide, axis=-1, keepdims=True) + eps)
    return mx.fast.rms_norm(x, gain, eps), RmsNormSaved(x, rstd)
