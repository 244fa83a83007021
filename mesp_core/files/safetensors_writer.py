"""Safetensors files written as a stream, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mesp_core.errors import MespError

#: Bytes of one value of each type that is written.
ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}

#: The safetensors type of each dtype name.
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even: its bits, uint16, of the same shape.

    NaN stays NaN, whatever its payload; values too large for bfloat16 become infinite.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    high = (rounded >> np.uint32(16)).astype(np.uint16)
    # Rounding could carry a NaN's payload into its exponent and sign.
    return np.where(np.isnan(values), np.uint16(0x7FC0), high)


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as they lie in a file of type ``kind`` (F32, F16, BF16): contiguous, little-endian."""
    if kind == "BF16":
        return to_bfloat16(values).astype("<u2", copy=False)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype={"F32": "<f4", "F16": "<f2"}[kind])


def write_safetensors(
    file: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    kind: str | Mapping[str, str],
    chunks: Callable[[str], Iterable[np.ndarray]],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors one after the other, each as consecutive pieces.

    shapes: every tensor, in the order of the file. kind: their type, or the type of each. chunks:
    gives the pieces of one tensor, already encoded. metadata: strings for the header.
    """
    kinds = dict.fromkeys(shapes, kind) if isinstance(kind, str) else kind
    file.write(safetensors_header(shapes, kinds, metadata))
    for name, shape in shapes.items():
        written = sum(file.write(piece.data) for piece in chunks(name) if piece.size)
        if written != size_in_file(shape, kinds[name]):
            raise MespError(f"tensor {name} of shape {shape} came as {written} bytes")


def safetensors_header(
    shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str], metadata: Mapping[str, str]
) -> bytes:
    """What stands before the tensors: the length of the description, and the description."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        end = offset + size_in_file(shape, kinds[name])
        header[name] = {"dtype": kinds[name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def size_in_file(shape: tuple[int, ...], kind: str) -> int:
    """The bytes of one tensor."""
    size = ITEM_SIZES[kind]
    for length in shape:
        size *= length
    return size


def replace_files(folder: Path, writers: Mapping[str, Callable[[BinaryIO], None]]) -> None:
    """Write files under temporary names in ``folder``, then rename them all, in order.

    What had these names before stays as it was unless every file could be written. Raises
    MespError where the folder cannot be made or written, or a name is that of a folder in it.
    """
    check_targets(folder, writers)
    partial = {name: folder / f".{name}.{os.getpid()}.partial" for name in writers}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            with open(partial[name], "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for name in writers:
            os.replace(partial[name], folder / name)
    except OSError as error:
        raise MespError(f"cannot write to {folder}: {error.strerror or error}") from None
    finally:
        for path in partial.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)


def check_targets(folder: Path, names: Iterable[str]) -> None:
    """Raises MespError when something that is not a file has one of these names in ``folder``."""
    for name in names:
        if (folder / name).exists() and not (folder / name).is_file():
            raise MespError(f"cannot write {folder / name}: what is there is not a regular file")


def json_writer(value: object) -> Callable[[BinaryIO], None]:
    """A writer for :func:`replace_files` that writes ``value`` as indented JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"

    def write(file: BinaryIO) -> None:
        # A path that is not UTF-8 comes as lone surrogates, which this writes as JSON escapes.
        file.write(text.encode(errors="backslashreplace"))

    return write
