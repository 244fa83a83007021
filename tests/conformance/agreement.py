"""The rule every formula is held to: err(kernel) ≤ err(naive in the same dtype) + tolerance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from mesp_reference.check.compare import assert_close, relative_error
from mesp_reference.check.naive import round_to, rounded
from mesp_reference.check.tolerances import TOLERANCES, bound
from tests.conformance.subjects import Subject

Values = Mapping[str, np.ndarray]


def draw(seed: int, dtype: str, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Standard normal float64 values that ``dtype`` holds exactly, by name."""
    generator = np.random.default_rng(seed)
    return {
        name: round_to(generator.standard_normal(shape), dtype) for name, shape in shapes.items()
    }


def check(
    subject: Subject,
    outputs: Mapping[str, Any],
    reference: Callable[..., Mapping[str, Any]],
    inputs: Values,
    *,
    wide: Collection[str] = (),
    through_narrow: bool = False,
    table: Mapping[str, float] = TOLERANCES,
) -> None:
    """Every output against ``reference(**inputs)``, absent ones included.

    inputs: float64 values, exactly those the kernel saw. wide: outputs in the accumulation
    dtype; the others are in the subject's. through_narrow: 16-bit values lie between the inputs
    and every output, so the naive computation is the 16-bit one for the wide outputs too.
    """
    exact = reference(**inputs)
    assert outputs.keys() == exact.keys()
    naive: dict[str, Mapping[str, Any]] = {}
    for name, expected in exact.items():
        if expected is None:
            assert outputs[name] is None, f"{name} should be absent"
            continue
        assert outputs[name] is not None, f"{name} is missing"
        dtype = subject.wide if name in wide else subject.dtype
        assert subject.dtype_name(outputs[name]) == dtype, f"{name} is not {dtype}"
        rule = subject.dtype if through_narrow else dtype
        if rule not in naive:
            naive[rule] = reference(**{key: rounded(v, rule) for key, v in inputs.items()})
        allowed = bound(rule, relative_error(np.array(naive[rule][name]), expected), table)
        assert allowed < 0.2, f"the bound of {name} holds nothing: {allowed}"
        actual = subject.numpy(outputs[name])
        assert_close(actual, expected, allowed, name=f"{name} on {subject.namespace}")
