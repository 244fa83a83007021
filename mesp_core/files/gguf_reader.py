"""The header of a GGUF file: metadata and tensor descriptions, read with bounds.

The reader of the gguf package makes several NumPy objects for each of 100,000 tokens and takes
seconds; and it trusts counts. Here nothing is read or allocated before it is known to lie inside
the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.mapped_file import MappedFile

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MOST_ITEMS = 1 << 24
_MOST_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 20

#: The types we read: name, weights in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: ``shape`` in NumPy's order (rows first), ``offset`` from the file's start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(file: MappedFile) -> GgufHeader:
    """Parse and check the whole header.

    Raises MespError for a damaged or truncated file, UnsupportedError for a version or tensor
    type that we lack.
    """
    cursor = _Cursor(file)
    if file.size < 24 or file.bytes[:4].tobytes() != b"GGUF":
        raise MespError(f"{file.path} is not a GGUF file")
    cursor.position = 4
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise UnsupportedError(f"{file.path}: GGUF version {version} is not supported, only 2 or 3")
    tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
    cursor.check_count(key_count, 13, "metadata entries")
    cursor.check_count(tensor_count, 32, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            raise MespError(f"{file.path} is damaged: metadata {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("<I"), key)
    descriptions = [_description(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    valid = isinstance(alignment, int) and 0 < alignment <= _LARGEST_ALIGNMENT
    if not valid or alignment & (alignment - 1):
        raise MespError(f"{file.path} is damaged: alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, dims, kind, offset in descriptions:
        if name in tensors:
            raise MespError(f"{file.path} is damaged: tensor {name} occurs twice")
        tensors[name] = _tensor(file, name, dims, kind, start + offset)
    return GgufHeader(metadata, tensors)


def _description(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string()
    dimensions = cursor.number("<I")
    if not name.isprintable():
        raise MespError(f"{cursor.path} is damaged: a tensor is called {name!r}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise MespError(f"{cursor.path} is damaged: tensor {name} has {dimensions} dimensions")
    dims = [cursor.number("<Q") for _ in range(dimensions)]
    return name, dims, cursor.number("<I"), cursor.number("<Q")


def _tensor(file: MappedFile, name: str, dims: list[int], kind: int, offset: int) -> GgufTensor:
    if kind not in TYPES:
        known = ", ".join(label for label, _, _ in TYPES.values())
        raise UnsupportedError(
            f"{file.path}: tensor {name} has type {_type_name(kind)}; supported: {known}"
        )
    label, block, size = TYPES[kind]
    if dims[0] % block:
        raise MespError(f"{file.path} is damaged: rows of {name} are not whole {label} blocks")
    end = offset + math.prod(dims) // block * size
    if end > file.size:
        raise MespError(
            f"{file.path} is damaged or truncated: tensor {name} ends at byte {end}, "
            f"the file has {file.size}"
        )
    return GgufTensor(name, label, tuple(reversed(dims)), offset)


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.path: Path = file.path
        self.position = 0
        self._buffer = file.bytes.data
        self._size = file.size

    def number(self, code: str) -> int:
        try:
            (value,) = struct.unpack_from(code, self._buffer, self.position)
        except struct.error:
            self._truncated()
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        buffer, position, size = self._buffer, self.position, self._size
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if position + 8 > size:
                self._truncated()
            start = position + 8
            position = start + length_at(buffer, position)[0]
            if position > size:
                self._truncated()
            # Some files hold tokens that are not UTF-8; what is asked for by name is ASCII.
            found.append(str(buffer[start:position], "utf-8", "replace"))
        self.position = position
        return found

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(kind, 1, key)[0].item()

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count > _MOST_ITEMS or count * least_bytes > self._size - self.position:
            raise MespError(f"{self.path} is damaged: it claims {count} {what}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            self.check_count(count, 8, f"strings in {key}")
            return self.strings(count)
        if kind == _ARRAY:
            raise UnsupportedError(f"{self.path}: nested arrays in {key!r} are not supported")
        return self._scalars(kind, count, key).tolist()

    def _scalars(self, kind: int, count: int, key: str) -> np.ndarray:
        if kind not in _SCALARS:
            raise MespError(f"{self.path} is damaged: metadata {key!r} has unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.check_count(count, dtype.itemsize, f"numbers in {key}")
        end = self.position + count * dtype.itemsize
        values = np.frombuffer(self._buffer[self.position : end], dtype)
        self.position = end
        return values

    def _truncated(self) -> NoReturn:
        raise MespError(f"{self.path} is damaged or truncated: its header goes past the end")
