"""MeZO: what it estimates, and that nothing is disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.methods.mezo import directions
from tests.methods.models import DIFFERENTIATING, LENGTHS, flat, gradients, tiny_model

BATCH = mesp.Batch.from_sequences(LENGTHS)


def direction(model: mesp.Model) -> np.ndarray:
    blocks = [directions(model, layer) for layer in range(model.config.layers)]
    return flat({name: z for block in blocks for name, z in block.items()})


def test_the_estimate_is_the_slope_along_a_direction(tmp_path: Path) -> None:
    """g · z in z's direction, up to terms in ε²: a tenth of ε leaves a hundredth of the error."""
    model = tiny_model(tmp_path, "numpy", dtype="float64")
    true, z = flat(gradients(model, BATCH)), direction(model)
    errors = []
    for epsilon in (1e-3, 1e-4):
        estimate = flat(gradients(model, BATCH, method="mezo", epsilon=epsilon))
        slope = estimate @ z / (z @ z)
        np.testing.assert_allclose(estimate, slope * z, rtol=1e-6)
        errors.append(abs(slope - true @ z))
    assert errors[0] < 1e-2 * abs(true @ z)
    assert errors[1] == pytest.approx(errors[0] / 100.0, rel=0.1)


def test_the_loss_is_the_mean_of_two(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "numpy", dtype="float64")
    found = mesp.loss_and_gradients(model, BATCH, method="mezo", epsilon=0.01).loss
    blocks = [directions(model, layer) for layer in range(model.config.layers)]
    start, losses = dict(model.parameters), []
    for step in (0.01, -0.01):
        for block in blocks:
            model.parameters |= {name: start[name] + step * z for name, z in block.items()}
        losses.append(mesp.loss_and_gradients(model, BATCH).loss)
    assert abs(losses[0] - losses[1]) > 1e-6
    assert found == pytest.approx(sum(losses) / 2.0, rel=1e-12)


def test_the_mean_over_directions_converges_to_the_gradient(tmp_path: Path) -> None:
    """(g·z) z has mean g and, over n directions, a relative error of √((d + 1) / n)."""
    lora = mesp.LoraConfig(rank=1, layers=1, targets=("k_proj",), dtype="float64")
    model = tiny_model(tmp_path, "numpy", dtype="float64", lora=lora)
    true = flat(gradients(model, BATCH))
    total, errors = np.zeros_like(true), {}
    for step in range(1, 401):
        model.step = step
        total += flat(gradients(model, BATCH, method="mezo", epsilon=1e-4))
        errors[step] = np.linalg.norm(total / step - true) / np.linalg.norm(true)
    for count in (100, 400):
        expected = np.sqrt((len(true) + 1) / count)
        assert 0.6 * expected < errors[count] < 1.6 * expected
    assert total @ true / np.linalg.norm(total) / np.linalg.norm(true) > 0.9


def test_one_direction_says_little(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "numpy", dtype="float64")
    true = flat(gradients(model, BATCH))
    cosines, agreement = [], []
    for step in range(20):
        model.step = step
        estimate = flat(gradients(model, BATCH, method="mezo"))
        cosines.append(estimate @ true / np.linalg.norm(estimate) / np.linalg.norm(true))
        agreement.append((np.sign(estimate) == np.sign(true)).mean())
    assert np.abs(cosines).max() <= 4.0 / np.sqrt(len(true))
    assert np.mean(agreement) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("kind", DIFFERENTIATING)
def test_every_backend_takes_the_same_step(tmp_path: Path, kind: str) -> None:
    expected = gradients(tiny_model(tmp_path, "numpy", dtype="float64"), BATCH, method="mezo")
    found = gradients(tiny_model(tmp_path, kind), BATCH, method="mezo")
    # A difference of two float32 losses, each off by 1e-7, over 2ε.
    np.testing.assert_allclose(flat(found), flat(expected), rtol=0.05)


def test_directions_are_those_of_a_philox_stream(tmp_path: Path) -> None:
    """So that a run can be repeated; a negative seed counts from 2⁶⁴ down."""
    model = tiny_model(tmp_path, "numpy")
    model.seed, model.step = -1, 3
    for place, z in enumerate(directions(model, 1).values()):
        sequence = np.random.SeedSequence((2**64 - 1, 3, 1, place, 0x4D655A4F))
        generator = np.random.Generator(np.random.Philox(sequence))
        np.testing.assert_array_equal(z, generator.standard_normal(z.shape, dtype=np.float32))


def test_passes_ask_for_no_gradient_and_compute_what_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path, "torch")
    backend, asked, staged = model.backend, [], []
    run, stage = backend.run, backend.stage

    def running(function: Any, *arguments: Any, **static: Any) -> Any:
        asked.extend(value for name, value in static.items() if name == "gradient")
        return run(function, *arguments, **static)

    def staging(*trees: Any) -> None:
        staged.extend(name for tree in trees if isinstance(tree, dict) for name in tree)
        stage(*trees)

    monkeypatch.setattr(backend, "run", running)
    monkeypatch.setattr(backend, "stage", staging)
    mesp.loss_and_gradients(model, BATCH, method="mezo")
    assert asked == [False, False]
    assert sorted(staged) == sorted(2 * list(model.parameters))


def test_directions_depend_on_what_they_should(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "numpy")
    first = direction(model)
    assert first.dtype == np.float32 and (direction(model) == first).all()
    assert abs(first.mean()) < 4.0 / np.sqrt(first.size)
    assert first.std() == pytest.approx(1.0, abs=4.0 / np.sqrt(first.size))
    seen = [first]
    for change in ({"step": 1}, {"seed": 1}):
        for name, value in change.items():
            setattr(model, name, value)
        seen.append(direction(model))
    blocks = [flat(directions(model, layer)) for layer in range(3)]
    for left, right in ((seen[0], seen[1]), (seen[1], seen[2]), blocks[:2], blocks[1:]):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4.0 / np.sqrt(left.size)
    q, k = (directions(model, 0)[f"model.layers.0.self_attn.{n}_proj.lora_a"] for n in "qk")
    assert not (q == k).any()


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16"])
def test_parameters_are_never_disturbed(tmp_path: Path, lora_dtype: str) -> None:
    """Nor is the step lost in the roundings of 16-bit parameters."""
    lora = mesp.LoraConfig(rank=3, dtype=lora_dtype)
    model = tiny_model(tmp_path, "torch", lora=lora)
    before = dict(model.parameters)
    values = {name: model.backend.to_numpy(array) for name, array in before.items()}
    estimate = flat(gradients(model, BATCH, method="mezo"))
    for name, array in model.parameters.items():
        assert array is before[name]
        assert (model.backend.to_numpy(array) == values[name]).all()
    true, z = flat(gradients(model, BATCH)), direction(model)
    assert estimate @ z / (z @ z) == pytest.approx(true @ z, rel=0.05)


def test_micro_batches_share_a_direction(tmp_path: Path) -> None:
    """Two micro-batches, normalised together, add up to the estimate of their joint batch."""
    model = tiny_model(tmp_path, "numpy", dtype="float64")
    joint = flat(gradients(model, BATCH, method="mezo"))
    weight = float(BATCH.weights.sum())
    parts = [
        flat(gradients(model, mesp.Batch.from_sequences(rows), method="mezo", normalizer=weight))
        for rows in (LENGTHS[:1], LENGTHS[1:])
    ]
    np.testing.assert_allclose(parts[0] + parts[1], joint, rtol=1e-6)
