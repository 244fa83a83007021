"""Each kernel, forward and backward, beside the framework's own differentiation of the component.

``make kernel-bench`` runs this, and nothing else does: its name is not that of a test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mesp_core import available_backends
from tests.benchmarks.frameworks import FRAMEWORKS
from tests.benchmarks.inputs import COMPONENTS, inputs


@pytest.mark.parametrize("which", ["mesp", "autodiff"])
@pytest.mark.parametrize("backend", FRAMEWORKS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_kernel(benchmark: Any, component: str, backend: str, which: str) -> None:
    reason = available_backends()[backend]
    if reason is not None:
        pytest.skip(reason)
    framework, given = FRAMEWORKS[backend](), inputs(component)
    run = framework.prepare(component, which, given)
    # Only what is right is timed; this is also its warm-up.
    other = framework.prepare(component, "autodiff" if which == "mesp" else "mesp", given)
    for found, expected in zip(run(), other(), strict=True):
        assert error(found, expected) < 1e-5
    benchmark.group = f"{component} {backend}"
    benchmark.extra_info |= {"component": component, "backend": backend, "which": which}
    benchmark(run)


def error(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖."""
    found, expected = (_numpy(array) for array in (found, expected))
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _numpy(array: Any) -> np.ndarray:
    return np.asarray(array.detach() if hasattr(array, "detach") else array, np.float64)
