"""Every case of ``mesp check``, component by component.

A case's shapes are small, odd and pairwise distinct, or those of a 135M model, so that real tiles
and native kernels run too. Numbers of tokens go through ``Backend.bucket``, as the product's do.
"""

from __future__ import annotations

from mesp_reference.check.case import Case
from mesp_reference.check.cases import attention, decoder, ends, linear, mlp, norm_rope, randomness

CASES: tuple[Case, ...] = (
    *ends.EMBEDDING,
    *norm_rope.CASES,
    *attention.CASES,
    *linear.CASES,
    *mlp.CASES,
    *ends.LINEAR_CROSS_ENTROPY,
    *decoder.CASES,
    *randomness.CASES,
)
COMPONENTS: tuple[str, ...] = tuple(dict.fromkeys(case.component for case in CASES))
