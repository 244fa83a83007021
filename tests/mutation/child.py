"""Runs tests against one mutant: the module under test is loaded from mutated text."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

#: Bytes of address space a mutant may ask for before it counts as noticed.
MEMORY_LIMIT = 48 << 30

SURVIVED, KILLED = 0, 1


class MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module, and executes the given text in its place."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name = name
        self._path = path
        self._source = source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        inside = [str(self._path.parent)] if self._path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=self, submodule_search_locations=inside
        )

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def run(name: str, path: Path, source: str, arguments: Sequence[str], limit: float) -> int:
    """SURVIVED when every test passes with ``source`` as the module ``name`` (the tree as it is
    when the name is empty), else KILLED. A signal ends the process after ``limit`` seconds of its
    own time, which other processes do not stretch, and also when it waits for many times as long.

    Raises RuntimeError when the module was there before, or when no test was chosen.
    """
    if name in sys.modules:
        raise RuntimeError(f"{name} is imported already; its mutant would not be used")
    signal.alarm(int(60 + 30 * limit))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    if name:
        sys.meta_path.insert(0, MutatedModule(name, path, source))
    # Nobody reads what an assertion says here, and most plugins cost more than a test.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ("-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    # pytest-timeout would use the same timer.
    code = pytest.main([*options, "--timeout=0", *arguments])
    if code in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(f"pytest ran no test: {arguments}")
    return SURVIVED if code == pytest.ExitCode.OK else KILLED
