"""PEFT's adapter folder: ``adapter_model.safetensors`` beside ``adapter_config.json``.

PEFT stores each factor as the weight of a linear layer, so transposed: ``lora_A`` [R, in] and
``lora_B`` [out, R]. When in = out = R the shapes cannot tell, only the name of the format can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.adapters.adapter import (
    CONFIG_FILE,
    Adapter,
    Settings,
    adapted_layers,
    check_complete,
    read_tensors,
    split_name,
)
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.lora import PROJECTIONS, LoraConfig

FILE = "adapter_model.safetensors"
METADATA = {"format": "pt"}

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

#: Options that change the function or its base and have no counterpart here: their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "exclude_modules": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "megatron_config": (),
    # The others (PiSSA, OLoRA, LoftQ, …) also change the base weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


def to_peft(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our factors ([in, R] and [R, out]) under PEFT's names, transposed."""
    return {
        _PREFIX + name.removesuffix(ours) + theirs: tensor.T
        for name, tensor in tensors.items()
        for ours, theirs in _SUFFIXES.items()
        if name.endswith(ours)
    }


def from_peft(tensors: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """PEFT's factors under our names, transposed and contiguous.

    Raises MespError for a name that is not that of a factor in a causal language model.
    """
    renamed = {}
    for name, tensor in tensors.items():
        stem = name.removeprefix(_PREFIX)
        ours = next((o for o, theirs in _SUFFIXES.items() if stem.endswith(theirs)), None)
        if stem == name or ours is None:
            raise MespError(f"{path}: tensor {name} is not a LoRA factor of a causal model in PEFT")
        full = stem.removesuffix(_SUFFIXES[ours]) + ours
        split_name(full, path)
        renamed[full] = np.ascontiguousarray(tensor.T)
    return renamed


def config_json(lora: LoraConfig, layers: int, base_name: str | None) -> dict[str, Any]:
    """PEFT's adapter_config.json. layers: how many blocks the model has."""
    some = 0 < lora.layers < layers
    alpha = lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilized,
        "target_modules": [name.rpartition(".")[2] for name in lora.targets],
        "layers_to_transform": list(lora.adapted_layers(layers)) if some else None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def read(folder: Path, raw: Mapping[str, Any]) -> Adapter:
    """The adapter in ``folder``, whose adapter_config.json holds ``raw``.

    Raises UnsupportedError naming an option that we lack, MespError naming the tensor or the key
    that is wrong. Pickled tensors are never opened.
    """
    path = folder / CONFIG_FILE
    settings = Settings(raw, path)
    rank = settings.integer("r", 8)
    alpha = settings.number("lora_alpha", 8)
    _check_supported(raw, path, rank, alpha)
    tensors_path = folder / FILE
    if not tensors_path.exists():
        _no_tensors(folder)
    stored, dtype = read_tensors(tensors_path)
    tensors = from_peft(stored, tensors_path)
    config = LoraConfig(
        rank=rank,
        alpha=alpha,
        dropout=settings.number("lora_dropout", 0.0),
        targets=_targets(settings, tensors),
        layers=_layers(settings, tensors, tensors_path),
        dtype=dtype,
        rank_stabilized=settings.flag("use_rslora"),
    )
    check_complete(tensors, config, tensors_path)
    return Adapter(config, tensors)


def _check_supported(raw: Mapping[str, Any], path: Path, rank: int, alpha: float) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type {kind!r} is not supported, only 'LORA'")
    for key, neutral in _NEUTRAL.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            raise UnsupportedError(f"{path}: {key} = {value!r} is not supported")
    # Patterns are regular expressions of an untrusted file: never run, so they may only repeat
    # what holds anyway.
    for key, usual in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        pattern = raw.get(key) or {}
        if not isinstance(pattern, Mapping):
            raise MespError(f"{path}: {key} must be an object, not {pattern!r}")
        for name, value in pattern.items():
            if value != usual:
                raise UnsupportedError(
                    f"{path}: {key} gives {name!r} {value!r} where the others have {usual}; "
                    "one rank and one alpha for all projections are supported"
                )


def _targets(settings: Settings, tensors: Iterable[str]) -> tuple[str, ...]:
    """The projections that ``target_modules`` names; those that have tensors when it is a pattern.

    A name means every module whose path ends in it, as in PEFT.
    """
    value = settings.raw.get("target_modules")
    if value == "all-linear":
        return PROJECTIONS
    if value is None or isinstance(value, str):
        found = {split_name(name, settings.path)[1] for name in tensors}
        return tuple(name for name in PROJECTIONS if name in found)
    names = settings.names("target_modules") or []
    for name in names:
        if not any(_ends_in(projection, name) for projection in PROJECTIONS):
            raise UnsupportedError(
                f"{settings.path}: target_modules has {name!r}, which is not a projection of a "
                f"block; supported: {', '.join(PROJECTIONS)}"
            )
    return tuple(p for p in PROJECTIONS if any(_ends_in(p, name) for name in names))


def _ends_in(projection: str, name: str) -> bool:
    return projection == name or projection.endswith("." + name)


def _layers(settings: Settings, tensors: Iterable[str], path: Path) -> int:
    """How many blocks from the last are adapted, 0 for all; which is the last, the model knows."""
    present = adapted_layers(tensors, path)
    listed = settings.raw.get("layers_to_transform")
    if listed is not None and listed != []:
        numbers = listed if isinstance(listed, list) else [listed]
        if not all(isinstance(number, int) for number in numbers) or sorted(numbers) != present:
            raise MespError(
                f"{path} has tensors of blocks {present}, but layers_to_transform is {listed!r}"
            )
    elif present[0] == 0 or isinstance(settings.raw.get("target_modules"), list):
        return 0
    if present != list(range(present[0], present[-1] + 1)):
        raise UnsupportedError(
            f"{path}: layers_to_transform {present} leaves out blocks in between; only the last "
            "blocks of a model can be adapted"
        )
    return len(present)


def _no_tensors(folder: Path) -> None:
    if (folder / "adapter_model.bin").exists():
        raise UnsupportedError(
            f"{folder} has only adapter_model.bin, a pickle, which can run code when read; "
            "save it again with PEFT's save_pretrained(folder, safe_serialization=True)"
        )
    raise MespError(f"{folder} has no {FILE}")
