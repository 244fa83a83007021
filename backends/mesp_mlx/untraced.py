"""Arrays that no function transformation follows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def untraced(array: mx.array) -> mx.array:
    """A copy of ``array`` that MLX does not know to depend on anything.

    Whatever is computed from an input of ``mx.grad`` keeps what it was computed from until the
    transformation ends, evaluated or not, also inside ``mx.custom_function``: a kernel that works
    in tiles would keep every tile.
    """
    if array.dtype == mx.bfloat16:
        return mx.array(_host(array.view(mx.uint16))).view(mx.bfloat16)
    return mx.array(_host(array), dtype=array.dtype)


def _host(array: mx.array) -> np.ndarray:
    mx.eval(array)
    return np.asarray(array)
