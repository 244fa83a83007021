"""``mesp compare``: methods side by side in memory, time and gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesp_core.cli.arguments import DEFAULT_MODEL, add_json_argument, add_model_arguments
from mesp_core.cli.output import INTERRUPTED, check_report, prepare_folder, say, write_report
from mesp_core.compare.ladder import climb, ladder_table
from mesp_core.compare.measure import Options
from mesp_core.compare.presets import PRESETS, preset_folder
from mesp_core.compare.process import run_child, signals_interrupt
from mesp_core.compare.reproduce import NAMES, Reproduction, chosen, reusable
from mesp_core.compare.setting import Setting, parse_method
from mesp_core.compare.study import Report, Study
from mesp_core.compare.table import heading, table
from mesp_core.errors import MespError
from mesp_core.files.checkpoint import open_checkpoint
from mesp_core.files.mapped_file import read_json
from mesp_core.lora import LoraConfig

#: Exit status when something could not be measured, though it should have been.
FAILED = 1

_METHODS = "mesp,mebp,mezo,autodiff"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="memory, time and gradients of several methods",
        description="Measures each method in a process of its own, after a step to warm up, and "
        "then the steps of all in turn in one more. Status 1 when a measurement failed.",
    )
    add_model_arguments(parser, default=DEFAULT_MODEL)
    parser.set_defaults(model=None, run=run)
    add = parser.add_argument
    add("--preset", help=f"a synthetic 4-bit checkpoint instead of --model: {', '.join(PRESETS)}")
    add("--methods", help=f"{_METHODS} (the default); a head can follow: mebp:tiled")
    add("--tokens", help="lengths of the one sequence, e.g. 128,256 (256)")
    add("--rank", help="LoRA ranks, e.g. 4,8 (8)")
    add(
        "--lora-dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of the LoRA parameters (float32; bfloat16 with --reproduce)",
    )
    add("--steps", type=int, default=3, help="timed steps of each method (3)")
    add("--no-time", action="store_true", help="do not time steps")
    add("--no-gradients", action="store_true", help="do not compare gradients")
    add(
        "--ladder",
        action="store_true",
        help="from plain autodiff down to MeSP, one idea at a time, instead of the methods (with "
        "--methods: as well)",
    )
    add("--plot", metavar="DIR", help="also draw the results into this folder, as SVG and PNG")
    add(
        "--reproduce",
        nargs="?",
        const="all",
        metavar="EXPERIMENTS",
        help=f"the experiments of the MeSP paper, all or some of {', '.join(NAMES)}; what the file "
        "of --json holds already is not measured again",
    )
    add("--cache", metavar="DIR", help="where presets are kept (the user's cache folder)")
    add_json_argument(parser)


@dataclass(frozen=True)
class Job:
    """What to do, the study that it fills, and how to print what there is of it."""

    work: Callable[[], None]
    study: Study
    tables: Callable[[], list[str]]


def run(options: argparse.Namespace) -> int:
    _check(options)
    draw = None if options.plot is None else _drawing(Path(options.plot))
    job = _comparison(options) if options.reproduce is None else _reproduction(options)
    status = 0
    try:
        with signals_interrupt():
            job.work()
    except KeyboardInterrupt:
        say("mesp: interrupted; what was measured until then:", error=True)
        status = INTERRUPTED
    for line in job.tables():
        say(line)
    if not job.study.empty:
        # An earlier report is worth more than an empty one.
        job.study.save()
    try:
        if draw is not None:
            draw(job.study.report)
    except MespError as error:
        if status != INTERRUPTED:
            raise
        say(f"mesp: {error}", error=True)
    return status or (FAILED if job.study.failed else 0)


def _check(options: argparse.Namespace) -> None:
    """Raises MespError for mistakes that need nothing opened."""
    check_report(options.json)
    if options.steps < 1:
        raise MespError(f"--steps must be at least 1, not {options.steps}; see --no-time")
    if options.model is not None and options.preset is not None:
        raise MespError("give --model or --preset, not both")


def _drawing(folder: Path) -> Callable[[Report], None]:
    """What draws a report into ``folder``; raises MespError now where it could not."""
    from mesp_core.compare.plot_style import require_matplotlib
    from mesp_core.compare.plots import draw

    require_matplotlib()
    prepare_folder(folder)

    def drawing(report: Report) -> None:
        say(f"Drew {len(draw(report, folder))} files into {folder}", error=True)

    return drawing


def _comparison(options: argparse.Namespace) -> Job:
    methods = [] if options.ladder and options.methods is None else _methods(options)
    lengths, ranks = (
        _numbers(options.tokens or "256", "--tokens"),
        _numbers(options.rank or "8", "--rank"),
    )
    lora_dtype = options.lora_dtype or "float32"
    for rank in ranks:
        LoraConfig(rank=rank, dtype=lora_dtype)
    source, label = _model(options)
    study, base = _study(options, source, options.dtype, lora_dtype)
    base = replace(base, model=source, label=label)

    def work() -> None:
        for tokens in lengths:
            for rank in ranks:
                cell = replace(base, tokens=tokens, rank=rank)
                if methods:
                    study.rows.cell([replace(cell, method=m, head=h) for m, h in methods])
        if options.ladder:
            climb(study, replace(base, tokens=lengths[0], rank=ranks[0]))

    def tables() -> list[str]:
        rows, rungs = study.report["rows"], study.report["ladder"]
        lines = table(rows) if rows else []
        return [*lines, "", heading(rungs), *ladder_table(rungs)] if rungs else lines

    return Job(work, study, tables)


def _reproduction(options: argparse.Namespace) -> Job:
    names = chosen(options.reproduce)
    for flag in ("model", "preset", "methods", "tokens", "rank", "ladder"):
        if getattr(options, flag):
            raise MespError(f"--reproduce says itself what is measured; leave --{flag} out")
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    earlier = _earlier(options.json)
    study, base = _study(options, None, dtype, options.lora_dtype or "bfloat16", earlier)
    reproduction = Reproduction(study, base, names, options.cache)
    return Job(reproduction.work, study, reproduction.tables)


def _earlier(path: str | None) -> dict[str, Any]:
    """The report that is in the file of --json already."""
    if path is None or not Path(path).exists() or not Path(path).stat().st_size:
        return {}
    return read_json(Path(path))


def _study(
    options: argparse.Namespace,
    source: str | None,
    dtype: str,
    lora_dtype: str,
    earlier: Mapping[str, Any] | None = None,
) -> tuple[Study, Setting]:
    """A study, and a setting with the backend and everything else that all settings share.

    source: the model whose dtype ``auto`` means; earlier: a report to go on with. Raises MespError
    where the model cannot be opened, the backend cannot run or lacks a dtype, or ``earlier`` is of
    something else.
    """
    stored = dtype
    if source is not None:
        checkpoint = open_checkpoint(source)
        stored = checkpoint.matrix("model.embed_tokens.weight").dtype
        checkpoint.close()
    request = {"task": "describe", "backend": options.backend, "dtype": dtype}
    answer = run_child(request | {"lora_dtype": lora_dtype, "stored": stored})
    if "error" in answer:
        raise MespError(answer["error"])
    base = Setting(
        model="",
        label="",
        backend=answer["backend"] if options.backend == "auto" else options.backend,
        dtype=answer.pop("dtype"),
        lora_dtype=lora_dtype,
        residency=options.residency,
        seed=options.seed,
    )
    settings = {key: value for key, value in vars(options).items() if key != "run"}
    report = {"command": "compare", **answer, "settings": settings}
    study = Study(
        report | (reusable(earlier, report, options.json) if earlier else {}),
        Options(
            steps=0 if options.no_time else options.steps,
            gradients=not options.no_gradients,
            timeline=options.plot is not None or options.json is not None,
            run=run_child,
        ),
        tell=lambda line: say(line, error=True),
        write=lambda report: write_report(options.json, report),
    )
    return study, base


def _model(options: argparse.Namespace) -> tuple[str, str]:
    """The source of the model, and what it is called."""
    if options.preset is not None:
        return str(preset_folder(options.preset, options.cache)), options.preset
    source = options.model or DEFAULT_MODEL
    return source, Path(source).name or source


def _methods(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """(method, head) of each of --methods, once each."""
    names = [name for name in (options.methods or _METHODS).split(",") if name.strip()]
    if not names:
        raise MespError("--methods names no method")
    return list(dict.fromkeys(parse_method(name) for name in names))


def _numbers(text: str, flag: str) -> list[int]:
    """The whole numbers of a list such as 128,256, once each and above 0."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise MespError(f"{flag} takes whole numbers such as 128,256, not {text!r}") from None
    if min(found) < 1:
        raise MespError(f"{flag} must be at least 1, not {min(found)}")
    return found
