"""Synthetic checkpoints: their shapes, their values, and a cache that repairs itself."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from mesp_core import Batch, LoraConfig, MespError, load_model, loss_and_gradients
from mesp_core.compare import presets
from mesp_core.compare.presets import PRESETS, Preset, default_cache, preset_folder, write_preset
from mesp_core.config import ModelConfig
from mesp_core.files.checkpoint import expected_shapes, open_checkpoint

TINY = Preset(hidden=128, layers=2, ffn=192, heads=4, kv_heads=2, vocab=1031)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preset")
    write_preset(TINY, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
    ],
)
def test_presets_have_as_many_parameters_as_the_models(name: str, parameters: int) -> None:
    shapes = expected_shapes(ModelConfig.from_huggingface(PRESETS[name].configuration()))
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_values_keep_the_size_of_what_passes_through(written: Path) -> None:
    checkpoint = open_checkpoint(written)
    for name, shape in expected_shapes(checkpoint.config).items():
        if len(shape) == 1:
            assert (checkpoint.vector(name) == float("norm" in name)).all(), name
            continue
        stored = checkpoint.matrix(name)
        assert (stored.bits, stored.group, stored.dtype) == (4, 64, "bfloat16")
        values, deviation = stored.decode(), 1 / math.sqrt(shape[1])
        assert np.std(values) == pytest.approx(deviation, rel=0.03)
        assert abs(np.mean(values)) < 0.03 * deviation
        assert len(np.unique(values)) == 16


def test_loss_and_gradients_are_finite_and_the_loss_near_log_v(written: Path) -> None:
    model = load_model(written, backend="numpy", lora=LoraConfig(rank=2))
    ids = np.random.default_rng(1).integers(0, TINY.vocab, 24).tolist()
    result = loss_and_gradients(model, Batch.from_sequences([ids]))
    assert result.loss == pytest.approx(math.log(TINY.vocab), abs=1.0)
    assert all(np.isfinite(gradient).all() for gradient in result.gradients.values())
    assert any(np.abs(gradient).max() > 0 for gradient in result.gradients.values())


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _spoil_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"U32", b"F32", 1))


def _change_configuration(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _spoil_header,
        _change_configuration,
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_a_damaged_one_is_written_again_and_a_whole_one_is_not(
    written: Path, tmp_path: Path, damage
) -> None:
    folder = shutil.copytree(written, tmp_path / "copy")
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    write_preset(TINY, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights
    damage(folder)
    write_preset(TINY, folder)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (written / name).read_bytes()


def test_what_a_killed_process_left_behind_goes_when_it_is_old(tmp_path: Path) -> None:
    old, fresh = (tmp_path / f".model.safetensors.{number}.partial" for number in (1, 2))
    for path in (old, fresh):
        path.write_bytes(b"part")
    os.utime(old, (0, 0))
    write_preset(TINY, tmp_path)
    assert not old.exists() and fresh.exists()


def test_a_cache_that_cannot_hold_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "PRESETS", {"small": TINY})
    with pytest.raises(MespError, match="no preset is called 'large'; choose from small"):
        preset_folder("large", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(MespError, match="cannot write to .*file"):
        preset_folder("small", tmp_path / "file")
    usage = namedtuple("usage", "free")(10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MespError, match="0 MB free.*--cache"):
        preset_folder("small", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/mesp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr("sys.platform", "linux")
    assert default_cache() == Path("/home/somebody/.cache/mesp")
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_cache() == Path("/home/somebody/Library/Caches/mesp")
