"""Small git repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """What a git command prints, run by nobody in particular."""
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, name: str, text: str) -> str:
    """Commits a file; the commit's hash."""
    (folder / name).write_text(text)
    git(folder, "add", name)
    git(folder, "commit", "-q", "-m", name)
    return git(folder, "rev-parse", "HEAD")


def commits(repository: Path) -> list[str]:
    """Oldest first."""
    return git(repository, "rev-list", "--reverse", "HEAD").split()
