"""What is taken from a compare report for the pictures, and how it is worded."""

from __future__ import annotations

import pytest

from mesp_core.compare import plot_data
from tests.compare.reports import row


def test_thinning_keeps_both_ends_and_every_extreme() -> None:
    x = list(range(5000))
    y = [float(index % 7) for index in x]
    y[1234], y[4321] = 99.0, -99.0
    points = plot_data.thinned(x, y, 50)
    assert len(points) <= 102
    assert points[0] == (0, 0.0) and points[-1] == (4999, 4999 % 7)
    assert (1234, 99.0) in points and (4321, -99.0) in points
    assert [place for place, _ in points] == sorted({place for place, _ in points})
    assert plot_data.thinned([1, 2], [3, 4], 50) == ((1, 3), (2, 4))


def test_the_running_median_is_of_the_values_around() -> None:
    assert plot_data.running_median([1, 2, 9, 4, 5], 3) == [1.5, 2, 4, 5, 4.5]
    assert plot_data.running_median([1, 2, 6], 1) == [1, 2, 6]


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0.0 MB"), (8_840_000, "8.8 MB"), (99_940_000, "99.9 MB"), (1_490_000_000, "1,490 MB")],
)
def test_sizes_are_in_megabytes(size: int, words: str) -> None:
    assert plot_data.megabytes(size) == words


def test_the_setting_names_what_is_unusual() -> None:
    made = row("mesp", 1, 1, residency="resident", apply="end", tiled=False, lora_dtype="bfloat16")
    assert plot_data.setting_words(made | {"model": "/some/folder/name"}, {}, ("tokens",)) == (
        "name, LoRA rank 8, bfloat16, mlx, weights resident, update: end, attention and MLP untiled"
    )


def test_the_first_of_rows_alike_counts_and_what_is_missing_is_told() -> None:
    rows = [
        row("mebp", 7, None, tokens=128),
        row("mesp", 3, None, tokens=256),
        row("mesp", 2, None, tokens=128),
        row("mesp", 9, None, tokens=256),
        row("mebp", None, None, tokens=256, error="killed"),
        row("mezo", None, None, tokens=128, error="no", unavailable=True),
        row("mezo", None, 4, tokens=256),
    ]
    found = plot_data.sweep(rows, "tokens", "peak_bytes")
    assert [(line.name, line.points, dict(line.missing)) for line in found] == [
        ("mesp", ((128, 2e6), (256, 3e6)), {}),
        ("mebp", ((128, 7e6),), {256: "failed"}),
        ("mezo", (), {128: "n/a", 256: "–"}),
    ]
    assert plot_data.figures(rows) == ["peak_bytes"]


def test_phases_end_where_the_next_begins_and_time_starts_at_the_first() -> None:
    made = {"seconds": [7.5, 8.0, 9.5], "bytes": [1, 3, 2], "measure": "peak_bytes"}
    line = plot_data.timeline({"timeline": made | {"phases": [[7.25, "forward"], [9.0, "head"]]}})
    assert line is not None and line.measure == "peak_bytes"
    assert line.points == ((0.25, 1), (0.75, 3), (2.25, 2))
    assert line.phases == ((0.0, 1.75, "forward"), (1.75, 2.25, "head"))


def test_curves_are_never_given_the_setting_of_something_else() -> None:
    own = {"model": "a", "tokens": 64}
    curve = {"step": [1, 2], "loss": [3.0, 2.0]}
    settings = {"model": "b", "tokens": "128,256"}
    told = {"curves": {"mesp": curve}, "settings": settings | {"curves": own}}
    assert plot_data.curve_setting(told) == own
    of_itself = {"curves": {"mesp": curve | own}, "settings": settings}
    assert plot_data.setting_words(plot_data.curve_setting(of_itself), {}) == "a, 64 tokens"
    silent = {"curves": {"mesp": curve}, "settings": settings}
    assert plot_data.setting_words(plot_data.curve_setting(silent), {}) == ""


@pytest.mark.parametrize("made", [None, {}, {"seconds": [1], "bytes": [2]}], ids=str)
def test_a_row_without_samples_has_no_timeline(made: object) -> None:
    assert plot_data.timeline({"timeline": made}) is None
