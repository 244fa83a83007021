"""The mutation check's command: ``python -m tests.mutation.run`` (``make mutation``).

Every mutant of every formula and specialisation is run against the tests that judge its module.
Survivors must be explained in ``explained.toml``; an unexplained one, or an explanation that no
survivor needs, fails the check.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation import child
from tests.mutation.mutants import Mutant, mutants, mutated

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Suite:
    """modules: a glob of files; stages: of a file's stem, pytest's arguments, the quick judge
    first. A mutant that survives one stage meets the next."""

    modules: str
    stages: Callable[[str], tuple[tuple[str, ...], ...]]


_CONFORMANCE = "tests/conformance"
_EXACT = "numpy-float64 or numpy-float16"
_MEMORY = "tests/memory/test_nothing_large_is_made.py"
_WHOLE = ("tests/oracle/test_whole_model.py", "-k", "numpy_float64")

#: The file of the matrix that is about a formula, where it is not named like it.
_ABOUT = {
    "activation": "gated_mlp",
    "cross_entropy": "ends",
    "embedding": "ends",
    "frozen_linear": "linear",
    "frozen_matrix": "linear",
    "quantization": "linear",
    "loops": "linear",
    "precision": "linear",
}


def _about(stem: str) -> str:
    return f"{_CONFORMANCE}/test_{_ABOUT.get(stem, stem)}.py"


def _backend(name: str) -> Suite:
    return Suite(
        f"backends/mesp_{name}/*.py",
        lambda stem: (
            (f"tests/{name}",),
            (_CONFORMANCE, "-k", name),
            ("tests/oracle/test_whole_model.py", "-k", name),
        ),
    )


SUITES = (
    Suite(
        "mesp_core/formulas/*.py",
        lambda stem: (
            (_about(stem), f"{_CONFORMANCE}/test_defaults.py", "-k", f"{_EXACT} or default"),
            (_about(stem), "-k", "not jax and not float64"),
            (_CONFORMANCE, "-k", _EXACT),
            (_MEMORY,),
            _WHOLE,
        ),
    ),
    Suite("mesp_core/block.py", lambda stem: ((_about(stem), "-k", _EXACT), (_MEMORY,), _WHOLE)),
    Suite("mesp_core/head.py", lambda stem: (_WHOLE, (_MEMORY,))),
    Suite("mesp_core/host_matrix.py", lambda stem: (_WHOLE, (_MEMORY,))),
    Suite("mesp_core/methods/mesp.py", lambda stem: (_WHOLE, (_MEMORY,))),
    _backend("mlx"),
    _backend("torch"),
    _backend("jax"),
)


@dataclass(frozen=True)
class Job:
    mutant: Mutant
    path: Path
    stages: tuple[tuple[str, ...], ...]


def jobs(pattern: str) -> Iterator[Job]:
    """Every mutant of the modules whose dotted name holds ``pattern``, with its judges."""
    for suite in SUITES:
        for path in sorted(ROOT.glob(suite.modules)):
            name = module_name(path)
            if pattern in name:
                for mutant in mutants(name, path.read_text("utf-8")):
                    yield Job(mutant, path, suite.stages(path.stem))


def module_name(path: Path) -> str:
    """The dotted name a file of this tree is imported by."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "backends":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def judge(job: Job) -> int:
    """What the stages say, each in a process of its own: a fork of this one, which has imported
    the test tools but nothing of the library."""
    source = mutated(job.path.read_text("utf-8"), job.mutant)
    for stage in job.stages:
        code = _forked(job, source, stage)
        if code != child.SURVIVED:
            return code
    return child.SURVIVED


def _forked(job: Job, source: str, arguments: Sequence[str]) -> int:
    process = os.fork()
    if not process:
        code = 2
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            error = os.dup(2)
            os.dup2(quiet, 2)
            code = child.run(job.mutant.module, job.path, source, arguments)
        except BaseException as problem:
            os.write(error, f"{job.mutant.name}: {problem!r}\n".encode())
        finally:
            os._exit(code)
    status = os.waitpid(process, 0)[1]
    return child.KILLED if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def _import_the_tools() -> None:
    """What every fork would import again. Nothing of the library but its reference, which no
    mutant touches; no framework, whose threads a fork would lose."""
    for name in ("array_api_strict", "tokenizers", "mesp_reference.decoder"):
        importlib.import_module(name)


def explained() -> dict[str, str]:
    """Why each survivor that may survive does, by its name."""
    groups = tomllib.loads((ROOT / "tests/mutation/explained.toml").read_text("utf-8"))
    return {name: group["reason"] for group in groups["because"] for name in group["mutants"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", default="", help="only modules whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args(arguments)
    todo = list(jobs(options.module))
    if options.list:
        print(*(job.mutant.name for job in todo), sep="\n")
        return 0
    os.chdir(ROOT)
    _import_the_tools()
    start = time.monotonic()
    survivors, reasons = run_all(todo, options.jobs), explained()
    names = {job.mutant.name for job in survivors}
    covered = {job.mutant.module for job in todo}
    stale = [n for n in reasons if n.partition(":")[0] in covered and n not in names]
    unexplained = [job for job in survivors if job.mutant.name not in reasons]
    print(
        f"{len(todo)} mutants, {len(todo) - len(survivors)} noticed, "
        f"{len(survivors) - len(unexplained)} survive with an explanation, "
        f"{len(unexplained)} without; {time.monotonic() - start:.0f} s"
    )
    for job in unexplained:
        print(f"  survived: line {job.mutant.line}: {job.mutant.name}")
    for name in stale:
        print(f"  explained, but does not survive: {name}")
    return 1 if unexplained or stale else 0


def run_all(todo: Sequence[Job], processes: int) -> list[Job]:
    """The jobs whose mutants survive, in order; ``processes`` at a time."""
    running: dict[int, Job] = {}
    results: dict[Job, int] = {}
    waiting = list(reversed(todo))
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop()
            process = os.fork()
            if not process:
                os._exit(judge(job))
            running[process] = job
        process, status = os.wait()
        job = running.pop(process)
        results[job] = os.waitstatus_to_exitcode(status)
        if sys.stderr.isatty():
            print(f"\r{len(results)}/{len(todo)}", end="", file=sys.stderr)
        if results[job] not in (child.SURVIVED, child.KILLED):
            raise RuntimeError(f"{job.mutant.name} could not be judged")
    return [job for job in todo if results[job] == child.SURVIVED]


if __name__ == "__main__":
    raise SystemExit(main())
