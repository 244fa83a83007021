"""Properties of a batch, over generated shapes and sequence boundaries.

A batch is its sequences and nothing else: one after the other or together, in any order, in one
piece or several, with any tiles, the gradients are the same; and no sequence sees another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mesp_core as mesp
from mesp_core.backend import Backend, TileSizes
from mesp_core.numpy_backend import NumpyBackend
from mesp_reference.check.tolerances import WHOLE_MODEL
from tests.tiny_reference import SIZES, tiny_checkpoint

#: How many examples each backend can afford, and the dtype it is exact in.
BACKENDS = {"numpy": (12, "float64"), "torch": (5, "float64"), "mlx": (4, "float32"),
            "jax": (2, "float32")}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """Sequences of token ids with their prompts' lengths, and how the work is cut."""

    rows: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    tiles: TileSizes
    order: tuple[int, ...]


@st.composite
def batches(draw: Any) -> Drawn:
    ids = st.integers(0, SIZES["vocab"] - 1)
    rows = draw(st.lists(st.lists(ids, min_size=2, max_size=9).map(tuple), min_size=1, max_size=4))
    prompts = tuple(draw(st.integers(0, len(row) - 1)) for row in rows)
    small = st.integers(1, 9)
    tiles = TileSizes(draw(st.sampled_from([1, 1 << 20])), draw(small), draw(small), draw(small))
    order = tuple(draw(st.permutations(range(len(rows)))))
    return Drawn(tuple(rows), prompts, tiles, order)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)


def backend_of(name: str, tiles: TileSizes) -> Backend:
    """The backend with tiles of its own where they can be given without compiling anew."""
    if name == "numpy":
        return NumpyBackend(tiles=tiles)
    if name == "torch":
        from mesp_torch.torch_backend import TorchBackend

        return TorchBackend("cpu", native=False, tiles=tiles)
    return _shared(name)


@cache
def _shared(name: str) -> Backend:
    return mesp.get_backend(f"{name}:cpu")


def opened(folder: Path, backend: Backend, dtype: str, dropout: float) -> mesp.Model:
    """A model whose adapter does something."""
    lora = mesp.LoraConfig(rank=2, alpha=3.0, dropout=dropout, dtype=dtype)
    model = mesp.load_model(folder, backend=backend, lora=lora, dtype=dtype, seed=3)
    generator = np.random.default_rng(5)
    for name, value in model.parameters.items():
        noise = generator.standard_normal(tuple(value.shape)) * 0.3
        model.parameters[name] = backend.from_numpy(noise.astype(np.float32), dtype)
    return model


def gradients(
    model: mesp.Model, drawn: Drawn, places: tuple[int, ...], normalizer: float
) -> dict[str, np.ndarray]:
    """Loss and gradients of some of the sequences, each with its own number for dropout."""
    batch = mesp.Batch.from_sequences(
        [drawn.rows[i] for i in places], [drawn.prompts[i] for i in places], list(places)
    )
    result = mesp.loss_and_gradients(model, batch, normalizer=normalizer)
    found = {name: model.backend.to_numpy(value) for name, value in result.gradients.items()}
    return {"loss": np.asarray(result.loss), **found}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], dtype: str) -> None:
    """Up to the rounding of sums in another order; of gradients that cancel, of the larger ones."""
    size = max(float(np.linalg.norm(value)) for value in expected.values())
    for name, value in expected.items():
        error = float(np.linalg.norm(actual[name].astype(np.float64) - value))
        scale = max(float(np.linalg.norm(value)), 1e-3 * size)
        assert error <= WHOLE_MODEL[dtype] * scale, f"{name}: {error / scale:.2e}"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["", "dropout"])
def test_a_batch_is_its_sequences(name: str, dropout: float, folder: Path) -> None:
    examples, dtype = BACKENDS[name]

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(batches())
    def check(drawn: Drawn) -> None:
        model = opened(folder, backend_of(name, drawn.tiles), dtype, dropout)
        everyone = tuple(range(len(drawn.rows)))
        normalizer = 7.0
        together = gradients(model, drawn, everyone, normalizer)

        permuted = gradients(model, drawn, drawn.order, normalizer)
        assert_same(permuted, together, dtype)

        parts = [gradients(model, drawn, (i,), normalizer) for i in everyone]
        alone = {key: np.sum([part[key] for part in parts], axis=0) for key in together}
        assert_same(alone, together, dtype)

        middle = len(everyone) // 2
        halves = [
            gradients(model, drawn, half, normalizer)
            for half in (everyone[:middle], everyone[middle:])
            if half
        ]
        split = {key: np.sum([half[key] for half in halves], axis=0) for key in together}
        assert_same(split, together, dtype)

    check()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sequence_never_sees_its_neighbour(name: str, folder: Path) -> None:
    """Another sequence's tokens changed: this one's logits stay, bit for bit."""
    examples, dtype = BACKENDS[name]

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(batches(), st.integers(1, SIZES["vocab"] - 1))
    def check(drawn: Drawn, shift: int) -> None:
        model = opened(folder, backend_of(name, drawn.tiles), dtype, 0.0)
        victim = drawn.order[0]
        changed = [
            [(token + shift) % SIZES["vocab"] for token in row] if i == victim else row
            for i, row in enumerate(drawn.rows)
        ]
        batch = mesp.Batch.from_sequences(drawn.rows)
        before = model.backend.to_numpy(mesp.logits(model, batch))
        after = model.backend.to_numpy(mesp.logits(model, mesp.Batch.from_sequences(changed)))
        own = batch.segment == victim
        np.testing.assert_array_equal(before[~own], after[~own])
        assert (before[own] != after[own]).any(axis=1).all()

    check()


@pytest.mark.parametrize("window", [None, 3])
def test_the_tiles_change_nothing(window: int | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    whole = NumpyBackend(tiles=TileSizes(query=64, key=64, tokens=64))

    @settings(max_examples=20, deadline=None, derandomize=True, database=None,
              suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
    @given(batches())
    def check(drawn: Drawn) -> None:
        results = []
        for backend in (whole, NumpyBackend(tiles=drawn.tiles)):
            model = opened(folder, backend, "float64", 0.0)
            if window is not None:
                windows = (window,) * model.config.layers
                object.__setattr__(model.config, "windows", windows)
            results.append(gradients(model, drawn, tuple(range(len(drawn.rows))), 5.0))
        assert_same(results[1], results[0], "float64")

    check()


def test_the_comparison_can_fail() -> None:
    given_ = {"loss": np.array(1.0), "a": np.ones((2, 3))}
    with pytest.raises(AssertionError, match="a: "):
        assert_same({**given_, "a": np.ones((2, 3)) * (1 + 1e-9)}, given_, "float64")
