"""JAX's NumPy as the namespace of the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class JaxNamespace:
    """``jax.numpy``, its products at full precision.

    Without being told so, a GPU or TPU multiplies float32 in fewer bits. All instances are equal,
    as what is compiled for a namespace is compiled for any.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b, summed in float32 or wider, in the dtype both promote to."""
        dtype = jnp.result_type(a, b)
        total = jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype
        highest = jax.lax.Precision.HIGHEST
        out = jnp.matmul(a, b, precision=highest, preferred_element_type=total)
        return out.astype(dtype)


XP = JaxNamespace()
