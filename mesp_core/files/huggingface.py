"""Checkpoints in a folder: config.json beside safetensors files, dense or quantised by MLX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mesp_core.config import ModelConfig
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.checkpoint import Checkpoint, check_shapes, expected_shapes
from mesp_core.files.mapped_file import read_json
from mesp_core.files.safetensors_file import SafetensorsFile
from mesp_core.stored_matrix import BITS, StoredMatrix

if TYPE_CHECKING:
    from mesp_core.files.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_GROUPS = (32, 64, 128)


class HuggingFaceCheckpoint(Checkpoint):
    """A Hugging Face or MLX folder.

    Raises MespError for a missing or damaged file or a tensor that does not fit config.json,
    UnsupportedError for an architecture, a type or a quantisation that we lack.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        self.config = ModelConfig.from_huggingface(raw)
        self._quantization = _quantization(raw, path)
        self._files = _open_files(path)
        self._expected = expected_shapes(self.config)
        self._shapes = self._check()

    def matrix(self, name: str) -> StoredMatrix:
        file = self._file(name)
        if len(self._shapes[name]) != 2:
            raise MespError(f"{name} is a vector, not a matrix")
        release = file.file.release
        if file.entries[name].kind != "U32":
            return StoredMatrix(values=file.view(name), on_release=release)
        bits, group = self._widths(name)
        stem = name.removesuffix(".weight")
        scales, biases = (
            self._files[f"{stem}.{part}"].view(f"{stem}.{part}") for part in ("scales", "biases")
        )
        codes = file.view(name).view(np.uint8).reshape(*scales.shape, group * bits // 8)
        return StoredMatrix(
            codes=codes, scales=scales, biases=biases, bits=bits, group=group, on_release=release
        )

    def vector(self, name: str) -> np.ndarray:
        file = self._file(name)
        if len(self._shapes[name]) != 1:
            raise MespError(f"{name} is a matrix, not a vector")
        return StoredMatrix(values=file.view(name)[np.newaxis]).decode()[0]

    def tokenizer(self) -> Tokenizer:
        from mesp_core.files.tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self.path, self.config.source)

    def close(self) -> None:
        self._files = {}

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._shapes or name not in self._files:
            raise MespError(f"{self.path} holds no tensor {name}")
        return self._files[name]

    def _check(self) -> dict[str, tuple[int, ...]]:
        """Every tensor against the configuration, with quantised ones in their logical shape."""
        expected = self._expected
        found: dict[str, tuple[int, ...]] = {}
        for name, file in self._files.items():
            stem, _, kind = name.rpartition(".")
            entry = file.entries[name]
            tied_head = stem == "lm_head" and self.config.tied
            if tied_head or name.endswith("rotary_emb.inv_freq"):
                continue
            if entry.kind == "U32" and kind == "weight":
                if name in expected:
                    self._check_quantized(name, expected[name])
                    found[name] = expected[name]
                    continue
            elif kind in ("scales", "biases") and self._is_packed(f"{stem}.weight"):
                continue
            if name in expected and entry.kind not in _FLOATS:
                raise UnsupportedError(f"{self.path}: tensor {name} has type {entry.kind}")
            found[name] = entry.shape
        return check_shapes(self.config, found, self.path)

    def _is_packed(self, name: str) -> bool:
        return name in self._files and self._files[name].entries[name].kind == "U32"

    def _check_quantized(self, name: str, shape: tuple[int, ...]) -> None:
        """Packed words, scales and biases against the logical shape and the stated widths."""
        stem = name.removesuffix(".weight")
        if self._quantization is None:
            raise UnsupportedError(
                f"{self.path}: {name} is packed, but config.json does not say how"
            )
        parts = [name, f"{stem}.scales", f"{stem}.biases"]
        for part in parts[1:]:
            if part not in self._files:
                raise UnsupportedError(f"{self.path}: {name} is packed without {part}")
            if self._files[part].entries[part].kind not in _FLOATS:
                raise UnsupportedError(f"{self.path}: {part} does not hold floats")
        found = [self._files[part].entries[part].shape for part in parts]
        bits, group = self._widths(name)
        out, width = shape if len(shape) == 2 else (0, 0)
        wanted = [(out, width * bits // 32), (out, width // group), (out, width // group)]
        if width % group or found != wanted:
            raise MespError(
                f"{self.path}: {name} has packed shapes {found}; its configuration, {bits} bits in "
                f"groups of {group}, says {wanted}"
            )

    def _widths(self, name: str) -> tuple[int, int]:
        """(bits, group) of a packed weight: its own entry, or what the shapes say."""
        stem = name.removesuffix(".weight")
        assert self._quantization is not None
        settings = self._quantization.get(stem, True)
        if settings is False:
            raise MespError(f"{self.path}: {name} is packed, but config.json says it is not")
        if settings is True:
            words = self._files[name].entries[name].shape[-1:]
            groups = self._files[f"{stem}.scales"].entries[f"{stem}.scales"].shape[-1:]
            width = self._expected[name][-1]
            if not words or not groups or not groups[0]:
                raise MespError(f"{self.path}: {name} has no scales")
            settings = {"bits": words[0] * 32 // width, "group_size": width // groups[0]}
        return _affine(settings, f"{self.path}: {name}")


def _affine(settings: Any, where: str) -> tuple[int, int]:
    if not isinstance(settings, dict):
        raise MespError(f"{where}: quantization must be an object, not {settings!r}")
    mode = settings.get("mode", "affine")
    if mode != "affine":
        raise UnsupportedError(f"{where}: quantisation mode {mode!r} is not supported, only affine")
    bits, group = settings.get("bits"), settings.get("group_size")
    whole = isinstance(bits, int) and isinstance(group, int)
    if not whole or bits not in BITS or group not in _GROUPS:
        raise UnsupportedError(
            f"{where}: quantisation to {bits} bits in groups of {group} is not supported; "
            f"bits {BITS}, groups {_GROUPS}"
        )
    return bits, group


def _quantization(raw: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """MLX's ``quantization`` of config.json, after a check that there is no other kind."""
    settings = raw.get("quantization")
    if settings is not None:
        _affine(settings, str(path))
        return settings
    other = raw.get("quantization_config")
    if other is None:
        return None
    method = other.get("quant_method", "unknown") if isinstance(other, dict) else other
    raise UnsupportedError(
        f"{path}: quantisation {method!r} is not supported; use the dense model, MLX's or GGUF"
    )


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor."""
    if not (path / _INDEX).exists():
        if not (path / _SINGLE).exists():
            _no_weights(path)
        file = SafetensorsFile(path / _SINGLE)
        return dict.fromkeys(file.entries, file)
    index = read_json(path / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise MespError(f"{path / _INDEX} has no weight_map")
    files = {shard: _open_shard(path, shard) for shard in dict.fromkeys(map(str, index.values()))}
    for name, shard in index.items():
        if name not in files[str(shard)].entries:
            raise MespError(f"{path / str(shard)} lacks the tensor {name} of the index")
    return {name: files[str(shard)] for name, shard in index.items()}


def _open_shard(path: Path, shard: str) -> SafetensorsFile:
    # A bare name cannot leave the folder. Links are followed: the Hugging Face cache is made of
    # them.
    plain = not any(mark in shard for mark in ("/", "\\", "\0", ":"))
    if not plain or not shard.endswith(".safetensors"):
        raise MespError(f"{path / _INDEX} names {shard!r}, which is not a file in its folder")
    if not (path / shard).exists():
        raise MespError(f"{path} lacks the shard {shard}; download the model again")
    return SafetensorsFile(path / shard)


def _no_weights(path: Path) -> None:
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise UnsupportedError(
            f"{path} has only pickled weights, which can run code when read; convert them with "
            "save_pretrained(folder, safe_serialization=True)"
        )
    raise MespError(f"{path} has no {_SINGLE} and no {_INDEX}")
