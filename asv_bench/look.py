"""``python -m asv_bench.look FOLDER``: opens what was published in a headless Chromium, and leaves
pictures of it in the folder; fails on an error in a page's console."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from asv_bench.browser import browser, find, served
from asv_bench.running import HTML

_GRAPH = "$('#main-graph').data('plot') && $('#main-graph').data('plot').getData().length"

#: Picture, page, what is true when it is drawn, the window's height, and whether it is dark.
PICTURES = (
    ("grid", "index.html", "$('#summarygrid-display canvas.flot-base').length", 1400, False),
    ("time", "index.html#step.Step.time_step", _GRAPH, 1000, False),
    ("memory", "index.html#step.StepMemory.track_peak_bytes_step", _GRAPH, 1000, False),
    ("report-light", "report.html", "document.querySelector('svg')", 2600, False),
    ("report-dark", "report.html", "document.querySelector('svg')", 2600, True),
)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or find() is None:
        print(__doc__ if find() else "Chromium is not installed", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    errors = pictures(HTML, folder)
    print(*errors, sep="\n")
    return 1 if errors else 0


def pictures(html: Path, folder: Path) -> list[str]:
    """Takes every picture; what the pages' consoles were told of errors."""
    with served(html) as address, browser() as page:
        for name, place, drawn, height, dark in PICTURES:
            page.show(height=height, dark=dark)
            page.open(f"{address}/{place}")
            page.wait(drawn)
            page.screenshot(folder / f"{name}.png")
        return page.errors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
