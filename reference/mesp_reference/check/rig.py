"""A backend in one dtype, as a case uses it: arrays go in, and are looked at again afterwards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_core.backend import Backend
from mesp_core.files.safetensors_writer import to_bfloat16
from mesp_core.formulas.dropout import Dropout, dropout_key
from mesp_core.formulas.frozen_matrix import FrozenMatrix
from mesp_core.formulas.precision import cast
from mesp_core.stored_matrix import StoredMatrix
from mesp_reference.check.naive import round_to
from mesp_reference.dropout import dropout_multiplier, dropout_words
from mesp_reference.quantization import dequantize, quantize
from mesp_reference.ragged import segment_and_position

Array = Any

#: Bits and columns of a group of a quantised matrix; None where it is dense.
Packing = tuple[int, int] | None


@dataclass(frozen=True)
class Ragged:
    """A batch's sequences. segment, position: [N] integers."""

    segment: np.ndarray
    position: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.segment)

    @property
    def lengths(self) -> list[int]:
        return np.bincount(self.segment).tolist()


@dataclass(frozen=True)
class Mask:
    """The counter of one projection's dropout. A rate of 0.2 makes 1/(1 − rate) exact."""

    projection: int
    rate: float = 0.2
    seed: int = 2**40 + 17
    step: int = 5
    layer: int = 3

    def multiplier(self, batch: Ragged, features: int) -> np.ndarray:
        """The reference's factor on each feature: [N, features]."""
        counter = (self.seed, self.step, self.layer, self.projection)
        words = dropout_words(*counter, batch.segment, batch.position, features)
        return dropout_multiplier(self.rate, words)


class Rig:
    """backend, dtype: what is checked. seed: of everything drawn; ``name`` keeps cases apart."""

    def __init__(self, backend: Backend, dtype: str, seed: int = 0, name: str = "") -> None:
        self.backend = backend
        self.dtype = dtype
        self.wide = "float64" if dtype == "float64" else "float32"
        self.generator = np.random.default_rng((seed, zlib.crc32(name.encode())))
        self._watched: list[tuple[Array, np.ndarray]] = []

    def draw(self, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Standard normal float64 values that the dtype holds exactly, by name."""
        return {name: self.round(self.generator.standard_normal(s)) for name, s in shapes.items()}

    def round(self, values: np.ndarray) -> np.ndarray:
        return round_to(values, self.dtype)

    def ragged(self, *lengths: int) -> Ragged:
        """Sequences of these lengths, the last one longer where the backend needs a batch of a
        rounder length (``Backend.bucket``)."""
        more = self.backend.bucket(sum(lengths)) - sum(lengths)
        starts = np.cumsum([0, *lengths[:-1], lengths[-1] + more])
        return Ragged(*segment_and_position(starts))

    def array(self, values: np.ndarray, dtype: str | None = None) -> Array:
        """The backend's array, in the dtype unless another is named; it may not change."""
        array = self.owned(values, dtype)
        self._watched.append((array, np.array(self.backend.to_numpy(array))))
        return array

    def owned(self, values: np.ndarray, dtype: str | None = None) -> Array:
        """The backend's array, for whoever may overwrite it."""
        return self.backend.from_numpy(np.asarray(values), dtype or self.dtype)

    def integers(self, values: np.ndarray) -> Array:
        return self.array(np.asarray(values).astype(np.int32), "int32")

    def check_unchanged(self) -> None:
        """Raises AssertionError where an input was written into."""
        for array, before in self._watched:
            after = self.backend.to_numpy(array)
            assert np.array_equal(after, before), f"an input of shape {before.shape} was changed"

    def stored(self, values: np.ndarray, packing: Packing) -> tuple[StoredMatrix, np.ndarray]:
        """A matrix as a checkpoint in the dtype holds it, and the values it then has."""
        if packing is None:
            values = self.round(values)
            return StoredMatrix(values=encoded(values, self.dtype)), values
        bits, group = packing
        packed, *parts = quantize(values, group, bits)
        scales, biases = (self.round(part) for part in parts)
        octets = np.ascontiguousarray(packed).astype("<u4").view(np.uint8)
        stored = StoredMatrix(
            codes=octets.reshape(*scales.shape, group * bits // 8),
            scales=encoded(scales, self.dtype),
            biases=encoded(biases, self.dtype),
            bits=bits,
            group=group,
        )
        return stored, dequantize(packed, scales, biases, group, bits)

    def frozen(
        self, values: np.ndarray, packing: Packing = None, residency: str = "streamed"
    ) -> tuple[FrozenMatrix, np.ndarray]:
        """The backend's own frozen matrix of a stored one, and the values it has."""
        stored, values = self.stored(values, packing)
        return self.backend.frozen(stored, self.dtype, residency), values

    def dropout(self, mask: Mask, batch: Ragged) -> Dropout:
        words = self.backend.words
        sequence, position = (
            cast(self.integers(part), words.dtype, self.backend.xp)
            for part in (batch.segment, batch.position)
        )
        key = dropout_key(mask.seed, mask.step, mask.layer, mask.projection)
        return Dropout(mask.rate, key, sequence, position, words)

    def poison(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Fills memory of these shapes with NaN and lets go of it.

        An allocator that hands it out again gives a result with unwritten elements NaN, where it
        might have given the right values of an earlier run.
        """
        junk = [
            self.owned(np.full(shape, np.nan), dtype)
            for shape in shapes.values()
            for dtype in {self.dtype, self.wide}
            for _ in range(2)
        ]
        self.backend.stage(junk)


def encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values that ``dtype`` holds, as a file of that dtype has them; bfloat16 as uint16."""
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
