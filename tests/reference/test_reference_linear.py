"""Frozen and LoRA linear layers against finite differences."""

import numpy as np
import pytest

from mesp_reference.finite_differences import gradient_errors, relative_error
from mesp_reference.linear import linear_backward, linear_forward
from mesp_reference.lora_linear import lora_linear_backward, lora_linear_forward

N, IN, OUT, R = 7, 5, 11, 3


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(with_bias):
    generator = np.random.default_rng(1)
    x, weight = generator.standard_normal((N, IN)), generator.standard_normal((OUT, IN))
    bias = generator.standard_normal(OUT) if with_bias else None
    dy = generator.standard_normal((N, OUT))
    y, saved = linear_forward(x, weight, bias)
    by_hand = [sum(x[2, i] * weight[o, i] for i in range(IN)) for o in range(OUT)]
    assert relative_error(y[2], np.array(by_hand) + (0 if bias is None else bias)) < 1e-14

    def loss(x):
        return np.sum(dy * linear_forward(x, weight, bias)[0])

    assert gradient_errors(loss, [x], [linear_backward(dy, saved)])[0] < 1e-9


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_dropout", [False, True])
def test_lora_linear(with_bias, with_dropout):
    generator = np.random.default_rng(2)
    x, weight = generator.standard_normal((N, IN)), generator.standard_normal((OUT, IN))
    lora_a, lora_b = generator.standard_normal((IN, R)), generator.standard_normal((R, OUT))
    bias = generator.standard_normal(OUT) if with_bias else None
    multiplier = (generator.random((N, IN)) > 0.4) / 0.6 if with_dropout else None
    dy = generator.standard_normal((N, OUT))

    def forward(x, lora_a, lora_b):
        return lora_linear_forward(x, weight, bias, lora_a, lora_b, 1.7, multiplier)

    def loss(*arguments):
        return np.sum(dy * forward(*arguments)[0])

    arguments = [x, lora_a, lora_b]
    gradients = lora_linear_backward(dy, forward(*arguments)[1])
    assert max(gradient_errors(loss, arguments, gradients)) < 1e-9


def test_lora_linear_is_the_linear_layer_of_the_merged_weight():
    generator = np.random.default_rng(3)
    x, weight = generator.standard_normal((N, IN)), generator.standard_normal((OUT, IN))
    lora_a, lora_b = generator.standard_normal((IN, R)), generator.standard_normal((R, OUT))
    y, _ = lora_linear_forward(x, weight, None, lora_a, lora_b, 0.6)
    merged, _ = linear_forward(x, weight + 0.6 * (lora_a @ lora_b).T)
    assert relative_error(y, merged) < 1e-14


def test_projection_without_lora_has_no_lora_gradient():
    generator = np.random.default_rng(4)
    x, weight = generator.standard_normal((N, IN)), generator.standard_normal((OUT, IN))
    y, saved = lora_linear_forward(x, weight)
    dx, dlora_a, dlora_b = lora_linear_backward(y, saved)
    assert relative_error(dx, y @ weight) == 0.0
    assert dlora_a is None
    assert dlora_b is None


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="together"):
        lora_linear_forward(np.ones((N, IN)), np.ones((OUT, IN)), None, np.ones((IN, R)))
