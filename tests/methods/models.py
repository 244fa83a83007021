"""Backends and small models for the tests of the methods."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

import mesp_core as mesp
from mesp_core.backend import Backend
from mesp_core.numpy_backend import NumpyBackend
from tests.tiny import sequences, write_model

#: Those with automatic differentiation; ``native``: what MLX does on a GPU, run on the CPU.
DIFFERENTIATING = ("mlx", "mlx-native", "torch", "jax")

LENGTHS = sequences(3, seed=11, shortest=6)


@cache
def backend_of(kind: str) -> Backend:
    """One of each kind in a process: JAX's programs are compiled once."""
    if kind == "numpy":
        return NumpyBackend()
    if kind.startswith("mlx"):
        from mesp_mlx.mlx_backend import BLAS, MlxBackend

        return MlxBackend("cpu", BLAS, native=kind.endswith("native"))
    return mesp.get_backend(f"{kind}:cpu")


def tiny_model(
    folder: Path, kind: str, family: str = "llama", *, dtype: str = "float32",
    lora: mesp.LoraConfig | None = None, **settings: object,
) -> mesp.Model:  # fmt: skip
    """A model of ``tests.tiny`` with an adapter whose B is not zero, so that no gradient is."""
    path = folder / family
    if not path.exists():
        write_model(path, family, **settings)
    lora = lora or mesp.LoraConfig(rank=3, dtype="float64" if dtype == "float64" else "float32")
    model = mesp.load_model(path, backend=backend_of(kind), lora=lora, dtype=dtype)
    generator = np.random.default_rng(8)
    for name, parameter in model.parameters.items():
        if name.endswith("lora_b"):
            values = 0.1 * generator.standard_normal(tuple(parameter.shape))
            model.parameters[name] = model.backend.from_numpy(values, lora.dtype)
    return model


def flat(by_name: dict[str, np.ndarray]) -> np.ndarray:
    """All entries, in the order of their names."""
    return np.concatenate([by_name[name].ravel() for name in sorted(by_name)])


def gradients(model: mesp.Model, batch: mesp.Batch, **options: object) -> dict[str, np.ndarray]:
    """By name, as NumPy."""
    result = mesp.loss_and_gradients(model, batch, **options)  # type: ignore[arg-type]
    return {name: model.backend.to_numpy(array) for name, array in result.gradients.items()}
