"""Optimizers: SGD and AdamW on a model's LoRA parameters, and what guards an update.

Everything is computed in float32 (float64 for float64 parameters), whatever the parameter's
dtype. A bfloat16 parameter is rounded up or down at random, right on average: rounding to the
nearest loses most of a small step. The random words are drawn from a counter (seed, update,
tensor), so the same run gives the same bits.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from mesp_core.backend import Backend
from mesp_core.errors import MespError, NonFiniteError
from mesp_core.formulas.dropout import random_words, threefry
from mesp_core.formulas.precision import cast, wide
from mesp_core.model import Model

Array = Any

_LOW = 0xFFFFFFFF
#: Keeps the words of rounding apart from those of dropout under the same seed.
_ROUNDING = 0x524E4447


class Optimizer(ABC):
    """Moves parameters against their gradients.

    learning_rate: settable between updates. state: arrays by ``{parameter}.{what}``, float32
    (float64 for float64 parameters), and ``{parameter}.step``, an int32 count of its updates.
    """

    def __init__(self, learning_rate: float, weight_decay: float) -> None:
        _require(learning_rate >= 0.0, "learning rate", learning_rate, "0 or more")
        _require(weight_decay >= 0.0, "weight decay", weight_decay, "0 or more")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.state: dict[str, Array] = {}

    def update(self, model: Model, gradients: Mapping[str, Array]) -> None:
        """Moves ``model.parameters[name]`` for each name in ``gradients``; others stay.

        The gradients may be those of one block, and are not written into.
        Raises MespError for a name or shape that no parameter has, NonFiniteError when a parameter
        would become NaN or infinite. After an exception every parameter is as it was; moments may
        have moved.
        """
        before = dict(model.parameters)
        try:
            self._update_all(model, gradients)
        except BaseException:
            model.parameters = before
            raise

    def _update_all(self, model: Model, gradients: Mapping[str, Array]) -> None:
        for name, gradient in gradients.items():
            parameter = model.parameters.get(name)
            if parameter is None:
                raise MespError(f"gradient {name} belongs to no parameter of the model")
            if tuple(parameter.shape) != tuple(gradient.shape):
                raise MespError(
                    f"gradient {name} has shape {tuple(gradient.shape)}, its parameter "
                    f"{tuple(parameter.shape)}"
                )
            self._update_one(model, name, parameter, gradient)
            if not _finite(model.parameters[name], model.backend):
                raise NonFiniteError(
                    f"this update would make parameter {name} NaN or infinite; lower the learning "
                    f"rate, which is {self.learning_rate:g}"
                )

    def load_state(self, backend: Backend, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a saved ``state``, given as NumPy arrays."""
        self.state = {name: backend.from_numpy(np.asarray(v)) for name, v in state.items()}

    def _update_one(self, model: Model, name: str, parameter: Array, gradient: Array) -> None:
        backend = model.backend
        count = int(self.state.get(f"{name}.step", 0)) + 1
        value = wide(parameter, backend.xp)
        moved, moments = self._move(
            value, cast(gradient, value.dtype, backend.xp), name, count, backend.xp
        )
        dtype = backend.dtype_name(parameter)
        if dtype == "bfloat16":
            words = rounding_words(backend, model.seed, count, name, tuple(parameter.shape))
            moved = backend.round_stochastic(moved, words, dtype)
        moved = cast(moved, parameter.dtype, backend.xp)
        backend.stage(moved, *moments.values())
        model.parameters[name] = moved
        self.state |= {f"{name}.{what}": moment for what, moment in moments.items()}
        self.state[f"{name}.step"] = backend.from_numpy(np.asarray(count, np.int32))

    @abstractmethod
    def _move(
        self, value: Array, gradient: Array, name: str, count: int, xp: Any
    ) -> tuple[Array, dict[str, Array]]:
        """The parameter after update number ``count`` (from 1), and its new moments."""


class SGD(Optimizer):
    """Stochastic gradient descent.

    g ← gradient + weight_decay · p;  v ← momentum · v + g;  p ← p − learning_rate · v.
    State: ``velocity``, only with momentum.
    """

    def __init__(
        self, learning_rate: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(learning_rate, weight_decay)
        _require(0.0 <= momentum < 1.0, "momentum", momentum, "in [0, 1)")
        self.momentum = momentum

    def _move(
        self, value: Array, gradient: Array, name: str, count: int, xp: Any
    ) -> tuple[Array, dict[str, Array]]:
        velocity = gradient + self.weight_decay * value if self.weight_decay else gradient
        if not self.momentum:
            return value - self.learning_rate * velocity, {}
        if count > 1:
            velocity = self.momentum * self.state[f"{name}.velocity"] + velocity
        return value - self.learning_rate * velocity, {"velocity": velocity}


class AdamW(Optimizer):
    """Adam with decoupled weight decay and bias correction (Loshchilov & Hutter 2019, alg. 2).

    m ← β₁m + (1 − β₁)g;  v ← β₂v + (1 − β₂)g²;
    p ← p · (1 − learning_rate · weight_decay)
        − learning_rate · (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + eps), t counted per parameter.
    State: ``mean`` m and ``square`` v.
    """

    def __init__(
        self,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(learning_rate, weight_decay)
        for beta in betas:
            _require(0.0 <= beta < 1.0, "beta", beta, "in [0, 1)")
        _require(eps > 0.0, "eps", eps, "above 0")
        self.betas = betas
        self.eps = eps

    def _move(
        self, value: Array, gradient: Array, name: str, count: int, xp: Any
    ) -> tuple[Array, dict[str, Array]]:
        first, second = self.betas
        mean = (1.0 - first) * gradient
        square = (1.0 - second) * gradient * gradient
        if count > 1:
            mean = first * self.state[f"{name}.mean"] + mean
            square = second * self.state[f"{name}.square"] + square
        root = xp.sqrt(square / (1.0 - second**count)) + self.eps
        step = self.learning_rate / (1.0 - first**count) * mean / root
        kept = 1.0 - self.learning_rate * self.weight_decay
        return kept * value - step, {"mean": mean, "square": square}


def rounding_words(
    backend: Backend, seed: int, count: int, name: str, shape: tuple[int, ...]
) -> Array:
    """Random 32-bit words [rows, columns] for rounding update ``count`` of the tensor ``name``.

    Threefry-2x32 under a key drawn from (seed, count, name), counter (row, column).
    """
    words, xp = backend.words, backend.xp
    seed_words = (seed & _LOW, ((seed >> 32) & _LOW) ^ _ROUNDING)
    key = threefry(seed_words, (count & _LOW, zlib.crc32(name.encode())))
    rows, columns = (
        xp.expand_dims(xp.astype(xp.arange(size, dtype=xp.int32), words.dtype), axis=axis)
        for size, axis in zip(shape, (1, 0), strict=True)
    )
    first, _ = random_words(
        (words.constant(key[0]), words.constant(key[1])), (rows, columns), words
    )
    return first


def first_not_finite(gradients: Mapping[str, Array], backend: Backend) -> str | None:
    """The name of the first gradient that holds NaN or infinity, or None."""
    for name, gradient in gradients.items():
        if not _finite(gradient, backend):
            return name
    return None


def _finite(array: Array, backend: Backend) -> bool:
    return bool(backend.xp.all(backend.xp.isfinite(array)))


def global_norm(gradients: Mapping[str, Array], backend: Backend) -> float:
    """√(Σ g²) over all finite gradients together, without overflow of the squares."""
    xp, total = backend.xp, 0.0
    for gradient in gradients.values():
        g = wide(gradient, xp)
        largest = float(xp.max(xp.abs(g)))
        if largest:
            scaled = g / largest
            total += largest**2 * float(xp.sum(scaled * scaled))
    return math.sqrt(total)


def clip_gradients(
    gradients: Mapping[str, Array], max_norm: float, backend: Backend
) -> tuple[dict[str, Array], float]:
    """The gradients, scaled down together where their global norm exceeds ``max_norm``, and the
    norm they had. New arrays; what was given stays as it is."""
    _require(max_norm > 0.0, "the largest gradient norm", max_norm, "above 0")
    norm = global_norm(gradients, backend)
    if norm <= max_norm:
        return dict(gradients), norm
    return {name: gradient * (max_norm / norm) for name, gradient in gradients.items()}, norm


def _require(holds: bool, what: str, value: float, range_: str) -> None:
    if not (math.isfinite(value) and holds):
        raise MespError(f"{what} must be {range_}, not {value}")
