"""The check passes what is right, and can fail: one planted error at a time, and what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesp_core.errors import MespError
from mesp_core.numpy_backend import NumpyBackend
from mesp_reference.check import run
from mesp_reference.check.case import DTYPES, Case, measure, one_line
from mesp_reference.check.cases import CASES, COMPONENTS
from mesp_reference.check.naive import rounded
from mesp_reference.check.rig import Mask, Rig
from tests.check.planted import PLANTED, Planted, replaced

#: Without the cases at the size of a model: these take a tenth of a second each.
SMALL = [case for case in CASES if not re.search("576|SmolLM2|9 heads", case.name)]


def missed(
    backend: NumpyBackend, dtype: str = "float32", **options: Any
) -> tuple[set[str], list[dict[str, Any]]]:
    report = run(backend, dtypes=[dtype], cases=SMALL, **options)
    return {row.component for row in report.rows if not row.ok}, report.misses


def test_numpy_holds_and_every_cell_is_accounted_for() -> None:
    report = run(NumpyBackend(), cases=SMALL)
    assert report.ok and not report.misses
    assert all(row.ok and row.error <= row.bound for row in report.rows)  # type: ignore[operator]
    expected = {(case.component, dtype) for case in SMALL for dtype in case.dtypes}
    cells = [(cell.component, cell.dtype) for cell in [*report.rows, *report.not_applicable]]
    assert len(cells) == len(set(cells)) and set(cells) == expected
    assert {cell.dtype for cell in report.not_applicable} == {"bfloat16"}
    assert all("NumPy has no bfloat16" in cell.reason for cell in report.not_applicable)
    assert {row.implementation for row in report.rows} == {"formula", "mesp_core.lora"}


def test_mlx_holds_in_every_dtype() -> None:
    from mesp_mlx.mlx_backend import MlxBackend

    report = run(MlxBackend.on("cpu"), cases=SMALL, seed=1)
    assert report.misses == [] and report.not_applicable == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_fails_its_rows_and_no_other(name: str) -> None:
    planted = PLANTED[name]
    assert missed(planted.backend(), planted.dtype)[0] == set(planted.rows)


def test_every_component_has_a_planted_error() -> None:
    """Stochastic rounding's, which NumPy lacks, is below."""
    struck = {row for planted in PLANTED.values() for row in planted.rows}
    assert struck == set(COMPONENTS) - {"stochastic_rounding"}


def test_rounding_to_nearest_is_not_stochastic() -> None:
    from mesp_mlx.mlx_backend import MlxBackend

    backend = MlxBackend.on("cpu")
    backend.round_stochastic = lambda x, words, dtype: x.astype(backend.dtype(dtype))
    report = run(backend, dtypes=["bfloat16"], components=["stochastic_rounding"])
    assert [(row.ok, row.case, row.tensor) for row in report.rows] == [(False, "bits", "rounded")]


def _norm(forward: Any) -> NumpyBackend:
    return Planted(replaced("rms_norm", forward), ()).backend()


def _nan(run: Any, x: Any, weight: Any, **options: Any) -> Any:
    out, saved = run(x, weight, **options)
    out[(-1,) * out.ndim] = np.nan
    return out, saved


def _unwritten(run: Any, x: Any, weight: Any, **options: Any) -> Any:
    right, saved = run(x, weight, **options)
    out = np.empty_like(right)
    out[:-1] = right[:-1]
    return out, saved


def _raises(run: Any, x: Any, weight: Any, **options: Any) -> Any:
    raise RuntimeError("kernel not found\nand a long story")


def _in_place(run: Any, x: Any, weight: Any, **options: Any) -> Any:
    out, saved = run(x, weight, **options)
    result = out, replace(saved, x=x.copy())
    x *= 2.0
    return result


def _too_wide(run: Any, x: Any, weight: Any, **options: Any) -> Any:
    out, saved = run(x, weight, **options)
    return out.astype(np.float64), saved


def _cut(run: Any, x: Any, weight: Any, **options: Any) -> Any:
    out, saved = run(x, weight, **options)
    return out[:1], saved


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_nan, "not finite"),
        (_unwritten, "not finite|exceeds"),
        (_raises, "^RuntimeError: kernel not found$"),
        (_in_place, r"an input of shape \(7, 19\) was changed"),
        (_too_wide, "is float64, not float32"),
        (_cut, r"shape \(1, 19\), reference \(7, 19\)"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(forward: Any, reason: str) -> None:
    rows, misses = missed(_norm(forward), components=["rms_norm", "dropout"])
    assert rows == {"rms_norm"}
    assert re.search(reason, misses[0]["reason"]), misses[0]


def test_a_missing_gradient_is_a_miss() -> None:
    planted = replaced("lora_linear", backward=lambda run, *a, **o: (run(*a, **o)[0], None))
    rows, misses = missed(Planted(planted, ()).backend(), components=["lora_linear"])
    assert rows == {"lora_linear"}
    assert {(miss["tensor"], miss["reason"]) for miss in misses} == {
        ("da", "is missing"),
        ("db", "is missing"),
    }


def test_the_implementation_that_ran_is_named() -> None:
    backend = _norm(lambda run, *args, **options: run(*args, **options))
    components = ["rms_norm", "rope", "block"]
    rows = run(backend, dtypes=["float32"], components=components, cases=SMALL).rows
    names = {row.component: row.implementation for row in rows}
    assert names == {"rms_norm": "planted", "rope": "formula", "block": "rms_norm by planted"}


def test_another_seed_draws_other_inputs() -> None:
    reports = [
        run(NumpyBackend(), dtypes=["float32"], components=["rope"], seed=seed, cases=SMALL)
        for seed in (0, 0, 1)
    ]
    first, again, other = (report.rows[0].error for report in reports)
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": ["float8"]}, "no dtype is called 'float8'"),
        ({"components": ["softmax"]}, "no component is called 'softmax'; .*attention"),
        ({"dtypes": ["bfloat16"]}, "nothing to check: NumPy has no bfloat16"),
        ({"dtypes": ["float16"], "components": ["lora_init"]}, "no case is in these dtypes"),
    ],
)
def test_a_question_without_an_answer_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MespError, match=message):
        run(NumpyBackend(), **options)


def test_poison_comes_back_from_the_allocator() -> None:
    """What is let go of is full of NaN: NumPy hands a small block out again at once."""
    rig = Rig(NumpyBackend(), "float32")
    rig.poison({"out": (7, 19)})
    assert np.isnan(np.empty((7, 19), np.float32)).all()


def test_every_dtype_has_a_large_case_where_tiles_and_kernels_are_real() -> None:
    large = {case for case in CASES if case not in SMALL}
    for component in ("attention", "frozen_linear", "lora_linear", "gated_mlp"):
        assert any(c.component == component and c.dtypes == DTYPES for c in large), component


def test_cases_are_named_apart() -> None:
    names = [(case.component, case.name) for case in CASES]
    assert len(set(names)) == len(names)


def test_a_case_that_cannot_be_drawn_is_a_miss_with_its_reason() -> None:
    def make(rig: Rig) -> Any:
        raise KeyError("weight")

    (result,) = measure(Case("rope", "none", make), Rig(NumpyBackend(), "float32"))
    assert not result.ok and result.reason == "KeyError: 'weight'"
    assert one_line(ValueError()) == "ValueError"


def test_masks_of_the_rig_follow_the_reference() -> None:
    rig = Rig(NumpyBackend(), "float32")
    batch = rig.ragged(3, 1, 4)
    assert batch.lengths == [3, 1, 4] and batch.tokens == 8
    multiplier = Mask(projection=1).multiplier(batch, 5)
    assert set(np.unique(multiplier)) <= {0.0, 1.25}


def test_a_bucket_lengthens_the_last_sequence() -> None:
    backend = NumpyBackend()
    backend.bucket = lambda tokens: -(-tokens // 16) * 16
    assert Rig(backend, "float32").ragged(3, 1, 4).lengths == [3, 1, 12]


@pytest.mark.parametrize("shape", [(7, 1001, 3), (64, 333, 157), (3, 19, 8), (200, 3, 57)])
def test_a_naive_product_in_order_adds_from_first_to_last(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    generator = np.random.default_rng(3)
    a, b = generator.standard_normal((k, m)).T, generator.standard_normal((n, k)).T
    expected = np.zeros((m, n), np.float32)
    for i in range(k):
        expected += a[:, i, None].astype(np.float32) * b[None, i].astype(np.float32)
    made = rounded(a, "float32", in_order=True) @ rounded(b, "float32", in_order=True)
    np.testing.assert_array_equal(np.asarray(made), expected)
