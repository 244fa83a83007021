"""A ragged batch: the sequences' tokens one after the other, with no padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """tokens, targets: [N] integers; weights: [N], 0 for a masked target; starts: [B+1]."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    starts: np.ndarray


def segment_and_position(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sequence that each token belongs to, and its place there: two [N] integer arrays.

    starts: [B+1], where each sequence begins, the last entry being N.
    """
    lengths = np.diff(starts)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    return segment, position
