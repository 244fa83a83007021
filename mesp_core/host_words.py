"""Random words drawn by NumPy in place: on a CPU in half the time of array by array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_core.formulas.dropout import PARITY, ROTATIONS, Words

Array = Any


def threefry_in_place(
    key: tuple[np.ndarray, np.ndarray], counter: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """``random_words`` on uint32 arrays that broadcast, in three buffers of the result's shape."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY))
    shape = np.broadcast_shapes(*(part.shape for part in (*key, *counter)))
    a, b, left = (np.empty(shape, np.uint32) for _ in range(3))
    # 32-bit sums wrap around: that is the generator's arithmetic.
    with np.errstate(over="ignore"):
        np.add(counter[0], keys[0], out=a)
        np.add(counter[1], keys[1], out=b)
        for group in range(5):
            for rotation in ROTATIONS[group % 2]:
                a += b
                np.left_shift(b, np.uint32(rotation), out=left)
                b >>= np.uint32(32 - rotation)
                b |= left
                b ^= a
            a += keys[(group + 1) % 3]
            b += keys[(group + 2) % 3]
            b += np.uint32(group + 1)
    return a, b


@dataclass(frozen=True)
class HostWords(Words):
    """to_host: an array of ``dtype`` as uint32 NumPy; from_host: the way back."""

    to_host: Callable[[Array], np.ndarray]
    from_host: Callable[[np.ndarray], Array]

    def draw(self, key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
        first, second = threefry_in_place(
            (self.to_host(key[0]), self.to_host(key[1])),
            (self.to_host(counter[0]), self.to_host(counter[1])),
        )
        return self.from_host(first), self.from_host(second)
