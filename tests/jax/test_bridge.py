"""MeSP's kernels inside ordinary ``jax.grad`` code, against JAX's own autodiff in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mesp_jax
from mesp_core import MespError
from mesp_core.bridge_kernels import Kernel, Quantized
from mesp_core.formulas import Projection
from mesp_jax.bridge import apply
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import bound
from mesp_reference.quantization import dequantize, quantize

N, D, F, V, R, H, K, E = 11, 32, 23, 19, 3, 4, 2, 6
Function = Callable[..., jax.Array]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def assert_same_gradients(ours: Function, plain: Function, *inputs: jax.Array) -> None:
    """Values and gradients under a loss with a gradient of its own for every output, the kernel
    inside ``jax.jit`` and outside of it."""
    probe = normal(99, *jax.eval_shape(plain, *inputs).shape)
    places = tuple(range(len(inputs)))

    def differentiated(function: Function) -> Any:
        return jax.value_and_grad(lambda *a: (function(*a) * probe).sum(), argnums=places)

    value, gradients = jax.jit(differentiated(plain))(*inputs)
    allowed = bound("float64", bound("float64"))
    for run in (differentiated(ours), jax.jit(differentiated(ours))):
        our_value, our_gradients = run(*inputs)
        assert_close(np.asarray(our_value), np.asarray(value), allowed, dtype="float64")
        for place, (mine, other) in enumerate(zip(our_gradients, gradients, strict=True)):
            name = f"input {place}"
            assert_close(np.asarray(mine), np.asarray(other), allowed, dtype="float64", name=name)


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(plus_one: bool) -> None:
    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        w = 1.0 + w if plus_one else w
        return x * w / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    assert_same_gradients(
        lambda x, w: mesp_jax.rms_norm(x, w, eps=1e-5, plus_one=plus_one),
        plain,
        normal(0, 2, N, D),
        normal(1, D),
    )


def test_embedding() -> None:
    tokens = jnp.asarray([3, 1, 3, 18, 0])
    assert_same_gradients(
        lambda t: mesp_jax.embedding(tokens, t), lambda t: t[tokens], normal(0, V, D)
    )


def test_rope() -> None:
    angle = normal(3, N, E // 2)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]

    def plain(x: jax.Array) -> jax.Array:
        a, b = x[..., : E // 2], x[..., E // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    assert_same_gradients(
        lambda x: mesp_jax.rope(x, jnp.cos(angle), jnp.sin(angle)), plain, normal(0, N, H, E)
    )


@pytest.mark.parametrize(("ragged", "tokens"), [(True, N), (False, 150)])
def test_attention(ragged: bool, tokens: int) -> None:
    """150 tokens are two tiles, the second of them shorter."""
    lengths = (4, tokens - 4)
    segment = jnp.repeat(jnp.arange(2), jnp.asarray(lengths)) if ragged else None

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        index = jnp.arange(tokens)
        seen = index[:, None] >= index[None, :]
        if segment is not None:
            seen = seen & (segment[:, None] == segment[None, :])
        scores = jnp.einsum("nhe,mhe->hnm", q, jnp.repeat(k, H // K, axis=1)) * E**-0.5
        p = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("hnm,mhe->nhe", p, jnp.repeat(v, H // K, axis=1))

    assert_same_gradients(
        lambda q, k, v: mesp_jax.attention(q, k, v, segment=segment),
        plain,
        normal(0, tokens, H, E),
        normal(1, tokens, K, E),
        normal(2, tokens, K, E),
    )


@pytest.mark.parametrize("bits", [0, 4])
def test_frozen_and_lora_linear(bits: int) -> None:
    weight, bias = normal(5, F, D), normal(6, F)
    given: Any = weight
    if bits:
        packed, scales, biases = quantize(np.asarray(weight), 32, bits)
        weight = jnp.asarray(dequantize(packed, scales, biases, 32, bits))
        codes = jnp.asarray(np.ascontiguousarray(packed).view(np.uint8))
        given = Quantized(codes, jnp.asarray(scales), jnp.asarray(biases), bits, 32)
    x, a, b = normal(0, 2, N, D), normal(1, D, R), normal(2, R, F)
    assert_same_gradients(
        lambda x: mesp_jax.frozen_linear(x, given, bias), lambda x: x @ weight.T + bias, x
    )
    assert_same_gradients(
        lambda x, a, b: mesp_jax.lora_linear(x, given, a, b, bias=bias, scale=2.0),
        lambda x, a, b: x @ weight.T + bias + 2.0 * (x @ a) @ b,
        x,
        a,
        b,
    )


def test_dropout_is_a_function_of_its_seed() -> None:
    x, weight, a, b = normal(0, N, D), normal(5, F, D), normal(1, D, R), normal(2, R, F)

    def out(**options: Any) -> np.ndarray:
        return np.asarray(mesp_jax.lora_linear(x, weight, a, b, dropout=0.5, **options))

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
    act = jax.nn.silu if activation == "silu" else jax.nn.gelu

    def ours(x: jax.Array, *ab: jax.Array) -> jax.Array:
        parts = [
            Projection(w, None, ab[2 * i], ab[2 * i + 1], 0.5)
            for i, w in enumerate(weights.values())
        ]
        return mesp_jax.gated_mlp(x, *parts, activation=activation)

    def plain(x: jax.Array, *ab: jax.Array) -> jax.Array:
        def linear(x: jax.Array, i: int, weight: jax.Array) -> jax.Array:
            return x @ weight.T + 0.5 * (x @ ab[2 * i]) @ ab[2 * i + 1]

        hidden = act(linear(x, 0, weights["gate"])) * linear(x, 1, weights["up"])
        return linear(hidden, 2, weights["down"])

    assert_same_gradients(ours, plain, normal(0, N, D), *factors)


@pytest.mark.parametrize("weighted", [False, True])
def test_linear_cross_entropy(weighted: bool) -> None:
    weight, targets = normal(5, V, D), jnp.arange(N) * 7 % V
    weights = jnp.arange(N) % 3 * 1.0 if weighted else None

    def plain(x: jax.Array) -> jax.Array:
        chosen = jax.nn.log_softmax(x @ weight.T)[jnp.arange(N), targets]
        return -chosen.mean() if weights is None else -(weights * chosen).sum() / weights.sum()

    assert_same_gradients(
        lambda x: mesp_jax.linear_cross_entropy(x, weight, targets, weights),
        plain,
        normal(0, N, D),
    )


def test_inside_a_scan() -> None:
    """Layers stacked by ``lax.scan``: the forward pass and every layer's gradients."""
    weights, a, b = normal(5, 3, D, D) * 0.1, normal(1, 3, D, R), normal(2, 3, R, D)

    def through(layer: Function) -> Function:
        def run(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            def body(y: jax.Array, parts: Any) -> tuple[jax.Array, None]:
                return y + layer(y, *parts), None

            return lax.scan(body, x, (weights, a, b))[0]

        return run

    assert_same_gradients(
        through(lambda y, w, a, b: mesp_jax.lora_linear(y, w, a, b, scale=0.3)),
        through(lambda y, w, a, b: y @ w.T + 0.3 * (y @ a) @ b),
        normal(0, N, D),
        a,
        b,
    )


def test_gradients_come_in_the_dtype_of_their_inputs() -> None:
    x, a, b = (normal(i, *s).astype(jnp.bfloat16) for i, s in enumerate(((N, D), (D, R), (R, F))))
    weight = normal(5, F, D).astype(jnp.bfloat16)

    def loss(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return mesp_jax.lora_linear(x, weight, a, b).astype(jnp.float32).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2))(x, a, b)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3


def test_what_cannot_run_says_so() -> None:
    x, weight = normal(0, N, D), normal(1, D)
    mesp_jax.rms_norm(x, weight)
    with pytest.raises(MespError, match="cannot be mixed"):
        mesp_jax.rms_norm(x, np.ones(D, np.float32))
    with pytest.raises(MespError, match="does not end in the weight's width"):
        mesp_jax.frozen_linear(x, normal(1, F, D + 1))
    with pytest.raises(MespError, match="multiple of the key heads"):
        mesp_jax.attention(normal(0, N, 4, E), normal(1, N, 3, E), normal(2, N, 3, E))


class Doubled(Kernel):
    """2x, which writes down whether a backward pass was said to follow."""

    differentiable = (True,)

    def __init__(self) -> None:
        self.told: list[bool] = []

    def forward(self, backend: Any, *inputs: Any, gradient: bool) -> Any:
        self.told.append(gradient)
        return 2.0 * inputs[0], ()

    def backward(self, backend: Any, dout: Any, saved: Any, *inputs: Any) -> Any:
        return (2.0 * dout,)


def test_a_backward_pass_is_prepared_only_where_one_can_follow() -> None:
    kernel, x = Doubled(), jnp.ones(3)
    assert apply(kernel, x).tolist() == [2.0] * 3 and kernel.told == [False]
    gradient = jax.grad(lambda x: apply(kernel, x).sum())(x)
    assert gradient.tolist() == [2.0] * 3 and kernel.told[1:] == [True]
