"""asv as the make targets use it: its configuration, commits, and one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asv.util import load_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
HTML = HERE / "html"


def git(*arguments: str, repository: Path = ROOT) -> str:
    """What a git command prints, without the last line's end."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip("\n")


@contextmanager
def configuration(results: Path, html: Path) -> Iterator[Path]:
    """A file that says the same as asv.conf.json, with these folders for results and pages."""
    settings = load_json(str(HERE / "asv.conf.json"), js_comments=True)
    # asv takes paths, and {conf_dir}, from where its configuration lies.
    commands = {
        name: [line.replace("{conf_dir}", str(HERE)) for line in settings[name]]
        for name in ("build_command", "install_command")
    }
    settings |= commands | {
        "repo": str(ROOT),
        "benchmark_dir": str(HERE / "benchmarks"),
        "env_dir": str(HERE / "env"),
        "results_dir": str(results),
        "html_dir": str(html),
    }
    with tempfile.TemporaryDirectory(prefix="mesp-asv-") as folder:
        path = Path(folder) / "asv.conf.json"
        path.write_text(json.dumps(settings))
        yield path


def asv(config: Path, *arguments: str, quiet: bool = False) -> int:
    """Runs asv; its exit status. quiet: what it prints is not shown."""
    # A path to another copy of the package would be found in every environment. This interpreter
    # comes first, as asv makes its environments with the first of its version that it finds.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "asv", arguments[0], "--config", str(config), *arguments[1:]]
    out = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, env=environment, stdout=out, check=False).returncode


def run(config: Path, patterns: Iterable[str], options: Sequence[str]) -> int:
    """``asv run`` of the cells that match a pattern; its exit status, 2 when one failed."""
    # asv asks about the machine once; what it finds by itself will do.
    if asv(config, "machine", "--yes", quiet=True):
        return 1
    chosen = [argument for pattern in patterns for argument in ("--bench", pattern)]
    return asv(config, "run", "--show-stderr", *chosen, *options)
