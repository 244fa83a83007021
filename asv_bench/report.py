"""The one page: for each backend today's step, against the commits before, the step's bare matrix
products, and the bounds that the design set. One HTML file, no script, nothing loaded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from asv_bench.benchmarks import synthetic
from asv_bench.charts import Limit, Series, chart
from asv_bench.measured import Run, cell
from asv_bench.units import megabytes, seconds

BACKENDS = ("mlx", "jax", "torch")
STYLE = Path(__file__).resolve().parent / "pages" / "report.css"

#: What a backend's peak counts; ``benchmarks/child.py`` measures it.
COUNTED = {
    "mlx": "all that MLX's allocator held",
    "jax": "temporaries of the largest compiled program",
    "torch": "anonymous memory of the process beyond its start",
}


@dataclass(frozen=True)
class Measure:
    """A figure of a step. short: its name where there is little room; read: from a run, for a
    backend; None where it is not there."""

    title: str
    short: str
    note: str
    read: Callable[[Run, str], float | None]
    form: Callable[[float], str]
    limit: Limit | None = None


def _standard(name: str, *more: object, tokens: int = 256) -> Callable[[Run, str], float | None]:
    return lambda run, backend: run.value(cell(name, backend, tokens, 8, "float32", *more))


_time = _standard("step.Step.time_step")
_peak = _standard("step.StepMemory.track_peak_bytes_step")
_growing = [_standard("step.StepMemory.track_peak_bytes_step", tokens=n) for n in (1024, 2048)]
_error = _standard("step.Step.track_gradient_error")
_share = _standard("step.Step.track_gemm_share")
_mebp = _standard("methods.Method.time_method", "mebp")


def over_products(run: Run, backend: str) -> float | None:
    """How many times as long as its bare matrix products a step takes."""
    share = _share(run, backend)
    return 1.0 / share if share else None


def over_mebp(run: Run, backend: str) -> float | None:
    """Time of a step over that of MeBP's."""
    own, other = _time(run, backend), _mebp(run, backend)
    return own / other if own is not None and other else None


def rows_per_token(run: Run, backend: str) -> float | None:
    """Growth of the peak for each further token, in rows of D float32 values."""
    short, long = (read(run, backend) for read in _growing)
    if short is None or long is None:
        return None
    return (long - short) / (2048 - 1024) / (4 * synthetic.HIDDEN)


def _times(value: float) -> str:
    return f"{value:.2f} ×"


def _rows(value: float) -> str:
    return f"{value:.1f} D"


def _tiny(value: float) -> str:
    return f"{value:.1e}" if value else "0"


MEASURES = (
    Measure("Time of a step", "Time", "median of the samples", _time, seconds),
    Measure(
        "Peak memory of a step",
        "Peak memory",
        "each backend counts in its own way",
        _peak,
        megabytes,
    ),
    Measure(
        "Time over the bare matrix products",
        "Over bare products",
        "their time alone would be 1",
        over_products,
        _times,
        Limit(1.25, "bound 1.25"),
    ),
    Measure(
        "Time over MeBP's",
        "Over MeBP",
        "the same step by the framework's own autodiff, block by block",
        over_mebp,
        _times,
        Limit(1.0, "bound 1"),
    ),
    Measure(
        "Error of the gradients",
        "Gradient error",
        "relative, against float64",
        _error,
        _tiny,
    ),
    Measure(
        "Growth of the peak per token",
        "Growth per token",
        "in rows of D float32 values, from 1024 to 2048 tokens",
        rows_per_token,
        _rows,
        Limit(synthetic.LAYERS + 10, f"bound L + 10 = {synthetic.LAYERS + 10}"),
    ),
)


@dataclass(frozen=True)
class Bound:
    """What the design promises. backends: those it is promised for."""

    text: str
    read: Callable[[Run, str], float | None]
    form: Callable[[float], str]
    limit: float
    backends: tuple[str, ...] = BACKENDS


def _real(model: str, dtype: str) -> Callable[[Run, str], float | None]:
    name = "real_models.RealModelMemory.track_peak_bytes_real_model"
    return lambda run, backend: run.value(cell(name, backend, 256, 8, dtype, model))


BOUNDS = (
    Bound("A step takes at most 1.25 × its bare matrix products", over_products, _times, 1.25),
    Bound("A step takes no longer than MeBP's", over_mebp, _times, 1.0),
    Bound(
        "The peak grows by at most (L + 10) · D values a token",
        rows_per_token,
        _rows,
        synthetic.LAYERS + 10,
    ),
    Bound(
        "Qwen2.5-0.5B in 4 bits, bfloat16, 256 tokens: at most 50 MB in all",
        _real("qwen2.5-0.5b", "bfloat16"),
        megabytes,
        50e6,
        ("mlx",),
    ),
)


def page(runs: Sequence[Run], repository: Path) -> str:
    """The page of the newest run, and of those before it which were measured in the same way."""
    same = comparable(runs, _history(repository))
    today = same[-1]
    names = {run.commit: _subject(run.commit, repository) for run in same}
    body = "\n".join(
        [
            _head(today, names[today.commit], len(same)),
            _cards(same),
            "<h2>Over the commits</h2>",
            _charts(same, names),
            "<h2>Bounds</h2>",
            _bounds(today),
            "<h2>Figures</h2>",
            _figures(same, names),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>MeSP: speed and memory</title><style>\n{STYLE.read_text('utf-8')}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def comparable(runs: Sequence[Run], history: Sequence[str]) -> list[Run]:
    """Runs of commits of the history, in its order, all on one machine and in one environment: of
    those with the newest commit the one with the most. history: oldest first. Runs that are not in
    it are what there is when no others are."""
    place = {commit: at for at, commit in enumerate(history)}
    known = [run for run in runs if run.commit in place] or list(runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(known, key=lambda run: place.get(run.commit, 0)):
        groups.setdefault((run.machine, run.environment), []).append(run)
    return max(groups.values(), key=lambda g: (place.get(g[-1].commit, 0), len(g)))


def _history(repository: Path) -> list[str]:
    return _git(repository, "rev-list", "--reverse", "HEAD").split()


def _subject(commit: str, repository: Path) -> str:
    return _git(repository, "log", "-1", "--format=%s", commit).strip()


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _head(today: Run, subject: str, count: int) -> str:
    date = datetime.fromtimestamp(today.date / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    model = (
        f"{synthetic.LAYERS} blocks, D = {synthetic.HIDDEN}, F = {synthetic.FFN}, "
        f"V = {synthetic.VOCABULARY}, {synthetic.BITS} bits"
    )
    return (
        "<h1>MeSP: speed and memory</h1>"
        f"<p>Today is <code>{today.commit[:8]}</code> {escape(subject)} "
        f'<span class="muted">({date}; {count} commits measured in this way)</span></p>'
        f'<p class="muted">One training step of a random model ({model}): 256 tokens, rank 8, '
        "float32, one thread. Every figure is of the commit's own source, which was checked. "
        '<a href="index.html">All benchmarks, as asv shows them</a></p>'
    )


def _cards(runs: Sequence[Run]) -> str:
    return f'<div class="cards">{"".join(_card(runs, backend) for backend in BACKENDS)}</div>'


def _card(runs: Sequence[Run], backend: str) -> str:
    lines = []
    for measure in MEASURES[:5]:
        values = [measure.read(run, backend) for run in runs]
        today = values[-1]
        shown = "not measured" if today is None else f"<b>{measure.form(today)}</b>"
        lines.append(f"<dt>{measure.short}</dt><dd>{shown}</dd>{_change(values)}")
    return (
        f'<section class="card {backend}"><h3>{backend}</h3><dl>{"".join(lines)}</dl>'
        f'<p class="muted">Peak: {COUNTED[backend]}.</p></section>'
    )


def _change(values: Sequence[float | None]) -> str:
    """Today against the commit before that has a value, and against the best of all."""
    earlier = [value for value in values[:-1] if value]
    if values[-1] is None or not earlier:
        return ""
    before, best = values[-1] / earlier[-1] - 1.0, values[-1] / min(earlier) - 1.0
    kind = "bad" if before > 0.05 else "good" if before < -0.05 else ""
    return (
        f'<dd class="change"><span class="{kind}">{_percent(before)} on the commit before</span>, '
        f"{_percent(best)} on the best</dd>"
    )


def _percent(change: float) -> str:
    return f"{change:+.0%}" if abs(change) >= 0.1 else f"{change:+.1%}"


def _charts(runs: Sequence[Run], names: dict[str, str]) -> str:
    figures = []
    commits = [run.commit[:8] for run in runs]
    for measure in MEASURES:
        series = [_series(measure, runs, names, backend) for backend in BACKENDS]
        drawn = chart(measure.title, series, commits, measure.form, measure.limit)
        caption = f"<figcaption>{measure.title}<small>{measure.note}</small></figcaption>"
        figures.append(f"<figure>{caption}{drawn}</figure>")
    return f'<div class="charts">{"".join(figures)}</div>'


def _series(measure: Measure, runs: Sequence[Run], names: dict[str, str], backend: str) -> Series:
    values = [measure.read(run, backend) for run in runs]
    notes = [
        ""
        if value is None
        else f"{backend} {measure.form(value)}\n{run.commit[:8]} {names[run.commit]}"
        for run, value in zip(runs, values, strict=True)
    ]
    return Series(backend, values, notes)


def _bounds(today: Run) -> str:
    rows = []
    for bound in BOUNDS:
        for backend in bound.backends:
            value = bound.read(today, backend)
            if value is None:
                found = '<td>not measured</td><td></td><td class="text"></td>'
            else:
                met = value <= bound.limit
                word = (
                    '<span class="good">✓ met</span>'
                    if met
                    else '<span class="bad">✗ not met</span>'
                )
                found = (
                    f"<td>{bound.form(value)}</td><td>{value / bound.limit:.2f}</td>"
                    f'<td class="text">{word}</td>'
                )
            rows.append(
                f'<tr><td class="wrap">{escape(bound.text)}</td><td class="text">{backend}</td>'
                f"<td>{bound.form(bound.limit)}</td>{found}</tr>"
            )
    head = (
        '<tr><th>bound</th><th class="text">backend</th><th>limit</th><th>today</th>'
        '<th>of the limit</th><th class="text"></th></tr>'
    )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _figures(runs: Sequence[Run], names: dict[str, str]) -> str:
    """Time and peak of every commit, newest first: the charts, for reading."""
    head = "<tr><th>commit</th><th class='text'></th>"
    head += "".join(f"<th>{b}: time</th><th>peak</th>" for b in BACKENDS) + "</tr>"
    rows = []
    for run in reversed(runs):
        figures = []
        for backend in BACKENDS:
            for measure in MEASURES[:2]:
                value = measure.read(run, backend)
                figures.append(f"<td>{'' if value is None else measure.form(value)}</td>")
        rows.append(
            f'<tr><td><code>{run.commit[:8]}</code></td><td class="wrap">'
            f"{escape(names[run.commit])}</td>{''.join(figures)}</tr>"
        )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'
