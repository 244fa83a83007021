"""Gradients in files: written block by block, compared chunk by chunk."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mesp_core import Batch, MespError, get_backend, loss_and_gradients
from mesp_core.compare import gradients
from mesp_core.compare.gradients import GradientFile, GradientWriter, gradient_quality
from mesp_core.compare.setting import Setting
from mesp_core.compare.workload import open_model


def file_of(path: Path, **values: list[float]) -> GradientFile:
    """A file of float32 gradients."""
    entries, offset = {}, 0
    for name, row in values.items():
        entries[name] = (offset, len(row))
        offset += 4 * len(row)
    path.write_bytes(np.concatenate(list(map(np.asarray, values.values()))).astype("<f4").tobytes())
    return GradientFile(path, "<f4", entries)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_the_figures_are_over_all_parameters_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(gradients, "_CHUNK", chunk)
    true = file_of(tmp_path / "true", a=[3.0, 0.0, -4.0], b=[12.0])
    other = file_of(tmp_path / "other", a=[6.0, 5.0, 4.0], b=[12.0])
    found = gradient_quality(true, other)
    assert found["gradient_cosine"] == pytest.approx((18 - 16 + 144) / (13 * math.sqrt(221)))
    # The entry whose true gradient is 0 does not count.
    assert found["gradient_sign_agreement"] == pytest.approx(2 / 3)
    assert found["gradient_relative_error"] == pytest.approx(math.sqrt(9 + 25 + 64) / 13)


def test_a_gradient_agrees_with_itself_and_not_with_its_opposite(tmp_path: Path) -> None:
    true = file_of(tmp_path / "true", a=[1.5, -2.0, 0.0])
    opposite = file_of(tmp_path / "other", a=[-1.5, 2.0, 0.0])
    assert list(gradient_quality(true, true).values()) == [pytest.approx(1.0), 1.0, 0.0]
    assert list(gradient_quality(true, opposite).values()) == [pytest.approx(-1.0), 0.0, 2.0]


def test_what_cannot_be_said_is_not_a_number(tmp_path: Path) -> None:
    zero, nan = (
        file_of(tmp_path / "zero", a=[0.0, 0.0]),
        file_of(tmp_path / "nan", a=[1.0, math.nan]),
    )
    one = file_of(tmp_path / "one", a=[1.0, 1.0])
    assert all(math.isnan(value) for value in gradient_quality(zero, one).values())
    assert math.isnan(gradient_quality(one, nan)["gradient_cosine"])
    assert math.isnan(gradient_quality(one, nan)["gradient_relative_error"])


def test_gradients_of_other_parameters_and_short_files_are_refused(tmp_path: Path) -> None:
    first, second = file_of(tmp_path / "1", a=[1.0, 2.0]), file_of(tmp_path / "2", a=[1.0])
    with pytest.raises(MespError, match="different parameters"):
        gradient_quality(first, second)
    (tmp_path / "1").write_bytes(bytes(7))
    with pytest.raises(MespError, match="shorter"):
        gradient_quality(first, first)


@pytest.mark.parametrize("lora_dtype", ["float32", "float64"])
def test_what_is_written_is_what_was_handed_on(
    tmp_path: Path, setting: Setting, lora_dtype: str
) -> None:
    dtype = {"dtype": lora_dtype, "lora_dtype": lora_dtype}
    model = open_model(Setting(**setting.as_json() | dtype), get_backend("numpy"))
    batch = Batch.from_sequences([[5, 7, 9, 4]])
    expected = loss_and_gradients(model, batch).gradients
    writer = GradientWriter(tmp_path / "file", model)
    loss_and_gradients(model, batch, on_block=writer.write)
    written = GradientFile(tmp_path / "file", **writer.close())
    assert list(written.entries) == list(model.parameters)
    for name, gradient in expected.items():
        assert (written.values(name, 0, gradient.size) == gradient.ravel()).all()
    assert (written.values(name, 2, 5) == gradient.ravel()[2:5]).all()


def test_a_gradient_that_never_came_is_named(tmp_path: Path, setting: Setting) -> None:
    model = open_model(setting, get_backend("numpy"))
    writer = GradientWriter(tmp_path / "file", model)
    name = "model.layers.0.mlp.down_proj.lora_a"
    blocks = loss_and_gradients(model, Batch.from_sequences([[5, 7, 9]])).gradients
    writer.write(0, {key: value for key, value in blocks.items() if key != name})
    with pytest.raises(MespError, match=f"no gradient came for {name}"):
        writer.close()
