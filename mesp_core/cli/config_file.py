"""The YAML file of ``--config``: mlx-lm's names and nesting, untrusted values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp_core.errors import MespError, UnsupportedError


@dataclass(frozen=True)
class Kind:
    """What an option holds: its type, and the values it may have (none given: any)."""

    type: Any
    choices: tuple[Any, ...] = ()

    def read(self, value: Any, where: str) -> Any:
        """``value`` in this type. Raises MespError naming ``where`` when it does not fit."""
        read = self._converted(value)
        if read is None:
            kind = "list of names" if self.type is list else self.type.__name__
            raise MespError(f"{where} must be of type {kind}, not {value!r}")
        if self.choices and read not in self.choices:
            raise MespError(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        return read

    def _converted(self, value: Any) -> Any:
        if self.type is list:
            names = isinstance(value, list) and all(isinstance(name, str) for name in value)
            return value if names else None
        if self.type is bool or isinstance(value, bool):
            return value if self.type is bool and isinstance(value, bool) else None
        if not isinstance(value, int | float | str):
            return None
        try:
            # YAML 1.1 reads 1e-5 as a string, and 100.0 is a whole number.
            if self.type is int and not isinstance(value, int):
                return int(float(value)) if float(value).is_integer() else None
            return self.type(value)
        except (ValueError, OverflowError):
            return None


_LORA: Mapping[str, tuple[str, Kind]] = {
    "rank": ("rank", Kind(int)),
    "alpha": ("alpha", Kind(float)),
    "scale": ("scale", Kind(float)),
    "dropout": ("dropout", Kind(float)),
    "keys": ("target_modules", Kind(list)),
}


def read_config(path: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The options in a file, by the names of their flags with ``_`` for ``-``.

    ``lora_parameters`` is taken apart (its ``scale`` stays ``scale``, its ``keys`` become
    ``target_modules``), and so is ``lr_schedule``; ``optimizer_config`` stays as it is. An unknown
    option that is false or empty asks for nothing and is passed over, any other is refused.
    Raises MespError naming the file and the option.
    """
    values: dict[str, Any] = {}
    for key, value in _read_yaml(path).items():
        where = f"{path}: {key}"
        if value is None:
            continue
        if key == "lora_parameters":
            values |= _lora_parameters(where, value)
        elif key == "lr_schedule" and isinstance(value, Mapping):
            values |= _schedule(where, value)
        elif key == "optimizer_config":
            values[key] = _mapping(where, value)
        elif key in kinds:
            values[key] = kinds[key].read(value, where)
        elif value not in (False, 0, "", [], {}):
            raise UnsupportedError(f"{where} is not an option here; remove it")
    return values


def _read_yaml(path: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise MespError("--config needs PyYAML; pip install pyyaml") from None
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MespError(f"cannot read {path}: {error.strerror}") from None
    # ValueError: not UTF-8, or a number of thousands of digits.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MespError(f"{path} is not valid YAML: {error}") from None
    return _mapping(path, raw)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MespError(f"{where} must hold options, one `name: value` a line")
    return value


def _lora_parameters(where: str, raw: Any) -> dict[str, Any]:
    values = {}
    for key, value in _mapping(where, raw).items():
        if key not in _LORA:
            raise UnsupportedError(f"{where}.{key} is not an option here; remove it")
        name, kind = _LORA[key]
        values[name] = kind.read(value, f"{where}.{key}")
    if "scale" in values and "alpha" in values:
        raise MespError(f"{where}: give scale or alpha, not both (scale = alpha / rank)")
    return values


def _schedule(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """mlx-lm's cosine_decay: its arguments are first rate, updates, last rate."""
    if raw.get("name") != "cosine_decay":
        raise UnsupportedError(f"{where}: {raw.get('name')!r} is not known; use cosine_decay")
    arguments = raw.get("arguments")
    if not isinstance(arguments, list) or len(arguments) not in (2, 3):
        raise MespError(f"{where}: cosine_decay needs arguments: [first rate, updates, last rate]")
    at = f"{where}.arguments"
    return {
        "lr_schedule": "cosine",
        "learning_rate": Kind(float).read(arguments[0], at),
        "lr_decay": Kind(int).read(arguments[1], at),
        "lr_end": Kind(float).read(arguments[2], at) if len(arguments) == 3 else 0.0,
        "warmup": Kind(int).read(raw.get("warmup", 0), f"{where}.warmup"),
    }
