"""GGUF: what the gguf package writes is read back; what is damaged is named."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from mesp_core.errors import MespError, UnsupportedError
from mesp_core.files.checkpoint import expected_shapes, open_checkpoint
from mesp_core.files.gguf_names import huggingface_name

gguf = pytest.importorskip("gguf", reason="writes the files and is the reference for their values")

NAMES = {
    "token_embd.weight": (70, 128),
    "output_norm.weight": (128,),
    "output.weight": (70, 128),
}
BLOCK = {
    "attn_norm.weight": (128,),
    "attn_q.weight": (128, 128),
    "attn_k.weight": (64, 128),
    "attn_v.weight": (64, 128),
    "attn_output.weight": (128, 128),
    "ffn_norm.weight": (128,),
    "ffn_gate.weight": (192, 128),
    "ffn_up.weight": (192, 128),
    "ffn_down.weight": (128, 192),
}


def random_tensors(**extra: tuple[int, ...]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(11)
    shapes = NAMES | {f"blk.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in extra.items()}
    return {n: generator.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def write(
    path: Path, tensors: dict[str, np.ndarray], kind: str = "F32", arch: str = "llama", **metadata
) -> Path:
    """Matrices in the type ``kind``, vectors in F32. ``metadata``: further keys, __ for a dot."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(128)
    writer.add_block_count(2)
    writer.add_feed_forward_length(192)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_vocab_size(70)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key.replace('__', '.')}", value)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, value in tensors.items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            data = gguf.quants.quantize(value, quantization)
            writer.add_tensor(name, data, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp's converter writes q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored_values(path: Path) -> dict[str, np.ndarray]:
    """Dense values by the gguf package, q and k rows as they are stored."""
    tensors = gguf.GGUFReader(str(path)).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_each_type_of_a_llama(tmp_path, kind):
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", random_tensors(), kind))
    expected = stored_values(checkpoint.path)
    assert {huggingface_name(name) for name in expected} == set(expected_shapes(checkpoint.config))
    for name, value in expected.items():
        ours = huggingface_name(name)
        if value.ndim == 1:
            assert np.array_equal(checkpoint.vector(ours), value)
            continue
        decoded = checkpoint.matrix(ours).decode()
        if "attn_q" in name or "attn_k" in name:
            decoded = permuted(decoded, 4 if "attn_q" in name else 2)
        assert np.array_equal(decoded, value), name


def test_configuration(tmp_path):
    config = open_checkpoint(write(tmp_path / "m.gguf", random_tensors())).config
    assert (config.model_type, config.hidden, config.layers, config.ffn) == ("llama", 128, 2, 192)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (4, 2, 32, 70)
    assert (config.eps, config.rope.theta, config.max_positions) == (1e-5, 10000.0, 64)
    assert not config.tied and not config.qkv_bias


def test_missing_output_is_a_tied_head(tmp_path):
    tensors = random_tensors()
    del tensors["output.weight"]
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors))
    assert checkpoint.config.tied
    with pytest.raises(MespError, match=r"holds no tensor lm_head\.weight"):
        checkpoint.matrix("lm_head.weight")


def test_qwen2_rows_are_not_permuted(tmp_path):
    sizes = {"q": 128, "k": 64, "v": 64}
    biases = {f"blk__{i}__attn_{p}__bias": (n,) for i in range(2) for p, n in sizes.items()}
    tensors = random_tensors(**biases)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors, arch="qwen2"))
    assert checkpoint.config.qkv_bias and not checkpoint.config.o_bias
    q = "model.layers.1.self_attn.q_proj"
    assert np.array_equal(checkpoint.matrix(f"{q}.weight").decode(), tensors["blk.1.attn_q.weight"])
    assert np.array_equal(checkpoint.vector(f"{q}.bias"), tensors["blk.1.attn_q.bias"])


def test_qwen3_has_query_and_key_norms(tmp_path):
    norms = {f"blk__{i}__attn_{p}_norm__weight": (32,) for i in range(2) for p in "qk"}
    tensors = random_tensors(**norms)
    checkpoint = open_checkpoint(
        write(tmp_path / "m.gguf", tensors, arch="qwen3", attention__key_length=32)
    )
    ours = checkpoint.vector("model.layers.0.self_attn.k_norm.weight")
    assert np.array_equal(ours, tensors["blk.0.attn_k_norm.weight"])


def test_llama_biases_are_permuted_with_their_rows(tmp_path):
    sizes = {"q": 128, "k": 64, "v": 64, "output": 128}
    biases = {f"blk__{i}__attn_{p}__bias": (n,) for i in range(2) for p, n in sizes.items()}
    tensors = random_tensors(**biases)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tensors))
    ours = checkpoint.vector("model.layers.0.self_attn.q_proj.bias")
    assert np.array_equal(permuted(ours, 4), tensors["blk.0.attn_q.bias"])


def llama3_factors(factor: float) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1 with heads of 32 features."""
    factors = []
    for i in range(16):
        wavelength = 2 * np.pi * 10000.0 ** (2 * i / 32)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    tensors = random_tensors() | {"rope_freqs.weight": llama3_factors(8.0)}
    scaling = open_checkpoint(write(tmp_path / "m.gguf", tensors)).config.rope.scaling
    assert scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_factors_are_refused(tmp_path):
    tensors = random_tensors() | {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight are not those of llama3"):
        open_checkpoint(write(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__dimension_count": 16}, "RoPE on 16 of 32"),
        ({"attention__key_length": 32, "attention__value_length": 16}, "value heads"),
    ],
)
def test_models_we_lack(tmp_path, metadata, message):
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(write(tmp_path / "m.gguf", random_tensors(), **metadata))


def test_architecture_we_lack(tmp_path):
    with pytest.raises(UnsupportedError, match=r"'gemma'.*llama, qwen2, qwen3"):
        open_checkpoint(write(tmp_path / "m.gguf", random_tensors(), arch="gemma"))


def test_type_we_lack_is_named(tmp_path):
    with pytest.raises(UnsupportedError, match=r"token_embd\.weight has type Q5_0"):
        open_checkpoint(write(tmp_path / "m.gguf", random_tensors(), "Q5_0"))


def test_shape_against_configuration(tmp_path):
    tensors = random_tensors() | {"blk.1.ffn_up.weight": np.zeros((160, 128), np.float32)}
    message = r"model\.layers\.1\.mlp\.up_proj\.weight has shape \(160, 128\).*\(192, 128\)"
    with pytest.raises(MespError, match=message):
        open_checkpoint(write(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize("keep", [0, 3, 10, 23, 24, 100, 700, 3000, -1])
def test_truncated(tmp_path, keep):
    path = write(tmp_path / "m.gguf", random_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MespError):
        open_checkpoint(path)


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


HOSTILE = {
    "magic": b"GGML" + bytes(40),
    "version 1": header(version=1) + bytes(40),
    "absurd tensors": header(tensors=2**63) + bytes(40),
    "absurd keys": header(keys=2**40) + bytes(40),
    "long key": header(keys=1) + string(b"k", 2**62) + bytes(40),
    "absurd array": header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(40),
    "absurd strings": header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(40),
    "nested arrays": header(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(40),
    "unknown type": header(keys=1) + string(b"k") + struct.pack("<I", 77) + bytes(40),
    "key twice": header(keys=2) + 2 * (string(b"k") + struct.pack("<IIQ", 4, 1, 0)) + bytes(40),
    "many dimensions": header(tensors=1) + string(b"t") + struct.pack("<I", 2**31) + bytes(40),
    "absurd size": header(tensors=1)
    + string(b"t")
    + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)
    + bytes(40),
    "far offset": header(tensors=1)
    + string(b"t")
    + struct.pack("<IQIQ", 1, 4, 0, 2**63)
    + bytes(40),
    "broken block": header(tensors=1)
    + string(b"t")
    + struct.pack("<IQIQ", 1, 33, 2, 0)
    + bytes(80),
    "unprintable name": header(tensors=1)
    + string(b"\x1b[2J\n")
    + struct.pack("<IQIQ", 1, 4, 0, 0)
    + bytes(40),
    "no architecture": header() + bytes(40),
    "alignment": header(keys=1)
    + string(b"general.alignment")
    + struct.pack("<II", 4, 3)
    + bytes(40),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path, case):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(MespError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_real_file_against_the_gguf_package():
    """Some tensors of each type; q and k by the definition in llama.cpp's converter."""
    smollm2 = open_checkpoint("smollm2-135m")
    reader = gguf.GGUFReader(str(smollm2.path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in ("token_embd", "blk.3.attn_q", "blk.29.attn_k", "blk.7.ffn_down", "blk.0.attn_v"):
        tensor = tensors[f"{name}.weight"]
        expected = gguf.quants.dequantize(tensor.data[:1000], tensor.tensor_type)
        decoded = smollm2.matrix(huggingface_name(tensor.name)).rows(0, 1000).decode()
        heads = {"attn_q": 9, "attn_k": 3}.get(name.rpartition(".")[2])
        assert np.array_equal(decoded if heads is None else permuted(decoded, heads), expected)
    norm = tensors["blk.4.ffn_norm.weight"].data
    assert np.array_equal(smollm2.vector("model.layers.4.post_attention_layernorm.weight"), norm)
    assert smollm2.config.tied and len(expected_shapes(smollm2.config)) == 272
