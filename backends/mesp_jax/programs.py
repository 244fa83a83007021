"""Functions compiled once for each signature, and what is known of each program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from mesp_core.host_memory import return_free_memory
from mesp_core.operations import Component


@dataclass(frozen=True)
class Program:
    """One function compiled for one signature.

    calls: for each component how often the program runs it.
    """

    name: str
    executable: Any
    calls: tuple[int, ...]

    @property
    def temporary_bytes(self) -> int:
        """Memory it takes beside its arguments and results, as XLA planned it."""
        return self.executable.memory_analysis().temp_size_in_bytes

    @property
    def planned_bytes(self) -> int:
        """The same with its results."""
        return self.temporary_bytes + self.executable.memory_analysis().output_size_in_bytes


class Programs:
    """Compiles and runs. Arrays and floats are traced; whatever else is in the arguments (tile
    sizes, flags, names) is compiled for.

    ``jax.jit`` would do, but that its programs could not be asked for their memory without
    compiling them again, and that what runs inside them could not be counted.
    """

    def __init__(self) -> None:
        #: What ``Program.calls`` counts; set when the components exist.
        self.components: Sequence[Component] = ()
        self._programs: dict[Hashable, Program] = {}

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        name: str,
        donate: int = 0,
    ) -> Any:
        """``function(*args, **options)``. Under a transformation (tracers among the arguments) it
        becomes part of what is traced.

        donate: how many of the leading arguments, each an array, the program may overwrite.
        """
        leaves, structure = jax.tree.flatten((args, dict(options)))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return function(*args, **options)
        signature = tuple(_signature(leaf) for leaf in leaves)
        key = (function, structure, signature, donate, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        program = self._programs.get(key)
        if program is None:
            program = self._compile(function, structure, leaves, name, donate)
            self._programs[key] = program
        out = program.executable(*(leaf for leaf in leaves if _is_traced(leaf)))
        for component, count in zip(self.components, program.calls, strict=False):
            component.calls += count
        return out

    def all(self) -> list[Program]:
        """Every program, in the order of their compilation."""
        return list(self._programs.values())

    def _compile(
        self, function: Callable[..., Any], structure: Any, leaves: list[Any], name: str,
        donate: int,
    ) -> Program:  # fmt: skip
        static = [None if _is_traced(leaf) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves) if _is_traced(leaf)]

        def program(*traced: Any) -> Any:
            filled = list(static)
            for place, value in zip(places, traced, strict=True):
                filled[place] = value
            args, options = jax.tree.unflatten(structure, filled)
            return function(*args, **options)

        program.__name__ = name
        before = [component.calls for component in self.components]
        jitted = jax.jit(program, donate_argnums=tuple(range(donate)))
        lowered = jitted.lower(*(leaves[place] for place in places))
        calls = []
        for component, count in zip(self.components, before, strict=True):
            # Tracing entered the components, but nothing has run yet.
            calls.append(component.calls - count)
            component.calls = count
        compiled = lowered.compile()
        return_free_memory()
        return Program(name, compiled, tuple(calls))


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, float))


def _signature(leaf: Any) -> Hashable:
    """What a program depends on of one leaf: an array's form and place, a constant's value."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding, leaf.committed
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    return float if isinstance(leaf, float) else (type(leaf), leaf)
