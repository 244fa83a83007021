"""Threefry against the published known answers, and the mask against its definition."""

import numpy as np
import pytest

from mesp_reference.dropout import (
    PROJECTION_NUMBERS,
    dropout_backward,
    dropout_forward,
    dropout_multiplier,
    dropout_words,
    threefry2x32,
)
from mesp_reference.finite_differences import gradient_errors, relative_error

# The 20-round lines for threefry2x32 in the Random123 distribution's known-answer tests.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
SEGMENT = np.array([0, 0, 0, 1, 2, 2, 2])
POSITION = np.array([0, 1, 2, 0, 0, 1, 2])
SEED = 0x1234_5678_9ABC_DEF0


def words(seed=SEED, step=3, layer=5, projection=6, features=11):
    return dropout_words(seed, step, layer, projection, SEGMENT, POSITION, features)


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN_ANSWERS)
def test_known_answers(key, counter, answer):
    assert tuple(int(word) for word in threefry2x32(key, counter)) == answer


def test_arrays_of_counters_are_counters_one_by_one():
    counters = np.array([0, 7, 0xFFFFFFFF])
    first, second = threefry2x32((1, 2), (counters, 5))
    one_by_one = [threefry2x32((1, 2), (int(counter), 5)) for counter in counters]
    assert first.tolist() == [int(pair[0]) for pair in one_by_one]
    assert second.tolist() == [int(pair[1]) for pair in one_by_one]


def test_words_follow_the_definition():
    key = threefry2x32((0x9ABC_DEF0, 0x1234_5678), (3, 5 * 256 + 6))
    table = words()
    for token in range(len(SEGMENT)):
        token_key = threefry2x32(key, (int(SEGMENT[token]), int(POSITION[token])))
        for feature in range(11):
            pair = threefry2x32(token_key, (feature // 2, 0))
            assert table[token, feature] == pair[feature % 2]


@pytest.mark.parametrize(
    "change", [{"seed": SEED + 2**32}, {"seed": SEED + 1}, {"step": 4}, {"layer": 4}]
)
def test_every_part_of_the_counter_matters(change):
    assert not np.any(words() == words(**change))


def test_projections_have_masks_of_their_own():
    assert list(PROJECTION_NUMBERS.values()) == list(range(7))
    tables = [words(projection=number) for number in PROJECTION_NUMBERS.values()]
    assert len({table.tobytes() for table in tables}) == 7


def test_words_do_not_depend_on_width_or_on_other_tokens():
    wide = words(features=11)
    assert np.array_equal(words(features=4), wide[:, :4])
    order = np.array([6, 2, 0])
    some = dropout_words(SEED, 3, 5, 6, SEGMENT[order], POSITION[order], 11)
    assert np.array_equal(some, wide[order])


def test_multiplier_threshold():
    threshold = round(0.3 * 2**32)
    edge = np.array([0, threshold - 1, threshold, 2**32 - 1], dtype=np.uint64)
    assert dropout_multiplier(0.3, edge).tolist() == [0.0, 0.0, 1 / 0.7, 1 / 0.7]
    assert np.all(dropout_multiplier(0.0, words()) == 1.0)
    with pytest.raises(ValueError, match="dropout rate"):
        dropout_multiplier(1.0, edge)


def test_multiplier_has_mean_one():
    positions = np.arange(500)
    table = dropout_words(1, 0, 0, 0, np.zeros(500, int), positions, 40)
    multiplier = dropout_multiplier(0.25, table)
    # 20,000 draws of standard deviation 0.58: five standard errors are 0.02.
    assert abs(multiplier.mean() - 1.0) < 0.02


def test_backward():
    generator = np.random.default_rng(19)
    x, dy = generator.standard_normal((7, 11)), generator.standard_normal((7, 11))
    multiplier = dropout_multiplier(0.5, words())
    y, saved = dropout_forward(x, multiplier)
    assert relative_error(y, multiplier * x) == 0.0
    errors = gradient_errors(
        lambda x: np.sum(dy * dropout_forward(x, multiplier)[0]), [x], [dropout_backward(dy, saved)]
    )
    assert errors[0] < 1e-9
