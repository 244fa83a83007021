"""Made-up compare reports, with a figure for everything a picture can show."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

#: Megabytes of (allocator peak, footprint) and seconds of a step.
METHODS = {
    "mesp": (52.25, 60.5, 9.1),
    "mesp-store-h": (53.5, 61.75, 9.0),
    "mebp": (310.0, 334.5, 10.25),
    "mezo": (38.5, 47.0, 6.5),
    "autodiff": (1490.0, 1533.0, 7.0),
}

LADDER = {
    "plain autodiff": ("autodiff", 1490),
    "checkpoint each block": ("mebp", 820),
    "hand-written backward": ("mesp-store-h", 118),
    "recompute h = xA": ("mesp", 116.5),
    "tile attention and MLP": ("mesp", 52.25),
}


def row(method: str, peak: float | None, footprint: float | None, **own: Any) -> Row:
    """A row as the report has it; sizes in megabytes."""
    return {
        "model": "qwen2.5-0.5b",
        "source": "qwen2.5-0.5b",
        "backend": "mlx",
        "method": method,
        "head": "dense" if method in ("mebp", "autodiff") else "tiled",
        "dtype": "bfloat16",
        "lora_dtype": "float32",
        "tokens": 256,
        "rank": 8,
        "residency": "streamed",
        "apply": "block",
        "tiled": True,
        "peak_bytes": None if peak is None else round(peak * 1e6),
        "footprint_bytes": None if footprint is None else round(footprint * 1e6),
        "compiled_bytes": None,
        "step_seconds": None,
        "step_ratio": None,
        "timeline": None,
        "error": None,
        **own,
    }


def timeline(peak: float, seconds: float, head: float) -> Row:
    """Memory that rises to ``peak`` MB at the end of the head, and falls. The head takes the part
    ``head`` of the step, from its middle on."""
    samples, middle = 900, 0.5 * seconds
    times = [5.25 + seconds * index / (samples - 1) for index in range(samples)]
    top = middle + head * seconds
    sizes = [
        peak * 1e6 * (0.2 + 0.8 * (1 - abs(time - 5.25 - top) / seconds) - 0.02 * (index % 2))
        for index, time in enumerate(times)
    ]
    sizes[max(range(samples), key=sizes.__getitem__)] = peak * 1e6
    phases = [[5.25, "forward"], [5.25 + middle, "head"], [5.25 + top, "backward"]]
    return {"seconds": times, "bytes": sizes, "phases": phases, "measure": "footprint_bytes"}


def full() -> Row:
    """Three models, four lengths, three ranks, the ladder, timelines and curves; one failure and
    one method that is not available."""
    rows = []
    for model, factor in (("qwen2.5-0.5b", 1.0), ("qwen2.5-1.5b", 1.75), ("qwen2.5-3b", 2.5)):
        for method, (peak, footprint, seconds) in METHODS.items():
            own: Row = {"model": model, "step_seconds": seconds * factor}
            own["step_ratio"] = seconds / METHODS["mesp"][2]
            if factor == 1:
                own["timeline"] = timeline(footprint, seconds, 0.01 if method == "mesp" else 0.2)
            rows.append(row(method, peak * factor, footprint * factor, **own))
    for tokens in (128, 512, 1024):
        for method, (peak, footprint, _) in METHODS.items():
            if method == "autodiff" and tokens == 1024:
                rows.append(row(method, None, None, tokens=tokens, error="killed: out of memory"))
                continue
            factor = 0.5 + tokens / 512
            rows.append(row(method, peak * factor, footprint * factor, tokens=tokens))
    for rank in (4, 32):
        for method in ("mesp", "mebp"):
            peak, footprint, _ = METHODS[method]
            rows.append(row(method, peak + rank, footprint + rank, rank=rank))
        own = {"rank": rank, "error": "no such thing here", "unavailable": True}
        rows.append(row("mezo", None, None, **own))
    ladder = [
        row(method, peak, peak + 8, rung=name, step_seconds=8.5, tiled=name.startswith("tile"))
        for name, (method, peak) in LADDER.items()
    ]
    return report(rows, ladder=ladder, curves=curves(), settings={"curves": curve_setting()})


def curves(steps: int = 60) -> dict[str, Row]:
    """Losses that fall; MeBP's are within 0.0001 of MeSP's."""
    numbers = list(range(1, steps + 1))
    noise = [0.3 * ((index * 37) % 11 - 5) / 5 for index in numbers]
    mesp = [2.5 + 30 / (20 + index) + own for index, own in zip(numbers, noise, strict=True)]
    mebp = [loss + 0.0001 * (index % 2) for index, loss in enumerate(mesp)]
    mezo = [3.25 + 5 / (20 + index) + own for index, own in zip(numbers, noise, strict=True)]
    return {
        name: {"step": numbers, "loss": losses}
        for name, losses in (("mebp", mebp), ("mesp", mesp), ("mezo", mezo))
    }


def curve_setting() -> Row:
    return {"model": "smollm2-135m", "tokens": 256, "rank": 8, "dtype": "float32", "backend": "mlx"}


def report(rows: list[Row], **own: Any) -> Row:
    return {"command": "compare", "backend": "mlx", "device": "cpu", "rows": rows, **own}
