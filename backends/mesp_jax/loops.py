"""Loops over tiles as XLA sees them: one body, compiled once, whatever the number of turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Body = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class JaxLoops:
    """``lax.fori_loop`` for more than one turn. All instances are equal."""

    def fold(self, body: Body, carry: Any, lo: Any, hi: Any) -> Any:
        """``body`` for lo … hi − 1; the bounds may be traced."""
        if isinstance(lo, int) and isinstance(hi, int):
            if hi <= lo:
                return carry
            if hi == lo + 1:
                return body(lo, carry)
        return lax.fori_loop(jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32), body, carry)

    def fold_tiles(self, body: Body, carry: Any, extent: int, size: int) -> Any:
        """``body`` for every tile of ``extent``; a shorter last one has a body of its own, whose
        index is a Python int, since a compiled loop's turns all have the same shapes."""
        whole, rest = divmod(extent, size)
        carry = self.fold(body, carry, 0, whole)
        return body(whole, carry) if rest else carry

    def tile(self, a: jax.Array, i: Any, size: int, axis: int = 0) -> jax.Array:
        """Tile ``i`` of ``a``: clamped for a Python int; a traced tile lies inside ``a`` whole."""
        extent = a.shape[axis]
        if not isinstance(i, int):
            return lax.dynamic_slice_in_dim(a, i * size, min(size, extent), axis)
        lo, hi = i * size, min((i + 1) * size, extent)
        return a if (lo, hi) == (0, extent) else lax.slice_in_dim(a, lo, hi, axis=axis)

    def put(self, a: Any, i: Any, size: int, axis: int, x: Any) -> Any:
        """``a`` with tile ``i`` replaced; XLA writes in place where the old value is dead."""
        if isinstance(a, tuple):
            return tuple(self.put(b, i, size, axis, y) for b, y in zip(a, x, strict=True))
        x = x.astype(a.dtype)
        if isinstance(i, int) and x.shape == a.shape:
            return x
        return lax.dynamic_update_slice_in_dim(a, x, i * size, axis)


LOOPS = JaxLoops()
