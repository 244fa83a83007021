"""Dropout whose mask is a function of a counter: Threefry-2x32. Derivation: docs/dropout.md.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: The number of each projection in the key.
PROJECTION_NUMBERS = {"q": 0, "k": 1, "v": 2, "o": 3, "gate": 4, "up": 5, "down": 6}

_WORD = np.uint64(0xFFFFFFFF)
_PARITY = np.uint64(0x1BD11BDA)
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)

Word = int | np.ndarray


def _rotate_left(word: np.ndarray, bits: int) -> np.ndarray:
    return ((word << np.uint64(bits)) | (word >> np.uint64(32 - bits))) & _WORD


def threefry2x32(
    key: Sequence[Word], counter: Sequence[Word], rounds: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32: two random 32-bit words of a two-word key and a two-word counter.

    Every word is an integer in [0, 2³²) or an array of them; arrays broadcast. Each round is
    x₀ += x₁, x₁ = rotl(x₁) xor x₀ (mod 2³²); after every fourth round the next two words of the
    key schedule (k₀, k₁, k₀ xor k₁ xor parity) are added, and the number of the injection.
    Returns uint64 arrays that hold 32-bit words.
    """
    key0, key1, x0, x1 = (np.asarray(word, dtype=np.uint64) for word in (*key, *counter))
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = (x0 + key0) & _WORD, (x1 + key1) & _WORD
    for i in range(rounds):
        x0 = (x0 + x1) & _WORD
        x1 = _rotate_left(x1, _ROTATIONS[i % 8]) ^ x0
        if i % 4 == 3:
            injection = i // 4 + 1
            x0 = (x0 + schedule[injection % 3]) & _WORD
            x1 = (x1 + schedule[(injection + 1) % 3] + np.uint64(injection)) & _WORD
    return x0, x1


def dropout_words(
    seed: int,
    step: int,
    layer: int,
    projection: int,
    sequence: np.ndarray,
    position: np.ndarray,
    features: int,
) -> np.ndarray:
    """One random 32-bit word for each token and feature.

    sequence, position: [N] integers. Returns [N, features] uint64.
    """
    projection_key = threefry2x32(
        (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), (step, layer * 256 + projection)
    )
    token_key = threefry2x32(projection_key, (sequence, position))
    pair = np.arange((features + 1) // 2)
    words = threefry2x32((token_key[0][:, None], token_key[1][:, None]), (pair[None, :], 0))
    return np.stack(words, axis=-1).reshape(len(sequence), -1)[:, :features]


def dropout_multiplier(rate: float, words: np.ndarray) -> np.ndarray:
    """m = [word ≥ round(rate·2³²)] / (1 - rate), float64 in the shape of words."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"the dropout rate must be in [0, 1), not {rate}")
    threshold = np.uint64(round(rate * 2**32))
    return (words >= threshold).astype(np.float64) / (1.0 - rate)


def dropout_forward(x: np.ndarray, multiplier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """m∘x. x, multiplier: [N, in]. Returns ([N, in], saved), saved being the multiplier."""
    return multiplier * x, multiplier


def dropout_backward(dy: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """dx = m∘dy. dy: [N, in]. Returns dx: [N, in]."""
    return saved * dy
