"""Loss and gradients of tiny models on torch against NumPy in float64."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

import mesp_core as mesp
from mesp_core.backend import Backend, TileSizes
from mesp_core.lora import LoraConfig
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import WHOLE_MODEL, bound
from mesp_torch.torch_backend import TorchBackend
from tests.tiny_reference import tiny_checkpoint

SEQUENCES = [[3, 1, 4, 1, 5, 9], [2, 6, 5], [35, 8, 9, 7, 9, 3, 2, 3]]
GROUPED: dict[str, Any] = {
    "hidden": 64, "ffn": 192, "head_dim": 16, "heads": 4, "kv_heads": 2,
}  # fmt: skip
#: Tiles that divide nothing.
SMALL_TILES = TileSizes(weights=800, query=4, key=3, tokens=5)

#: Family, bits, what changes in config.json, rate of dropout.
CASES: dict[str, tuple[str, int, dict[str, Any], float]] = {
    "plain": ("llama", 0, {}, 0.0),
    "bias": ("qwen2", 0, {}, 0.0),
    "qk_norm": ("qwen3", 0, {}, 0.0),
    "4bit": ("llama", 4, {}, 0.0),
    "3bit_bias": ("qwen2", 3, {}, 0.0),
    "8bit": ("qwen3", 8, {}, 0.0),
    "dropout": ("llama", 0, {}, 0.3),
    "softcap": ("llama", 0, {"attn_logit_softcapping": 0.7}, 0.0),
    "window": (
        "qwen3",
        0,
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        0.0,
    ),
    "gelu": ("llama", 0, {"hidden_act": "gelu_pytorch_tanh"}, 0.2),
}


def checkpoint(folder: Path, case: str) -> Path:
    family, bits, settings, _ = CASES[case]
    tiny_checkpoint(folder, family, bits=bits, **(GROUPED if bits else {}))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return folder


def run(folder: Path, backend: Backend, dtype: str, rate: float, **options: Any) -> mesp.Result:
    """Loss and gradients, as NumPy, with a lora_b that is not zero."""
    wide = "float64" if dtype == "float64" else "float32"
    lora = LoraConfig(rank=3, alpha=7.0, dropout=rate, dtype=wide)
    model = mesp.load_model(folder, backend=backend, lora=lora, dtype=dtype, **options)
    generator = np.random.default_rng(4)
    for name, value in model.parameters.items():
        noise = 0.1 * generator.standard_normal(tuple(value.shape))
        given = noise if name.endswith("lora_b") else backend.to_numpy(value)
        model.parameters[name] = backend.from_numpy(given.astype(np.float32), wide)
    result = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(SEQUENCES))
    arrays = {name: backend.to_numpy(value) for name, value in result.gradients.items()}
    return mesp.Result(result.loss, result.tokens, arrays)


def compare(result: mesp.Result, truth: mesp.Result, limit: float) -> None:
    assert result.tokens == truth.tokens
    assert_close(result.loss, truth.loss, limit, name="loss")
    assert result.gradients.keys() == truth.gradients.keys()
    for name, gradient in result.gradients.items():
        assert_close(gradient, truth.gradients[name], limit, name=name)


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize("native", [False, True], ids=["host", "native"])
@pytest.mark.parametrize("tiles", [TileSizes(), SMALL_TILES], ids=["one_tile", "small_tiles"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_numpy_in_float64(
    tmp_path: Path, case: str, tiles: TileSizes, native: bool, residency: str
) -> None:
    folder, rate = checkpoint(tmp_path / "model", case), CASES[case][3]
    truth = run(folder, mesp.get_backend("numpy"), "float64", rate)
    for dtype in ("float64", "float32"):
        backend = TorchBackend("cpu", native=native, tiles=tiles)
        result = run(folder, backend, dtype, rate, residency=residency)
        compare(result, truth, bound(dtype, table=WHOLE_MODEL))
        reasons = {row.component: row.reason for row in backend.explain()}
        assert ("by the formula's tiles" in reasons["attention"]) == (case in ("softcap", "window"))


def test_a_call_leaves_earlier_results_as_they_were(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "4bit")
    model = mesp.load_model(folder, backend="torch:cpu", lora=LoraConfig(rank=3))
    first = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(SEQUENCES)).gradients
    kept = {name: gradient.clone() for name, gradient in first.items()}
    again = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(SEQUENCES)).gradients
    mesp.loss_and_gradients(model, mesp.Batch.from_sequences([[7, 8, 9, 10]]))
    for name, gradient in first.items():
        assert torch.equal(gradient, kept[name])
        assert torch.equal(again[name], kept[name])
        assert again[name].data_ptr() != gradient.data_ptr()


def test_a_step_of_the_real_model(tmp_path: Path) -> None:
    """smollm2-135m learns the text it is given, and starts from the loss of transformers."""
    model = mesp.load_model("smollm2-135m", backend="torch:cpu", lora=LoraConfig(rank=4))
    ids = model.checkpoint.tokenizer().encode(topics["lambda"])
    batch = mesp.Batch.from_sequences([ids])
    optimizer = mesp.AdamW(1e-3)
    losses = []
    for _ in range(2):
        result = mesp.loss_and_gradients(model, batch)
        optimizer.update(model, result.gradients)
        losses.append(result.loss)
    assert result.tokens == 111
    assert losses[0] == pytest.approx(3.3241, abs=2e-3)
    assert losses[1] < losses[0] - 0.05
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters.values())
