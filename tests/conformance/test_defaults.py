"""What an option means when it is not given: part of the public surface of the formulas."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from functools import reduce
from typing import Any

import pytest

from mesp_core import formulas
from mesp_core.formulas.activation import FORMULA

DEFAULTS: dict[str, dict[str, Any]] = {
    "AttentionPlan": {"window": None, "softcap": None, "query_tile": 128, "key_tile": 128},
    "LoraLinearSaved": {"h": None},
    "MlpPlan": {"dropouts": (None, None, None)},
    "Projection": {"bias": None, "lora_a": None, "lora_b": None, "scale": 1.0},
    "embedding_backward": {"tile": 1024},
    "frozen_linear_forward": {"bias": None},
    "gated_mlp_backward": {"activations": FORMULA},
    "gated_mlp_forward": {"activations": FORMULA},
    "linear_cross_entropy_forward": {"gradient": True},
    "lora_linear_backward": {"dropout": None, "input_gradient": True},
    "lora_linear_forward": {"dropout": None, "store_h": False},
    "rms_norm_backward": {"plus_one": False, "weight_gradient": False},
    "rms_norm_forward": {"plus_one": False},
    "rope_backward": {"interleaved": False},
    "rope_forward": {"interleaved": False},
    "rope_frequencies": {"scaling": None, "max_positions": 0},
    "words_of": {"masked": False},
}


def defaults_of(item: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(item):
        fields = dataclasses.fields(item)
        return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    if not inspect.isfunction(item):
        return {}
    given = inspect.signature(item).parameters.values()
    return {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}


def test_every_default_of_the_formulas() -> None:
    found = {name: defaults_of(getattr(formulas, name)) for name in formulas.__all__}
    assert {name: values for name, values in found.items() if values} == DEFAULTS


#: A backend's own way to a component, and the formula whose options it has.
SPECIALISATIONS = {
    "mesp_mlx.fast:rms_norm_forward": "rms_norm_forward",
    "mesp_torch.fast:rms_norm_forward": "rms_norm_forward",
    "mesp_torch.fast:rms_norm_backward": "rms_norm_backward",
    "mesp_torch.fast:LoraLinear.forward": "lora_linear_forward",
    "mesp_torch.fast:LoraLinear.backward": "lora_linear_backward",
}


@pytest.mark.parametrize("place", SPECIALISATIONS)
def test_specialisations_have_the_defaults_of_their_formula(place: str) -> None:
    module, _, path = place.partition(":")
    item = reduce(getattr, path.split("."), importlib.import_module(module))
    assert defaults_of(item) == DEFAULTS[SPECIALISATIONS[place]]
