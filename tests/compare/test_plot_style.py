"""The look of the pictures: colours that can be read and told apart, labels that do not collide."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mesp_core.compare import plot_data
from mesp_core.compare.plot_style import DARK, LIGHT, Theme, spread

THEMES = (LIGHT, DARK)


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours "#rrggbb" as WCAG defines it, 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """The relative luminance of "#rrggbb", 0 (black) to 1 (white)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_every_colour_can_be_read_on_its_page(theme: Theme) -> None:
    colours = [theme.ink, theme.muted, *theme.methods.values(), *theme.others]
    assert {colour for colour in colours if contrast(colour, theme.page) < 4.5} == set()
    assert set(theme.methods) == set(plot_data.METHODS)


def test_contrast_is_wcags() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert contrast("#ff0000", "#0000ff") == pytest.approx(2.15, abs=0.005)


#: Linear RGB as seen with protanopia, deuteranopia and tritanopia (Machado et al., 2009).
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of "#rrggbb" after the matrix ``seen``."""
    parts = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(matrix @ np.clip(seen @ linear, 0.001, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", DEFICIENCIES)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_methods_differ_for_every_kind_of_colour_vision(theme: Theme, seen: str) -> None:
    colours = {name: lab(value, DEFICIENCIES[seen]) for name, value in theme.methods.items()}
    near = {
        (first, second)
        for first, second in itertools.combinations(colours, 2)
        if np.linalg.norm(colours[first] - colours[second]) < 20
    }
    assert near == set()


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([1.0, 3.0, 2.0], [0.5, 0.5, 0.5], 0, 4) == [1.0, 3.0, 2.0]


@pytest.mark.parametrize(
    "wanted",
    [[2.0, 2.0, 2.0], [0.0, 0.1, 4.0], [4.0, 3.9, 4.1, 0.2], [1.0, 1.1, 1.9, 2.0, 2.2, 9.0]],
    ids=str,
)
def test_crowded_labels_are_pushed_apart_in_order(wanted: list[float]) -> None:
    sizes = [0.3 + 0.1 * index for index in range(len(wanted))]
    places = spread(wanted, sizes, 0, 4)
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    for before, after in itertools.pairwise(order):
        room = (sizes[before] + sizes[after]) / 2
        assert places[after] - places[before] >= room - 1e-9
    assert places[order[0]] - sizes[order[0]] / 2 >= -1e-9
    assert places[order[-1]] + sizes[order[-1]] / 2 <= 4 + 1e-9
