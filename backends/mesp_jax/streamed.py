"""Frozen matrices in a mapped file: given to a program whole, or fetched by it tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from mesp_core.formulas.frozen_matrix import tiled_matmul, tiled_matmul_t
from mesp_core.stored_matrix import StoredMatrix
from mesp_jax.loops import LOOPS
from mesp_jax.matrices import JaxDense, JaxQuantized, is_large
from mesp_jax.namespace import XP
from mesp_jax.quantized import Layout, arrays_of

#: Indices in one question to the host. JAX hands arguments of 100 KiB and more to its threads,
#: which may all be waiting for the answer.
_INDICES = 1024


@dataclass(frozen=True)
class StreamedMatrix:
    """A matrix in a mapped file. What a stage is given of it lives as long as the stage. Outside
    of stages a product loads it, too.

    put: places NumPy arrays on the device.
    fetched: whether a program asks for tiles where the matrix is larger than one.
    """

    stored: StoredMatrix
    dtype: str
    tile_weights: int
    put: Callable[[list[np.ndarray]], list[Any]]
    fetched: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    def argument(self) -> JaxDense | JaxQuantized | FetchedMatrix:
        """What a program is given."""
        if not (self.fetched and is_large(self)):
            return self.load()
        host = HostMatrix.of(self.stored)
        return FetchedMatrix(
            host.number, self.shape, host.layout, host.forms, self.dtype, self.tile_weights
        )

    def load(self) -> JaxDense | JaxQuantized:
        """The stored bytes on the device, rows in logical order, nothing decoded."""
        layout, arrays = arrays_of(self.stored)
        order = self.stored.row_order
        if order is not None:
            arrays = [np.take(array, order, axis=0) for array in arrays]
        return _matrix(self.put(arrays), layout, self.dtype, self.tile_weights)

    def matmul(self, x: jax.Array) -> jax.Array:
        return self.load().matmul(x)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        return self.load().matmul_t(dy)

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        return self.load().tile(i, size, axis)

    def take(self, rows: jax.Array) -> jax.Array:
        """The rows at indices [n]: [n, in] in ``dtype``, decoded on the host; no other is read."""
        return self.put([self.stored.take(np.asarray(rows), np.dtype(self.dtype).type)])[0]


class HostMatrix:
    """A stored matrix as programs know it: by ``number``, int32, for as long as it lives.

    layout, forms: of its bytes; a form is the shape, rows in logical order, and the dtype of an
    array.
    """

    def __init__(self, stored: StoredMatrix) -> None:
        # A copy: to refer to the key would keep it, and its entry, for ever.
        self.stored = replace(stored)
        self.layout, self._arrays = arrays_of(stored)
        self.forms = tuple(((stored.shape[0], *a.shape[1:]), a.dtype) for a in self._arrays)
        self.number = np.int32(next(_NUMBERS))

    @staticmethod
    def of(stored: StoredMatrix) -> HostMatrix:
        """The one of ``stored``, which lives as long."""
        with _LOCK:
            host = _HOSTS.get(stored)
            if host is None:
                host = _HOSTS[stored] = HostMatrix(stored)
                _BY_NUMBER[int(host.number)] = host
            return host

    def tile(self, i: int, step: int, axis: int) -> tuple[np.ndarray, ...]:
        """Tile ``i`` of ``step`` rows, or of columns or groups, of each array."""
        here = slice(i * step, (i + 1) * step)
        if axis == 1:
            return tuple(self._in_order(array[:, here], slice(None)) for array in self._arrays)
        return tuple(self._in_order(array, here) for array in self._arrays)

    def _in_order(self, array: np.ndarray, rows: slice) -> np.ndarray:
        order = self.stored.row_order
        return array[rows] if order is None else np.take(array, order[rows], axis=0)


_LOCK = Lock()
_NUMBERS = count()
_HOSTS: WeakKeyDictionary[StoredMatrix, HostMatrix] = WeakKeyDictionary()
_BY_NUMBER: WeakValueDictionary[int, HostMatrix] = WeakValueDictionary()


@dataclass(frozen=True)
class FetchedMatrix:
    """A matrix of which a program asks the host for one tile at a time.

    Given to a program whole, a matrix is copied wherever its file does not align it for XLA.

    number: int32, traced, of a ``HostMatrix``; one program is for all of the same form.
    """

    number: Any
    shape: tuple[int, int]
    layout: Layout | None
    forms: tuple[tuple[tuple[int, ...], Any], ...]
    dtype: str
    tile_weights: int

    def matmul(self, x: jax.Array) -> jax.Array:
        """x Wᵀ: [N, in] -> [N, out]."""
        return tiled_matmul(self, x, XP, LOOPS, self.tile_weights)

    def matmul_t(self, dy: jax.Array) -> jax.Array:
        """dy W: [N, out] -> [N, in]."""
        return tiled_matmul_t(self, dy, XP, LOOPS, self.tile_weights)

    def tile(self, i: Any, size: int, axis: int) -> JaxDense:
        """Tile ``i`` of rows or columns, in ``dtype``; ValueError for columns inside a group."""
        step = size
        if axis == 1 and self.layout is not None:
            step = self.layout.groups(size, self.shape[1])
        results = []
        for shape, dtype in self.forms:
            # A traced tile lies inside the matrix whole.
            rest = shape[axis] - i * step if isinstance(i, int) else shape[axis]
            cut = (*shape[:axis], min(step, rest), *shape[axis + 1 :])
            results.append(jax.ShapeDtypeStruct(cut, jax.dtypes.canonicalize_dtype(dtype)))
        fetch = partial(_fetch_tile, step=step, axis=axis)
        arrays = jax.pure_callback(fetch, results, self.number, i, vmap_method="sequential")
        return _matrix(arrays, self.layout, self.dtype, self.tile_weights).dense()

    def take(self, rows: jax.Array) -> jax.Array:
        """The rows at indices [n]: [n, in] in ``dtype``, decoded on the host; no other is read."""
        shape, dtype = (rows.shape[0], self.shape[1]), np.dtype(self.dtype)
        fetch = partial(_fetch_rows, dtype=dtype)

        def body(i: Any, taken: jax.Array) -> jax.Array:
            some = LOOPS.tile(rows, i, _INDICES)
            result = jax.ShapeDtypeStruct((some.shape[0], shape[1]), dtype)
            found = jax.pure_callback(fetch, result, self.number, some, vmap_method="sequential")
            return LOOPS.put(taken, i, _INDICES, 0, found)

        return LOOPS.fold_tiles(body, jnp.zeros(shape, dtype), shape[0], _INDICES)


def load_streamed(tree: Any) -> tuple[Any, bool]:
    """``tree`` with what a program reads its streamed matrices by, and whether there was any."""
    leaves, structure = jax.tree.flatten(tree)
    if not any(isinstance(leaf, StreamedMatrix) for leaf in leaves):
        return tree, False
    read = [leaf.argument() if isinstance(leaf, StreamedMatrix) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, read), True


@contextmanager
def interruptions() -> Iterator[None]:
    """An interruption that came while the host was answering a program is one again: XLA makes an
    error of its own of whatever is raised there."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise


def _matrix(
    arrays: list[Any], layout: Layout | None, dtype: str, tile_weights: int
) -> JaxDense | JaxQuantized:
    if layout is None:
        return JaxDense(arrays[0], dtype, tile_weights)
    return JaxQuantized(tuple(arrays), layout, dtype, tile_weights)


def _fetch_tile(number: Any, i: Any, *, step: int, axis: int) -> list[np.ndarray]:
    return list(_BY_NUMBER[int(number)].tile(int(i), step, axis))


def _fetch_rows(number: Any, rows: Any, *, dtype: np.dtype) -> np.ndarray:
    return _BY_NUMBER[int(number)].stored.take(np.asarray(rows), dtype.type)
