"""Dropout as the formulas take it, and the multiplier the reference draws for the same counter."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mesp_core.formulas import Dropout, dropout_key
from mesp_reference.dropout import dropout_multiplier, dropout_words
from mesp_reference.ragged import segment_and_position
from tests.conformance.subjects import Subject

#: Three sequences of 3, 1 and 3 tokens.
STARTS = np.array([0, 3, 4, 7])
SEGMENT, POSITION = segment_and_position(STARTS)


@dataclass(frozen=True)
class Mask:
    """The counter of one projection's mask."""

    projection: int
    rate: float = 0.5
    seed: int = 2**40 + 17
    step: int = 5
    layer: int = 3
    sequence: np.ndarray = field(default_factory=SEGMENT.copy)
    position: np.ndarray = field(default_factory=POSITION.copy)

    def dropout(self, subject: Subject) -> Dropout:
        words = subject.words
        key = dropout_key(self.seed, self.step, self.layer, self.projection)
        counters = (
            subject.xp.astype(subject.array(part.astype(np.int32), "int32"), words.dtype)
            for part in (self.sequence, self.position)
        )
        return Dropout(self.rate, key, *counters, words)

    def words(self, features: int) -> np.ndarray:
        return dropout_words(
            self.seed,
            self.step,
            self.layer,
            self.projection,
            self.sequence,
            self.position,
            features,
        )

    def multiplier(self, features: int) -> np.ndarray:
        return dropout_multiplier(self.rate, self.words(features))
