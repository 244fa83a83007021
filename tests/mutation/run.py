"""The mutation check's command: ``python -m tests.mutation.run`` (``make mutation``).

Every mutant of every formula and specialisation is run against the tests that judge its module.
Survivors must be explained in ``explained.toml``; an unexplained one, or an explanation that no
survivor needs, fails the check. Each verdict is printed as it comes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutation import child
from tests.mutation.mutants import Mutant, mutants, mutated
from tests.mutation.suites import SUITES, Stage

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    mutant: Mutant
    path: Path
    stages: tuple[Stage, ...]


def jobs(patterns: Sequence[str] = ()) -> Iterator[Job]:
    """Every mutant of the modules whose dotted name holds one of ``patterns``, with its judges."""
    for suite in SUITES:
        for path in sorted(ROOT.glob(suite.modules)):
            name = module_name(path)
            if patterns and not any(pattern in name for pattern in patterns):
                continue
            for mutant in mutants(name, path.read_text("utf-8")):
                yield Job(mutant, path, suite.stages(path.stem))


def module_name(path: Path) -> str:
    """The dotted name a file of this tree is imported by."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "backends":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def judge(job: Job, limits: Mapping[Stage, float]) -> int:
    """What the stages say, each in a process of its own: a fork of this one, which has imported
    the tools and frameworks but nothing of the library. Prints the verdict."""
    source = mutated(job.path.read_text("utf-8"), job.mutant)
    start = time.monotonic()
    verdict, code = "SURVIVED", child.SURVIVED
    for number, stage in enumerate(job.stages, start=1):
        code, signalled, _ = _forked(job.mutant.module, job.path, source, stage, limits[stage])
        if code != child.SURVIVED:
            verdict = f"died {number}" if signalled else f"stage {number}"
            break
    seconds = time.monotonic() - start
    os.write(1, f"{verdict:10} {seconds:6.1f} s  {job.mutant.name}\n".encode())
    return code


def time_limits(stages: Sequence[Stage]) -> dict[Stage, float]:
    """Seconds of its own time each stage may take: a few times what it takes without a mutant.

    Raises RuntimeError for a stage that fails without one, and so would notice anything.
    """
    limits = {}
    for stage in stages:
        code, _, seconds = _forked("", ROOT, "", stage, 600.0)
        print(f"{seconds:6.1f} s without a mutant: {' '.join(stage)}", flush=True)
        if code != child.SURVIVED:
            raise RuntimeError("these tests fail without a mutant")
        limits[stage] = 10.0 + 4.0 * seconds
    return limits


def _forked(
    module: str, path: Path, source: str, stage: Stage, limit: float
) -> tuple[int, bool, float]:
    """A stage in a process of its own: its code, whether a signal ended it, and its seconds."""
    process = os.fork()
    if not process:
        code = 2
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            error = os.dup(2)
            os.dup2(quiet, 2)
            code = child.run(module, path, source, stage, limit)
        except BaseException as problem:
            os.write(error, f"{module}: {problem!r}\n".encode())
        finally:
            os._exit(code)
    _, status, usage = os.wait4(process, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        return child.KILLED, True, seconds
    return os.waitstatus_to_exitcode(status), False, seconds


_TOOLS = (
    "array_api_compat.torch",
    "array_api_strict",
    "hypothesis",
    "jax",
    "mesp_reference.decoder",
    "peft",
    "tokenizers",
    "transformers.models.llama.modeling_llama",
)


def _import_the_tools() -> None:
    """What every fork would import again: frameworks, which start no thread when imported and none
    of whose devices is touched here, and of the library only the reference, which no mutant
    changes. MLX is left out: its backend must be there before it to choose a BLAS."""
    for name in _TOOLS:
        importlib.import_module(name)
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(list(tasks.iterdir())) > 1:
        raise RuntimeError(
            "an import has started a thread, which a fork would lose; set OPENBLAS_NUM_THREADS, "
            "OMP_NUM_THREADS and MKL_NUM_THREADS to 1"
        )
    # JAX warns of forks because its devices have threads; this process never asks for one.
    warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
    gc.freeze()


def explained() -> dict[str, str]:
    """Why each survivor that may survive does, by its name."""
    groups = tomllib.loads((HERE / "explained.toml").read_text("utf-8"))
    return {name: group["reason"] for group in groups["because"] for name in group["mutants"]}


def survivors_in(log: Path) -> set[str]:
    """The names of the mutants that an earlier run's output says survived."""
    lines = log.read_text("utf-8").splitlines()
    return {line.partition(" s  ")[2] for line in lines if line.startswith("SURVIVED")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--module", nargs="*", default=[], help="only modules whose names hold one of these"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--stages", type=int, default=99, help="only so many judges, quick ones")
    parser.add_argument("--again", type=Path, help="only what survived in this earlier output")
    options = parser.parse_args(arguments)
    todo = [replace(job, stages=job.stages[: options.stages]) for job in jobs(options.module)]
    if options.again is not None:
        names = survivors_in(options.again)
        todo = [job for job in todo if job.mutant.name in names]
    if options.list:
        print(*(job.mutant.name for job in todo), sep="\n")
        return 0
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as compiled:
        _keep_what_jax_compiles(compiled)
        _import_the_tools()
        start = time.monotonic()
        limits = time_limits(list(dict.fromkeys(stage for job in todo for stage in job.stages)))
        survivors = run_all(todo, options.jobs, limits)
    return report(todo, survivors, time.monotonic() - start)


def _keep_what_jax_compiles(folder: str) -> None:
    """Most programs of a mutant are those of the code as it is; JAX finds them by what they are."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def report(todo: Sequence[Job], survivors: Sequence[Job], seconds: float) -> int:
    """Prints the count and what is wrong; 1 when something is, else 0."""
    reasons = explained()
    judged = {job.mutant.name for job in todo}
    names = {job.mutant.name for job in survivors}
    stale = [name for name in reasons if name in judged and name not in names]
    unexplained = [job for job in survivors if job.mutant.name not in reasons]
    print(
        f"{len(todo)} mutants, {len(todo) - len(survivors)} noticed, "
        f"{len(survivors) - len(unexplained)} survive with an explanation, "
        f"{len(unexplained)} without; {seconds:.0f} s"
    )
    for job in unexplained:
        print(f"  survived: line {job.mutant.line}: {job.mutant.name}")
    for name in stale:
        print(f"  explained, but does not survive: {name}")
    return 1 if unexplained or stale else 0


def run_all(todo: Sequence[Job], processes: int, limits: Mapping[Stage, float]) -> list[Job]:
    """The jobs whose mutants survive, in order; ``processes`` at a time."""
    running: dict[int, Job] = {}
    results: dict[Job, int] = {}
    waiting = list(reversed(todo))
    sys.stdout.flush()
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop()
            process = os.fork()
            if not process:
                os._exit(judge(job, limits))
            running[process] = job
        process, status = os.wait()
        job = running.pop(process)
        results[job] = os.waitstatus_to_exitcode(status)
        if results[job] not in (child.SURVIVED, child.KILLED):
            raise RuntimeError(f"{job.mutant.name} could not be judged")
    return [job for job in todo if results[job] == child.SURVIVED]


if __name__ == "__main__":
    raise SystemExit(main())
