"""What every component checks before it computes."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from mesp_core import MespError, get_backend
from mesp_core.formulas import DenseMatrix
from mesp_core.formulas.lora_linear import Projection

BACKENDS = ("numpy", "mlx", "jax", "torch")


@pytest.mark.parametrize(("name", "foreign"), list(permutations(BACKENDS, 2)))
def test_arrays_of_two_libraries_are_refused(name: str, foreign: str) -> None:
    backend, other = get_backend(f"{name}:cpu"), get_backend(f"{foreign}:cpu")
    x, weight = np.ones((3, 5), np.float32), np.ones(5, np.float32)
    norm = backend.ops.rms_norm
    norm.forward(backend.from_numpy(x), backend.from_numpy(weight), eps=1e-6)
    with pytest.raises(MespError, match="rms_norm got an array of .* cannot be mixed"):
        norm.forward(other.from_numpy(x), backend.from_numpy(weight), eps=1e-6)
    with pytest.raises(MespError, match="cannot be mixed"):
        norm.forward(backend.from_numpy(x), other.from_numpy(weight), eps=1e-6)


@pytest.mark.parametrize("name", ["mlx", "jax", "torch"])
def test_an_array_inside_a_projection_is_seen(name: str) -> None:
    backend = get_backend(f"{name}:cpu")
    x = np.ones((3, 5), np.float32)
    weight = DenseMatrix(backend.from_numpy(np.ones((7, 5)), "float32"), backend.xp, backend.loops)
    projection = Projection(weight, bias=np.ones(7, np.float32))
    with pytest.raises(MespError, match="lora_linear got an array of numpy"):
        backend.ops.lora_linear.forward(backend.from_numpy(x), projection)
