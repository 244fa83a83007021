"""RMS norm and rotary embedding: finite differences, frequencies, and their invariants."""

import math

import numpy as np
import pytest

from mesp_reference.finite_differences import gradient_errors, relative_error
from mesp_reference.rms_norm import rms_norm_backward, rms_norm_forward
from mesp_reference.rope import rope_backward, rope_forward, rope_frequencies

N, H, E = 7, 3, 10
THETA = 5e5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_untruncated": {**YARN, "truncate": False, "beta_fast": 20, "beta_slow": 2},
    "yarn_mscale": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn_given_amplitude": {**YARN, "attention_factor": 1.25},
}


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(5,), (N, 5), (N, H, 5)])
def test_rms_norm(plus_one, shape):
    generator = np.random.default_rng(5)
    x, weight = generator.standard_normal(shape), generator.standard_normal(shape[-1])
    dy = generator.standard_normal(shape)

    def loss(x, weight):
        return np.sum(dy * rms_norm_forward(x, weight, 0.1, plus_one=plus_one)[0])

    _, saved = rms_norm_forward(x, weight, 0.1, plus_one=plus_one)
    assert max(gradient_errors(loss, [x, weight], rms_norm_backward(dy, saved))) < 1e-9


def test_rms_norm_has_unit_mean_square():
    x = np.random.default_rng(6).standard_normal((N, 5))
    y, _ = rms_norm_forward(x, np.ones(5), 0.0)
    assert relative_error(np.mean(y**2, axis=1), np.ones(N)) < 1e-14
    shifted, _ = rms_norm_forward(x, np.zeros(5), 0.0, plus_one=True)
    assert relative_error(shifted, y) == 0.0


@pytest.mark.parametrize("partial_rotary", [1.0, 0.4])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, partial_rotary):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = 80
    frequencies, amplitude = rope_frequencies(head_dim, THETA, SCALINGS[name], partial_rotary)
    if name == "default":
        rotary = int(head_dim * partial_rotary)
        expected = [math.exp(-2 * i / rotary * math.log(THETA)) for i in range(rotary // 2)]
        assert relative_error(frequencies, np.array(expected)) < 1e-14
        assert amplitude == 1.0
        return
    parameters = {
        **SCALINGS[name],
        "rope_theta": THETA,
        "partial_rotary_factor": partial_rotary,
    }
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=16384, rope_parameters=parameters
    )
    theirs, their_amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    # Theirs are computed in float32; per entry, since the small frequencies matter as much.
    np.testing.assert_allclose(frequencies, theirs.double().numpy(), rtol=2e-6)
    assert amplitude == pytest.approx(their_amplitude, rel=1e-12)


def test_every_part_of_the_ramps_is_reached():
    for name in ("llama3", "yarn"):
        ratio = rope_frequencies(80, THETA)[0] / rope_frequencies(80, THETA, SCALINGS[name])[0]
        factor = SCALINGS[name]["factor"]
        assert ratio[0] == pytest.approx(1.0)
        assert ratio[-1] == pytest.approx(factor)
        assert np.any((ratio > 1.01) & (ratio < 0.99 * factor))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial_rotary", [1.0, 0.6])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_rope(interleaved, partial_rotary, scaling):
    generator = np.random.default_rng(7)
    x, dy = generator.standard_normal((N, H, E)), generator.standard_normal((N, H, E))
    position = np.array([0, 1, 2, 0, 0, 1, 900])
    frequencies, amplitude = rope_frequencies(E, 100.0, scaling, partial_rotary)

    def forward(x):
        return rope_forward(x, position, frequencies, amplitude=amplitude, interleaved=interleaved)

    _, saved = forward(x)
    gradient = rope_backward(dy, saved)
    errors = gradient_errors(lambda x: np.sum(dy * forward(x)[0]), [x], [gradient])
    assert errors[0] < 1e-9


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_the_complex_one(interleaved):
    x = np.random.default_rng(8).standard_normal((N, H, E))
    position = np.arange(N) * 13
    frequencies, _ = rope_frequencies(E, 100.0, partial_rotary=0.6)
    y, _ = rope_forward(x, position, frequencies, interleaved=interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 3) for i in range(3)]
    for i, (first, second) in enumerate(pairs):
        turned = (x[..., first] + 1j * x[..., second]) * np.exp(
            1j * frequencies[i] * position[:, None]
        )
        assert relative_error(y[..., first], turned.real) < 1e-14
        assert relative_error(y[..., second], turned.imag) < 1e-14
    assert relative_error(y[..., 6:], x[..., 6:]) == 0.0


def test_scores_depend_on_distance_alone():
    generator = np.random.default_rng(9)
    q, k = generator.standard_normal((1, 1, E)), generator.standard_normal((1, 1, E))
    frequencies, _ = rope_frequencies(E, 100.0)

    def score(i, j):
        turned_q, _ = rope_forward(q, np.array([i]), frequencies)
        turned_k, _ = rope_forward(k, np.array([j]), frequencies)
        return float(np.sum(turned_q * turned_k))

    assert score(11, 4) == pytest.approx(score(107, 100), rel=1e-12)
    assert abs(score(11, 4) - score(11, 5)) > 1e-3


def test_rope_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown rope_type"):
        rope_frequencies(E, THETA, {"rope_type": "sideways"})
    with pytest.raises(ValueError, match="even"):
        rope_frequencies(E, THETA, partial_rotary=0.5)
