"""mlx-lm's adapter folder: ``adapters.safetensors`` beside ``adapter_config.json``.

Its ``scale`` multiplies ``(x A) B`` directly, where PEFT's ``alpha`` is divided by the rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesp_core.adapters.adapter import CONFIG_FILE, Adapter, Settings, check_complete, read_tensors
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.lora import PROJECTIONS, LoraConfig

FILE = "adapters.safetensors"
METADATA = {"format": "mlx"}


def config_json(lora: LoraConfig, base_name: str | None) -> dict[str, Any]:
    """What mlx-lm's ``load_adapters`` reads. base_name: the base, for people."""
    config: dict[str, Any] = {
        "fine_tune_type": "lora",
        "num_layers": lora.layers if lora.layers > 0 else -1,
        "lora_parameters": {
            "rank": lora.rank,
            "scale": lora.scale,
            "dropout": lora.dropout,
            "keys": list(lora.targets),
        },
    }
    return config if base_name is None else {"model": base_name, **config}


def read(folder: Path, raw: Mapping[str, Any]) -> Adapter:
    """The adapter in ``folder``, whose adapter_config.json holds ``raw``.

    ``scale`` is taken as it is. Where there is ``alpha`` instead, scale = alpha / rank; where there
    are both they must agree. Without ``keys`` all projections are adapted, as in mlx-lm.
    Raises MespError naming the tensor or the key that is wrong.
    """
    path = folder / CONFIG_FILE
    kind = raw.get("fine_tune_type", "lora")
    if kind != "lora":
        raise UnsupportedError(f"{path}: fine_tune_type {kind!r} is not supported, only 'lora'")
    parameters = raw.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise MespError(f"{path} lacks lora_parameters with rank and scale")
    settings = Settings(parameters, path)
    rank = settings.integer("rank")
    scale = _scale(settings, rank)
    keys = settings.names("keys")
    tensors_path = folder / FILE
    if not tensors_path.exists():
        _no_tensors(folder)
    tensors, dtype = read_tensors(tensors_path)
    config = LoraConfig.from_scale(
        rank,
        scale,
        dropout=settings.number("dropout", 0.0),
        targets=PROJECTIONS if keys is None else tuple(dict.fromkeys(keys)),
        layers=max(0, Settings(raw, path).integer("num_layers", 0)),
        dtype=dtype,
    )
    check_complete(tensors, config, tensors_path)
    return Adapter(config, tensors)


def _scale(settings: Settings, rank: int) -> float:
    has_scale, has_alpha = (settings.raw.get(key) is not None for key in ("scale", "alpha"))
    if not has_scale and not has_alpha:
        raise MespError(f"{settings.path}: lora_parameters lacks scale")
    if rank < 1:
        raise MespError(f"{settings.path}: rank must be at least 1, not {rank}")
    if not has_alpha:
        return settings.number("scale")
    scale = settings.number("alpha") / rank
    if has_scale and not math.isclose(scale, settings.number("scale"), rel_tol=1e-6):
        raise MespError(
            f"{settings.path}: scale {settings.number('scale')} is not alpha / rank = {scale}; "
            "remove one of them"
        )
    return settings.number("scale") if has_scale else scale


def _no_tensors(folder: Path) -> None:
    if (folder / "adapters.npz").exists():
        raise UnsupportedError(
            f"{folder} has only adapters.npz, of an old mlx-lm; convert it with "
            "mx.save_safetensors('adapters.safetensors', mx.load('adapters.npz'))"
        )
    raise MespError(f"{folder} has no {FILE}")
