"""How much of a step's time its bare matrix products would take."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.work import Step

_RUNS = 5


def gemm_share(step: Step) -> float:
    """Time of the products with frozen weights alone, over the time of the step.

    The products are the backend's own, dense and float32, of exactly the step's shapes; both are
    timed in turn, so that whatever slows the machine slows both.
    """
    bare = [_prepared(step.backend, *shape) for shape in products(step)]
    counts = list(products(step).values())
    shares = []
    for _ in range(_RUNS):
        products_time = sum(
            count * _seconds(product) for product, count in zip(bare, counts, strict=True)
        )
        shares.append(products_time / _seconds(step.run))
    return statistics.median(shares)


def products(step: Step) -> Counter[tuple[int, int, int]]:
    """How many products [N, a] · [a, b] there are of each (N, a, b), for a step of N tokens.

    Forward with every matrix, again for the block that is recomputed (but for ``down``, which
    nothing needs), and back to every input; the logits once, and back.
    """
    config = step.model.config
    tokens, hidden, layers = len(step.batch.tokens), config.hidden, config.layers
    heads, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: Counter[tuple[int, int, int]] = Counter()
    for width, out, count in (
        (hidden, heads, 1),
        (hidden, keys, 2),
        (heads, hidden, 1),
        (hidden, config.ffn, 2),
    ):
        found[tokens, width, out] += 2 * count * layers
        found[tokens, out, width] += count * layers
    found[tokens, config.ffn, hidden] += layers
    found[tokens, hidden, config.ffn] += layers
    found[tokens, hidden, config.vocab] += 1
    found[tokens, config.vocab, hidden] += 1
    return found


def _prepared(backend: Any, tokens: int, width: int, out: int) -> Callable[[], None]:
    """One product, warm."""
    generator = np.random.default_rng(0)
    x, weight = (
        backend.from_numpy(generator.standard_normal(shape).astype(np.float32), "float32")
        for shape in ((tokens, width), (width, out))
    )

    def product() -> None:
        backend.stage(backend.xp.matmul(x, weight))

    product()
    return product


def _seconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
