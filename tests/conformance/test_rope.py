"""RoPE against the reference: both pairings, partial rotation, every scaling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mesp_core.formulas import rope_forward, rope_frequencies, rope_tables
from mesp_reference import rope as reference
from mesp_reference.check.compare import assert_close
from tests.conformance.agreement import check, draw
from tests.conformance.masks import POSITION
from tests.conformance.subjects import Subject, cells

N, H, E = 7, 3, 12
THETA = 1e4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": YARN,
    "yarn_untruncated": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn_mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6},
    "yarn_one_mscale": {**YARN, "mscale": 1.3},
    "yarn_attention_factor": {**YARN, "attention_factor": 0.8},
    "yarn_little": {**YARN, "factor": 1.5},
    "yarn_shrunk": {**YARN, "factor": 0.5},
    "yarn_long": {**YARN, "original_max_position_embeddings": 4096},
    "yarn_ramp_beyond_the_last": {**YARN, "beta_slow": 1e-9},
    # Both ends of the ramp at dimension 7.9985: a step, less steep than a jump.
    "yarn_step": {
        **YARN,
        "truncate": False,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 2.0 * math.pi * THETA ** (7.9985 * 2.0 / 64),
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [12, 64])
def test_frequencies(scaling: str, head_dim: int) -> None:
    options = SCALINGS[scaling]
    frequencies, factor = rope_frequencies(head_dim, THETA, options)
    expected, amplitude = reference.rope_frequencies(head_dim, THETA, options)
    assert_close(np.array(frequencies), expected, 1e-15, name=scaling)
    assert factor == pytest.approx(amplitude, rel=1e-15)


def test_yarn_takes_the_models_positions_where_the_scaling_names_none() -> None:
    bare = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    assert rope_frequencies(64, THETA, bare, 64) == rope_frequencies(64, THETA, YARN)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'longrope'"):
        rope_frequencies(64, THETA, {"rope_type": "longrope"})


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("partial", [1.0, 0.5], ids=["whole", "partial"])
@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn"])
def test_rope(subject: Subject, interleaved: bool, partial: float, scaling: str) -> None:
    values = draw(11, subject.dtype, x=(N, H, E), dout=(N, H, E))
    inv_freq, amplitude = reference.rope_frequencies(E, THETA, SCALINGS[scaling], partial)

    def expected(x: Any, dout: Any) -> dict[str, Any]:
        out, saved = reference.rope_forward(
            x, POSITION, inv_freq, amplitude=amplitude, interleaved=interleaved
        )
        return {"out": out, "dx": reference.rope_backward(dout, saved)}

    frequencies, factor = rope_frequencies(int(E * partial), THETA, SCALINGS[scaling])
    tables = rope_tables(POSITION.astype(np.float64), np.asarray(frequencies), factor, xp=np)
    tables = [subject.array(table, subject.wide) for table in tables]
    rope = subject.ops.rope
    out, saved = rope.forward(subject.array(values["x"]), *tables, interleaved=interleaved)
    assert saved is None
    dx = rope.backward(subject.array(values["dout"]), saved, *tables, interleaved=interleaved)
    check(subject, {"out": out, "dx": dx}, expected, values)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("heads", "half"), [(6, 3), (3, 4), (1, 1), (12, 5)])
def test_features_beyond_the_rotated_ones_pass_through(
    heads: int, half: int, interleaved: bool
) -> None:
    """Also where there are as many heads as rotated features, or a third is left over."""
    x = np.random.default_rng(0).standard_normal((N, heads, E))
    angle = np.linspace(0.1, 3.0, N * half).reshape(N, half)
    out, _ = rope_forward(x, np.cos(angle), np.sin(angle), interleaved=interleaved, xp=np)
    assert out.shape == x.shape
    np.testing.assert_array_equal(out[:, :, 2 * half :], x[:, :, 2 * half :])
    assert (out[:, :, : 2 * half] != x[:, :, : 2 * half]).all()


@pytest.mark.parametrize("subject", cells("rope_tables"), ids="-".join, indirect=True)
def test_tables(subject: Subject) -> None:
    """The tables computed on the namespace itself."""
    frequencies, _ = rope_frequencies(E, THETA)
    factor = 1.1

    def expected(position: Any, inv_freq: Any) -> dict[str, Any]:
        angle = position[:, None] * inv_freq
        return {"cos": np.cos(angle) * factor, "sin": np.sin(angle) * factor}

    # The dtype of tables is the accumulation dtype, whatever the activations'.
    inputs = {"position": POSITION.astype(np.float64), "inv_freq": np.array(frequencies)}
    if subject.wide == "float32":
        inputs["inv_freq"] = inputs["inv_freq"].astype(np.float32).astype(np.float64)
    given = [subject.array(inputs[name], subject.wide) for name in ("position", "inv_freq")]
    cos, sin = rope_tables(*given, factor, xp=subject.xp)
    check(subject, {"cos": cos, "sin": sin}, expected, inputs, wide=("cos", "sin"))
