"""Optimizers against their formulas in plain NumPy, and the guards of an update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesp_core import SGD, AdamW, MespError, NonFiniteError, get_backend
from mesp_core.optimizers import clip_gradients, first_not_finite, global_norm

SHAPES = {"a": (5, 3), "b": (3, 7)}


def holder(backend: Any, dtype: str, seed: int = 0) -> Any:
    """What an optimizer needs of a model."""
    generator = np.random.default_rng(1)
    values = {name: generator.normal(size=shape) for name, shape in SHAPES.items()}
    parameters = {name: backend.from_numpy(value, dtype) for name, value in values.items()}
    return SimpleNamespace(backend=backend, parameters=parameters, seed=seed)


def gradients(backend: Any, dtype: str, step: int) -> dict[str, Any]:
    generator = np.random.default_rng(100 + step)
    return {
        name: backend.from_numpy(generator.normal(size=shape), dtype)
        for name, shape in SHAPES.items()
    }


def numpy_values(model: Any) -> dict[str, np.ndarray]:
    return {n: np.array(model.backend.to_numpy(p), np.float64) for n, p in model.parameters.items()}


def sgd_by_hand(
    p: np.ndarray, gs: list[np.ndarray], rate: float, momentum: float, decay: float
) -> np.ndarray:
    velocity = np.zeros_like(p)
    for g in gs:
        velocity = momentum * velocity + g + decay * p
        p = p - rate * velocity
    return p


def adamw_by_hand(
    p: np.ndarray,
    gs: list[np.ndarray],
    rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> np.ndarray:
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gs, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        p = p - rate * decay * p - rate * m_hat / (np.sqrt(v_hat) + eps)
    return p


@pytest.mark.parametrize(
    ("backend", "dtype", "bound"),
    [("numpy", "float64", 1e-14), ("numpy", "float32", 1e-6), ("mlx", "float32", 1e-6)],
)
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adamw"])
def test_three_updates_follow_the_formula(
    backend: str, dtype: str, bound: float, rule: str
) -> None:
    model = holder(get_backend(backend), dtype)
    before = numpy_values(model)
    given = [gradients(model.backend, dtype, step) for step in range(3)]
    kept = [{n: np.array(model.backend.to_numpy(g)) for n, g in step.items()} for step in given]
    optimizer: Any = {
        "sgd": lambda: SGD(0.1),
        "momentum": lambda: SGD(0.1, momentum=0.7, weight_decay=0.03),
        "adamw": lambda: AdamW(0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
    }[rule]()
    for step in given:
        optimizer.update(model, step)
    after = numpy_values(model)
    for name, start in before.items():
        gs = [np.array(step[name], np.float64) for step in kept]
        expected = {
            "sgd": lambda p, g: sgd_by_hand(p, g, 0.1, 0.0, 0.0),
            "momentum": lambda p, g: sgd_by_hand(p, g, 0.1, 0.7, 0.03),
            "adamw": lambda p, g: adamw_by_hand(p, g, 0.1, (0.8, 0.95), 1e-3, 0.05),
        }[rule](start, gs)
        np.testing.assert_allclose(after[name], expected, rtol=bound, atol=bound)
    for step, copy in zip(given, kept, strict=True):
        for name, gradient in step.items():
            np.testing.assert_array_equal(model.backend.to_numpy(gradient), copy[name])


def test_the_learning_rate_is_settable_between_updates() -> None:
    model = holder(get_backend("numpy"), "float64")
    before = numpy_values(model)
    optimizer, g = SGD(1.0), gradients(model.backend, "float64", 0)
    optimizer.learning_rate = 0.25
    optimizer.update(model, g)
    np.testing.assert_allclose(model.parameters["a"], before["a"] - 0.25 * g["a"], rtol=1e-15)


def test_updates_of_one_block_at_a_time_equal_one_update_of_all() -> None:
    backend = get_backend("numpy")
    together, apart = holder(backend, "float32"), holder(backend, "float32")
    first, second = AdamW(0.01), AdamW(0.01)
    for step in range(3):
        g = gradients(backend, "float32", step)
        first.update(together, g)
        for name in ("b", "a"):
            second.update(apart, {name: g[name]})
    for name in SHAPES:
        np.testing.assert_array_equal(together.parameters[name], apart.parameters[name])


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_a_saved_state_goes_on_bit_for_bit(backend: str) -> None:
    through, stopped = (holder(get_backend(backend), "float32") for _ in range(2))
    one, two = AdamW(0.01), AdamW(0.01)
    for step in range(4):
        g = gradients(through.backend, "float32", step)
        one.update(through, g)
        if step == 2:
            saved = {n: np.array(stopped.backend.to_numpy(a)) for n, a in two.state.items()}
            two = AdamW(0.01)
            two.load_state(stopped.backend, saved)
        two.update(stopped, g)
    for name in SHAPES:
        np.testing.assert_array_equal(numpy_values(through)[name], numpy_values(stopped)[name])
    assert sorted(one.state) == sorted(
        f"{n}.{w}" for n in SHAPES for w in ("mean", "square", "step")
    )


def test_the_state_is_float32_under_bfloat16_parameters() -> None:
    model = holder(get_backend("mlx"), "bfloat16")
    optimizer = AdamW(0.01)
    optimizer.update(model, gradients(model.backend, "bfloat16", 0))
    kinds = {model.backend.dtype_name(optimizer.state[f"a.{w}"]) for w in ("mean", "square")}
    assert kinds == {"float32"}
    assert model.backend.dtype_name(model.parameters["a"]) == "bfloat16"


def test_small_steps_of_bfloat16_parameters_are_right_on_average() -> None:
    """Each step is 1/256 of the distance between neighbours: nearest rounding would lose it."""
    backend = get_backend("mlx")
    one = backend.from_numpy(np.ones((64, 64)), "bfloat16")
    model: Any = SimpleNamespace(backend=backend, parameters={"a": one}, seed=4)
    optimizer = SGD(1.0)
    step = 2.0**-8 / 256  # Below 1, bfloat16 numbers are 2⁻⁸ apart.
    for _ in range(32):
        optimizer.update(model, {"a": backend.from_numpy(np.full((64, 64), step), "float32")})
    values = backend.to_numpy(model.parameters["a"])
    moved = 1.0 - float(values.mean())
    # 32 · 4096 draws of probability 1/256 have a relative standard deviation of 4.4 %.
    assert moved == pytest.approx(32 * step, rel=0.2)
    assert np.unique(values).size > 1


def test_rounding_depends_on_seed_and_update_only() -> None:
    def run(seed: int) -> np.ndarray:
        model = holder(get_backend("mlx"), "bfloat16", seed)
        optimizer = SGD(1e-3)
        for step in range(2):
            optimizer.update(model, gradients(model.backend, "float32", step))
        return numpy_values(model)["a"]

    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_an_update_that_overflows_changes_no_parameter(backend: str, kind: Any) -> None:
    chosen = get_backend(backend)
    model = holder(chosen, "float32")
    g = gradients(chosen, "float32", 0)
    # The first tensor moves far, the second one too far.
    g["a"], model.parameters["a"] = g["a"] * 0.0, model.parameters["a"] * 1e-3
    model.parameters["b"] = model.parameters["b"] * 1e3
    before = numpy_values(model)
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match="parameter b NaN or inf"):
        kind(1e37, weight_decay=0.5).update(model, g)
    for name, expected in before.items():
        np.testing.assert_array_equal(numpy_values(model)[name], expected)


def test_a_gradient_of_nothing_is_refused() -> None:
    model = holder(get_backend("numpy"), "float32")
    with pytest.raises(MespError, match="gradient c belongs to no parameter"):
        SGD(0.1).update(model, {"c": np.ones((5, 3))})
    with pytest.raises(MespError, match=r"a has shape \(3, 5\), its parameter \(5, 3\)"):
        SGD(0.1).update(model, {"a": np.ones((3, 5))})


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(-1.0),
        lambda: SGD(float("nan")),
        lambda: SGD(0.1, momentum=1.0),
        lambda: SGD(0.1, weight_decay=-0.1),
        lambda: AdamW(0.1, betas=(0.9, 1.0)),
        lambda: AdamW(0.1, eps=0.0),
        lambda: AdamW(float("inf")),
    ],
)
def test_impossible_settings_are_refused(make: Any) -> None:
    with pytest.raises(MespError, match="must be"):
        make()


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_clipping_is_by_the_norm_of_everything_together(backend: str) -> None:
    chosen = get_backend(backend)
    g = gradients(chosen, "float32", 0)
    flat = np.concatenate([np.array(chosen.to_numpy(x)).ravel() for x in g.values()])
    norm = float(np.linalg.norm(flat.astype(np.float64)))
    assert global_norm(g, chosen) == pytest.approx(norm, rel=1e-6)
    clipped, told = clip_gradients(g, norm / 3, chosen)
    assert told == pytest.approx(norm, rel=1e-6)
    assert global_norm(clipped, chosen) == pytest.approx(norm / 3, rel=1e-6)
    left, _ = clip_gradients(g, norm * 1.01, chosen)
    for name, gradient in g.items():
        np.testing.assert_array_equal(chosen.to_numpy(left[name]), chosen.to_numpy(gradient))


def test_the_norm_of_huge_gradients_does_not_overflow() -> None:
    chosen = get_backend("numpy")
    assert global_norm({"a": np.full((2, 2), 1e30, np.float32)}, chosen) == pytest.approx(2e30)
    assert global_norm({"a": np.zeros((2, 2), np.float32)}, chosen) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_one_value_that_is_not_finite_is_found_and_named(backend: str, bad: float) -> None:
    chosen = get_backend(backend)
    g = gradients(chosen, "float32", 0)
    assert first_not_finite(g, chosen) is None
    values = np.array(chosen.to_numpy(g["b"]))
    values[2, 5] = bad
    g["b"] = chosen.from_numpy(values, "float32")
    assert first_not_finite(g, chosen) == "b"
