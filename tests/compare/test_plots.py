"""Pictures of a compare report: the files, the data in them, and that they can be read."""

from __future__ import annotations

import io
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from mesp_core.compare.plot_data import megabytes
from mesp_core.compare.plot_style import DARK, LIGHT, Sheet, Theme, default_style
from mesp_core.compare.plots import draw, pictures
from mesp_core.errors import MespError
from tests.compare.reports import LADDER, METHODS, curves, full, report, row, timeline

NAMES = ("methods", "memory-by-tokens", "memory-by-rank", "ladder", "timeline", "loss")
THEMES = (LIGHT, DARK)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with every picture of the full report."""
    folder = tmp_path_factory.mktemp("pictures") / "new"
    written = draw(full(), folder)
    assert sorted(written) == sorted(folder.iterdir())
    return folder


def shape(svg: str, gid: str) -> np.ndarray:
    """The corners [n, 2] of the path with an id, y downwards; the id must be there once."""
    (found,) = re.findall(rf'<g id="{re.escape(gid)}">\n<path d="([^"]*)"', svg)
    numbers = [float(text) for text in re.findall(r"-?[\d.]+", found)]
    return np.array(numbers).reshape(-1, 2)


def words_of(svg: str) -> list[str]:
    """What is written in the picture."""
    return re.findall(r"<!-- (.*?) -->", svg)


def assert_linear(places: Any, values: Any) -> None:
    """Places on the page are a straight line's of the values, to a tenth of a point."""
    places, values = np.asarray(places, float), np.asarray(values, float)
    fit = np.polyfit(values, places, 1)
    assert abs(fit[0]) * np.ptp(values) > 20
    np.testing.assert_allclose(np.polyval(fit, values), places, atol=0.1)


def test_every_picture_comes_as_svg_and_png_for_both_pages(drawn: Path) -> None:
    expected = {
        f"{n}{end}.{kind}" for n in NAMES for end in ("", "-dark") for kind in ("svg", "png")
    }
    assert {path.name for path in drawn.iterdir()} == expected
    for name in NAMES:
        for ending, theme in (("", LIGHT), ("-dark", DARK)):
            with Image.open(drawn / f"{name}{ending}.png") as picture:
                page = picture.convert("RGB")
            corners = itertools.product((0, page.width - 1), (0, page.height - 1))
            colours = {"#{:02x}{:02x}{:02x}".format(*page.getpixel(corner)) for corner in corners}
            assert colours == {theme.page}
            assert page.width == 1200 and len(page.getcolors()) > 20
            svg = (drawn / f"{name}{ending}.svg").read_text("utf-8")
            assert len(svg) < 130_000 and f'style="fill: {theme.page}"' in svg
            # Whole pixels, or the last row would be a line of another colour.
            (points,) = re.findall(r'width="576pt" height="(\d+)pt"', svg)
            assert page.height == int(points) / 72 * 150 and int(points) % 3 == 0


@pytest.mark.parametrize("figure", ["peak_bytes", "footprint_bytes"])
def test_the_sweep_over_lengths_shows_every_point(drawn: Path, figure: str) -> None:
    svg = (drawn / "memory-by-tokens.svg").read_text("utf-8")
    tokens = (128, 256, 512, 1024)
    across, up, sizes = [], [], []
    for method, figures in METHODS.items():
        points = shape(svg, f"{figure}.{method}")
        known = tokens[:3] if method == "autodiff" else tokens
        assert len(points) == len(known)
        across += list(zip(points[:, 0], known, strict=True))
        up += list(points[:, 1])
        size = figures[("peak_bytes", "footprint_bytes").index(figure)]
        sizes += [size * (0.5 + length / 512) for length in known]
    places, known = zip(*across, strict=True)
    assert_linear(places, np.log2(known))
    # 27 to 2,300 MB: too wide for a linear axis.
    assert_linear(up, np.log(sizes))
    words = words_of(svg)
    assert words.count("failed") == 2 and "480" not in words and "465" in words
    assert "qwen2.5-0.5b, LoRA rank 8, bfloat16 (LoRA float32), mlx on cpu" in words
    assert "allocator peak (MB, logarithmic)" in words


def artist(picture: Any, gid: str) -> Any:
    """The shape of that id in a painted picture."""
    (found,) = picture.figure.findobj(lambda shape: shape.get_gid() == gid)
    return found


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_axes_are_in_megabytes_tokens_seconds_and_steps(theme: Theme) -> None:
    with default_style():
        sheets = {picture.name: picture.paint(theme) for picture in pictures(full())}
    for method, (peak, footprint, seconds) in METHODS.items():
        line = artist(sheets["memory-by-tokens"], f"peak_bytes.{method}")
        expected = [(t, peak * (0.5 + t / 512)) for t in (128, 256, 512, 1024)]
        np.testing.assert_allclose(line.get_xydata(), expected[: 4 - (method == "autodiff")])
        line = artist(sheets["timeline"], f"timeline.{method}").get_xydata()
        np.testing.assert_allclose([line[:, 0].max(), line[:, 1].max()], [seconds, footprint])
    for method, curve in curves().items():
        each = artist(sheets["loss"], f"each.{method}").get_xydata()
        np.testing.assert_allclose(each, np.stack([curve["step"], curve["loss"]], axis=1))
    labels = artist(sheets["memory-by-tokens"], "peak_bytes.mesp").axes.yaxis.get_majorticklabels()
    assert {label.get_text() for label in labels} >= {"50", "100", "1,000"}


def test_the_sweep_over_ranks_is_linear_where_the_range_allows_it(drawn: Path) -> None:
    svg = (drawn / "memory-by-rank.svg").read_text("utf-8")
    up = [*shape(svg, "peak_bytes.mesp")[:, 1], *shape(svg, "peak_bytes.mebp")[:, 1]]
    assert len(up) == 6
    small = report([r for r in full()["rows"] if r["method"] in ("mesp", "mebp")])
    (picture,) = [p for p in pictures(small) if p.name == "memory-by-rank"]
    with default_style():
        svg = picture.paint(LIGHT).files()["svg"].decode()
    up = [*shape(svg, "peak_bytes.mesp")[:, 1], *shape(svg, "peak_bytes.mebp")[:, 1]]
    assert_linear(up, [56.25, 52.25, 84.25, 314, 310, 342])
    assert "allocator peak (MB)" in words_of(svg)


def test_what_a_backend_cannot_do_is_told_from_a_failure(drawn: Path) -> None:
    words = words_of((drawn / "memory-by-rank.svg").read_text("utf-8"))
    # MeZO at two ranks, in both panels; the other methods were not asked for there.
    assert words.count("n/a") == 4 and "failed" not in words and "–" in words


def test_bars_are_as_long_as_their_values(drawn: Path) -> None:
    svg = (drawn / "methods.svg").read_text("utf-8")
    for column, index in (("peak_bytes", 0), ("footprint_bytes", 1), ("step_seconds", 2)):
        lengths, values = [0.0], [0.0]
        for model, factor in (("qwen2.5-0.5b", 1.0), ("qwen2.5-1.5b", 1.75), ("qwen2.5-3b", 2.5)):
            for method, figures in METHODS.items():
                lengths.append(np.ptp(shape(svg, f"{column}.{model}.{method}")[:, 0]))
                values.append(figures[index] * factor)
        assert_linear(lengths, values)
        np.testing.assert_allclose(np.polyfit(values, lengths, 1)[1], 0, atol=0.1)
    words = words_of(svg)
    assert "256 tokens" in words[1] and "qwen" not in words[1]
    assert {"52.2 MB", "91.4 MB", "1,490 MB", "9.10 s (1.00×)", "10.25 s (1.13×)"} <= set(words)


def test_words_stand_right_behind_their_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with default_style():
        sheet = {picture.name: picture.paint(LIGHT) for picture in pictures(full())}["ladder"]
        boxes = dict(written(sheet.figure, monkeypatch))
    for words, index in (("820 MB · −670 MB (−45 %) · 8.50 s", 2), ("1,490 MB · 8.50 s", 1)):
        bar = artist(sheet, f"ladder.peak_bytes.{index}").get_window_extent()
        assert 3 < boxes[words].x0 - bar.x1 < 10
        assert bar.y0 < (boxes[words].y0 + boxes[words].y1) / 2 < bar.y1


def test_the_ladder_says_what_each_rung_saves(drawn: Path) -> None:
    svg = (drawn / "ladder.svg").read_text("utf-8")
    values = [peak for _, peak in LADDER.values()]
    rungs = [shape(svg, f"ladder.peak_bytes.{index + 1}") for index in range(len(values))]
    assert_linear([np.ptp(rung[:, 0]) for rung in rungs], values)
    tops = [rung[:, 1].min() for rung in rungs]
    assert tops == sorted(tops)
    words = words_of(svg)
    for text in (
        "2. checkpoint each block",
        "1,490 MB · 8.50 s",
        "820 MB · −670 MB (−45 %) · 8.50 s",
        "116 MB · −1.5 MB (−1 %) · 8.50 s",
        "52.2 MB · −64.2 MB (−55 %) · in all −96 % · 8.50 s",
    ):
        assert text in words


def test_a_rung_that_failed_is_named_and_skipped_in_the_savings(tmp_path: Path) -> None:
    rungs = [row("autodiff", 400, None, rung="a"), row("mebp", None, None, rung="b", error="x")]
    rungs.append(row("mesp", 300, None, rung="c"))
    draw(report([], ladder=rungs), tmp_path)
    words = words_of((tmp_path / "ladder.svg").read_text("utf-8"))
    assert {"2. b", "failed", "300 MB · −100 MB (−25 %)"} <= set(words)


def test_a_timeline_shows_the_phases_and_the_peak(drawn: Path) -> None:
    svg = (drawn / "timeline.svg").read_text("utf-8")
    words = words_of(svg)
    for method, (_, footprint, seconds) in METHODS.items():
        head = 0.01 if method == "mesp" else 0.2
        begins = [
            shape(svg, f"phase.{method}.{index}.{name}")[0, 0]
            for index, name in ((0, "forward"), (1, "head"), (2, "backward"))
        ]
        # The longest step is as wide as the panel.
        assert_linear(begins, [0, 0.5 * seconds, (0.5 + head) * seconds])
        line = shape(svg, f"timeline.{method}")
        assert 100 < len(line) <= 242
        assert abs(line[line[:, 1].argmin(), 0] - begins[2]) < 1
        assert megabytes(footprint * 1e6) in " ".join(words)
    assert words.count("head") == len(METHODS)
    assert "every panel has its own scale, dashed: peak of mesp" in " ".join(words)


def test_a_peak_that_the_samples_missed_is_told(tmp_path: Path) -> None:
    rows = [row("mesp", 1, 25, timeline=timeline(20, 2.0, 0.1))]
    draw(report(rows), tmp_path)
    words = "\n".join(words_of((tmp_path / "timeline.svg").read_text("utf-8")))
    assert "peak 25.0 MB\nsampled 20.0 MB\nat 1.20 s" in words


def test_timelines_of_like_size_share_a_scale() -> None:
    rows = [row(m, 1, p, timeline=timeline(p, 2.0, 0.1)) for m, p in (("mesp", 20), ("mebp", 60))]
    (picture,) = [p for p in pictures(report(rows)) if p.name == "timeline"]
    with default_style():
        sheet = picture.paint(DARK)
        svg = sheet.files()["svg"].decode()
    heights = [np.ptp(shape(svg, f"timeline.{m}")[:, 1]) for m in ("mesp", "mebp")]
    assert heights[1] / heights[0] == pytest.approx(3, rel=0.02)
    assert "own scale" not in sheet.setting and "anonymous footprint" in sheet.setting


def test_loss_curves_show_every_step_and_how_near_they_are(drawn: Path) -> None:
    svg = (drawn / "loss.svg").read_text("utf-8")
    found, losses = [], []
    for method, curve in curves().items():
        points = shape(svg, f"each.{method}")
        assert_linear(points[:, 0], curve["step"])
        found += list(points[:, 1])
        losses += curve["loss"]
        assert len(shape(svg, f"loss.{method}")) == 60
    assert_linear(found, losses)
    words = words_of(svg)
    assert "at most 0.0001 from mesp" in words
    assert not any("mezo" in text and "from" in text for text in words)
    setting = "smollm2-135m, 256 tokens, LoRA rank 8, float32, mlx on cpu; thick: median of 4 steps"
    assert any(text.startswith(setting) for text in words)


def test_the_same_report_gives_the_same_bytes_whatever_the_users_style(
    drawn: Path, tmp_path: Path
) -> None:
    with matplotlib.rc_context({"axes.grid": True, "font.size": 20, "svg.fonttype": "none"}):
        before = dict(matplotlib.rcParams)
        draw(full(), tmp_path)
        assert dict(matplotlib.rcParams) == before
    for path in drawn.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"rows": [], "ladder": [], "curves": {}},
        report([row("mesp", 3, 4)]),
        report([row("mesp", None, None, error="x"), row("mebp", None, None, error="y")]),
        report([row("mesp", None, None, peak_bytes=math.nan)] * 2),
        {
            "curves": {
                "mesp": {"step": [1], "loss": [2.0]},
                "mebp": {"step": [1, 2], "loss": [None] * 2},
            }
        },
    ],
    ids=["nothing", "empty", "one row", "failures", "not finite", "one point"],
)
def test_a_report_without_data_draws_nothing_and_says_so(content: Any, tmp_path: Path) -> None:
    with pytest.raises(MespError, match="nothing to draw: .* at least two methods"):
        draw(content, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first", "utf-8")
    with pytest.raises(MespError, match="file"):
        draw(report([row("mesp", 3, 4), row("mebp", 5, 6)]), tmp_path / "file")
    assert (tmp_path / "file").read_text("utf-8") == "here first"


def test_without_matplotlib_the_remedy_is_named_and_nothing_else_needs_it() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
from pathlib import Path
from mesp_core.compare import plot_bars, plot_data, plot_lines, plot_style, plot_timeline, plots
from mesp_core.errors import MespError
try:
    plots.draw({}, Path("never"))
except MespError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pictures need matplotlib; pip install 'mesp[plot]'\n"


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from mesp_core.compare.plots import draw
from tests.compare.reports import report, row
draw(report([row("mesp", 3, 4), row("mebp", 5, 6)]), Path({str(tmp_path)!r}))
print("matplotlib.figure" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False\n"


def crowded() -> dict[str, Any]:
    """Everything at once: long names, equal values, two heads, unknown methods, a tiny phase."""
    rows = []
    for tokens in (100, 101, 128, 4096):
        for method in (*METHODS, "a-method-of-someone-else", "mesp"):
            rows.append(
                row(method, 99.5, 99.5 + tokens / 8, tokens=tokens, compiled_bytes=5_000_000)
            )
        rows[-1]["head"] = "dense"
    for made in rows[:7]:
        made["step_seconds"], made["step_ratio"] = 1234.5, 0.01
        made["timeline"] = timeline(99.5, 0.004, 0.0005)
    same = {"step": list(range(200)), "loss": [2.5] * 200}
    rungs = [row("mesp", 1, 1, rung=f"rung {i} " + "and more " * 20) for i in range(12)]
    return report(rows, ladder=rungs, curves=dict.fromkeys((*METHODS, "a-new-one"), same))


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("content", [full, crowded])
def test_no_words_overlap_or_leave_the_page(
    content: Any, theme: Theme, monkeypatch: pytest.MonkeyPatch
) -> None:
    with default_style():
        for picture in pictures(content()):
            figure = picture.paint(theme).figure
            boxes = written(figure, monkeypatch)
            assert len(boxes) > 8
            for words, box in boxes:
                assert box.x0 > 0 and box.y0 > 0, (picture.name, words)
                assert box.x1 < figure.bbox.x1 and box.y1 < figure.bbox.y1, (picture.name, words)
            for (first, one), (second, other) in itertools.combinations(boxes, 2):
                assert not overlap(one, other), (picture.name, first, second)


def written(figure: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every text that really is drawn, and the box it fills."""
    found = []

    def draw_text(self: Any, renderer: Any, *rest: Any, **how: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            found.append((self.get_text(), self.get_window_extent()))

    monkeypatch.setattr(matplotlib.text.Text, "draw", draw_text)
    figure.canvas.draw()
    return found


def overlap(one: Any, other: Any) -> bool:
    """Whether two boxes share more than a hairline."""
    across = min(one.x1, other.x1) - max(one.x0, other.x0)
    return across > 0.5 and min(one.y1, other.y1) - max(one.y0, other.y0) > 0.5


def test_the_check_of_overlaps_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = Sheet(LIGHT, 2.0, "title", "setting")
    for x in (1, 1.2, 3):
        sheet.text(x, 1, "words")
    boxes = [box for words, box in written(sheet.figure, monkeypatch) if words == "words"]
    assert overlap(boxes[0], boxes[1]) and not overlap(boxes[0], boxes[2])


def test_two_settings_have_files_of_their_own(tmp_path: Path) -> None:
    pair = [row("mesp", 3, 4), row("mebp", 5, 6)]
    other = [made | {"backend": "torch", "rank": 4, "tiled": False} for made in pair]
    sweep = [made | {"tokens": 64} for made in pair + other]
    names = {picture.name for picture in pictures(report(pair + other + sweep))}
    assert names == {
        "methods-mlx-rank-8-tiled",
        "methods-torch-rank-4-untiled",
        "memory-by-tokens-mlx-rank-8-tiled",
        "memory-by-tokens-torch-rank-4-untiled",
    }


def test_two_models_of_one_name_do_not_overwrite_each_other() -> None:
    rows = [
        row(method, size, None, model=f"{folder}/model", tokens=tokens)
        for folder in ("one", "two")
        for tokens, size in ((64, 3), (128, 5))
        for method in ("mesp", "mebp")
    ]
    names = [picture.name for picture in pictures(report(rows))]
    assert names == ["methods", "memory-by-tokens-model", "memory-by-tokens-model-2"]


def test_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    rows = [row("mesp", 3, 4, model="a$x_1$"), row("mebp", 5, 6, model="a$x_1$")]
    draw(report(rows), tmp_path)
    assert any(
        "a$x_1$," in text for text in words_of((tmp_path / "methods.svg").read_text("utf-8"))
    )


def test_a_png_is_the_picture_of_its_svg(drawn: Path) -> None:
    """Both show MeSP's bars in MeSP's colour, as many pixels wide as the SVG says."""
    svg = (drawn / "ladder.svg").read_text("utf-8")
    bar = shape(svg, "ladder.peak_bytes.2")
    with Image.open(io.BytesIO((drawn / "ladder.png").read_bytes())) as picture:
        page = np.asarray(picture.convert("RGB")).astype(int)
    scale = 150 / 72
    line = page[round(bar[:, 1].mean() * scale)]
    colour = [int(LIGHT.methods["mebp"][start : start + 2], 16) for start in (1, 3, 5)]
    coloured = (np.abs(line - colour).max(axis=1) < 8).sum()
    assert coloured == pytest.approx(np.ptp(bar[:, 0]) * scale, abs=2)
