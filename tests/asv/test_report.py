"""The one page of figures, from results alone."""

from __future__ import annotations

import itertools
import re
import tarfile
from pathlib import Path

import pytest

from asv_bench import charts, offline, report
from asv_bench.charts import Limit, Series, chart, ticks
from asv_bench.measured import Run, Value, cell
from asv_bench.units import human
from tests.asv.history import commits, git


def run(commit: str, values: dict[str, float], environment: str = "e", date: int = 0) -> Run:
    stored = {name: Value(value) for name, value in values.items()}
    return Run(commit, date, "m", environment, stored, frozenset(), frozenset())


def standard(name: str, backend: str, *more: object, tokens: int = 256) -> str:
    return cell(name, backend, tokens, 8, "float32", *more)


TIME, SHARE = "step.Step.time_step", "step.Step.track_gemm_share"
PEAK, MEBP = "step.StepMemory.track_peak_bytes_step", "methods.Method.time_method"


def test_figures_are_of_the_standard_cell() -> None:
    today = run(
        "c",
        {
            standard(TIME, "jax"): 0.3,
            standard(TIME, "jax", tokens=1024): 9.0,
            standard(MEBP, "jax", "mebp"): 0.4,
            standard(SHARE, "jax"): 0.5,
            standard(PEAK, "jax"): 1e6,
            standard(PEAK, "jax", tokens=1024): 2e6,
            standard(PEAK, "jax", tokens=2048): 2e6 + 1024 * 4 * 256 * 3.5,
        },
    )
    assert report.over_products(today, "jax") == 2.0
    assert report.over_mebp(today, "jax") == pytest.approx(0.75)
    assert report.rows_per_token(today, "jax") == pytest.approx(3.5)
    for read in (report.over_products, report.over_mebp, report.rows_per_token):
        assert read(today, "mlx") is None


def page(runs: list[Run], repository: Path) -> str:
    """The words of the page, without what a pointer is told."""
    text = report.page(runs, repository)
    text = re.sub(r"<style>.*?</style>|<title>.*?</title>", "", text, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def test_today_is_told_against_the_commit_before_and_the_best(repository: Path) -> None:
    names = commits(repository)
    times = [0.2, 0.4, 0.3]
    runs = [run(n, {standard(TIME, "mlx"): t}) for n, t in zip(names, times, strict=True)]
    text = page(runs, repository)
    assert f"Today is {names[-1][:8]} README.md" in text
    assert "Time 300 ms -25% on the commit before , +50% on the best" in text
    assert text.count("not measured") >= 2 * 5


def test_bounds_are_met_or_not(repository: Path) -> None:
    large = "real_models.RealModelMemory.track_peak_bytes_real_model"
    values = {
        standard(SHARE, "mlx"): 0.9,
        standard(SHARE, "torch"): 0.5,
        cell(large, "mlx", 256, 8, "bfloat16", "qwen2.5-0.5b"): 55e6,
    }
    text = page([run(commits(repository)[-1], values)], repository)
    assert "bare matrix products mlx 1.25 × 1.11 × 0.89 ✓ met" in text
    assert "bare matrix products torch 1.25 × 2.00 × 1.60 ✗ not met" in text
    assert "bare matrix products jax 1.25 × not measured" in text
    assert "at most 50 MB in all mlx 50 MB 55 MB 1.10 ✗ not met" in text


def test_a_message_of_a_commit_is_text(repository: Path) -> None:
    git(repository, "commit", "-q", "--allow-empty", "-m", "<b>bold</b> & more")
    name = git(repository, "rev-parse", "HEAD")
    text = report.page([run(name, {standard(TIME, "mlx"): 1.0})], repository)
    assert "<b>bold" not in text and "&lt;b&gt;bold&lt;/b&gt; &amp; more" in text


def test_only_what_was_measured_in_one_way_is_compared() -> None:
    history = ["a", "b", "c"]
    mine = [run("c", {}, date=1), run("a", {}, date=9)]
    others = [run("b", {}, "other"), run("a", {}, "other"), run("x", {})]
    found = report.comparable([*mine, *others], history)
    assert [(r.commit, r.environment) for r in found] == [("a", "e"), ("c", "e")]
    # Of two with the newest commit, the one with more.
    found = report.comparable([run("c", {}, "few"), *mine], history)
    assert [r.environment for r in found] == ["e", "e"]
    assert [r.commit for r in report.comparable([run("x", {})], history)] == ["x"]


def test_a_chart_breaks_its_line_where_a_value_is_missing() -> None:
    series = Series("jax", [1.0, 2.0, None, 3.0], ["one", "two", "", "<four>"])
    svg = chart("Title", [series], ["a", "b", "c", "d"], str)
    assert len(re.findall("<polyline", svg)) == 2
    assert len(re.findall("<rect", svg)) == 3
    assert "<title>&lt;four&gt;</title>" in svg and 'aria-label="Title"' in svg
    assert "nothing measured" in chart("T", [Series("jax", [None], [""])], ["a"], str)


def test_values_stand_where_they_belong() -> None:
    series = Series("mlx", [0.0, 4.0], ["", ""])
    svg = chart("T", [series], ["a", "b"], str, Limit(2.0, "bound"))
    low, high = (float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg))
    limit = float(re.search(r'class="limit" x1="\d+" x2="\d+" y1="([\d.]+)"', svg)[1])
    assert low == charts.HEIGHT - charts.BOTTOM
    assert charts.TOP <= high < limit < low
    assert limit == pytest.approx((low + high) / 2, abs=0.1)


@pytest.mark.parametrize("values", [(5.0, 5.0, 5.0), (1.0, 1.01, 9.0), (0.0, 0.0, 0.0)])
def test_names_do_not_cover_each_other(values: tuple[float, ...]) -> None:
    names = ("mlx", "jax", "torch")
    series = [Series(name, [value], [""]) for name, value in zip(names, values, strict=True)]
    svg = chart("T", series, ["a"], str, Limit(9.0, "bound"))
    places = sorted(float(re.search(rf'y="([\d.]+)">{name}</text>', svg)[1]) for name in names)
    assert all(b - a >= 14 for a, b in itertools.pairwise(places))
    assert places[0] >= charts.TOP and places[-1] <= charts.HEIGHT


@pytest.mark.parametrize("top", [1e-7, 0.3, 1.0, 7.5, 1.9e7])
def test_ticks_are_few_and_round(top: float) -> None:
    found = ticks(top)
    assert 2 <= len(found) <= 6 and found[0] == 0.0 and found[-1] <= top < found[-1] * 2.01
    assert float(f"{found[1]:.1g}") == pytest.approx(found[1])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a.time_x('mlx')", 0.01234, "12.3 ms"),
        ("a.time_x", 2.5, "2.5 s"),
        ("a.time_x", 2.5e-5, "25 µs"),
        ("a.track_peak_bytes_x", 12_345_678, "12.3 MB"),
        ("a.track_gradient_error", 1.23e-6, "1.2e-06"),
        ("a.track_gemm_share", 0.5, "0.50"),
    ],
)
def test_figures_have_units(name: str, value: float, text: str) -> None:
    assert human(name, value) == text


def test_asv_pages_load_nothing_from_elsewhere() -> None:
    page = (
        '<link rel="stylesheet" href="https://a.example/bootstrap@3.1.1/dist/css/b.css" x="y">'
        '<script src="https://b.example/jquery-3.3.1.min.js" integrity="i"></script>'
        '<script src="//c.example/ajax/stupidtable/1.0.1/stupidtable.min.js"></script>'
        '<script src="asv.js"></script><a href="https://d.example">d</a>'
    )
    assert offline.rewritten(page) == (
        '<link rel="stylesheet" href="vendor/bootstrap.min.css">'
        '<script src="vendor/jquery.min.js" onerror="js_load_failure()"></script>'
        '<script src="vendor/tablesort.js" onerror="js_load_failure()"></script>'
        '<script src="asv.js"></script><a href="https://d.example">d</a>'
    )


def test_an_unknown_script_is_an_error() -> None:
    with pytest.raises(ValueError, match="new.js, for which"):
        offline.rewritten('<script src="https://a.example/new.js"></script>')


def test_a_copy_with_another_hash_is_refused(tmp_path: Path) -> None:
    script = offline.SCRIPTS[0]
    (tmp_path / "package" / "dist").mkdir(parents=True)
    (tmp_path / "package" / script.path).write_text("not jQuery")
    with tarfile.open(tmp_path / "jquery-3.3.1.tgz", "w:gz") as package:
        package.add(tmp_path / "package", "package")
    with pytest.raises(ValueError, match="not the file it should be"):
        offline._extract(tmp_path, script, tmp_path)
    assert not (tmp_path / script.name).exists()
    assert not offline.fetched(tmp_path)
