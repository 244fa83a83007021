"""The native flash pair against the formula's tiles, and where it is not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mesp_core as mesp
from mesp_core.backend import TileSizes
from mesp_core.formulas import AttentionPlan, attention_backward, attention_forward
from mesp_core.formulas.loops import EagerLoops
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import TOLERANCES
from mesp_torch.flash import SCHEMAS, _heads_first, unusable
from mesp_torch.torch_backend import TorchBackend

SCALE = 0.37
LENGTHS = {
    "one": (23,),
    "two": (9, 4),
    "ragged": (5, 1, 11, 6),
    "one_token": (1,),
    "one_token_each": (1, 1, 1),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_operators_have_the_schema_they_are_called_with(name: str) -> None:
    found = str(getattr(torch.ops.aten, name).default._schema)
    assert found == SCHEMAS[name], (
        f"torch {torch.__version__} has changed aten::{name}: attention now runs by tiles. Read "
        "what changed, adapt mesp_torch/flash.py, and pin the new schema there."
    )


def test_another_schema_or_device_means_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable(torch.device("cpu")) is None
    assert "CPUs" in str(unusable(torch.device("cuda")))
    changed = dict.fromkeys(SCHEMAS, "aten::something_else()")
    monkeypatch.setattr("mesp_torch.flash.SCHEMAS", changed)
    backend = TorchBackend.on("cpu")
    row = next(row for row in backend.explain() if row.component == "attention")
    assert row.name == "formula"
    assert "has changed" in row.reason


def plan_of(lengths: tuple[int, ...], **options: Any) -> AttentionPlan:
    segment = np.repeat(np.arange(len(lengths)), lengths)
    backend = TorchBackend("cpu", native=False, tiles=TileSizes(query=5, key=7))
    return AttentionPlan(
        segment=torch.tensor(segment, dtype=torch.int32),
        first_key_tile=backend.first_key_tiles(segment, options.get("window")),
        scale=SCALE,
        query_tile=5,
        key_tile=7,
        **options,
    )


def draw(
    tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, width: int = 5
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, width))
    return [torch.randn(*s, generator=generator).to(dtype) for s in (*shapes, shapes[0])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("case", LENGTHS)
def test_the_pair_is_the_formula(case: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    backend = TorchBackend.on("cpu")
    plan = plan_of(LENGTHS[case])
    q, k, v, do = draw(sum(LENGTHS[case]), *heads, dtype)
    options: dict[str, Any] = {"plan": plan, "loops": EagerLoops(), "xp": backend.xp}
    o, saved = backend.ops.attention.forward(q, k, v, plan=plan)
    true_o, true_saved = attention_forward(q, k, v, **options)
    wide = "float64" if dtype == torch.float64 else "float32"
    narrow, limit = str(dtype).removeprefix("torch."), TOLERANCES[wide]
    values = backend.to_numpy(true_o)
    assert_close(o, values, TOLERANCES[narrow], dtype=narrow, backend=backend, name="o")
    true_lse = backend.to_numpy(true_saved.lse)
    assert_close(saved.lse, true_lse, limit, dtype=wide, backend=backend, name="lse")
    found = backend.ops.attention.backward(do, saved, q, k, v, true_o, plan=plan)
    truth = attention_backward(do, true_saved, q, k, v, true_o, **options)
    for name, d, true in zip(("dq", "dk", "dv"), found, truth, strict=True):
        size = float(true.norm())
        if name != "dv" and max(LENGTHS[case]) == 1:
            # One visible key: the probability is 1, and neither q nor k matters.
            assert float(d.norm()) < 1e-2 * (float(do.float().norm()) + size)
            continue
        assert_close(d, backend.to_numpy(true), limit, dtype=wide, backend=backend, name=name)
    row = next(row for row in backend.explain() if row.component == "attention")
    assert (row.name, row.calls) == ("aten::_scaled_dot_product_flash_attention_for_cpu", 2)


def test_inputs_in_any_layout_are_neither_required_nor_changed() -> None:
    backend, plan = TorchBackend.on("cpu"), plan_of((9, 4))
    plain = draw(13, 6, 2, torch.float64)
    strided = [a.permute(2, 0, 1).contiguous().permute(1, 2, 0) for a in plain]
    assert strided[0].stride(-1) != 1
    results = []
    for q, k, v, do in (plain, strided):
        before = [a.clone() for a in (q, k, v, do)]
        o, saved = backend.ops.attention.forward(q, k, v, plan=plan)
        results.append([o, *backend.ops.attention.backward(do, saved, q, k, v, o, plan=plan)])
        assert all(torch.equal(a, b) for a, b in zip((q, k, v, do), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("options", "segment", "reason"),
    [
        ({"window": 3}, (0,) * 9, "a window"),
        ({"softcap": 0.8}, (0,) * 9, "a soft-cap"),
        ({}, (0, 0, 1, 1, 1, 0, 0, 0, 0), "not in one piece"),
    ],
)
def test_where_tiles_run_and_why(
    options: dict[str, Any], segment: tuple[int, ...], reason: str
) -> None:
    backend, numpy = TorchBackend.on("cpu"), mesp.get_backend("numpy")
    ids = np.array(segment, np.int32)
    q, k, v, do = draw(9, 6, 2, torch.float64)
    results = []
    for each in (backend, numpy):
        plan = AttentionPlan(
            segment=each.from_numpy(ids),
            first_key_tile=each.first_key_tiles(ids, options.get("window")),
            scale=SCALE,
            **options,
        )
        arrays = [each.from_numpy(a.numpy()) for a in (q, k, v, do)]
        o, saved = each.ops.attention.forward(*arrays[:3], plan=plan)
        gradients = each.ops.attention.backward(arrays[3], saved, *arrays[:3], o, plan=plan)
        results.append([each.to_numpy(a) for a in (o, *gradients)])
    for ours, true in zip(*results, strict=True):
        assert_close(ours, true, TOLERANCES["float64"])
    row = next(row for row in backend.explain() if row.component == "attention")
    assert row.name == "formula"
    assert reason in row.reason and "2 for" in row.reason


def test_calls_by_the_pair_and_by_tiles_are_told_apart() -> None:
    backend = TorchBackend.on("cpu")
    q, k, v, _ = draw(23, 6, 2, torch.float64)
    for options in ({}, {"window": 3}, {}, {"window": 3}):
        backend.ops.attention.forward(q, k, v, plan=plan_of((23,), **options))
    row = next(row for row in backend.explain() if row.component == "attention")
    assert (row.name, row.calls) == ("aten::_scaled_dot_product_flash_attention_for_cpu", 4)
    assert "of the calls 2 by the formula's tiles: 2 for a window" in row.reason


def test_only_features_that_lie_apart_are_copied() -> None:
    rows = torch.randn(7, 3, 8)
    apart = torch.randn(5, 7, 3).permute(1, 2, 0)
    for given in (rows, rows[:, :, :5]):
        taken = _heads_first(given)
        assert taken.shape == (1, 3, 7, given.shape[2])
        assert taken.data_ptr() == given.data_ptr()
    assert _heads_first(apart).stride(-1) == 1
