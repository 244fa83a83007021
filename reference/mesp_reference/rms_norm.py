"""RMS norm: y = x/rms(x) ∘ w, or ∘ (1 + w). Derivation: docs/rms_norm.md.

Source: Zhang and Sennrich, Root mean square layer normalization (NeurIPS 2019), eq. 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RmsNormSaved:
    """normed: [..., D], x·r; inverse_rms: [..., 1], r; gain: [D], w or 1 + w."""

    normed: np.ndarray
    inverse_rms: np.ndarray
    gain: np.ndarray


def rms_norm_forward(
    x: np.ndarray, weight: np.ndarray, eps: float, *, plus_one: bool = False
) -> tuple[np.ndarray, RmsNormSaved]:
    """y = g∘(x r), r = (mean(x²) + eps)^(-1/2), g = w or 1 + w, over the last axis.

    x: [..., D]; weight: [D]. Returns y: [..., D].
    """
    inverse_rms = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    gain = 1.0 + weight if plus_one else weight
    normed = x * inverse_rms
    return normed * gain, RmsNormSaved(normed, inverse_rms, gain)


def rms_norm_backward(dy: np.ndarray, saved: RmsNormSaved) -> tuple[np.ndarray, np.ndarray]:
    """u = g∘dy, dx = r (u - n mean(u∘n)), dw = Σ dy∘n over the tokens, n = x r.

    dy: [..., D]. Returns dx: [..., D], dweight: [D].
    """
    u = saved.gain * dy
    dx = saved.inverse_rms * (u - saved.normed * np.mean(u * saved.normed, axis=-1, keepdims=True))
    dweight = np.sum((dy * saved.normed).reshape(-1, dy.shape[-1]), axis=0)
    return dx, dweight
