"""How the pictures look: colours for a light and a dark page, a sheet measured in inches, files.

matplotlib is imported inside functions only, and used without pyplot: no global state changes.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesp_core.errors import MespError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

#: Inches: every picture is as wide; on a page of 830 pixels its letters are about 12 high.
WIDTH = 8.0
MARGIN = 0.15


@dataclass(frozen=True)
class Theme:
    """Colours for one kind of page. Text and lines have a contrast of at least 4.5 to ``page``,
    and methods differ for every kind of colour vision (from Okabe and Ito's hues)."""

    name: str
    page: str
    ink: str
    muted: str
    grid: str
    methods: Mapping[str, str]
    others: tuple[str, ...]

    def colour(self, method: str) -> str:
        """The colour of a method; those without one of their own share ``others`` by name."""
        if method in self.methods:
            return self.methods[method]
        return self.others[sum(method.encode()) % len(self.others)]


LIGHT = Theme(
    name="light",
    page="#ffffff",
    ink="#1f2328",
    muted="#59636e",
    grid="#d8dee4",
    methods={
        "mesp": "#0072c6",
        "mesp-store-h": "#5b2a80",
        "mebp": "#c4500a",
        "mezo": "#0b4a2d",
        "autodiff": "#767676",
    },
    others=("#8a6100", "#a8478b"),
)
DARK = Theme(
    name="dark",
    page="#0d1117",
    ink="#e6edf3",
    muted="#9198a1",
    grid="#30363d",
    methods={
        "mesp": "#4a9bff",
        "mesp-store-h": "#d9bfff",
        "mebp": "#f56c2d",
        "mezo": "#3be392",
        "autodiff": "#858b94",
    },
    others=("#e3b341", "#e08fc4"),
)

#: Marker and dashes of each method, so that colour is never the only difference.
MARKS: Mapping[str, tuple[str, Any]] = {
    "mesp": ("o", "solid"),
    "mesp-store-h": ("D", (0, (4, 1.5))),
    "mebp": ("s", "solid"),
    "mezo": ("^", (0, (1, 1))),
    "autodiff": ("v", (0, (6, 1.5, 1, 1.5))),
}
OTHER_MARK: tuple[str, Any] = ("P", (0, (2, 1)))


def header_height(setting: str) -> float:
    """Inches that a sheet's title and setting take."""
    return 0.55 + 0.18 * len(_wrapped(setting))


def _wrapped(setting: str) -> list[str]:
    return textwrap.wrap(setting, 100)


def require_matplotlib() -> None:
    """Raises MespError where matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise MespError("pictures need matplotlib; pip install 'mesp[plot]'") from None


@contextmanager
def default_style() -> Iterator[None]:
    """matplotlib's own defaults, whatever the user's configuration says, and repeatable SVG."""
    import matplotlib.style

    # Letters as outlines: the same on every machine, and exactly as wide as was measured.
    exact = {"svg.hashsalt": "mesp", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    with matplotlib.style.context(["default", exact]):
        yield


@dataclass
class Sheet:
    """A figure addressed in inches from its top left corner, with a title and a setting line."""

    theme: Theme
    height: float
    title: str
    setting: str
    figure: Any = field(init=False)

    def __post_init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        # Whole pixels at 96 and at 150 an inch: a row half covered is a line at the bottom edge.
        self.height = math.ceil(self.height * 6 - 1e-6) / 6
        self.figure = Figure(figsize=(WIDTH, self.height), facecolor=self.theme.page)
        FigureCanvasAgg(self.figure)
        self.text(MARGIN, 0.17, self.title, size=12.5, weight="bold", va="top")
        lines = "\n".join(_wrapped(self.setting))
        self.text(MARGIN, 0.45, lines, colour=self.theme.muted, va="top", linespacing=1.3)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes without frame or ticks."""
        bounds = (
            left / WIDTH,
            1 - (top + height) / self.height,
            width / WIDTH,
            height / self.height,
        )
        axes = self.figure.add_axes(bounds, facecolor="none")
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(
            length=0, pad=5, labelsize=9, labelcolor=self.theme.muted, left=False, bottom=False
        )
        axes.set_axisbelow(True)
        return axes

    def width_of(self, words: str, **how: Any) -> float:
        """How wide ``words`` are in inches, written as by :meth:`text`."""
        text = self.text(0, 0, words, **how)
        width = text.get_window_extent(self.figure.canvas.get_renderer()).width / self.figure.dpi
        text.remove()
        return width

    def text(
        self, x: float, y: float, words: str, *, colour: str | None = None, **how: Any
    ) -> Text:
        """Writes at (x, y) inches from the top left; ``how`` is matplotlib's."""
        how = {"size": 9, "va": "center", "ha": "left", "parse_math": False, **how}
        place = (x / WIDTH, 1 - y / self.height)
        return self.figure.text(*place, words, color=colour or self.theme.ink, **how)

    def rule(self, start: tuple[float, float], end: tuple[float, float], **how: Any) -> None:
        """A straight line between two places in inches from the top left."""
        from matplotlib.lines import Line2D

        across = [start[0] / WIDTH, end[0] / WIDTH]
        down = [1 - start[1] / self.height, 1 - end[1] / self.height]
        self.figure.add_artist(Line2D(across, down, **{"linewidth": 0.8, **how}))

    def files(self) -> dict[str, bytes]:
        """The picture by file ending: svg and png. The same report gives the same bytes."""
        return {"svg": self._svg(), "png": self._png()}

    def _svg(self) -> bytes:
        metadata = {"Date": None, "Creator": None, "Title": f"{self.title}: {self.setting}"}
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="svg", facecolor=self.theme.page, metadata=metadata)
        # Places come with six decimals of a point, and two are finer than any screen.
        places, shorter = re.compile(rb' d="M [^"]*"|translate[^)]*'), re.compile(rb"(\.\d\d)\d+")
        text = places.sub(lambda found: shorter.sub(rb"\1", found[0]), buffer.getvalue())
        return re.sub(rb"\n +", rb"\n", text)

    def _png(self) -> bytes:
        from PIL import Image

        self.figure.set_dpi(150)
        canvas = self.figure.canvas
        canvas.draw()
        size = canvas.get_width_height()
        picture = Image.frombytes("RGBA", size, bytes(canvas.buffer_rgba())).convert("RGB")
        buffer = io.BytesIO()
        picture.quantize(128, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
        return buffer.getvalue()


def identifier(*parts: str) -> str:
    """The id of a shape in the SVG, so that what it shows can be found there."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", ".".join(parts))


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Places for labels of ``sizes`` along a line, as near to ``wanted`` as they fit between
    ``low`` and ``high`` without touching; crowded ones are pushed apart evenly."""
    blocks: list[list[int]] = []
    for index in sorted(range(len(wanted)), key=lambda index: (wanted[index], index)):
        blocks.append([index])
        while len(blocks) > 1:
            _, end = _reach(blocks[-2], wanted, sizes, low, high)
            start, _ = _reach(blocks[-1], wanted, sizes, low, high)
            if end <= start:
                break
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = [0.0] * len(wanted)
    for block in blocks:
        edge = _reach(block, wanted, sizes, low, high)[0]
        for index in block:
            places[index] = edge + sizes[index] / 2
            edge += sizes[index]
    return places


def _reach(
    block: Sequence[int],
    wanted: Sequence[float],
    sizes: Sequence[float],
    low: float,
    high: float,
) -> tuple[float, float]:
    """From where to where labels that touch each other reach, in their best place."""
    total, shift = 0.0, 0.0
    for index in block:
        shift += wanted[index] - (total + sizes[index] / 2)
        total += sizes[index]
    start = max(low, min(high - total, shift / len(block)))
    return start, start + total
