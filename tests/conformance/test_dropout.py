"""Masks: the reference's words bit for bit, whatever the tiling, the order or the arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesp_core.formulas import dropout_key, dropout_multiplier, words_of
from mesp_core.formulas.dropout import Words, random_words, threefry
from tests.conformance.masks import POSITION, SEGMENT, Mask
from tests.conformance.subjects import SUBJECTS, Subject, settings_of

WIDTH = 13


def drawn(subject: Subject, mask: Mask, first: int = 0, width: int = WIDTH) -> np.ndarray:
    dtype = subject.native_dtype(subject.dtype)
    made = dropout_multiplier(mask.dropout(subject), first, width, dtype=dtype, xp=subject.xp)
    assert subject.dtype_name(made) == subject.dtype
    return subject.numpy(made)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.97])
def test_the_references_mask(subject: Subject, rate: float) -> None:
    mask = Mask(projection=6, rate=rate)
    made, expected = drawn(subject, mask), mask.multiplier(WIDTH)
    np.testing.assert_array_equal(made != 0, expected != 0)
    kept = made[made != 0].astype(np.float64)
    # One rounding of 1/(1 − rate) to the dtype.
    precision = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    np.testing.assert_allclose(kept, 1.0 / (1.0 - rate), rtol=precision[subject.dtype])


def test_tiles_and_permutations_of_a_mask(subject: Subject) -> None:
    mask = Mask(projection=1)
    whole = drawn(subject, mask)
    for first, width in ((0, 5), (4, 6), (10, 3), (2, 1)):
        np.testing.assert_array_equal(
            drawn(subject, mask, first, width), whole[:, first : first + width]
        )
    order = np.array([6, 3, 0, 5, 1, 2, 4])
    shuffled = replace(mask, sequence=SEGMENT[order], position=POSITION[order])
    np.testing.assert_array_equal(drawn(subject, shuffled), whole[order])


def test_a_word_at_the_threshold_is_kept(subject: Subject) -> None:
    """And the word one below it is not."""
    mask = Mask(projection=6)
    word = int(mask.words(WIDTH)[3, 4])
    for threshold, kept in ((word, True), (word + 1, False)):
        made = drawn(subject, replace(mask, rate=threshold / 2**32))
        assert (made[3, 4] != 0) == kept


@pytest.mark.parametrize(("width", "pairs"), [(1, 1), (2, 1), (12, 6), (13, 7)])
def test_no_more_words_are_drawn_than_there_are_features(width: int, pairs: int) -> None:
    drawn: list[tuple[int, ...]] = []

    class Watched(Words):
        def draw(self, key: Any, counter: Any) -> Any:
            drawn.append(counter[0].shape)
            return super().draw(key, counter)

    dropout = Mask(projection=1).dropout(Subject("numpy", "float32"))
    dropout = replace(dropout, words=Watched(np.uint32, False, np))
    dropout_multiplier(dropout, 2, width, dtype=np.float32, xp=np)
    assert drawn == [POSITION.shape, (1, pairs)]


#: torch's uint32 cannot add, shift or compare.
ARITHMETIC = [
    (name, masked) for name in SUBJECTS for masked in (False, True) if masked or name != "torch"
]


@pytest.mark.parametrize(("namespace", "masked"), ARITHMETIC)
def test_words_bit_for_bit(namespace: str, masked: bool) -> None:
    with settings_of(namespace, "int64" if masked else "float32"):
        check_words(namespace, masked)


def check_words(namespace: str, masked: bool) -> None:
    subject, mask = Subject(namespace, "float32"), Mask(projection=4, rate=0.3)
    xp, words = subject.xp, words_of(subject.xp, masked=masked)
    key = tuple(words.constant(word) for word in dropout_key(mask.seed, mask.step, mask.layer, 4))
    counter = tuple(
        xp.astype(subject.array(part.astype(np.int32), "int32"), words.dtype)
        for part in (mask.sequence, mask.position)
    )
    token = tuple(xp.expand_dims(word, axis=1) for word in random_words(key, counter, words))
    pair = xp.expand_dims(xp.astype(xp.arange(7, dtype=xp.int32), words.dtype), axis=0)
    made = random_words(token, (pair, xp.zeros_like(pair)), words)
    stacked = np.stack([subject.numpy(word).astype(np.uint64) for word in made], axis=-1)
    np.testing.assert_array_equal(stacked.reshape(7, 14)[:, :WIDTH], mask.words(WIDTH))

    dropout = replace(mask.dropout(subject), words=words, sequence=counter[0], position=counter[1])
    multiplier = dropout_multiplier(dropout, 0, WIDTH, dtype=xp.float32, xp=xp)
    np.testing.assert_array_equal(subject.numpy(multiplier) != 0, mask.multiplier(WIDTH) != 0)


def test_published_vectors() -> None:
    """Known answers of Threefry-2x32-20, from the generator's authors' own test file."""
    ones = 0xFFFFFFFF
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert threefry((ones, ones), (ones, ones)) == (0x1CB996FC, 0xBB002BE7)
    pi = ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3))
    assert threefry(*pi) == (0xC4923A9C, 0x483DF7A0)


def test_the_rate_and_the_independence_of_counters() -> None:
    """The share of zeros is the rate to five standard deviations, and every part of the counter
    changes the mask."""
    subject, width, rate = Subject("numpy", "float32"), 301, 0.3
    tokens = np.arange(500)
    mask = Mask(projection=0, rate=rate, sequence=tokens * 0, position=tokens)
    whole = drawn(subject, mask, 0, width) != 0
    count = whole.size
    assert abs(1.0 - whole.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / count)
    changes: list[dict] = [
        {"seed": mask.seed + 1},
        {"seed": mask.seed + 2**32},
        {"step": 6},
        {"layer": 4},
        {"projection": 1},
        {"sequence": tokens * 0 + 1},
        {"position": tokens + 500},
    ]
    for change in changes:
        other = drawn(subject, replace(mask, **change), 0, width) != 0
        agreeing = (whole == other).mean()
        expected = rate**2 + (1 - rate) ** 2
        spread = math.sqrt(expected * (1 - expected) / count)
        assert abs(agreeing - expected) < 5 * spread, change
