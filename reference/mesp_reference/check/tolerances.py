"""The one table of tolerances.

The error of a tensor is ‖Δ‖/‖reference‖. A result in ``dtype`` may be off by what naive code in the
same dtype is off by, plus the entry here: ``bound(dtype, naive_error)``. Never loosened for a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: One component. The 16-bit entries are half a unit in the last place: one rounding.
TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-13, "float32": 1e-6, "float16": 2.0**-12, "bfloat16": 2.0**-9}
)

#: One block: a dozen components in a row, each of which may be off by one component's entry.
BLOCK: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-12, "float32": 4e-6, "float16": 2.0**-12, "bfloat16": 2.0**-9}
)

#: A whole model, loss and gradients, whose errors have passed through every block twice.
WHOLE_MODEL: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-10, "float32": 1e-5, "float16": 2.0**-12, "bfloat16": 2.0**-9}
)

#: transformers with its casts to float32 against itself without them.
CASTS_TO_FLOAT32 = 1e-5


def bound(dtype: str, naive_error: float = 0.0, table: Mapping[str, float] = TOLERANCES) -> float:
    """The largest error allowed in ``dtype`` where naive code is off by ``naive_error``."""
    return naive_error + table[dtype]
