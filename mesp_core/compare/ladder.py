"""From plain automatic differentiation down to MeSP, one idea at a time, and what each should save.

The estimates are counts of arrays by their shapes: what a rung no longer keeps. They are ranges,
because frameworks differ in what they keep beside what a derivative needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesp_core.backend import TileSizes
from mesp_core.compare.setting import Row, Setting
from mesp_core.compare.study import Study
from mesp_core.compare.table import megabytes
from mesp_core.config import ModelConfig
from mesp_core.files.checkpoint import open_checkpoint
from mesp_core.formulas.frozen_matrix import rows_per_tile

#: Bytes of a value of each dtype.
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

#: The figures that a saving can be read from, the best first.
_FIGURES = ("peak_bytes", "footprint_bytes")


@dataclass(frozen=True)
class Estimate:
    """The bytes that a rung should save, from ``low`` to ``high``, and the arithmetic in words."""

    low: float
    high: float
    words: str


@dataclass(frozen=True)
class Shapes:
    """Bytes of what a step of ``tokens`` tokens makes, by the letters of docs/README.md."""

    config: ModelConfig
    tokens: int
    rank: int
    #: Bytes of a value where activations are kept, and where hand-written passes add up.
    kept: int
    wide: int
    stored: int

    @property
    def heads(self) -> int:
        """Values of q, k, v and o of a token."""
        c = self.config
        return 2 * (c.heads + c.kv_heads) * c.head_dim

    @property
    def scores(self) -> int:
        return self.config.heads * self.tokens**2 * self.kept

    @property
    def block(self) -> int:
        """What a plain block keeps for its derivative: 4 D (its input, x_mid, two norms), q, k, v
        and o, 4 F (gate, up, activation, product) and h of seven projections."""
        c = self.config
        return self.tokens * (4 * c.hidden + self.heads + 4 * c.ffn + 7 * self.rank) * self.kept

    @property
    def block_at_most(self) -> int:
        """The same where a framework keeps more than it needs, as JAX does: two of D and the scores
        twice in the accumulation dtype beside the dtype of the block, a mask, six of F."""
        c = self.config
        wider = 2 * c.hidden * self.wide + 2 * c.ffn * self.kept
        scores = c.heads * self.tokens**2 * (2 * self.wide + self.kept + 1)
        return self.block + self.tokens * wider + scores

    @property
    def input(self) -> int:
        return self.tokens * self.config.hidden * self.kept

    @property
    def logits(self) -> int:
        return self.tokens * self.config.vocab * self.wide

    def hand_written(self, features: int, square: int) -> int:
        """The most that a hand-written pass of a block has at once, in its MLP or its attention:
        five arrays of ``features`` features beside q, k, v, o and four of D, or two of H · square
        scores beside q, k, v, o, their gradients and three of D."""
        c = self.config
        mlp = self.tokens * (self.heads + 4 * c.hidden + 5 * features)
        attention = self.tokens * (2 * self.heads + 3 * c.hidden) + 2 * c.heads * square
        return max(mlp, attention) * self.wide


def _checkpoints(s: Shapes) -> Estimate:
    others = s.config.layers - 1
    return Estimate(
        others * (s.block - s.input),
        others * (s.block_at_most - s.input),
        f"{others} blocks keep their input of {megabytes(s.input)} MB instead of the "
        f"{megabytes(s.block)} MB of intermediate results that derivatives need, or the "
        f"{megabytes(s.block_at_most)} MB that JAX keeps, H·N² attention scores among them",
    )


def _streaming(s: Shapes) -> Estimate:
    return Estimate(s.stored, s.stored, "the stored weights lie in the mapped file")


def _head(s: Shapes) -> Estimate:
    least, most = _plain_backward(s)
    return Estimate(
        max(0, 2 * s.logits - most),
        max(0, 4 * s.logits - least),
        f"2 to 4 arrays of N·V logits, {megabytes(s.logits)} MB each, no longer tower above a "
        f"block's {megabytes(least)} to {megabytes(most)} MB",
    )


def _by_hand(s: Shapes) -> Estimate:
    least, most = _plain_backward(s)
    ours = s.hand_written(s.config.ffn, s.tokens**2)
    return Estimate(
        max(0, least - ours),
        max(0, most - ours),
        f"a plain block and its gradients come to {megabytes(least)} to {megabytes(most)} MB; "
        f"hand-written passes that free early have {megabytes(ours)} MB at most",
    )


def _plain_backward(s: Shapes) -> tuple[int, int]:
    """Bytes of a plain block with two gradients of F features, and at most of the accumulation
    dtype and with those of the scores."""
    features = 2 * s.tokens * s.config.ffn
    scores = s.config.heads * s.tokens**2
    return s.block + features * s.kept, s.block_at_most + (features + scores) * s.wide


def _low_rank(s: Shapes) -> Estimate:
    size = 4 * s.tokens * s.rank * s.wide
    return Estimate(0, size, f"h = xA of q, k, v and o: 4·N·R, {megabytes(size)} MB")


def _tiles(s: Shapes) -> Estimate:
    sizes = TileSizes()
    features = min(s.config.ffn, rows_per_tile(3 * s.config.hidden, sizes.weights))
    whole = s.hand_written(s.config.ffn, s.tokens**2)
    cut = s.hand_written(features, min(s.tokens**2, sizes.query * sizes.key))
    return Estimate(
        (whole - cut) / 2,
        2 * (whole - cut),
        f"MLP and attention have {megabytes(cut)} MB at most instead of {megabytes(whole)}: tiles "
        f"of {features} of F = {s.config.ffn} features, of {sizes.query} × {sizes.key} scores",
    )


@dataclass(frozen=True)
class Rung:
    """name: the idea that is new; changes: of the setting; estimate: None for the first."""

    name: str
    changes: Mapping[str, Any]
    estimate: Callable[[Shapes], Estimate] | None = None


RUNGS: Sequence[Rung] = (
    Rung("plain autodiff, weights in memory", {"method": "autodiff", "residency": "resident"}),
    Rung("a checkpoint a block", {"method": "mebp", "residency": "resident"}, _checkpoints),
    Rung("weights streamed from the file", {"method": "mebp"}, _streaming),
    Rung("the head in tiles", {"method": "mebp", "head": "tiled"}, _head),
    Rung(
        "hand-written passes, freeing early", {"method": "mesp-store-h", "tiled": False}, _by_hand
    ),
    Rung("h recomputed", {"method": "mesp", "tiled": False}, _low_rank),
    Rung("attention and MLP in tiles", {"method": "mesp"}, _tiles),
)


def climb(study: Study, base: Setting) -> None:
    """Measures every rung for the model, length and rank of ``base``, into ``study.ladder``.

    Its rows get ``rung``, ``saving_bytes`` (over the last rung before that was measured),
    ``expected_bytes`` (low, high) and ``expected``, the arithmetic in words; those that there are
    when an interruption comes, too.
    """
    plain = replace(base, residency="streamed", tiled=True)
    settings = [replace(plain, **{"head": None} | dict(rung.changes)) for rung in RUNGS]
    try:
        study.ladder.cell(settings)
    finally:
        _annotate(dict(zip(settings, RUNGS, strict=True)), study.ladder.rows)
        study.save()


def _annotate(rungs: Mapping[Setting, Rung], rows: Sequence[Row]) -> None:
    if not rows:
        return
    shapes = _shapes(next(iter(rungs)), rows[0]["stored_bytes"])
    figure, above = _figure(rows), None
    for row in rows:
        rung = rungs[Setting.from_row(row)]
        value = None if figure is None else row[figure]
        saving = None if value is None or above is None else above - value
        row |= {"rung": rung.name, "saving_bytes": saving}
        if rung.estimate is not None:
            found = rung.estimate(shapes)
            row |= {"expected_bytes": [found.low, found.high], "expected": found.words}
        above = above if value is None else value


def _shapes(setting: Setting, stored: int) -> Shapes:
    checkpoint = open_checkpoint(setting.model)
    config = checkpoint.config
    checkpoint.close()
    kept = _BYTES[setting.dtype]
    return Shapes(config, setting.tokens, setting.rank, kept, max(kept, 4), stored)


def _figure(rows: Iterable[Row]) -> str | None:
    """The figure that savings are read from: the best that all measured rungs have."""
    measured = [row for row in rows if row["error"] is None]
    found = (figure for figure in _FIGURES if all(row[figure] is not None for row in measured))
    return next(found, None)


def ladder_table(rows: Sequence[Row]) -> list[str]:
    """The rungs with their savings, measured and expected, and the arithmetic of each."""
    figure = _figure(rows)
    name = {"peak_bytes": "allocator", "footprint_bytes": "footprint"}.get(figure or "", "memory")
    width = max(len(row["rung"]) for row in rows) + 3
    lines = [
        f"  {'':<{width}} {name:>9}  {'saves':>9}  {'expected':>17}  {'step':>6}   MB and seconds"
    ]
    for place, row in enumerate(rows, start=1):
        title = f"{place}. {row['rung']}"
        if row["error"] is not None:
            lines.append(f"  {title:<{width}} {row['error']}")
            continue
        value = megabytes(row[figure] if figure else None)
        low, high = row.get("expected_bytes") or (None, None)
        expected = "" if low is None else f"{megabytes(low)}–{megabytes(high)}"
        seconds = "" if row["step_seconds"] is None else f"{row['step_seconds']:.2f}"
        saves = megabytes(row["saving_bytes"])
        lines.append(
            f"  {title:<{width}} {value:>9}  {saves:>9}  {expected:>17}  {seconds:>6}".rstrip()
        )
    words = [f"  {n}. {row['expected']}" for n, row in enumerate(rows, 1) if row.get("expected")]
    return [*lines, "", *words]
