"""An exported base holds the source's values, in every dtype, and other libraries open it."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mesp_core import MespError, NonFiniteError
from mesp_core.config import ModelConfig
from mesp_core.export import export_base
from mesp_core.files.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from mesp_core.files.safetensors_writer import to_bfloat16
from mesp_core.files.tokenizer import Tokenizer
from mesp_core.stored_matrix import StoredMatrix
from tests.adapters.tiny_llama import difference, mlx_lm_logits, peft_logits


def test_float32_is_exact_and_opens_everywhere(original: Path, base: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (base, original))
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    wanted = peft_logits(original, None)
    np.testing.assert_array_equal(peft_logits(base, None), wanted)
    assert difference(mlx_lm_logits(base, None), wanted) < 1e-4


def test_the_tokenizer_and_the_end_of_a_text_come_along(original: Path, base: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    found, wanted = (AutoTokenizer.from_pretrained(folder) for folder in (base, original))
    text = "w3 w17 w29 </s>"
    assert found(text)["input_ids"] == wanted(text)["input_ids"] == [3, 17, 29, 1]
    assert found.eos_token_id == 1
    assert AutoConfig.from_pretrained(base).eos_token_id == 1
    assert GenerationConfig.from_pretrained(base).eos_token_id == 1


def test_end_of_text_from_the_tokenizer_alone(original: Path, tmp_path: Path) -> None:
    for path in original.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"eos_token_id": None, "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = export_base(tmp_path, tmp_path / "out")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1
    exported = json.loads((folder / "config.json").read_text())
    assert exported["eos_token_id"] == 1 and "auto_map" not in exported


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_round_as_torch_does(original: Path, dtype: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    folder = export_base(original, tmp_path / "out", dtype)
    found, wanted = (load_torch(f / "model.safetensors") for f in (folder, original))
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype))), name
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
    assert difference(peft_logits(folder, None), peft_logits(original, None)) < 0.05
    assert difference(mlx_lm_logits(folder, None), peft_logits(original, None)) < 0.05


def test_bfloat16_of_every_kind_of_float() -> None:
    import torch

    bits = np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint32)
    ties = (np.arange(512, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x3F008000)
    edges = [
        0,
        0x80000000,
        1,
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F800001,
    ]
    values = np.concatenate([bits, ties, np.array(edges, np.uint32)]).view(np.float32)
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    found = to_bfloat16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(found[~nan], wanted[~nan])
    assert ((found[nan] & 0x7FFF) > 0x7F80).all()
    # A shape survives, and so does the caller's array.
    assert to_bfloat16(values[:6].reshape(2, 3).T).shape == (3, 2)


def test_shards(original: Path, base: Path, tmp_path: Path) -> None:
    folder = export_base(original, tmp_path / "out", shard_bytes=9000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (folder / "model.safetensors").exists()
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    for shard in shards:
        (length,) = struct.unpack("<Q", shard.read_bytes()[:8])
        assert shard.stat().st_size - 8 - length <= 9000
    np.testing.assert_array_equal(peft_logits(folder, None), peft_logits(base, None))
    assert difference(mlx_lm_logits(folder, None), peft_logits(base, None)) < 1e-4


def test_a_quantised_base_is_exported_as_what_it_means(tmp_path: Path) -> None:
    """An MLX 4-bit folder, against mlx-lm's own logits over the quantised model."""
    from mlx_lm.utils import load, quantize_model, save

    from tests.adapters.tiny_llama import write_llama

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    dense = write_llama(tmp_path / "dense", **sizes, intermediate_size=96)
    model, tokenizer, config = cast("tuple", load(str(dense), return_config=True))
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save(tmp_path / "quantised", dense, model, tokenizer, config)
    folder = export_base(tmp_path / "quantised", tmp_path / "out")
    assert "quantization" not in json.loads((folder / "config.json").read_text())
    wanted = mlx_lm_logits(tmp_path / "quantised", None)
    assert difference(peft_logits(dense, None), wanted) > 1e-3
    assert difference(peft_logits(folder, None), wanted) < 1e-4
    assert difference(mlx_lm_logits(folder, None), wanted) < 1e-4


def test_a_folder_in_use(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export_base(original, folder, shard_bytes=9000)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(MespError, match="not empty; name another folder, or pass --overwrite"):
        export_base(original, folder)
    assert len(list(folder.glob("model-*"))) > 2
    export_base(original, folder, overwrite=True)
    # Shards of the replaced model would be read by mlx-lm, what is not a model's stays.
    assert not list(folder.glob("model-*")) and not list(folder.glob("*.index.json"))
    assert (folder / "notes.txt").read_text() == "mine"
    assert difference(mlx_lm_logits(folder, None), peft_logits(original, None)) < 1e-4
    with pytest.raises(MespError, match="is the source itself"):
        export_base(folder, folder, overwrite=True)
    with pytest.raises(MespError, match="is a file"):
        export_base(original, folder / "notes.txt")
    with pytest.raises(MespError, match="cannot write to"):
        export_base(original, folder / "notes.txt" / "below")
    with pytest.raises(MespError, match=r"dtype must be one of .*, not 'int4'"):
        export_base(original, tmp_path / "new", "int4")
    (tmp_path / "empty").mkdir()
    assert (export_base(original, tmp_path / "empty") / "config.json").exists()


@pytest.fixture
def altered(original: Path, tmp_path: Path) -> Callable[[float], Path]:
    """The original with one weight changed."""

    def alter(value: float) -> Path:
        folder = tmp_path / "altered"
        folder.mkdir()
        for path in original.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.2.mlp.up_proj.weight"][4, 5] = value
        save_file(tensors, folder / "model.safetensors")
        return folder

    return alter


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        (1e5, "float16", MespError, "up_proj.weight is too large for float16; use bfloat16"),
        (np.nan, "float32", NonFiniteError, r"model\.layers\.2\.mlp\.up_proj\.weight of .* NaN"),
    ],
)
def test_a_failed_export_leaves_what_was_there(
    original: Path,
    altered: Callable[[float], Path],
    value: float,
    dtype: str,
    error: type[MespError],
    message: str,
    tmp_path: Path,
) -> None:
    source = altered(value)
    folder = export_base(original, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for target in (folder, tmp_path / "new"):
        with pytest.raises(error, match=message):
            export_base(source, target, dtype, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["altered", "out"]


def test_too_little_space(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MespError, match="has 1000 bytes free; the base needs"):
        export_base(original, tmp_path / "out")
    assert not any(tmp_path.iterdir())


class WideCheckpoint(Checkpoint):
    """A model with a large matrix in memory: 8-bit codes of 40,000 × 256, 40 MB as float32."""

    def __init__(self, path: Path, like: Path) -> None:
        source = open_checkpoint(like)
        changes = {"vocab_size": 40_000, "hidden_size": 256, "num_hidden_layers": 1}
        self.path = path
        self.config = ModelConfig.from_huggingface(source.config.source | changes)
        self.shapes = expected_shapes(self.config)
        self.released = 0
        self._tokenizer = source.tokenizer()
        codes = np.arange(40_000 * 256, dtype=np.uint32).astype(np.uint8)
        self._wide = StoredMatrix(
            codes=codes.reshape(40_000, 8, 32),
            scales=np.full((40_000, 8), 0.5, np.float16),
            bits=8,
            group=32,
            zero=128,
            on_release=self._release,
        )

    def _release(self, address: int, size: int) -> None:
        self.released += size

    def names(self) -> set[str]:
        return set(self.shapes)

    def matrix(self, name: str) -> StoredMatrix:
        if self.shapes[name] == self._wide.shape:
            return self._wide
        return StoredMatrix(values=np.zeros(self.shapes[name], np.float16))

    def vector(self, name: str) -> np.ndarray:
        return np.ones(self.shapes[name], np.float32)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def close(self) -> None:
        raise AssertionError("whoever opened it closes it")


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("traced")
def test_memory_stays_at_a_few_rows(original: Path, dtype: str, tmp_path: Path) -> None:
    source = WideCheckpoint(tmp_path, original)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    folder = export_base(source, tmp_path / "out", dtype)
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < 8e6, peak
    # Embedding and head, whose pages were given back on the way.
    assert source.released >= 2 * 40_000 * 256
    found = (
        open_checkpoint(folder).matrix("model.embed_tokens.weight").take(np.array([123, 39_999]))
    )
    wanted = (np.arange(256, dtype=np.float32) - 128) * 0.5
    np.testing.assert_array_equal(found, [wanted, wanted])
