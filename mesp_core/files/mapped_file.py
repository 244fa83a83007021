"""A file mapped into memory, read-only, whose pages can be given back."""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.errors import MespError

#: JSON beside a model is far smaller; what is larger is not read.
_LARGEST_JSON = 256 * 1024 * 1024


class MappedFile:
    """Read-only typed views of a file; what is not looked at is never read.

    The mapping lives as long as its last view. Raises MespError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise MespError(f"cannot read {path}: {error}") from None
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._address = self.bytes.ctypes.data

    @property
    def size(self) -> int:
        return self.bytes.size

    def view(self, offset: int, dtype: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
        """The values at ``offset``, in place. Raises MespError, naming ``what``, past the end."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.size:
            raise MespError(
                f"{self.path} is damaged or truncated: {what} needs bytes {offset} to "
                f"{offset + size}, the file has {self.size}"
            )
        return self.bytes[offset : offset + size].view(dtype).reshape(shape)

    def release(self, address: int, size: int) -> None:
        """Drop the pages of these bytes from the process; they are read again when touched."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = (address - self._address) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(address - self._address + size, self.size)
        if 0 <= start < end:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def check_regular(path: Path) -> None:
    """Raise MespError unless ``path`` leads to a regular file (opening a pipe would hang)."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise MespError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise MespError(f"{path} is not a regular file")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a regular file. Raises MespError when there is none."""
    check_regular(path)
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        raise MespError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MespError(f"{path} is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in an untrusted JSON file. Raises MespError when there is none."""
    check_regular(path)
    if path.stat().st_size > _LARGEST_JSON:
        raise MespError(f"{path} is too large to be a JSON file of a model")
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MespError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise MespError(f"{path} must hold a JSON object")
    return value
