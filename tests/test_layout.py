"""The import arrows of the layout, checked on the built wheel, and what an import must not do."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("cupy", "jax", "jaxlib", "mlx", "tensorflow", "torch")

#: What each backend may import beside itself, mesp_core and NumPy.
BACKENDS = {
    "mesp_jax": {"jax", "ml_dtypes"},
    "mesp_mlx": {"mlx"},
    "mesp_torch": {"torch", "array_api_compat"},
}

#: Distributions whose import name is not their own name.
IMPORT_NAMES = {"array-api-compat": "array_api_compat", "pyyaml": "yaml"}


def imported_names(source: str) -> set[str]:
    """Every dotted name a module's text imports, wherever the statement stands.

    ``from a import b`` gives ``a.b``: b may be a module. A relative import gives a leading dot.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            called = called.id if isinstance(called, ast.Name) else called
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names.add(str(first.value))
    return names


def allowed_imports(module: str, dependencies: set[str]) -> set[str]:
    """The prefixes of dotted names that ``module`` may import, besides the standard library."""
    array_api = {"array_api_compat", "array_api_extra"}
    if _within(module, "mesp_core.formulas"):
        return array_api | {"mesp_core.formulas"}
    if module.startswith("mesp_core.compare.plot"):
        return dependencies | {"mesp_core", "matplotlib", "PIL"}
    if _within(module, "mesp_core"):
        return dependencies | {"mesp_core"}
    if _within(module, "mesp_reference.check"):
        return {"mesp_reference", "mesp_core", "numpy"}
    if _within(module, "mesp_reference"):
        return {"mesp_reference", "numpy"}
    for backend, framework in BACKENDS.items():
        if _within(module, backend):
            return {backend, "mesp_core", "numpy"} | framework
    raise AssertionError(f"{module} has no rule: say what it may import")


def violations(module: str, source: str, dependencies: set[str]) -> list[str]:
    """What ``module`` imports and may not."""
    allowed = allowed_imports(module, dependencies)
    return sorted(
        name
        for name in imported_names(source)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(_within(name, prefix) for prefix in allowed)
    )


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as built from this tree, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def modules(wheel: Path) -> Iterator[tuple[str, str]]:
    """The dotted name and the text of every module in the wheel."""
    for path in sorted(wheel.rglob("*.py")):
        parts = list(path.relative_to(wheel).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text("utf-8")


def required_distributions(wheel: Path) -> set[str]:
    """Import names of the dependencies that come without any extra."""
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    names = set()
    for line in metadata.read_text("utf-8").splitlines():
        # What has a marker is a platform's default backend, which the core never imports.
        if line.startswith("Requires-Dist:") and ";" not in line:
            match = re.match(r"Requires-Dist:\s*([A-Za-z0-9._-]+)", line)
            assert match is not None
            names.add(IMPORT_NAMES.get(match[1], match[1]))
    return names


def run_python(wheel: Path, code: str) -> object:
    """What ``code`` prints as JSON, run by a new interpreter that sees the wheel first."""
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_wheel_holds_its_packages_and_nothing_else(wheel: Path) -> None:
    packages = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert packages == {"mesp_core", "mesp_reference", *BACKENDS}


def test_every_module_keeps_to_its_arrows(wheel: Path) -> None:
    dependencies = required_distributions(wheel)
    assert "numpy" in dependencies
    found = {name: violations(name, text, dependencies) for name, text in modules(wheel)}
    assert len(found) > 40
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("mesp_core.formulas.rope", "import numpy as np", ["numpy"]),
        ("mesp_core.formulas.rope", "from mesp_core.errors import E", ["mesp_core.errors.E"]),
        ("mesp_core.formulas.rope", "from mesp_core import block", ["mesp_core.block"]),
        ("mesp_core.model", "def f():\n    import mlx.core as mx", ["mlx.core"]),
        ("mesp_core.model", "import importlib as i\ni.import_module('torch')", ["torch"]),
        ("mesp_core.model", "import matplotlib.figure", ["matplotlib.figure"]),
        ("mesp_core.compare.plots", "import torch", ["torch"]),
        ("mesp_core.model", "from mesp_mlx import backend", ["mesp_mlx.backend"]),
        ("mesp_core.model", "from mesp_reference import rope", ["mesp_reference.rope"]),
        ("mesp_core.model", "from .batch import Batch", [".batch.Batch"]),
        ("mesp_reference.rope", "import mesp_core.batch", ["mesp_core.batch"]),
        ("mesp_reference.rope", "import array_api_compat", ["array_api_compat"]),
        ("mesp_mlx.backend", "import torch", ["torch"]),
        ("mesp_mlx.backend", "from mesp_reference import rope", ["mesp_reference.rope"]),
    ],
)
def test_the_checker_sees_a_planted_violation(
    module: str, source: str, expected: list[str]
) -> None:
    assert violations(module, source, {"numpy"}) == expected


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mesp_core.formulas.rope", "import math\nfrom mesp_core.formulas.loops import Loops"),
        ("mesp_core.model", "import numpy as np\nfrom mesp_core import batch"),
        ("mesp_reference.check", "from mesp_core.block import Block\nimport mesp_reference.rope"),
        ("mesp_mlx.backend", "import mlx.core as mx\nfrom mesp_core.backend import Backend"),
    ],
)
def test_the_checker_lets_the_arrows_pass(module: str, source: str) -> None:
    assert violations(module, source, {"numpy"}) == []


def test_a_package_without_a_rule_is_refused() -> None:
    with pytest.raises(AssertionError, match="mesp_new has no rule"):
        violations("mesp_new", "import math", set())


def test_importing_everything_of_the_core_imports_no_framework(wheel: Path) -> None:
    core = [name for name, _ in modules(wheel) if _within(name, "mesp_core")]
    code = f"""
import importlib, json, sys
for name in {core!r} + ["mesp_reference", *{list(BACKENDS)!r}]:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps([name for name in {FRAMEWORKS!r} if name in sys.modules]))
"""
    assert run_python(wheel, code) == []


#: Hides some frameworks from the import system, as if they were not installed.
WITHOUT = """
import json, sys
HIDDEN = {hidden!r}

class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
import mesp_core, mesp_mlx, mesp_jax, mesp_torch
"""


def test_without_frameworks_the_packages_import_and_say_why_they_cannot_run(wheel: Path) -> None:
    code = WITHOUT.format(hidden=["mlx", "jax", "jaxlib", "torch"])
    code += "print(json.dumps([mesp_core.available_backends(), mesp_core.get_backend().name]))"
    reasons, automatic = run_python(wheel, code)  # type: ignore[misc]
    assert automatic == "numpy" and reasons.pop("numpy") is None
    assert reasons.keys() == {"jax", "mlx", "torch"}
    for name, reason in reasons.items():
        assert "not installed" in reason and "pip install" in reason, name


@pytest.mark.parametrize("hidden", ["mlx", "jax", "torch"])
def test_without_one_framework_the_others_run(wheel: Path, hidden: str) -> None:
    code = WITHOUT.format(hidden=[hidden, hidden + "lib"])
    code += "print(json.dumps([mesp_core.available_backends(), mesp_core.get_backend().name]))"
    reasons, automatic = run_python(wheel, code)  # type: ignore[misc]
    assert [name for name, reason in reasons.items() if reason] == [hidden]
    assert automatic not in (hidden, "numpy")


def test_the_wheel_registers_its_backends(wheel: Path) -> None:
    code = "import json, mesp_core; print(json.dumps(mesp_core.available_backends()))"
    assert run_python(wheel, code) == {"jax": None, "mlx": None, "numpy": None, "torch": None}
