"""One safetensors file, checked and mapped."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.mapped_file import MappedFile, check_regular

#: safetensors types we read; bfloat16 is kept as its bits.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor: its type as the file names it, and where it lies."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile:
    """Mapped views of the tensors of a safetensors file.

    The safetensors library validates the header first (size, JSON, offsets without gaps or
    overlaps). Raises MespError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        check_regular(path)
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise MespError(f"{path} is damaged or truncated: {error}") from None
        self.path = path
        self.file = MappedFile(path)
        self.entries = self._read_header()

    def view(self, name: str) -> np.ndarray:
        """The values of a tensor, in place. Raises UnsupportedError for a type that we lack."""
        entry = self.entries[name]
        if entry.kind not in DTYPES:
            known = ", ".join(DTYPES)
            raise UnsupportedError(
                f"{self.path}: tensor {name} has type {entry.kind}; supported: {known}"
            )
        dtype = np.dtype(DTYPES[entry.kind])
        if math.prod(entry.shape) * dtype.itemsize != entry.size:
            raise MespError(f"{self.path} is damaged: {name} does not fill its bytes")
        return self.file.view(entry.offset, dtype, entry.shape, name)

    def _read_header(self) -> dict[str, SafetensorsEntry]:
        (length,) = struct.unpack("<Q", self.file.view(0, np.uint8, (8,), "its length").tobytes())
        header = self.file.view(8, np.uint8, (length,), "its header")
        try:
            parsed = json.loads(header.tobytes())
            if not all(name.isprintable() for name in parsed):
                raise ValueError("a tensor's name is not printable")
            return {
                name: _entry(value, 8 + length)
                for name, value in parsed.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MespError(f"{self.path} is damaged: its header is not valid: {error}") from None


def _entry(value: dict, start: int) -> SafetensorsEntry:
    first, last = (int(offset) for offset in value["data_offsets"])
    shape = tuple(int(size) for size in value["shape"])
    if not 0 <= first <= last or any(size < 0 for size in shape):
        raise ValueError(f"offsets {first}, {last} of shape {shape}")
    return SafetensorsEntry(str(value["dtype"]), shape, start + first, last - first)
