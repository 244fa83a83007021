"""Saved adapters compute the same function in every reader, and come back as they were."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesp_core import LoraConfig, MespError, Model, load_adapter, load_model, save_adapter
from mesp_core.adapters import adapter_tensors, read_adapter, read_tensors, save_tensors
from tests.adapters.tiny_llama import adapted, difference, mlx_lm_logits, our_logits, peft_logits

# PEFT asks transformers for an attribute by its old name; it is no warning about our folders.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

CONFIGS = {
    "all": LoraConfig(rank=5, alpha=7.0),
    "last_two_blocks": LoraConfig(rank=3, alpha=16.0, layers=2, targets=("v_proj", "down_proj")),
    "rank_stabilized": LoraConfig(rank=5, alpha=4.0, rank_stabilized=True, targets=("q_proj",)),
    "dropout": LoraConfig(rank=2, alpha=3.0, dropout=0.25),
}


@pytest.mark.parametrize("lora", CONFIGS.values(), ids=CONFIGS)
def test_every_reader_computes_the_same_function(
    base: Path, lora: LoraConfig, tmp_path: Path
) -> None:
    model = adapted(base, lora)
    save_adapter(model, tmp_path / "mlx", format="mlx-lm")
    save_adapter(model, tmp_path / "peft", format="peft")
    ours = our_logits(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = peft_logits(base, tmp_path / "peft")
    assert [str(w.message) for w in caught if "gradient_checkpointing" not in str(w.message)] == []
    # The adapter matters: a reader that ignored it would be far off.
    assert difference(peft_logits(base, None), theirs) > 0.1
    assert difference(ours, theirs) < 1e-4
    assert difference(mlx_lm_logits(base, tmp_path / "mlx"), theirs) < 1e-4


@pytest.mark.parametrize("format", ["mlx-lm", "peft"])
@pytest.mark.parametrize("lora", CONFIGS.values(), ids=CONFIGS)
def test_round_trip_keeps_every_bit(
    base: Path, lora: LoraConfig, format: str, tmp_path: Path
) -> None:
    model = adapted(base, lora)
    save_adapter(model, tmp_path, format=format)
    adapter = read_adapter(tmp_path)
    assert adapter.config.scale == pytest.approx(lora.scale, rel=1e-12)
    for field in ("rank", "dropout", "targets", "layers", "dtype"):
        assert getattr(adapter.config, field) == getattr(lora, field), field
    loaded = load_model(base, backend="numpy", adapter=tmp_path)
    assert_same_parameters(loaded, model)
    assert difference(our_logits(loaded), our_logits(model)) < 1e-6
    other = load_model(base, backend="numpy", lora=lora, seed=9)
    load_adapter(other, tmp_path)
    assert_same_parameters(other, model)


def assert_same_parameters(found: Model, expected: Model) -> None:
    assert set(found.parameters) == set(expected.parameters)
    for name, array in adapter_tensors(expected).items():
        np.testing.assert_array_equal(adapter_tensors(found)[name], array, err_msg=name)


@pytest.mark.parametrize("save_all", [True, False])
def test_an_adapter_that_peft_saved(base: Path, save_all: bool, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    settings = PeftConfig(
        r=3,
        lora_alpha=8,
        target_modules="all-linear" if save_all else ["q_proj", "mlp.up_proj"],
        layers_to_transform=None if save_all else [1, 2],
        use_rslora=not save_all,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(str(tmp_path))
    loaded = load_model(base, backend="numpy", adapter=tmp_path)
    assert difference(our_logits(loaded), peft_logits(base, tmp_path)) < 1e-4


def test_an_adapter_that_mlx_lm_saved(base: Path, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load, save_config

    parameters = {"rank": 4, "scale": 1.75, "dropout": 0.0}
    model = load(str(base))[0]
    model.freeze()
    linear_to_lora_layers(model, 2, dict(parameters))
    key = mx.random.key(3)
    tensors = {}
    trainable: Any = tree_flatten(model.trainable_parameters())
    for name, array in trainable:
        key, drawn = mx.random.split(key)
        tensors[name] = 0.3 * mx.random.normal(array.shape, key=drawn)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    save_config(config, tmp_path / "adapter_config.json")
    loaded = load_model(base, backend="numpy", adapter=tmp_path)
    assert loaded.lora is not None and loaded.lora.layers == 2
    assert difference(our_logits(loaded), mlx_lm_logits(base, tmp_path)) < 1e-4


def test_case_13_scale_is_what_multiplies_the_product(base: Path, tmp_path: Path) -> None:
    """The contribution of non-zero A and B is exactly scale · x A B, with alpha = scale · rank."""
    from mesp_core.files.checkpoint import open_checkpoint

    scaled = LoraConfig.from_scale(4, 1.75, targets=("q_proj",))
    assert scaled == LoraConfig(rank=4, alpha=7.0, targets=("q_proj",))
    model = adapted(base, scaled)
    save_adapter(model, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["lora_parameters"]["scale"] == 1.75
    checkpoint = open_checkpoint(base)
    x = np.random.default_rng(2).normal(size=(6, 20))
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj"
        a, b = (model.parameters[f"{name}.{factor}"] for factor in ("lora_a", "lora_b"))
        weight = checkpoint.matrix(f"{name}.weight").decode().astype(np.float64)
        wanted = x @ weight.T + 1.75 * (x @ np.float64(a)) @ np.float64(b)
        from_peft = peft_projection(base, model, tmp_path / "peft", layer, x)
        assert difference(from_peft, wanted) < 1e-6
    # And without the adapter's product in between, the whole model: twice the scale is twice B.
    doubled = LoraConfig.from_scale(4, 3.5, targets=("q_proj",))
    halved = adapted(base, doubled)
    halved.parameters |= {
        name: array * 0.5 if name.endswith("lora_b") else array
        for name, array in model.parameters.items()
    }
    assert difference(our_logits(halved), our_logits(model)) < 1e-6


def peft_projection(
    base: Path, model: Model, folder: Path, layer: int, x: np.ndarray
) -> np.ndarray:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_adapter(model, folder, format="peft")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    module = theirs.get_submodule(f"base_model.model.model.layers.{layer}.self_attn.q_proj")
    with torch.no_grad():
        return module.double()(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize(
    ("parameters", "scale"),
    [
        ({"rank": 5, "scale": 3.0}, 3.0),
        ({"rank": 5, "alpha": 15.0}, 3.0),
        ({"rank": 5, "alpha": 15.0, "scale": 3.0}, 3.0),
    ],
)
def test_case_13_alpha_in_an_mlx_lm_configuration(
    saved: Callable[[str], Path], parameters: dict[str, float], scale: float
) -> None:
    folder = saved("mlx-lm")
    write_parameters(folder, parameters)
    assert read_adapter(folder).config.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rank": 5, "alpha": 3.0, "scale": 3.0}, r"scale 3.0 is not alpha / rank = 0.6"),
        ({"rank": 5}, r"lacks scale"),
    ],
)
def test_case_13_an_unclear_scale_is_refused(
    saved: Callable[[str], Path], parameters: dict[str, float], message: str
) -> None:
    folder = saved("mlx-lm")
    write_parameters(folder, parameters)
    with pytest.raises(MespError, match=message):
        read_adapter(folder)


def write_parameters(folder: Path, parameters: dict[str, float]) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"lora_parameters": parameters}))


def test_case_14_asymmetric_square_factors(square_base: Path, tmp_path: Path) -> None:
    """in = out = R = 12: only the format says which way round a factor is stored."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    model = adapted(square_base, LoraConfig(rank=12, alpha=6.0, targets=targets))
    assert {array.shape for array in model.parameters.values()} == {(12, 12)}
    ours = our_logits(model)
    for format in ("mlx-lm", "peft"):
        folder = tmp_path / format
        save_adapter(model, folder, format=format)
        loaded = load_model(square_base, backend="numpy", adapter=folder)
        assert_same_parameters(loaded, model)
        assert difference(our_logits(loaded), ours) < 1e-6
    assert difference(peft_logits(square_base, tmp_path / "peft"), ours) < 1e-4
    assert difference(mlx_lm_logits(square_base, tmp_path / "mlx-lm"), ours) < 1e-4
    swapped = load_model(square_base, backend="numpy", adapter=tmp_path / "peft")
    swapped.parameters |= {n: a.T for n, a in swapped.parameters.items()}
    assert difference(our_logits(swapped), ours) > 0.1


def test_case_15_unknown_and_wrong_shaped_tensors(
    base: Path, lora: LoraConfig, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.lora_a"
    theirs = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    wide = np.ones((27, 5), np.float32)
    for format, file, key, tensor in (
        ("mlx-lm", "adapters.safetensors", name, wide),
        ("peft", "adapter_model.safetensors", theirs, wide.T.copy()),
    ):
        folder = saved(format)
        path = folder / file
        whole = load_file(path)
        changes = {
            rf"tensor {name} .* shape \(27, 5\), the model needs \(26, 5\)": {key: tensor},
            rf"tensor {name} has shape .*rank 5 needs": {key: tensor[:3, :3].copy()},
            r"tensor .*layers\.1\.mlp\.extra_proj": {key.replace("down", "extra"): tensor},
            r"though it has model\.layers\.3\.": {key.replace("rs.1", "rs.3"): tensor},
            r"tensor .*lm_head": {"lm_head.lora_a": tensor},
        }
        for message, change in changes.items():
            save_file(whole | change, path)
            assert_refused(base, lora, folder, message)
        save_file({k: v for k, v in whole.items() if k != key}, path)
        assert_refused(base, lora, folder, rf"lacks the tensor {name}")
        lower = {k: v for k, v in whole.items() if ".layers.0." not in k}
        save_file(lower, path)
        assert_refused(base, lora, folder, r"lacks the tensor model\.layers\.0\.")


def assert_refused(base: Path, lora: LoraConfig, folder: Path, message: str) -> None:
    """Both ways of loading say so, and a model that was there keeps its parameters."""
    model = adapted(base, lora, seed=6)
    before = adapter_tensors(model)
    with pytest.raises(MespError, match=message):
        load_adapter(model, folder)
    for name, array in adapter_tensors(model).items():
        np.testing.assert_array_equal(array, before[name])
    with pytest.raises(MespError):
        load_model(base, backend="numpy", adapter=folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "has rank 5, the model has 4; load the model with adapter="),
        ({"alpha": 14.0}, r"has scale 1\.4, the model has 2\.8"),
        ({"targets": ("q_proj",)}, "the model has self_attn.q_proj; load the model with adapter="),
        ({"layers": 2}, r"has adapted blocks \[0, 1, 2\], the model has \[1, 2\]"),
    ],
)
def test_an_adapter_of_another_configuration_is_not_loaded_into_a_model(
    base: Path, lora: LoraConfig, saved: Callable[[str], Path], change: dict, message: str
) -> None:
    model = adapted(base, replace(lora, **change))
    with pytest.raises(MespError, match=message):
        load_adapter(model, saved("peft"))


def test_a_model_without_lora_neither_loads_nor_saves(
    base: Path, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load_model(base, backend="numpy")
    with pytest.raises(MespError, match="no LoRA parameters; load it with lora= or adapter="):
        load_adapter(model, saved("mlx-lm"))
    with pytest.raises(MespError, match="no LoRA parameters"):
        save_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_bfloat16_tensors_stay_bfloat16(tmp_path: Path) -> None:
    import mlx.core as mx
    import torch
    from safetensors.torch import load_file as load_torch

    values = np.random.default_rng(3).normal(size=(7, 5)).astype(np.float32)
    wanted = torch.from_numpy(values).bfloat16()
    path = tmp_path / "0000012_adapters.safetensors"
    save_tensors(path, {"x": values, "y": values.T}, dtype="bfloat16")
    found = load_torch(path)
    assert torch.equal(found["x"], wanted) and torch.equal(found["y"], wanted.T)
    read_by_mlx: Any = mx.load(str(path))
    assert read_by_mlx["y"].dtype == mx.bfloat16
    tensors, dtype = read_tensors(path)
    assert dtype == "bfloat16"
    save_tensors(path, tensors, dtype=dtype)
    assert torch.equal(load_torch(path)["x"], wanted)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_base_name(base: Path, lora: LoraConfig, tmp_path: Path) -> None:
    model = adapted(base, lora)
    for given, expected in ((None, str(base)), ("someone/model", "someone/model")):
        save_adapter(model, tmp_path, format="peft", base_name=given)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == expected
    # The other format in the same folder takes its place.
    save_adapter(model, tmp_path, format="mlx-lm")
    assert difference(mlx_lm_logits(base, tmp_path), our_logits(model)) < 1e-4
    shutil.rmtree(tmp_path)
