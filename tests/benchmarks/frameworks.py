"""Each framework: the components as one writes them in it, MeSP's functions with the same
arguments, and how a function is run forward and backward."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mesp_core.formulas import Projection
from tests.benchmarks.inputs import EPS, SCALE, Inputs

Array = Any


class Framework(ABC):
    """name: of the backend. Methods with a component's name are the framework's own."""

    name: str

    @abstractmethod
    def array(self, value: np.ndarray) -> Array: ...

    @abstractmethod
    def runner(
        self, function: Callable[..., Array], wrt: Sequence[Array], dout: Array
    ) -> Callable[[], list[Array]]:
        """Runs ``function(*wrt)`` and back from ``dout``; waits; returns [out, *gradients]."""

    def prepare(self, component: str, which: str, given: Inputs) -> Callable[[], list[Array]]:
        """What is timed. which: ``mesp`` or ``autodiff``."""
        arrays = {name: self.array(value) for name, value in given.by.items()}
        own = Mesp(f"mesp_{self.name}") if which == "mesp" else self
        called = getattr(own, component)

        def function(*wrt: Array) -> Array:
            return called(**(arrays | dict(zip(given.wrt, wrt, strict=True))))

        return self.runner(function, [arrays[name] for name in given.wrt], self.array(given.dout))


class Mesp:
    """MeSP's functions of one framework, by the arguments that the plain ones have."""

    def __init__(self, package: str) -> None:
        self._package = importlib.import_module(package)

    def __getattr__(self, component: str) -> Any:
        return getattr(self._package, component)

    def rms_norm(self, x: Array, weight: Array) -> Array:
        return self._package.rms_norm(x, weight, eps=EPS)

    def lora_linear(self, x: Array, weight: Array, lora_a: Array, lora_b: Array) -> Array:
        return self._package.lora_linear(x, weight, lora_a, lora_b, scale=SCALE)

    def gated_mlp(self, x: Array, **mlp: Array) -> Array:
        projections = [
            Projection(mlp[f"{name}_weight"], None, mlp[f"{name}_a"], mlp[f"{name}_b"], SCALE)
            for name in ("gate", "up", "down")
        ]
        return self._package.gated_mlp(x, *projections)


class Torch(Framework):
    name = "torch"

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        self.nn = importlib.import_module("torch.nn.functional")

    def array(self, value: np.ndarray) -> Array:
        return self.torch.tensor(value)

    def runner(
        self, function: Callable[..., Array], wrt: Sequence[Array], dout: Array
    ) -> Callable[[], list[Array]]:
        for array in wrt:
            array.requires_grad_()

        def run() -> list[Array]:
            out = function(*wrt)
            return [out, *self.torch.autograd.grad(out, wrt, dout)]

        return run

    def embedding(self, tokens: Array, table: Array) -> Array:
        return self.nn.embedding(tokens, table)

    def rms_norm(self, x: Array, weight: Array) -> Array:
        return self.nn.rms_norm(x, (x.shape[-1],), weight, EPS)

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        return _rope(x, cos, sin, self.torch.cat)

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        heads = [array.transpose(0, 1)[None] for array in (q, k, v)]
        out = self.nn.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    def frozen_linear(self, x: Array, weight: Array) -> Array:
        return self.nn.linear(x, weight)

    def lora_linear(self, x: Array, weight: Array, lora_a: Array, lora_b: Array) -> Array:
        return self.nn.linear(x, weight) + SCALE * (x @ lora_a @ lora_b)

    def gated_mlp(self, x: Array, **mlp: Array) -> Array:
        return _gated_mlp(self, self.nn.silu, x, mlp)

    def linear_cross_entropy(self, x: Array, weight: Array, targets: Array) -> Array:
        return self.nn.cross_entropy(self.nn.linear(x, weight), targets.long())


class Jax(Framework):
    name = "jax"

    def __init__(self) -> None:
        self.jax = importlib.import_module("jax")
        self.jnp = importlib.import_module("jax.numpy")

    def array(self, value: np.ndarray) -> Array:
        return self.jnp.asarray(value)

    def runner(
        self, function: Callable[..., Array], wrt: Sequence[Array], dout: Array
    ) -> Callable[[], list[Array]]:
        @self.jax.jit
        def program(wrt: Sequence[Array], dout: Array) -> list[Array]:
            out, back = self.jax.vjp(function, *wrt)
            return [out, *back(dout)]

        return lambda: self.jax.block_until_ready(program(wrt, dout))

    def embedding(self, tokens: Array, table: Array) -> Array:
        return table[tokens]

    def rms_norm(self, x: Array, weight: Array) -> Array:
        mean = self.jnp.mean(x * x, axis=-1, keepdims=True)
        return x * self.jax.lax.rsqrt(mean + EPS) * weight

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        return _rope(x, cos, sin, self.jnp.concatenate)

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        return self.jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def frozen_linear(self, x: Array, weight: Array) -> Array:
        return x @ weight.T

    def lora_linear(self, x: Array, weight: Array, lora_a: Array, lora_b: Array) -> Array:
        return x @ weight.T + SCALE * (x @ lora_a @ lora_b)

    def gated_mlp(self, x: Array, **mlp: Array) -> Array:
        return _gated_mlp(self, self.jax.nn.silu, x, mlp)

    def linear_cross_entropy(self, x: Array, weight: Array, targets: Array) -> Array:
        logs = self.jax.nn.log_softmax(x @ weight.T)
        return -self.jnp.mean(logs[self.jnp.arange(len(targets)), targets])


class Mlx(Framework):
    name = "mlx"

    def __init__(self) -> None:
        # MLX binds its BLAS when it is first imported; the backend chooses one before.
        importlib.import_module("mesp_mlx.mlx_backend")
        self.mx = importlib.import_module("mlx.core")
        self.nn = importlib.import_module("mlx.nn")

    def array(self, value: np.ndarray) -> Array:
        return self.mx.array(value)

    def runner(
        self, function: Callable[..., Array], wrt: Sequence[Array], dout: Array
    ) -> Callable[[], list[Array]]:
        def run() -> list[Array]:
            out, gradients = self.mx.vjp(function, list(wrt), [dout])
            self.mx.eval(out, gradients)
            return [*out, *gradients]

        return run

    def embedding(self, tokens: Array, table: Array) -> Array:
        return table[tokens]

    def rms_norm(self, x: Array, weight: Array) -> Array:
        return self.mx.fast.rms_norm(x, weight, EPS)

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        return _rope(x, cos, sin, self.mx.concatenate)

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        heads = [array.transpose(1, 0, 2)[None] for array in (q, k, v)]
        scale = q.shape[-1] ** -0.5
        out = self.mx.fast.scaled_dot_product_attention(*heads, scale=scale, mask="causal")
        return out[0].transpose(1, 0, 2)

    def frozen_linear(self, x: Array, weight: Array) -> Array:
        return x @ weight.T

    def lora_linear(self, x: Array, weight: Array, lora_a: Array, lora_b: Array) -> Array:
        return x @ weight.T + SCALE * (x @ lora_a @ lora_b)

    def gated_mlp(self, x: Array, **mlp: Array) -> Array:
        return _gated_mlp(self, self.nn.silu, x, mlp)

    def linear_cross_entropy(self, x: Array, weight: Array, targets: Array) -> Array:
        return self.mx.mean(self.nn.losses.cross_entropy(x @ weight.T, targets))


def _rope(x: Array, cos: Array, sin: Array, join: Callable[..., Array]) -> Array:
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return join([left * cos - right * sin, right * cos + left * sin], -1)


def _gated_mlp(own: Any, silu: Callable[[Array], Array], x: Array, mlp: dict[str, Array]) -> Array:
    def project(x: Array, name: str) -> Array:
        return own.lora_linear(x, mlp[f"{name}_weight"], mlp[f"{name}_a"], mlp[f"{name}_b"])

    return project(silu(project(x, "gate")) * project(x, "up"), "down")


FRAMEWORKS = {framework.name: framework for framework in (Mlx, Jax, Torch)}
