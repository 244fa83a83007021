"""Whole models: JAX's loss and gradients are NumPy's in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.block import block_backward, block_forward
from mesp_core.numpy_backend import NumpyBackend
from mesp_jax.jax_backend import JaxBackend
from mesp_reference.check.compare import assert_close
from mesp_reference.check.naive import round_to
from mesp_reference.check.tolerances import WHOLE_MODEL, bound
from tests.jax.models import QUANTIZED, SEQUENCES, gradients, opened
from tests.tiny_reference import tiny_checkpoint

#: 199 tokens: four tiles of 64 queries, the last of them shorter, in a bucket of 256.
LONG = [np.random.default_rng(6).integers(0, 37, n).tolist() for n in (150, 51)]
#: family, options of the checkpoint, options of the model, sequences.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[list[int]]]] = {
    "llama": ("llama", {}, {}, SEQUENCES),
    "bias_dropout_untied": ("qwen2", {"tied": False}, {"dropout": 0.4}, SEQUENCES),
    "qk_norm_4bit_window_softcap": (
        "qwen3",
        {"bits": 4, **QUANTIZED},
        {"window": 3, "softcap": 1.5, "residency": "resident"},
        LONG,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_float64(tmp_path: Path, backend: JaxBackend, case: str) -> None:
    family, stored, options, sequences = CASES[case]
    folder = tiny_checkpoint(tmp_path / "model", family, **stored)
    numpy = mesp.get_backend("numpy")
    truth = gradients(opened(folder, numpy, dtype="float64", **options), sequences)
    found = gradients(opened(folder, backend, dtype="float32", **options), sequences)
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        assert_close(gradient, truth[name], bound("float32", table=WHOLE_MODEL), name=name)


def test_float64_under_x64(tmp_path: Path, backend: JaxBackend) -> None:
    """And float32 stays float32 there: the same gradients, the same dtypes."""
    folder = tiny_checkpoint(tmp_path / "model")
    truth = gradients(opened(folder, mesp.get_backend("numpy"), dtype="float64"))
    narrow = gradients(opened(folder, backend, dtype="float32"))
    with jax.enable_x64(True):
        wide = gradients(opened(folder, backend, dtype="float64"))
        model = opened(folder, backend, dtype="float32")
        result = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(SEQUENCES))
    for name, gradient in wide.items():
        assert_close(gradient, truth[name], bound("float64", table=WHOLE_MODEL), name=name)
    for name, gradient in result.gradients.items():
        assert gradient.dtype == np.float32
        assert_close(backend.to_numpy(gradient), narrow[name], bound("float32"), name=name)


class RoundingBackend(NumpyBackend):
    """float64, but for the values that pass between blocks, which are rounded to bfloat16."""

    def run(self, stage: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
        place = 1 if stage is block_backward else 0
        given = list(arguments)
        given[place] = round_to(given[place], "bfloat16")
        out = super().run(stage, *given, **static)
        return round_to(out, "bfloat16") if stage is block_forward else out


def test_bfloat16_activations(tmp_path: Path, backend: JaxBackend) -> None:
    """Rounded once a block, everything between in float32."""
    folder = tiny_checkpoint(tmp_path / "model")
    truth = gradients(opened(folder, RoundingBackend(), dtype="float64"))
    found = gradients(opened(folder, backend, dtype="bfloat16"))
    for name, gradient in found.items():
        assert_close(gradient, truth[name], bound("bfloat16", table=WHOLE_MODEL), name=name)


def test_twenty_updates_follow_numpys(tmp_path: Path, backend: JaxBackend) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    losses = []
    for chosen in (mesp.get_backend("numpy"), backend):
        model = opened(folder, chosen, dtype="float32")
        optimizer, batch = mesp.AdamW(1e-2), mesp.Batch.from_sequences(SEQUENCES)
        losses.append([])
        for _ in range(20):
            result = mesp.loss_and_gradients(model, batch)
            optimizer.update(model, result.gradients)
            losses[-1].append(result.loss)
    assert losses[1][-1] < losses[1][0] - 0.1
    assert_close(np.array(losses[1]), np.array(losses[0]), 1e-4)
