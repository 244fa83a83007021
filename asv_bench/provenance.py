"""Every result is of the source of the commit that it is filed under, or is refused.

A process may import another source than the commit's (an installed copy, a working tree, what an
environment kept), and its figures look like any others. So each result carries a hash of what was
imported, and it is compared here with the commit's own tree.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from asv_bench.benchmarks.source import PACKAGES, source_hash
from asv_bench.measured import Run


def problems(runs: Iterable[Run], repository: Path) -> list[str]:
    """What is wrong with the results, a line each: no hash, a commit that is not there, or
    another source than the commit's. Commits whose packages are equal may share a hash."""
    found, runs = [], list(runs)
    hashes = {run.commit: tree_hash(repository, run.commit) for run in runs}
    owners = {value: commit for commit, value in hashes.items()}
    for run in runs:
        where, measured = f"{run.commit[:8]} ({run.environment})", run.source_hash
        if hashes[run.commit] is None:
            found.append(f"{where} is no commit of this repository")
        elif measured is None:
            # A commit that could not be built has no figures either.
            if not run.values:
                continue
            found.append(f"{where} does not tell which source was measured")
        elif measured != hashes[run.commit]:
            owner = owners.get(measured)
            whose = f"that of {owner[:8]}" if owner else "of no commit that has results"
            found.append(f"{where} was measured on another source: {whose}")
    return found


@cache
def tree_hash(repository: Path, commit: str) -> int | None:
    """The hash that the packages of a commit have when they are imported; None where there is no
    such commit."""
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit]
    done = subprocess.run(command, check=False, capture_output=True)
    return None if done.returncode else source_hash(_modules(done.stdout))


def _modules(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """As ``imported_files`` has them: ``backends/mesp_mlx/blas.py`` is ``mesp_mlx/blas.py``."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        for member in tree:
            name = member.name.removeprefix("backends/")
            if name.endswith(".py") and name.partition("/")[0] in PACKAGES:
                file = tree.extractfile(member)
                assert file is not None
                yield name, file.read()
