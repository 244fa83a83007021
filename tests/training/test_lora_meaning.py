"""What the LoRA parameters mean, and where their first values come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesp_core import Batch, LoraConfig, MespError, Model, load_model, logits
from mesp_core.lora import PROJECTIONS
from tests.tiny import Tensors, sequences, write_model


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"rank": 3, "alpha": 6.0}, 2.0),
        ({"rank": 4, "alpha": 6.0}, 1.5),
        ({"rank": 4, "alpha": 6.0, "rank_stabilized": True}, 3.0),
    ],
)
def test_case_13_the_contribution_is_exactly_scale_times_xab(
    open_tiny: Callable[..., Model], tmp_path: Path, fields: dict, scale: float
) -> None:
    """The adapted model is the one whose weights are W + scale · (A B)ᵀ."""
    model = open_tiny(filled=True, dtype="float64", **fields)
    assert model.lora is not None and model.lora.scale == pytest.approx(scale)

    def fuse(tensors: Tensors) -> None:
        for layer in range(model.config.layers):
            for projection in PROJECTIONS:
                name = f"model.layers.{layer}.{projection}"
                a, b = (model.parameters[f"{name}.{f}"] for f in ("lora_a", "lora_b"))
                tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] + scale * (a @ b).T).astype(
                    np.float32
                )

    fused = load_model(write_model(tmp_path / "fused", change=fuse), backend="numpy", lora=None)
    batch = Batch.from_sequences(sequences(3))
    np.testing.assert_allclose(logits(model, batch), logits(fused, batch), rtol=1e-4, atol=1e-4)
    plain = open_tiny(dtype="float64", **fields)
    assert np.abs(logits(model, batch) - logits(plain, batch)).max() > 0.1


def test_case_13_scale_is_mlx_lms_and_alpha_is_divided_by_the_rank() -> None:
    assert LoraConfig.from_scale(8, 20.0).alpha == 160.0
    assert LoraConfig.from_scale(8, 20.0).scale == 20.0
    assert LoraConfig.from_scale(4, 20.0, rank_stabilized=True).scale == 20.0
    assert LoraConfig(rank=8, alpha=16.0).scale == 2.0


def test_case_21_the_seed_alone_decides_the_first_values(tiny: Path) -> None:
    def first_values(seed: int, **fields) -> dict[str, np.ndarray]:
        lora = LoraConfig(rank=3, **fields)
        return load_model(tiny, backend="numpy", lora=lora, seed=seed).parameters

    expected = first_values(7)
    np.random.default_rng(0).normal(size=100)
    np.random.seed(99)
    np.random.normal(size=100)
    again = first_values(7)
    assert list(again) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(again[name], value)
        assert (value == 0).all() == name.endswith("lora_b")
    other = first_values(8)
    name = "model.layers.2.mlp.up_proj.lora_a"
    assert (other[name] != expected[name]).any()
    # Nor do the other targets and layers matter.
    fewer = first_values(7, targets=("up_proj",), layers=1)
    np.testing.assert_array_equal(fewer[name], expected[name])


def test_case_21_every_backend_starts_from_the_same_values(tiny: Path) -> None:
    ours, theirs = (load_model(tiny, backend=b, lora=LoraConfig(rank=3)) for b in ("numpy", "mlx"))
    for name, value in ours.parameters.items():
        np.testing.assert_array_equal(theirs.backend.to_numpy(theirs.parameters[name]), value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": "8"}, "rank must be an integer, not '8'"),
        ({"rank": 2.5}, "rank must be an integer, not 2.5"),
        ({"rank": True}, "rank must be an integer, not True"),
        ({"rank": 0}, "rank must be at least 1, not 0"),
        ({"rank": 10**9}, "rank must be at most 65536, not 1000000000"),
        ({"layers": 1.5}, "layers must be an integer, not 1.5"),
        ({"alpha": "16"}, "alpha must be a number, not '16'"),
        ({"alpha": math.nan}, "alpha must be a finite number, not nan"),
        ({"alpha": 10**400}, "alpha must be a finite number"),
        ({"dropout": "0"}, "dropout must be a number, not '0'"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        # Its threshold would be 2³², which wraps to 0: nothing would be dropped.
        ({"dropout": 1.0 - 2.0**-34}, r"dropout must be in \[0, 1\)"),
        ({"targets": ()}, "at least one target"),
        ({"targets": ("router",)}, "'router' does not exist"),
        ({"targets": ([],)}, "does not exist"),
    ],
)
def test_configurations_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MespError, match=message):
        LoraConfig(**fields)


def test_a_target_that_comes_twice_counts_once() -> None:
    config = LoraConfig(targets=("up_proj", "self_attn.q_proj", "mlp.up_proj", "q_proj"))
    assert config.targets == ("mlp.up_proj", "self_attn.q_proj")
