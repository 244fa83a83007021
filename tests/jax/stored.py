"""Stored matrices in every form, small, for the tests of what JAX makes of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mesp_core.stored_matrix import StoredMatrix
from mesp_reference.check.tolerances import bound

OUT, IN, N, GROUP = 300, 64, 5, 32
ALLOWED = bound("float32", bound("float32"))


def dense(dtype: str) -> StoredMatrix:
    values = np.random.default_rng(1).normal(size=(OUT, IN)).astype(np.float32)
    if dtype == "bfloat16":
        return StoredMatrix(values=(values.view(np.uint32) >> 16).astype(np.uint16))
    return StoredMatrix(values=values.astype(dtype))


def quantized(bits: int) -> StoredMatrix:
    generator = np.random.default_rng(bits)
    groups = IN // GROUP
    return StoredMatrix(
        codes=generator.integers(0, 256, (OUT, groups, GROUP * bits // 8), dtype=np.uint8),
        scales=generator.normal(size=(OUT, groups)).astype(np.float16),
        biases=generator.normal(size=(OUT, groups)).astype(np.float16),
        bits=bits,
        group=GROUP,
    )


def blocks() -> StoredMatrix:
    """Scale, bias and codes interleaved as in GGUF's q4_1, rows in another order."""
    generator = np.random.default_rng(7)
    groups = IN // GROUP
    raw = generator.integers(0, 256, (OUT, groups, 4 + GROUP // 2), dtype=np.uint8)
    raw[:, :, :4] = generator.normal(size=(OUT, groups, 2)).astype(np.float16).view(np.uint8)
    halves = raw[:, :, :4].view(np.float16)
    return StoredMatrix(
        codes=raw[:, :, 4:],
        scales=halves[:, :, 0],
        biases=halves[:, :, 1],
        bits=4,
        group=GROUP,
        order="halves",
        row_order=generator.permutation(OUT),
    )


#: ``test_quantized.py`` has every form of bytes.
STORED: dict[str, Callable[[], StoredMatrix]] = {
    "float32": lambda: dense("float32"),
    "bfloat16": lambda: dense("bfloat16"),
    "4 bits": lambda: quantized(4),
    "q4_1": blocks,
}
