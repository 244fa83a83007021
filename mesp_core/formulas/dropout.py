"""Dropout masks that are regenerated, never stored. Mathematics: docs/dropout.md.

Threefry-2x32 (Salmon et al. 2011) turns a counter into random words by additions, rotations and
exclusive ors of 32-bit integers, so every backend draws the same mask, for any tile of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any

#: Of Threefry-2x32: the rotations of its rounds, and the parity of its key schedule.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
_LOW = 0xFFFFFFFF


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two random 32-bit words of a key and a counter, all Python integers."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    a, b = (counter[0] + keys[0]) & _LOW, (counter[1] + keys[1]) & _LOW
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = (a + b) & _LOW
            b = ((b << rotation) | (b >> (32 - rotation))) & _LOW
            b ^= a
        a = (a + keys[(group + 1) % 3]) & _LOW
        b = (b + keys[(group + 2) % 3] + group + 1) & _LOW
    return a, b


@dataclass(frozen=True)
class Words:
    """32-bit arithmetic on arrays: uint32, or int64 with a mask where uint32 cannot add."""

    dtype: Any
    masked: bool
    xp: Any

    def constant(self, value: int) -> Array:
        return self.xp.asarray(value, dtype=self.dtype)

    def add(self, a: Array, b: Array) -> Array:
        total = a + b
        return self.xp.bitwise_and(total, self.constant(_LOW)) if self.masked else total

    def rotate(self, a: Array, by: int) -> Array:
        xp = self.xp
        left = xp.bitwise_left_shift(a, self.constant(by))
        if self.masked:
            left = xp.bitwise_and(left, self.constant(_LOW))
        return xp.bitwise_or(left, xp.bitwise_right_shift(a, self.constant(32 - by)))

    def draw(self, key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
        """``random_words``, or a backend's faster way to the same."""
        return random_words(key, counter, self)


def words_of(xp: Any, *, masked: bool = False) -> Words:
    """The arithmetic for a namespace; ``masked`` where it lacks unsigned additions."""
    return Words(xp.int64 if masked else xp.uint32, masked, xp)


def random_words(
    key: tuple[Array, Array], counter: tuple[Array, Array], words: Words
) -> tuple[Array, Array]:
    """Threefry-2x32 on arrays of ``words.dtype`` that broadcast against each other."""
    xp = words.xp
    parity = xp.bitwise_xor(xp.bitwise_xor(key[0], key[1]), words.constant(PARITY))
    keys = (key[0], key[1], parity)
    a, b = words.add(counter[0], keys[0]), words.add(counter[1], keys[1])
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = words.add(a, b)
            b = xp.bitwise_xor(words.rotate(b, rotation), a)
        a = words.add(a, keys[(group + 1) % 3])
        b = words.add(words.add(b, keys[(group + 2) % 3]), words.constant(group + 1))
    return a, b


@dataclass(frozen=True)
class Dropout:
    """The mask of one projection in one step: everything but which features are asked for.

    rate: probability of a zero. key: two words drawn from seed, step, layer and projection.
    sequence, position: [N] in ``words.dtype``: which token of which sequence each row is, so
    that tiling, bucketing or permuting the batch changes no mask.
    """

    rate: float
    key: tuple[int, int]
    sequence: Array
    position: Array
    words: Words


def dropout_key(seed: int, step: int, layer: int, projection: int) -> tuple[int, int]:
    """The key of one projection's mask in one step."""
    seed_words = (seed & _LOW, (seed >> 32) & _LOW)
    return threefry(seed_words, (step & _LOW, layer * 256 + projection))


def dropout_multiplier(dropout: Dropout, first: Any, width: int, *, dtype: Any, xp: Any) -> Array:
    """0 or 1/(1 − rate) for features first … first + width − 1 of every token: [N, width].

    Token key t = threefry(key, (sequence, position)); feature f takes word f mod 2 of
    threefry(t, (f // 2, 0)), and is kept when that word ≥ round(rate · 2³²).
    first: a multiple of 2.
    """
    words = dropout.words
    key = tuple(words.constant(word) for word in dropout.key)
    token = words.draw(key, (dropout.sequence, dropout.position))
    token = tuple(xp.expand_dims(word, axis=1) for word in token)
    pairs = (width + 1) // 2
    pair = xp.astype(xp.arange(pairs, dtype=xp.int32) + first // 2, words.dtype)
    zero = xp.zeros_like(pair)
    counter = (xp.expand_dims(pair, axis=0), xp.expand_dims(zero, axis=0))
    drawn = xp.stack(words.draw(token, counter), axis=-1)
    drawn = xp.reshape(drawn, (drawn.shape[0], 2 * pairs))[:, :width]
    kept = drawn >= words.constant(round(dropout.rate * 2**32))
    return xp.astype(kept, dtype) * (1.0 / (1.0 - dropout.rate))
