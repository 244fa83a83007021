"""Writing a base model as a Hugging Face folder, whatever its source was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.errors import MespError, NonFiniteError
from mesp_core.files.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from mesp_core.files.mapped_file import read_json
from mesp_core.files.safetensors_writer import (
    KINDS,
    encode,
    json_writer,
    replace_files,
    size_in_file,
    write_safetensors,
)

#: Weights decoded at a time.
_CHUNK = 1 << 18

_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"

#: Names of code to import. A copy of a file's weights has no use for its code.
_CODE_KEYS = ("auto_map", "model_file")


def export_base(
    source: str | Path | Checkpoint,
    folder: str | Path,
    dtype: str = "float32",
    *,
    overwrite: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Write a base model, dequantised, as a folder that transformers and mlx-lm open.

    source: as for ``load_model``, or an opened checkpoint. dtype: float32, float16 or bfloat16
    (rounded to nearest, ties to even) of every tensor. overwrite: replace a model that is already
    in the folder; other files in it stay. shard_bytes: the most a weight file holds, unless one
    tensor is larger. Weights are decoded a few rows at a time, and the folder's files appear when
    all are written. Returns the folder.

    Raises MespError for an unknown dtype, a folder in use, too little space, weights that float16
    cannot hold, and whatever opening the source raises; NonFiniteError for a weight that is NaN or
    infinite.
    """
    if dtype not in KINDS:
        raise MespError(f"dtype must be one of {', '.join(KINDS)}, not {dtype!r}")
    folder = Path(folder)
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    try:
        _check_target(opened, folder, overwrite)
        staging = folder.parent / f".{folder.name}.{os.getpid()}.partial"
        try:
            _write(opened, staging, dtype, shard_bytes)
            _move(staging, folder)
        except OSError as error:
            raise MespError(f"cannot write to {folder}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        if opened is not source:
            opened.close()
    return folder


def _check_target(source: Checkpoint, folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise MespError(f"{folder} is a file; name a folder to export to")
    if folder.exists() and source.path.exists() and folder.samefile(source.path):
        raise MespError(f"{folder} is the source itself; export to another folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise MespError(f"{folder} is not empty; name another folder, or pass --overwrite")


def _write(source: Checkpoint, staging: Path, dtype: str, shard_bytes: int) -> None:
    tokenizer = source.tokenizer()
    shapes = expected_shapes(source.config)
    kind = KINDS[dtype]
    total = sum(size_in_file(shape, kind) for shape in shapes.values())
    with suppress(OSError):
        free = shutil.disk_usage(_existing(staging.parent)).free
        if free < total:
            raise MespError(f"{staging.parent} has {free} bytes free; the base needs {total}")
    shards = _shards(shapes, kind, shard_bytes)
    staging.mkdir(parents=True)
    for file, names in shards.items():
        part = {name: shapes[name] for name in names}
        with open(staging / file, "wb") as stream:
            write_safetensors(
                stream, part, kind, lambda n: _pieces(source, n, shapes[n], kind), {"format": "pt"}
            )
            stream.flush()
            os.fsync(stream.fileno())
    generation = _generation_config(source, tokenizer.eos_id)
    texts: dict[str, Any] = {
        "config.json": _config(source, dtype, generation),
        "generation_config.json": generation,
    }
    if len(shards) > 1:
        places = {name: file for file, names in shards.items() for name in names}
        texts[_INDEX] = {"metadata": {"total_size": total}, "weight_map": places}
    replace_files(staging, {name: json_writer(value) for name, value in texts.items()})
    tokenizer.save(staging)


def _pieces(
    source: Checkpoint, name: str, shape: tuple[int, ...], kind: str
) -> Iterator[np.ndarray]:
    """One tensor, a few rows at a time, encoded; the mapped pages are given back."""
    if len(shape) == 1:
        yield _encode(source.vector(name), kind, name, source)
        return
    matrix = source.matrix(name)
    step = max(1, _CHUNK // shape[1])
    for lo in range(0, shape[0], step):
        rows = matrix.rows(lo, min(lo + step, shape[0]))
        yield _encode(rows.decode(), kind, name, source)
        rows.release()


def _encode(values: np.ndarray, kind: str, name: str, source: Checkpoint) -> np.ndarray:
    if not np.isfinite(values).all():
        raise NonFiniteError(f"weight {name} of {source.path} holds NaN or infinite values")
    encoded = encode(values, kind)
    if kind == "F16" and not np.isfinite(encoded).all():
        raise MespError(f"weight {name} is too large for float16; use bfloat16 or float32")
    return encoded


def _shards(
    shapes: Mapping[str, tuple[int, ...]], kind: str, shard_bytes: int
) -> dict[str, list[str]]:
    """The tensors of each file, filled in order."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = size_in_file(shape, kind)
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {
        f"model-{place:05d}-of-{count:05d}.safetensors": names
        for place, names in enumerate(groups, start=1)
    }


def _config(source: Checkpoint, dtype: str, generation: Mapping[str, Any]) -> dict[str, Any]:
    config = source.config.to_huggingface()
    for key in (*_CODE_KEYS, "dtype"):
        config.pop(key, None)
    # transformers 4 knows only this name of the dtype, and 5 still reads it.
    config["torch_dtype"] = dtype
    for key in ("bos_token_id", "eos_token_id"):
        if config.get(key) is None and generation.get(key) is not None:
            config[key] = generation[key]
    return config


def _generation_config(source: Checkpoint, eos_id: int | None) -> dict[str, Any]:
    """The source's own, or one with the tokens that begin and end a text."""
    path = source.path / "generation_config.json"
    if path.exists():
        return read_json(path)
    config = {key: source.config.source.get(key) for key in ("bos_token_id", "eos_token_id")}
    if config["eos_token_id"] is None:
        config["eos_token_id"] = eos_id
    return {key: value for key, value in config.items() if value is not None}


def _move(staging: Path, folder: Path) -> None:
    """Put the finished files in place; a folder that was not there appears at once."""
    if not folder.exists():
        os.replace(staging, folder)
        return
    # mlx-lm reads every model*.safetensors, so weights of the replaced model must go.
    for stale in (*folder.glob("model*.safetensors"), folder / _INDEX):
        stale.unlink(missing_ok=True)
    # The configuration last: without it nothing takes the folder for a model.
    (folder / "config.json").unlink(missing_ok=True)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(path, folder / path.name)


def _existing(folder: Path) -> Path:
    """The nearest folder that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
