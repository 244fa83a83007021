"""Loops over tiles: the only way a formula iterates, so that a tracing backend can fold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

Array = Any


class Loops(Protocol):
    """What a formula needs to walk over tiles. ``i`` may be traced; sizes never are."""

    def fold(self, body: Callable[[Any, Any], Any], carry: Any, lo: Any, hi: Any) -> Any:
        """``for i in range(lo, hi): carry = body(i, carry)``; the bounds may be traced."""
        ...

    def fold_tiles(
        self, body: Callable[[Any, Any], Any], carry: Any, extent: int, size: int
    ) -> Any:
        """``fold`` over the tiles of ``size`` that cover ``extent``, the last perhaps shorter."""
        ...

    def tile(self, a: Array, i: Any, size: int, axis: int = 0) -> Array:
        """Tile ``i`` of ``a`` along ``axis``; the last tile may be shorter."""
        ...

    def put(self, a: Any, i: Any, size: int, axis: int, x: Any) -> Any:
        """``a`` with tile ``i`` along ``axis`` replaced by ``x``.

        ``a`` must be owned: it may be written in place, so nothing but ``x`` may still have to
        be computed from what it held. Both may be tuples of arrays, replaced together.
        """
        ...


def tile_count(extent: int, size: int) -> int:
    """How many tiles of ``size`` cover ``extent``."""
    return -(-extent // size)


def arrays_in(tree: Any) -> list[Array]:
    """The arrays inside nested tuples, lists, dicts and dataclasses; None and numbers left out."""
    if tree is None or isinstance(tree, (int, float, str, bool)):
        return []
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    if isinstance(tree, (tuple, list)):
        return [array for item in tree for array in arrays_in(item)]
    return [tree]


class EagerLoops:
    """Plain loops for array libraries that compute at once, or lazily with ``stage``.

    stage: called with the carried arrays after each turn, so that a lazy library computes them
        and drops what they came from.
    """

    def __init__(self, stage: Callable[..., None] | None = None) -> None:
        self._stage = stage

    def fold(self, body: Callable[[Any, Any], Any], carry: Any, lo: int, hi: int) -> Any:
        for i in range(lo, hi):
            carry = body(i, carry)
            if self._stage is not None:
                self._stage(*arrays_in(carry))
        return carry

    def fold_tiles(
        self, body: Callable[[Any, Any], Any], carry: Any, extent: int, size: int
    ) -> Any:
        return self.fold(body, carry, 0, tile_count(extent, size))

    def tile(self, a: Array, i: int, size: int, axis: int = 0) -> Array:
        return a[_span(a, i, size, axis)]

    def put(self, a: Any, i: int, size: int, axis: int, x: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(self.put(b, i, size, axis, y) for b, y in zip(a, x, strict=True))
        return self.assign(a, _span(a, i, size, axis), x)

    def assign(self, a: Array, span: tuple[slice, ...], x: Array) -> Array:
        """``a`` with ``a[span]`` set to ``x``."""
        a[span] = x
        return a


def _span(a: Array, i: int, size: int, axis: int) -> tuple[slice, ...]:
    lo = i * size
    hi = min(lo + size, a.shape[axis])
    return (slice(None),) * axis + (slice(lo, hi),) + (slice(None),) * (a.ndim - axis - 1)
