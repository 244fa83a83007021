"""The matrix of namespaces and dtypes has no hole: each cell is tested or says why it cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mesp_reference.check.naive import round_to, rounded
from tests.conformance.subjects import (
    CELLS,
    DTYPES,
    ONE_CASE_IN,
    SUBJECTS,
    WITHOUT,
    Subject,
    cells,
    runs,
    table,
)

#: Their arrays cannot be written at all.
IMMUTABLE = ("numpy-readonly", "jax", "jax-jit")


def test_every_cell_is_declared() -> None:
    assert set(CELLS) == {(namespace, dtype) for namespace in SUBJECTS for dtype in DTYPES}
    assert all(reason is None or len(reason) > 10 for reason in CELLS.values())
    assert all(CELLS[cell[:2]] is None for cell in WITHOUT)
    assert len(cells()) == 27 and len(cells("rope_tables")) == 26


def test_the_table_in_the_docs_is_this_declaration() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text("utf-8")
    assert table() in page, "put into docs/conformance.md:\n" + table()


def test_only_jax_leaves_cases_out_and_these() -> None:
    assert {subject for subject, _ in ONE_CASE_IN} == {"jax", "jax-jit"}
    chosen = {
        (subject, dtype): [case for case in range(32) if runs((subject, dtype), case)]
        for subject in ("jax", "jax-jit")
        for dtype in DTYPES
    }
    assert [chosen["jax", dtype] for dtype in DTYPES] == [[0, 16], [4, 20], [8, 24], [12, 28]]
    assert chosen["jax-jit", "float32"] == list(range(0, 32, 2))
    assert chosen["jax-jit", "bfloat16"] == [18]
    assert runs(("torch", "bfloat16"), 1)


def test_a_subject_makes_its_dtype_and_notices_a_change(subject: Subject) -> None:
    values = round_to(np.linspace(-1.0, 1.0, 6).reshape(2, 3), subject.dtype)
    array = subject.array(values)
    assert subject.dtype_name(array) == subject.dtype
    np.testing.assert_array_equal(subject.numpy(array), values)
    other = Subject(subject.namespace, subject.dtype)
    changed = other.array(values)
    if subject.namespace in IMMUTABLE:
        with pytest.raises((ValueError, TypeError)):
            changed[0, 0] = 3.0
        return
    changed[0, 0] = 3.0
    with pytest.raises(AssertionError):
        other.check_unchanged()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_naive_computation_rounds_every_result(dtype: str) -> None:
    """Each operation's result is one of the dtype, and sums of rounded terms differ from the
    rounded sum in the narrow ones."""
    generator = np.random.default_rng(1)
    a, b = (rounded(generator.standard_normal((5, 7)), dtype) for _ in range(2))
    results = [a + b, a @ b.T, np.einsum("ij,kj->ik", a, b), np.exp(a).sum(axis=1), np.mean(a)]
    results += [np.where(a > 0, a, b), a[1:, ::2] * 3.0, np.max(a, axis=1, keepdims=True)]
    for result in results:
        plain = np.asarray(result).view(np.ndarray)
        np.testing.assert_array_equal(plain, round_to(plain, dtype))
    chained = np.asarray((a * b) * a)
    direct = np.asarray(a) * np.asarray(b) * np.asarray(a)
    assert (chained != direct).any() == (dtype != "float64")
