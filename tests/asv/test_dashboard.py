"""What is published, opened in a real browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asv_bench import look, offline
from asv_bench.browser import Browser, browser, find, served
from tests.asv.conftest import COUNT, Published
from tests.asv.fabricate import HASH

# What checks a submission has to look.
MAY_SKIP = "CI" not in os.environ

needs_chromium = pytest.mark.skipif(find() is None and MAY_SKIP, reason="Chromium is not installed")

MEMORY = "step.StepMemory.track_peak_bytes_step"

#: What a chart of asv's shows: how many points each of its lines has.
POINTS = """
$('#main-graph').data('plot').getData()
    .map(line => line.data.filter(point => point && point[1] !== null).length)
"""

#: How many pixels of a chart's canvas are not empty.
DRAWN = """
(() => {
    const canvas = $('#main-graph canvas.flot-base')[0];
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let at = 3; at < data.length; at += 4) count += data[at] > 0;
    return count;
})()
"""


@pytest.fixture(scope="module")
def address(published: Published) -> Iterator[str]:
    if offline.foreign(published.html) and MAY_SKIP:
        pytest.skip("npm is missing, or offline: asv's pages have no scripts of their own")
    with served(published.html) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as page:
        yield page


@needs_chromium
def test_the_grid_shows_every_benchmark_that_was_measured(
    address: str, chromium: Browser, published: Published, tmp_path: Path
) -> None:
    chromium.errors.clear()
    # What is not in the window is not drawn.
    chromium.show(height=3000)
    chromium.open(f"{address}/index.html")
    names = sorted(
        benchmark["pretty_name"]
        for name, benchmark in published.benchmarks.items()
        if name != HASH and not name.startswith("components.")
    )
    shown = "$('#summarygrid-display .benchmark-text').map((i, e) => $(e).text()).get()"
    chromium.wait(f"$('#summarygrid-display canvas.flot-base').length === {len(names)}")
    assert sorted(chromium.evaluate(shown)) == names
    chromium.screenshot(tmp_path / "grid.png")
    assert chromium.errors == []


@needs_chromium
def test_a_memory_graph_draws_its_points(address: str, chromium: Browser, tmp_path: Path) -> None:
    chromium.errors.clear()
    chromium.show()
    chromium.open(f"{address}/index.html#{MEMORY}")
    chromium.wait("$('#main-graph').data('plot') && $('#main-graph canvas').length")
    # How many choices of the other parameters asv begins with is its own affair.
    chromium.wait(f"{POINTS}.length >= 3")
    lines = chromium.evaluate(POINTS)
    assert lines == [COUNT] * len(lines)
    labels = chromium.evaluate("$('#main-graph').data('plot').getData().map(line => line.label)")
    assert all(any(name in label for label in labels) for name in ("mlx", "jax", "torch"))
    assert chromium.evaluate(DRAWN) > 1000
    chromium.screenshot(tmp_path / "memory.png")
    assert chromium.errors == []


@needs_chromium
def test_the_other_pages_of_asv_open(address: str, chromium: Browser) -> None:
    chromium.errors.clear()
    chromium.open(f"{address}/index.html#/summarylist")
    chromium.wait("$('#summarylist-body tbody tr').length > 5")
    first = "$('#summarylist-body tbody tr td:first-child').first().text()"
    before = chromium.evaluate(first)
    chromium.evaluate("$('#summarylist-body thead th').first().click() && 0")
    assert chromium.evaluate(first) != before
    chromium.open(f"{address}/index.html#/regressions")
    chromium.wait("$('#regressions-display').is(':visible')")
    assert chromium.errors == []


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_draws_every_chart(
    address: str, chromium: Browser, dark: bool, tmp_path: Path
) -> None:
    chromium.errors.clear()
    chromium.show(height=2400, dark=dark)
    chromium.open(f"{address}/report.html")
    chromium.screenshot(tmp_path / "report.png")
    for backend in ("mlx", "jax", "torch"):
        marks = f"document.querySelectorAll('svg .series.{backend} g').length"
        # Six charts, a point for each commit.
        assert chromium.evaluate(marks) == 6 * COUNT
    # The page has no script, so what is seen is what was written.
    assert chromium.evaluate("document.scripts.length") == 0
    page = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.errors == []


@needs_chromium
def test_pictures_are_taken_of_every_page(
    address: str, published: Published, tmp_path: Path
) -> None:
    assert look.pictures(published.html, tmp_path) == []
    taken = {path.stem: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert taken.keys() == {name for name, *_ in look.PICTURES}
    # A PNG of an empty page of this size has a few thousand bytes.
    assert min(taken.values()) > 12_000


@needs_chromium
def test_an_error_of_a_page_is_seen(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        "<script>console.error('one'); setTimeout(() => { throw new Error('two') })</script>"
        "<script src='missing.js'></script>"
    )
    with served(tmp_path) as address:
        chromium.errors.clear()
        chromium.open(f"{address}/index.html")
        chromium.wait("true")
        chromium.evaluate("new Promise(done => setTimeout(done, 300)) && 0")
    told = json.dumps(chromium.errors)
    assert "one" in told and "two" in told and "missing.js" in told
