"""Configurations against transformers, which reads the same config.json."""

from __future__ import annotations

import json

import pytest

from mesp_core.config import ModelConfig
from mesp_core.errors import MespError, UnsupportedError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def test_families_differ_by_table(config):
    llama = ModelConfig.from_huggingface(config | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (
        True,
        True,
        True,
        False,
    )
    qwen2 = ModelConfig.from_huggingface(config | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = ModelConfig.from_huggingface(config | {"model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    mistral = ModelConfig.from_huggingface(config | {"model_type": "mistral", "sliding_window": 9})
    assert mistral.windows == (9, 9)
    open_ended = ModelConfig.from_huggingface(
        config | {"model_type": "mistral", "sliding_window": None}
    )
    assert open_ended.windows == (None, None)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_the_upper_layers(config, model_type):
    config |= {"model_type": model_type, "sliding_window": 5, "max_window_layers": 1}
    assert ModelConfig.from_huggingface(config).windows == (None, None)
    config["use_sliding_window"] = True
    assert ModelConfig.from_huggingface(config).windows == (None, 5)
    config["layer_types"] = ["sliding_attention", "full_attention"]
    assert ModelConfig.from_huggingface(config).windows == (5, None)


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}, LLAMA3, YARN])
def test_both_styles_of_rope(config, scaling):
    old = ModelConfig.from_huggingface(config | {"rope_theta": 5e5, "rope_scaling": scaling})
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    del config["rope_theta"]
    new = ModelConfig.from_huggingface(config | {"rope_parameters": parameters})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5
    assert (old.rope.scaling or {}).get("rope_type") == (
        parameters["rope_type"] if scaling else None
    )


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
def test_export_reads_back_here_and_in_transformers(config, model_type, scaling, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the reader of the export")
    config |= {
        "model_type": model_type,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e4, **(scaling or {})},
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "quantization": {"bits": 4, "group_size": 64},
    }
    ours = ModelConfig.from_huggingface(config)
    exported = ours.to_huggingface()
    assert not [key for key in exported if key.startswith("quantization")]
    again = ModelConfig.from_huggingface(exported)
    for name in ModelConfig.__dataclass_fields__:
        if name != "source":
            assert getattr(again, name) == getattr(ours, name), name
    (tmp_path / "config.json").write_text(json.dumps(exported))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.head_dim == 32
    assert theirs.rope_parameters["rope_theta"] == 7e4
    expected = "default" if scaling is None else scaling["rope_type"]
    assert theirs.rope_parameters["rope_type"] == expected


def test_partial_rotary(config):
    ours = ModelConfig.from_huggingface(config | {"partial_rotary_factor": 0.25})
    assert ours.rope.dim == 8
    assert ModelConfig.from_huggingface(ours.to_huggingface()).rope.dim == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba'.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layer to layer"),
    ],
)
def test_unsupported(config, change, message):
    with pytest.raises(UnsupportedError, match=message):
        ModelConfig.from_huggingface(config | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "lacks model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 12.5}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"head_dim": None, "hidden_size": 130}, "not a multiple"),
        ({"head_dim": 31}, "even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs factor"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor must be at most 1"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "each of the 2 layers"),
        ({"sliding_window": 4, "layer_types": [["x"]] * 2}, "layer type .'x'. is not supported"),
        ({"layer_types": [["x"]] * 2}, "layer type .'x'. is not supported"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window is in force"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
    ],
)
def test_impossible_values(config, change, message):
    with pytest.raises(MespError, match=message):
        ModelConfig.from_huggingface(config | change)
