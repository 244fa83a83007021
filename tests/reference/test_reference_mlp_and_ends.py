"""Activations, gated MLP, embedding and linear cross-entropy."""

import math

import numpy as np
import pytest

from mesp_reference.activation import activation_backward, activation_forward
from mesp_reference.cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from mesp_reference.embedding import embedding_backward, embedding_forward
from mesp_reference.finite_differences import gradient_errors, relative_error
from mesp_reference.gated_mlp import gated_mlp_backward, gated_mlp_forward
from mesp_reference.lora_linear import Projection

N, D, F, V, R = 7, 5, 11, 13, 3


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation(kind):
    x = np.array([-30.0, -2.1, -0.4, 0.0, 0.3, 1.9, 25.0])
    dy = np.random.default_rng(14).standard_normal(x.shape)
    y, saved = activation_forward(x, kind)
    if kind == "silu":
        expected = [value / (1 + math.exp(-value)) for value in x]
    else:
        inner = [math.sqrt(2 / math.pi) * (value + 0.044715 * value**3) for value in x]
        expected = [0.5 * v * (1 + math.tanh(u)) for v, u in zip(x, inner, strict=True)]
    assert relative_error(y, np.array(expected)) < 1e-14
    gradient = activation_backward(dy, saved, kind)
    errors = gradient_errors(lambda x: np.sum(dy * activation_forward(x, kind)[0]), [x], [gradient])
    assert errors[0] < 1e-9


@pytest.mark.parametrize("x", [-1e5, 1e5])
def test_silu_far_out_is_finite(x):
    with np.errstate(all="raise"):
        y, saved = activation_forward(np.array([x]), "silu")
        gradient = activation_backward(np.ones(1), saved, "silu")
    assert y[0] == max(x, 0.0)
    assert gradient[0] == float(x > 0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_dropout", [False, True])
def test_gated_mlp(activation, with_dropout):
    generator = np.random.default_rng(15)
    shapes = [(F, D), (F, D), (D, F)]
    weights = [generator.standard_normal(shape) / 2 for shape in shapes]
    factors = [
        generator.standard_normal(shape) / 2
        for out, width in shapes
        for shape in ((width, R), (R, out))
    ]
    masks = [
        (generator.random((N, width)) > 0.3) / 0.7 if with_dropout else None for _, width in shapes
    ]
    x, dy = generator.standard_normal((N, D)), generator.standard_normal((N, D))

    def forward(x, *factors):
        gate, up, down = (
            Projection(weights[i], None, factors[2 * i], factors[2 * i + 1], 1.3, masks[i])
            for i in range(3)
        )
        return gated_mlp_forward(x, gate, up, down, activation)

    dx, *pairs = gated_mlp_backward(dy, forward(x, *factors)[1])
    gradients = [dx, *(gradient for pair in pairs for gradient in pair)]
    errors = gradient_errors(
        lambda *arguments: np.sum(dy * forward(*arguments)[0]), [x, *factors], gradients
    )
    assert max(errors) < 1e-9


def test_embedding():
    generator = np.random.default_rng(16)
    table, tokens = generator.standard_normal((V, D)), np.array([3, 0, 3, 12, 7, 3, 0])
    dx = generator.standard_normal((N, D))
    _, saved = embedding_forward(tokens, table)
    dtable = embedding_backward(dx, saved)
    errors = gradient_errors(
        lambda table: np.sum(dx * embedding_forward(tokens, table)[0]), [table], [dtable]
    )
    assert errors[0] < 1e-9
    assert relative_error(dtable[3], dx[0] + dx[2] + dx[5]) < 1e-15


@pytest.mark.parametrize("token", [-1, V])
def test_embedding_refuses_ids_outside_the_table(token):
    with pytest.raises(ValueError, match="token ids"):
        embedding_forward(np.array([0, token]), np.ones((V, D)))


@pytest.mark.parametrize("normalizer", [None, 2.9])
def test_linear_cross_entropy(normalizer):
    generator = np.random.default_rng(17)
    x, weight = generator.standard_normal((N, D)), generator.standard_normal((V, D))
    targets = np.array([0, 12, 4, 4, 7, 1, 9])
    weights = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 0.0, 1.0])

    def loss(x, weight):
        return linear_cross_entropy_forward(x, weight, targets, weights, normalizer)[0]

    value, saved = linear_cross_entropy_forward(x, weight, targets, weights, normalizer)
    expected = 0.0
    for i in range(N):
        logits = [float(x[i] @ row) for row in weight]
        expected += weights[i] * -math.log(
            math.exp(logits[targets[i]]) / sum(math.exp(z) for z in logits)
        )
    assert value == pytest.approx(expected / (normalizer or weights.sum()), rel=1e-13)
    gradients = linear_cross_entropy_backward(1.0, saved)
    assert max(gradient_errors(loss, [x, weight], gradients)) < 1e-9
    assert np.all(gradients[0][weights == 0.0] == 0.0)
    for gradient, doubled in zip(gradients, linear_cross_entropy_backward(2.0, saved), strict=True):
        assert relative_error(doubled, 2.0 * gradient) < 1e-15


def test_dx_is_the_difference_of_mean_row_and_target_row():
    """The form that one online-softmax pass gives, docs/cross_entropy.md."""
    generator = np.random.default_rng(18)
    x, weight = generator.standard_normal((N, D)), generator.standard_normal((V, D))
    targets, weights = np.arange(N), np.linspace(0.2, 1.4, N)
    _, saved = linear_cross_entropy_forward(x, weight, targets, weights, 3.0)
    dx, _ = linear_cross_entropy_backward(1.0, saved)
    exponential = np.exp(x @ weight.T)
    o = exponential @ weight / exponential.sum(axis=1, keepdims=True)
    assert relative_error(dx, (weights / 3.0)[:, None] * (o - weight[targets])) < 1e-13


def test_all_targets_masked_is_zero_loss_and_zero_gradient():
    x, weight = np.ones((N, D)), np.ones((V, D))
    loss, saved = linear_cross_entropy_forward(x, weight, np.zeros(N, int), np.zeros(N))
    dx, dweight = linear_cross_entropy_backward(1.0, saved)
    assert loss == 0.0
    assert np.all(dx == 0.0)
    assert np.all(dweight == 0.0)


def test_large_logits_do_not_overflow():
    x, weight = np.full((1, D), 1e3), np.eye(V, D)
    loss, _ = linear_cross_entropy_forward(x, weight, np.array([12]), np.ones(1))
    assert loss == pytest.approx(1e3 + math.log(D))
