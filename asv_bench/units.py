"""Figures as people read them."""

from __future__ import annotations


def human(cell: str, value: float) -> str:
    """A cell's value with its unit, which the benchmark's name tells: 12.3 ms, 4.5 MB."""
    if "time_" in cell:
        return seconds(value)
    if "track_peak_bytes" in cell:
        return megabytes(value)
    return f"{value:.1e}" if "error" in cell else f"{value:.2f}"


def seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1.0:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.3g} MB"
