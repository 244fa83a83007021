"""MeSP, MeBP and plain autodiff: the same loss, the same gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.methods import HEADS, METHODS, reason_against
from mesp_reference.check.compare import relative_error
from mesp_reference.check.tolerances import WHOLE_MODEL, bound
from tests.methods.models import DIFFERENTIATING, LENGTHS, backend_of, flat, gradients, tiny_model

RAGGED = mesp.Batch.from_sequences(LENGTHS, [0, 2, 1])
ALONE = mesp.Batch.from_sequences([LENGTHS[0]])

#: Family, what its config.json says, batch, LoRA. Every part of a block that a family can have.
CASES: dict[str, tuple[str, dict[str, Any], mesp.Batch, mesp.LoraConfig]] = {
    "alone": ("llama", {}, ALONE, mesp.LoraConfig(rank=3)),
    "ragged": ("llama", {}, RAGGED, mesp.LoraConfig(rank=3)),
    "dropout": ("qwen3", {}, RAGGED, mesp.LoraConfig(rank=3, dropout=0.4)),
    "window": ("mistral", {"sliding_window": 3}, ALONE, mesp.LoraConfig(rank=3)),
    "softcap": ("llama", {"attn_logit_softcapping": 0.7}, ALONE, mesp.LoraConfig(rank=3)),
    "some": ("qwen2", {}, RAGGED, mesp.LoraConfig(rank=2, layers=2, targets=("q_proj", "up_proj"))),
}
FEW_FOR_JAX = ("ragged", "some")


def assert_agree(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= WHOLE_MODEL["float32"], errors


@cache
def truth(folder: Path, case: str) -> dict[str, np.ndarray]:
    """MeSP in float64, which is held to transformers and PEFT elsewhere."""
    family, settings, batch, lora = CASES[case]
    lora = replace(lora, dtype="float64")
    return gradients(
        tiny_model(folder, "numpy", family, dtype="float64", lora=lora, **settings), batch
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case: tmp_path_factory.mktemp(case) for case in CASES}


@pytest.mark.parametrize(
    ("kind", "case"),
    [(k, c) for k in DIFFERENTIATING for c in CASES if k != "jax" or c in FEW_FOR_JAX],
)
def test_differentiation_gives_the_gradients_of_mesp(
    folders: dict[str, Path], kind: str, case: str
) -> None:
    family, settings, batch, lora = CASES[case]
    model = tiny_model(folders[case], kind, family, lora=lora, **settings)
    exact, expected = truth(folders[case], case), mesp.loss_and_gradients(model, batch)
    for method in ("mebp", "autodiff"):
        for head in HEADS:
            result = mesp.loss_and_gradients(model, batch, method=method, head=head)
            assert result.tokens == expected.tokens
            assert result.loss == pytest.approx(expected.loss, rel=1e-6)
            assert result.gradients.keys() == exact.keys()
            for name, array in result.gradients.items():
                error = relative_error(model.backend.to_numpy(array), exact[name])
                of_mesp = relative_error(
                    model.backend.to_numpy(expected.gradients[name]), exact[name]
                )
                assert error <= bound("float32", of_mesp, WHOLE_MODEL), (method, head, name)


def test_the_three_agree_in_float64(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "torch", dtype="float64")
    expected = gradients(model, RAGGED)
    for method in ("mebp", "autodiff"):
        found = gradients(model, RAGGED, method=method)
        worst = max(relative_error(found[name], expected[name]) for name in expected)
        assert worst <= WHOLE_MODEL["float64"]


@pytest.mark.parametrize("kind", ["mlx", "mlx-native", "torch"])
def test_half_width_mesp_errs_no_more_than_half_width_autodiff(
    folders: dict[str, Path], kind: str
) -> None:
    exact = flat(truth(folders["alone"], "alone"))
    model = tiny_model(folders["alone"], kind, dtype="bfloat16")
    errors = {
        method: relative_error(flat(gradients(model, ALONE, method=method)), exact)
        for method in ("mesp", "mebp", "autodiff")
    }
    assert errors["mesp"] <= bound("bfloat16", errors["autodiff"], WHOLE_MODEL)
    # MeBP rounds what passes between two blocks, as autodiff does.
    assert errors["mebp"] <= bound("bfloat16", errors["autodiff"], WHOLE_MODEL)
    assert errors["autodiff"] < 0.1


@pytest.mark.parametrize("kind", ["torch", "mlx"])
def test_the_dense_head_is_one_of_its_own_for_mesp_too(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path, kind)
    tiled, dense = (gradients(model, RAGGED, head=head) for head in HEADS)
    assert_agree(dense, tiled)
    assert any((dense[name] != tiled[name]).any() for name in tiled)


@pytest.mark.parametrize("kind", ["numpy", "mlx", "torch"])
def test_storing_h_changes_no_gradient(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path, kind, lora=mesp.LoraConfig(rank=3, dropout=0.3))
    assert_agree(gradients(model, RAGGED, method="mesp-store-h"), gradients(model, RAGGED))


def test_storing_h_saves_one_product_for_each_of_q_k_v_and_o(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "numpy")
    counts = {}
    for method in ("mesp", "mesp-store-h"):
        with pytest.MonkeyPatch.context() as patch:
            calls: list[tuple[int, ...]] = []
            plain = np.matmul
            patch.setattr(np, "matmul", lambda a, b, f=plain, c=calls: c.append(b.shape) or f(a, b))
            gradients(model, ALONE, method=method)
        counts[method] = len(calls)
    assert counts["mesp"] - counts["mesp-store-h"] == 4 * model.config.layers


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (k, m)
        for k in ("numpy", "torch", "mlx")
        for m in METHODS
        if k != "numpy" or m not in ("mebp", "autodiff")
    ],
)
def test_every_method_hands_its_blocks_on_from_the_last_to_the_first(
    tmp_path: Path, kind: str, method: str
) -> None:
    model = tiny_model(tmp_path, kind)
    layers: list[int] = []
    names: list[str] = []
    phases: list[str] = []

    def on_block(layer: int, given: dict[str, Any]) -> None:
        layers.append(layer)
        names.extend(given)
        assert given.keys() == set(model.parameter_names(layer))

    result = mesp.loss_and_gradients(
        model, ALONE, method=method, on_block=on_block, on_phase=phases.append
    )
    assert layers == [2, 1, 0] and set(names) == model.parameters.keys()
    assert not result.gradients
    once = ["forward", "head"]
    expected = {"mezo": [*once, *once, "update"], "autodiff": ["forward", "backward"]}
    assert phases == expected.get(method, [*once, "backward"])


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_on(tmp_path: Path, method: str) -> None:
    losses = [
        mesp.loss_and_gradients(
            tiny_model(tmp_path, "torch", lora=mesp.LoraConfig(rank=3, dropout=rate)),
            RAGGED,
            method=method,
        ).loss
        for rate in (0.0, 0.5)
    ]
    assert abs(losses[1] / losses[0] - 1.0) > 1e-4


@pytest.mark.parametrize("method", ["mesp", "mesp-store-h", "mebp"])
def test_the_lowest_blocks_input_gradient_is_not_asked_for(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path, "torch")
    asked: list[bool] = []
    run = model.backend.run

    def running(stage: Any, *arguments: Any, **static: Any) -> Any:
        if "input_gradient" in static:
            asked.append(static["input_gradient"])
        return run(stage, *arguments, **static)

    monkeypatch.setattr(model.backend, "run", running)
    mesp.loss_and_gradients(model, ALONE, method=method)
    assert asked == [True, True, False]


def test_autodiff_computes_before_it_hands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path, "torch")
    events: list[Any] = []
    monkeypatch.setattr(model.backend, "stage", lambda *trees: events.append(len(trees)))
    mesp.loss_and_gradients(
        model, ALONE, method="autodiff", on_block=lambda layer, given: events.append(f"{layer}")
    )
    assert events[-4:] == [2, "2", "1", "0"]


@pytest.mark.parametrize("method", ["mesp", "mebp", "autodiff"])
def test_parameters_may_be_updated_as_blocks_come(tmp_path: Path, method: str) -> None:
    model = tiny_model(tmp_path, "torch")
    expected = gradients(model, RAGGED, method=method)
    seen: dict[str, np.ndarray] = {}

    def on_block(layer: int, given: dict[str, Any]) -> None:
        for name, array in given.items():
            seen[name] = model.backend.to_numpy(array)
            model.parameters[name] = model.parameters[name] * 0.0

    mesp.loss_and_gradients(model, RAGGED, method=method, on_block=on_block)
    assert_agree(seen, expected)


@pytest.mark.parametrize(
    ("method", "head"), [("mebp", None), ("autodiff", "tiled"), ("mesp", "dense")]
)
def test_numpy_says_why_it_cannot_differentiate(
    tmp_path: Path, method: str, head: str | None
) -> None:
    model = tiny_model(tmp_path, "numpy")
    assert "numpy has no automatic differentiation" in str(
        reason_against(model.backend, method, head)
    )
    with pytest.raises(mesp.UnsupportedError, match="numpy has no automatic differentiation"):
        mesp.loss_and_gradients(model, ALONE, method=method, head=head)


def test_every_other_pair_can_run() -> None:
    for kind in DIFFERENTIATING:
        for method in METHODS:
            assert [reason_against(backend_of(kind), method, head) for head in HEADS] == [None] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "unknown method 'magic'; choose from mesp, mesp-store-h, mebp"),
        ({"head": "wide"}, "unknown head 'wide'; choose from tiled, dense"),
        ({"method": "mezo", "epsilon": 0.0}, "epsilon must be above 0, not 0.0"),
        ({"method": "mezo", "epsilon": float("nan")}, "epsilon must be above 0, not nan"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(mesp.MespError, match=words):
        mesp.loss_and_gradients(tiny_model(tmp_path, "numpy"), ALONE, **options)
