"""Synthetic checkpoints with the exact shapes of known models.

Memory and time do not depend on the values of weights, so a comparison needs no download: packed
random codes are written straight into a file, quantised to 4 bits in groups of 64 as MLX does.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.config import ModelConfig
from mesp_core.errors import MespError
from mesp_core.files.checkpoint import expected_shapes
from mesp_core.files.mapped_file import read_json
from mesp_core.files.safetensors_writer import (
    encode,
    json_writer,
    replace_files,
    safetensors_header,
    size_in_file,
    write_safetensors,
)

BITS, GROUP = 4, 64

#: Standard deviation of a code that is uniform on 0 … 15.
_CODE_DEVIATION = math.sqrt((2 ** (2 * BITS) - 1) / 12)

#: Values made at a time.
_CHUNK = 1 << 20

_METADATA = {"format": "mlx"}

#: A partial file this old, in seconds, belongs to no process that still writes it.
_STALE = 3600


@dataclass(frozen=True)
class Preset:
    """Sizes of a Qwen2 model: tied head, biases on q, k and v."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = 151_936

    def configuration(self) -> dict[str, Any]:
        """config.json as mlx-lm writes it beside quantised weights."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "max_position_embeddings": 32768,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "quantization": {"group_size": GROUP, "bits": BITS},
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }


PRESETS: Mapping[str, Preset] = {
    "qwen2.5-0.5b": Preset(hidden=896, layers=24, ffn=4864, heads=14, kv_heads=2),
    "qwen2.5-1.5b": Preset(hidden=1536, layers=28, ffn=8960, heads=12, kv_heads=2),
    "qwen2.5-3b": Preset(hidden=2048, layers=36, ffn=11008, heads=16, kv_heads=2),
}


def preset_folder(name: str, cache: str | Path | None = None) -> Path:
    """The model folder of a preset, written into the cache where it is not there or is damaged.

    cache: the folder for all presets; by default the user's cache (``default_cache``).
    Raises MespError for an unknown name, or where the cache cannot hold it.
    """
    folder = preset_path(name, cache)
    write_preset(PRESETS[name], folder)
    return folder


def preset_path(name: str, cache: str | Path | None = None) -> Path:
    """Where ``preset_folder`` keeps a preset, whether it is there or not."""
    if name not in PRESETS:
        raise MespError(f"no preset is called {name!r}; choose from {', '.join(PRESETS)}")
    return (default_cache() if cache is None else Path(cache)) / "presets" / name


def default_cache() -> Path:
    """``mesp`` in the folder where this system keeps a user's caches."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "mesp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mesp"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "mesp"
    return Path.home() / ".cache" / "mesp"


def write_preset(preset: Preset, folder: Path) -> None:
    """Writes the model into ``folder`` unless it is there already; other files stay.

    Both files appear whole or not at all. Raises MespError where they cannot be written.
    """
    shapes, kinds = _layout(preset)
    header = safetensors_header(shapes, kinds, _METADATA)
    size = len(header) + sum(size_in_file(shapes[name], kinds[name]) for name in shapes)
    if _complete(folder, preset, header, size):
        return
    _clear(folder)
    _check_space(folder, size)
    generator = np.random.default_rng(0)
    replace_files(
        folder,
        {
            "model.safetensors": lambda file: write_safetensors(
                file, shapes, kinds, lambda name: _values(name, shapes, generator), _METADATA
            ),
            "config.json": json_writer(preset.configuration()),
        },
    )


def _layout(preset: Preset) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shape and type of every tensor of the file, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    config = ModelConfig.from_huggingface(preset.configuration())
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            shapes[name], kinds[name] = shape, "BF16"
            continue
        rows, width = shape
        if width % GROUP:
            raise MespError(f"{name} has {width} columns, which are not whole groups of {GROUP}")
        stem = name.removesuffix(".weight")
        shapes[name], kinds[name] = (rows, width * BITS // 32), "U32"
        for part in ("scales", "biases"):
            shapes[f"{stem}.{part}"], kinds[f"{stem}.{part}"] = (rows, width // GROUP), "BF16"
    return shapes, kinds


def _values(
    name: str, shapes: Mapping[str, tuple[int, ...]], generator: np.random.Generator
) -> Iterator[np.ndarray]:
    """One tensor in pieces, encoded. Weights have mean 0 and standard deviation 1 / √in: the
    outputs of every product are then of the size of its inputs, and the loss is near log V."""
    stem, _, kind = name.rpartition(".")
    count = math.prod(shapes[name])
    if kind == "weight" and f"{stem}.scales" in shapes:
        for lo in range(0, count, _CHUNK):
            yield generator.integers(0, 2**32, min(_CHUNK, count - lo), np.uint32).astype("<u4")
        return
    value = 0.0
    if kind in ("scales", "biases"):
        scale = 1.0 / (math.sqrt(shapes[name][1] * GROUP) * _CODE_DEVIATION)
        value = scale if kind == "scales" else -(2**BITS - 1) / 2 * scale
    elif "norm" in stem:
        value = 1.0
    yield encode(np.full(count, value, np.float32), "BF16")


def _complete(folder: Path, preset: Preset, header: bytes, size: int) -> bool:
    """Whether both files are there, and are those that would be written."""
    path = folder / "model.safetensors"
    try:
        if read_json(folder / "config.json") != preset.configuration():
            return False
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == size and file.read(len(header)) == header
    except (MespError, OSError):
        return False


def _clear(folder: Path) -> None:
    """Removes what a killed process left behind."""
    for partial in folder.glob(".*.partial"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE:
                partial.unlink()


def _check_space(folder: Path, size: int) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with suppress(OSError):
        free = shutil.disk_usage(existing).free
        if free < size:
            raise MespError(
                f"{existing} has {free / 1e6:.0f} MB free, and this model needs "
                f"{size / 1e6:.0f} MB; name another folder with --cache"
            )
