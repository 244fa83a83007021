"""MeSP's kernels inside ordinary ``mx.grad`` code, against MLX's own autodiff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mesp_mlx
from mesp_core import MespError
from mesp_core.bridge_kernels import Quantized
from mesp_core.formulas import Projection
from mesp_mlx.mlx_backend import BLAS, MlxBackend
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import bound

N, D, F, V, R, H, K, E = 11, 32, 23, 19, 3, 4, 2, 6


def normal(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def assert_same_gradients(
    ours: Callable[..., mx.array], plain: Callable[..., mx.array], *inputs: mx.array
) -> None:
    """Values and gradients under a loss with a gradient of its own for every output."""
    probe = normal(99, *plain(*inputs).shape)
    # A second, unused argument makes MLX return a tuple even for one input.
    places = (*range(len(inputs)), len(inputs))
    results = [
        mx.value_and_grad(lambda *a, f=function: (f(*a[:-1]) * probe).sum(), argnums=places)(
            *inputs, mx.zeros(1)
        )
        for function in (ours, plain)
    ]
    (value, (*gradients, _)), (expected, (*wanted, _)) = results
    # Both sides are float32, so each may be off by a component.
    allowed = bound("float32", bound("float32"))
    assert_close(np.array(value), np.array(expected), allowed)
    for place, (gradient, other) in enumerate(zip(gradients, wanted, strict=True)):
        assert gradient.dtype == inputs[place].dtype
        assert_close(np.array(gradient), np.array(other), allowed, name=f"input {place}")


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(plus_one: bool) -> None:
    assert_same_gradients(
        lambda x, w: mesp_mlx.rms_norm(x, w, eps=1e-5, plus_one=plus_one),
        lambda x, w: mx.fast.rms_norm(x, 1.0 + w if plus_one else w, 1e-5),
        normal(0, 2, N, D),
        normal(1, D),
    )


def test_embedding() -> None:
    tokens = mx.array([3, 1, 3, 18, 0])
    assert_same_gradients(
        lambda t: mesp_mlx.embedding(tokens, t), lambda t: t[tokens], normal(0, V, D)
    )


def test_rope() -> None:
    angle = normal(3, N, E // 2)
    cos, sin = mx.cos(angle)[:, None, :], mx.sin(angle)[:, None, :]

    def plain(x: mx.array) -> mx.array:
        a, b = x[..., : E // 2], x[..., E // 2 :]
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    assert_same_gradients(
        lambda x: mesp_mlx.rope(x, mx.cos(angle), mx.sin(angle)), plain, normal(0, N, H, E)
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_attention(ragged: bool) -> None:
    segment = mx.array([0] * 4 + [1] * 7) if ragged else None

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        index = mx.arange(N)
        seen = index[:, None] >= index[None, :]
        if segment is not None:
            seen = seen & (segment[:, None] == segment[None, :])
        scores = mx.einsum("nhe,mhe->hnm", q, mx.repeat(k, H // K, axis=1)) * E**-0.5
        p = mx.softmax(mx.where(seen, scores, -1e30), axis=-1)
        return mx.einsum("hnm,mhe->nhe", p, mx.repeat(v, H // K, axis=1))

    assert_same_gradients(
        lambda q, k, v: mesp_mlx.attention(q, k, v, segment=segment),
        plain,
        normal(0, N, H, E),
        normal(1, N, K, E),
        normal(2, N, K, E),
    )


@pytest.mark.parametrize("bits", [0, 4])
def test_frozen_and_lora_linear(bits: int) -> None:
    weight, bias = normal(5, F, D), normal(6, F)
    given: Any = weight
    if bits:
        words, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
        weight = mx.dequantize(words, scales, biases, group_size=32, bits=bits)
        given = Quantized(words.view(mx.uint8), scales, biases, bits, 32)
    x, a, b = normal(0, 2, N, D), normal(1, D, R), normal(2, R, F)
    assert_same_gradients(
        lambda x: mesp_mlx.frozen_linear(x, given, bias), lambda x: x @ weight.T + bias, x
    )
    assert_same_gradients(
        lambda x, a, b: mesp_mlx.lora_linear(x, given, a, b, bias=bias, scale=2.0),
        lambda x, a, b: x @ weight.T + bias + 2.0 * (x @ a) @ b,
        x,
        a,
        b,
    )


def test_dropout_is_a_function_of_its_seed() -> None:
    x, weight, a, b = normal(0, N, D), normal(5, F, D), normal(1, D, R), normal(2, R, F)

    def out(**options: Any) -> np.ndarray:
        return np.array(mesp_mlx.lora_linear(x, weight, a, b, dropout=0.5, **options))

    np.testing.assert_array_equal(out(seed=3, step=1), out(seed=3, step=1))
    assert (out(seed=3, step=1) != out(seed=3, step=2)).any()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(activation: str) -> None:
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    weights = {name: normal(10 + i, *s) * 0.3 for i, (name, s) in enumerate(shapes.items())}
    factors = [
        normal(20 + 2 * i + j, *shape)
        for i, (out, inner) in enumerate(shapes.values())
        for j, shape in enumerate(((inner, R), (R, out)))
    ]
    act = nn.silu if activation == "silu" else nn.gelu_approx

    def ours(x: mx.array, *ab: mx.array) -> mx.array:
        parts = [
            Projection(w, None, ab[2 * i], ab[2 * i + 1], 0.5)
            for i, w in enumerate(weights.values())
        ]
        return mesp_mlx.gated_mlp(x, *parts, activation=activation)

    def plain(x: mx.array, *ab: mx.array) -> mx.array:
        def linear(x: mx.array, i: int, weight: mx.array) -> mx.array:
            return x @ weight.T + 0.5 * (x @ ab[2 * i]) @ ab[2 * i + 1]

        hidden = act(linear(x, 0, weights["gate"])) * linear(x, 1, weights["up"])
        return linear(hidden, 2, weights["down"])

    assert_same_gradients(ours, plain, normal(0, N, D), *factors)


@pytest.mark.parametrize("weighted", [False, True])
def test_linear_cross_entropy(weighted: bool) -> None:
    weight, targets = normal(5, V, D), mx.array(np.arange(N) * 7 % V)
    weights = mx.array(np.arange(N) % 3, dtype=mx.float32) if weighted else None

    def plain(x: mx.array) -> mx.array:
        losses = nn.losses.cross_entropy(x @ weight.T, targets)
        return losses.mean() if weights is None else (weights * losses).sum() / weights.sum()

    assert_same_gradients(
        lambda x: mesp_mlx.linear_cross_entropy(x, weight, targets, weights),
        plain,
        normal(0, N, D),
    )


def test_a_training_step_of_a_small_network() -> None:
    """Chained and shared use inside ordinary code: the loss falls."""
    weight, a, b = normal(5, V, D) * 0.1, normal(1, D, R) * 0.1, mx.zeros((R, D))
    frozen, x, targets = normal(6, D, D) * 0.1, normal(0, N, D), mx.array(np.arange(N) % V)

    def loss(a: mx.array, b: mx.array) -> mx.array:
        y = mesp_mlx.rms_norm(x, mx.ones(D))
        y = y + mesp_mlx.lora_linear(y, frozen, a, b)
        return mesp_mlx.linear_cross_entropy(
            y + mesp_mlx.lora_linear(y, frozen, a, b), weight, targets
        )

    first = float(loss(a, b))
    for _ in range(20):
        da, db = mx.grad(loss, argnums=(0, 1))(a, b)
        a, b = a - 0.3 * da, b - 0.3 * db
    assert float(loss(a, b)) < first - 0.1


def test_what_cannot_run_says_so() -> None:
    x, weight = normal(0, N, D), normal(1, D)
    with pytest.raises(MespError, match=r"cannot be traced by mx\.compile"):
        mx.compile(lambda x: mesp_mlx.rms_norm(x, weight))(x)
    with pytest.raises(MespError, match="cannot be mixed"):
        mesp_mlx.rms_norm(x, np.ones(D, np.float32))
    with pytest.raises(MespError, match="does not end in the weight's width"):
        mesp_mlx.frozen_linear(x, normal(1, F, D + 1))
    with pytest.raises(MespError, match="multiple of the key heads"):
        mesp_mlx.attention(normal(0, N, 4, E), normal(1, N, 3, E), normal(2, N, 3, E))


def test_tiles_do_not_outlive_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles of the logits are 12 MB, and a turn of the loop makes several arrays of that
    size. MLX keeps what is computed from a traced array; MeSP's kernels compute from copies."""
    backend = MlxBackend("cpu", BLAS, native=True)
    monkeypatch.setattr("mesp_mlx.bridge._backend", lambda: backend)
    x, weight, targets = normal(0, 3072, 8), normal(1, 1000, 8), mx.arange(3072) % 1000
    mx.eval(x, weight, targets)

    def loss(x: mx.array) -> mx.array:
        return mesp_mlx.linear_cross_entropy(x, weight, targets)

    peaks = []
    for function in (loss, mx.grad(loss)):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(function(x))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 1.3 * peaks[0]


def test_a_frozen_weight_has_a_gradient_of_zeros() -> None:
    x, weight = normal(0, N, D), normal(1, F, D)
    gradient = mx.grad(lambda w: mesp_mlx.frozen_linear(x, w).sum())(weight)
    assert gradient.shape == weight.shape and not np.array(gradient).any()
