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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mesp_core.backend import Backend
from mesp_core.errors import MespError, NonFiniteError
from mesp_core.formulas.dropout import threefry
from mesp_core.formulas.precision import cast, wide
from mesp_core.model import Model

Array = Any

_LOW = 0xFFFFFFFF
#: Keeps the words of rounding apart from those of dropout under the same seed.
_ROUNDING = 0x524E4447


#: How a value moves: arrays and numbers only, so that a compiling backend can trace it.
Rule = Callable[..., tuple[Array, dict[str, Array]]]


class Optimizer(ABC):
    """Moves parameters against their gradients.

    learning_rate: settable between updates. state: arrays by ``{parameter}.{what}``, float32
    (float64 for float64 parameters), and ``{parameter}.step``, the count of its updates, a NumPy
    int32.
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
            if not self._update_one(model, name, parameter, gradient):
                raise NonFiniteError(
                    f"this update would make parameter {name} NaN or infinite; lower the learning "
                    f"rate, which is {self.learning_rate:g}"
                )

    def load_state(self, backend: Backend, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a saved ``state``, given as NumPy arrays."""
        self.state = {
            name: np.asarray(v) if name.endswith(".step") else backend.from_numpy(np.asarray(v))
            for name, v in state.items()
        }

    def _update_one(self, model: Model, name: str, parameter: Array, gradient: Array) -> bool:
        """Moves one parameter; False where it is no longer finite."""
        backend = model.backend
        count = int(self.state.get(f"{name}.step", 0)) + 1
        key = None
        if backend.dtype_name(parameter) == "bfloat16":
            key = _rounding_key(backend, model.seed, count, name)
        moments = self._moments(name, parameter, backend)
        moved, moments, finite = backend.run(
            update_stage, self._rule, parameter, gradient, moments, self._factors(count), key
        )
        backend.stage(moved, *moments.values())
        model.parameters[name] = moved
        self.state |= {f"{name}.{what}": moment for what, moment in moments.items()}
        self.state[f"{name}.step"] = np.asarray(count, np.int32)
        return bool(finite)

    def _moments(self, name: str, parameter: Array, backend: Backend) -> dict[str, Array]:
        """The parameter's moments, zeros before its first update."""
        found = {}
        for what in self._kept():
            moment = self.state.get(f"{name}.{what}")
            if moment is None:
                moment = backend.xp.zeros_like(wide(parameter, backend.xp))
            found[what] = moment
        return found

    #: (value, gradient, moments, factors) -> (moved value, new moments), of arrays in the
    #: accumulation dtype and Python floats.
    _rule: Rule

    @abstractmethod
    def _kept(self) -> tuple[str, ...]:
        """The names of a parameter's moments."""

    @abstractmethod
    def _factors(self, count: int) -> dict[str, float]:
        """The numbers of update ``count`` (from 1) of a parameter."""


def update_stage(
    rule: Rule,
    parameter: Array,
    gradient: Array,
    moments: dict[str, Array],
    factors: dict[str, float],
    key: tuple[Array, Array] | None,
    *,
    ops: Any,
    backend: Backend,
) -> tuple[Array, dict[str, Array], Array]:
    """(the parameter moved, its moments, whether it is finite). key: of stochastic rounding."""
    xp = backend.xp
    value = wide(parameter, xp)
    moved, moments = rule(value, cast(gradient, value.dtype, xp), moments, factors, xp)
    if key is not None:
        words = _words(key, tuple(parameter.shape), backend)
        moved = backend.round_stochastic(moved, words, "bfloat16")
    moved = cast(moved, parameter.dtype, xp)
    return moved, moments, xp.all(xp.isfinite(moved))


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

    def _kept(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def _factors(self, count: int) -> dict[str, float]:
        return {
            "rate": self.learning_rate,
            "momentum": self.momentum,
            "decay": self.weight_decay,
        }

    @staticmethod
    def _rule(
        value: Array, gradient: Array, moments: dict[str, Array], f: dict[str, float], xp: Any
    ) -> tuple[Array, dict[str, Array]]:
        velocity = gradient + f["decay"] * value
        if moments:
            velocity = f["momentum"] * moments["velocity"] + velocity
            moments = {"velocity": velocity}
        return value - f["rate"] * velocity, moments


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

    def _kept(self) -> tuple[str, ...]:
        return "mean", "square"

    def _factors(self, count: int) -> dict[str, float]:
        first, second = self.betas
        return {
            "first": first,
            "first_rest": 1.0 - first,
            "second": second,
            "second_rest": 1.0 - second,
            "square_bias": 1.0 - second**count,
            "step": self.learning_rate / (1.0 - first**count),
            "kept": 1.0 - self.learning_rate * self.weight_decay,
            "eps": self.eps,
        }

    @staticmethod
    def _rule(
        value: Array, gradient: Array, moments: dict[str, Array], f: dict[str, float], xp: Any
    ) -> tuple[Array, dict[str, Array]]:
        mean = f["first"] * moments["mean"] + f["first_rest"] * gradient
        square = f["second"] * moments["square"] + f["second_rest"] * gradient * gradient
        root = xp.sqrt(square / f["square_bias"]) + f["eps"]
        return f["kept"] * value - f["step"] * mean / root, {"mean": mean, "square": square}


def rounding_words(
    backend: Backend, seed: int, count: int, name: str, shape: tuple[int, ...]
) -> Array:
    """Random 32-bit words [rows, columns] for rounding update ``count`` of the tensor ``name``.

    Threefry-2x32 under a key drawn from (seed, count, name), counter (row, column).
    """
    return _words(_rounding_key(backend, seed, count, name), shape, backend)


def _rounding_key(backend: Backend, seed: int, count: int, name: str) -> tuple[Array, Array]:
    seed_words = (seed & _LOW, ((seed >> 32) & _LOW) ^ _ROUNDING)
    first, second = threefry(seed_words, (count & _LOW, zlib.crc32(name.encode())))
    return backend.words.constant(first), backend.words.constant(second)


def _words(key: tuple[Array, Array], shape: tuple[int, ...], backend: Backend) -> Array:
    words, xp = backend.words, backend.xp
    rows, columns = (
        xp.expand_dims(xp.astype(xp.arange(size, dtype=xp.int32), words.dtype), axis=axis)
        for size, axis in zip(shape, (1, 0), strict=True)
    )
    first, _ = words.draw(key, (rows, columns))
    return first


def first_not_finite(gradients: Mapping[str, Array], backend: Backend) -> str | None:
    """The name of the first gradient that holds NaN or infinity, or None."""
    if not gradients:
        return None
    flags = backend.to_numpy(backend.run(finite_stage, list(gradients.values())))
    return next((name for name, ok in zip(gradients, flags, strict=True) if not ok), None)


def finite_stage(arrays: list[Array], *, ops: Any, backend: Backend) -> Array:
    """For each array whether all of it is finite: [n]."""
    xp = backend.xp
    return xp.stack([xp.all(xp.isfinite(array)) for array in arrays])


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
