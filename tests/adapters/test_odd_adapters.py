"""Damaged, hostile and unsupported adapter folders: one clear line, and nothing lost."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesp_core import LoraConfig, MespError, NonFiniteError, UnsupportedError, save_adapter
from mesp_core.adapters import read_adapter, save_tensors
from tests.adapters.tiny_llama import adapted

Saver = Callable[[str], Path]


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"^model.layers.0": 99}),
        ("init_lora_weights", "pissa"),
        ("exclude_modules", ["q_proj"]),
        ("target_parameters", ["x"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("target_modules", ["q_proj", "lm_head"]),
    ],
)
def test_peft_options_that_we_lack_are_named(saved: Saver, key: str, value: Any) -> None:
    folder = saved("peft")
    configure(folder, **{key: value})
    with pytest.raises(UnsupportedError, match=key):
        read_adapter(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 7}},
        {"modules_to_save": [], "exclude_modules": None, "init_lora_weights": "gaussian"},
        {"layers_to_transform": [2, 0, 1]},
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
        {"an_option_of_the_future": None},
    ],
)
def test_peft_options_that_change_nothing_are_accepted(
    saved: Saver, lora: LoraConfig, changes: dict[str, Any]
) -> None:
    folder = saved("peft")
    wanted = read_adapter(folder)
    configure(folder, **changes)
    found = read_adapter(folder)
    assert found.config.targets == lora.targets and found.config.scale == lora.scale
    assert found.config.layers in (0, 3)
    for name, tensor in wanted.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor)


def test_a_pattern_is_never_run(saved: Saver) -> None:
    """Run as a regular expression, this one would take longer than the universe has."""
    folder = saved("peft")
    endless = "(.*)*" * 40 + "!"
    configure(folder, target_modules=endless, rank_pattern={endless: 5})
    assert read_adapter(folder).config.rank == 5


@pytest.mark.parametrize("blocks", [[0, 1], [0, 2], [7], "12", {"1": 2}, [0.5], [[1]]])
def test_layers_to_transform_must_be_the_blocks_of_the_tensors(saved: Saver, blocks: Any) -> None:
    folder = saved("peft")
    configure(folder, layers_to_transform=blocks)
    with pytest.raises(MespError, match="layers_to_transform"):
        read_adapter(folder)


@pytest.mark.parametrize(("blocks", "rejected_by"), [([0, 2], "read"), ([0, 1], "load")])
def test_blocks_that_are_not_the_last(
    base: Path, saved: Saver, blocks: list[int], rejected_by: str
) -> None:
    from mesp_core import load_model

    folder = saved("peft")
    path = folder / "adapter_model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if any(f"layers.{b}." in k for b in blocks)}
    save_file(kept, path)
    configure(folder, layers_to_transform=blocks)
    if rejected_by == "load":
        assert read_adapter(folder).config.layers == 2
    with pytest.raises(UnsupportedError, match="only the last blocks"):
        load_model(base, backend="numpy", adapter=folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "rank"),
        ({"r": "5"}, "r must be an integer"),
        ({"r": True}, "r must be an integer"),
        ({"r": 10**40}, "r must be an integer"),
        ({"r": 6}, r"has shape .*rank 6 needs"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
        ({"lora_dropout": 1.0}, "dropout"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"target_modules": {"q_proj": 1}}, "target_modules must be a list of names"),
        ({"target_modules": ["q_proj"]}, "of a projection its configuration lacks"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ],
)
def test_impossible_values_in_a_peft_configuration(
    saved: Saver, changes: dict[str, Any], message: str
) -> None:
    folder = saved("peft")
    configure(folder, **changes)
    with pytest.raises(MespError, match=message):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type 'dora' is not supported"),
        ({"fine_tune_type": "full"}, "fine_tune_type 'full' is not supported"),
        ({"lora_parameters": None}, "lacks lora_parameters"),
        ({"lora_parameters": {"rank": 0, "alpha": 1.0}}, "rank must be at least 1"),
        ({"lora_parameters": {"rank": 5.5, "scale": 1.0}}, "rank must be an integer"),
        ({"lora_parameters": {"rank": 5, "scale": "2"}}, "scale must be a finite number"),
        ({"lora_parameters": {"rank": 5, "scale": 2.0, "keys": "q"}}, "keys must be a list"),
        ({"lora_parameters": {"rank": 5, "scale": 2.0, "keys": []}}, "at least one target"),
        ({"lora_parameters": {"rank": 5, "scale": 2.0, "keys": ["lm_head"]}}, "'lm_head' does not"),
        ({"num_layers": "all"}, "num_layers must be an integer"),
    ],
)
def test_impossible_values_in_an_mlx_lm_configuration(
    saved: Saver, changes: dict[str, Any], message: str
) -> None:
    folder = saved("mlx-lm")
    configure(folder, **changes)
    with pytest.raises(MespError, match=message):
        read_adapter(folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("renamed", [False, True])
def test_a_pickle_is_never_opened(
    saved: Saver, renamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved("peft")
    tensors = folder / "adapter_model.safetensors"
    tensors.unlink()
    target = tensors if renamed else folder / "adapter_model.bin"
    target.write_bytes(pickle.dumps(Bomb()))
    message = "damaged or truncated" if renamed else r"a pickle, .* safe_serialization=True"
    with pytest.raises(MespError, match=message):
        read_adapter(folder)
    assert not (tmp_path / "exploded").exists()


def test_missing_files(saved: Saver, tmp_path: Path) -> None:
    with pytest.raises(MespError, match="no adapter folder"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(MespError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"model": "x"}')
    with pytest.raises(UnsupportedError, match=r"neither mlx-lm's .* nor PEFT's"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(MespError, match="must hold a JSON object"):
        read_adapter(tmp_path)
    for format, file in (("mlx-lm", "adapters"), ("peft", "adapter_model")):
        folder = saved(format)
        (folder / f"{file}.safetensors").unlink()
        with pytest.raises(MespError, match=f"has no {file}.safetensors"):
            read_adapter(folder)
    (saved("mlx-lm") / "adapters.safetensors").rename(folder / "x")
    (tmp_path / "saved-mlx-lm" / "adapters.npz").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"adapters\.npz.*mx\.save_safetensors"):
        read_adapter(tmp_path / "saved-mlx-lm")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_tensor_file(saved: Saver, keep: int) -> None:
    path = saved("mlx-lm") / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MespError, match=r"adapters\.safetensors"):
        read_adapter(path.parent)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((20, 5), np.int32), "has type I32"),
        (np.ones(100, np.float32), "not a matrix"),
        (np.ones((0, 5), np.float32), "has shape"),
        (np.full((20, 5), np.nan, np.float32), "NaN or infinite"),
    ],
)
def test_odd_tensors_are_named(saved: Saver, value: np.ndarray, message: str) -> None:
    path = saved("mlx-lm") / "adapters.safetensors"
    name = "model.layers.1.mlp.up_proj.lora_a"
    save_file(load_file(path) | {name: value}, path)
    with pytest.raises(MespError, match=rf"tensor {name}.*{message}"):
        read_adapter(path.parent)


def test_a_file_without_tensors(saved: Saver) -> None:
    path = saved("peft") / "adapter_model.safetensors"
    save_file({}, path)
    with pytest.raises(MespError, match="holds no tensors"):
        read_adapter(path.parent)


@pytest.mark.parametrize("format", ["mlx-lm", "peft"])
def test_a_failed_save_leaves_the_adapter_before_it(
    base: Path, lora: LoraConfig, saved: Saver, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(format)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    model = adapted(base, lora, seed=8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(MespError, match=r"cannot write to .*: No space left on device"):
            save_adapter(model, folder, format=format)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    name = next(iter(model.parameters))
    model.parameters[name] = model.parameters[name] * np.inf
    with pytest.raises(NonFiniteError, match=f"not saved: parameter {name}"):
        save_adapter(model, folder, format=format)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_interrupted_save_leaves_the_adapter_before_it(
    base: Path, lora: LoraConfig, saved: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("mlx-lm")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_adapter(adapted(base, lora, seed=8), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_cannot_be_written_where(base: Path, lora: LoraConfig, tmp_path: Path) -> None:
    model = adapted(base, lora)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(MespError, match="cannot write to"):
        save_adapter(model, tmp_path / "file")
    with pytest.raises(MespError, match="cannot write to"):
        save_tensors(tmp_path / "file" / "0000001_adapters.safetensors", {})
    with pytest.raises(MespError, match="adapter format must be one of mlx-lm, peft"):
        save_adapter(model, tmp_path / "new", format="gguf")
    with pytest.raises(MespError, match=r"saved in one of .*, not 'int8'"):
        save_tensors(tmp_path / "x.safetensors", {}, dtype="int8")
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
