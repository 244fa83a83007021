"""What users of other tools ran into, each a case for this one, by its number.

Cases 2, 3, 4, 5, 9, 12, 20 and 21 are in tests/training, 13 to 15 in tests/adapters and
tests/training, 7 in tests/memory.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.backend import TileSizes
from mesp_core.formulas import DenseMatrix, EagerLoops, linear_cross_entropy_forward
from mesp_core.model import Model
from mesp_core.numpy_backend import NumpyBackend
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import WHOLE_MODEL
from mesp_reference.decoder import Lora
from mesp_reference.decoder import loss_and_gradients as reference_gradients
from mesp_reference.ragged import RaggedBatch
from tests.tiny_reference import tiny_checkpoint, tiny_config, tiny_frozen

ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 35], [8, 9, 7, 9, 3]]
#: Tiles that divide nothing, so that every loop has several turns and a short last one.
TILES = TileSizes(weights=1, query=3, key=2, tokens=4)


def test_case_01_no_pad_position_is_trained() -> None:
    """mlx-lm#1697: ids 11 … 2 with a prompt of 2 have exactly the targets 13, 14, 2."""
    batch = mesp.Batch.from_sequences([[11, 12, 13, 14, 2], [7, 8]], prompt_lengths=[2, 0])
    assert batch.targets[batch.weights > 0].tolist() == [13, 14, 2, 8]
    assert batch.tokens.tolist() == [11, 12, 13, 14, 7]
    alone = mesp.Batch.from_sequences([[11, 12, 13, 14, 2]], prompt_lengths=[2])
    assert alone.target_count == 3


@pytest.mark.parametrize("tile", [1, 7, 16, 64, 500])
def test_case_08_tiled_cross_entropy_is_the_dense_one(tile: int) -> None:
    """trl#5575: a vocabulary that the tile does not divide, against dense logits."""
    generator = np.random.default_rng(8)
    x, weight = generator.normal(size=(11, 6)), generator.normal(size=(101, 6))
    targets, weights = generator.integers(0, 101, 11), generator.random(11)
    logits = x @ weight.T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    picked = p[np.arange(11), targets]
    loss, saved = linear_cross_entropy_forward(
        x, DenseMatrix(weight, np), targets, weights,
        normalizer=3.5, vocabulary_tile=tile, token_tile=4, loops=EagerLoops(), xp=np,
    )  # fmt: skip
    p[np.arange(11), targets] -= 1.0
    assert_close(loss, -(weights * np.log(picked)).sum() / 3.5, 1e-13)
    assert_close(saved.dx, (p * weights[:, None] / 3.5) @ weight, 1e-13)


def model_with_factors(folder: Path, family: str, dropout: float, backend: object) -> Model:
    """A tiny float64 model whose lora_b is not zero."""
    lora = mesp.LoraConfig(rank=3, alpha=2.1, dropout=dropout, dtype="float64")
    model = mesp.load_model(folder, backend=backend, dtype="float64", lora=lora, seed=2**33 + 5)  # type: ignore[arg-type]
    generator = np.random.default_rng(6)
    for name, value in model.parameters.items():
        model.parameters[name] = generator.normal(size=value.shape) * 0.3
    return model


def expected(model: Model, family: str, dropout: float) -> tuple[float, dict[str, np.ndarray]]:
    batch = mesp.Batch.from_sequences(ROWS, prompt_lengths=[2, 0, 1])
    assert model.lora is not None
    loss, gradients = reference_gradients(
        RaggedBatch(batch.tokens, batch.targets, batch.weights.astype(np.float64), batch.starts),
        tiny_frozen(family),
        dict(model.parameters),
        tiny_config(family),
        Lora(model.lora.scale, dropout, model.seed, model.step),
    )
    return float(loss), gradients


def agree(model: Model, family: str, dropout: float) -> None:
    loss, gradients = expected(model, family, dropout)
    batch = mesp.Batch.from_sequences(ROWS, prompt_lengths=[2, 0, 1])
    result = mesp.loss_and_gradients(model, batch)
    bound = WHOLE_MODEL["float64"]
    assert_close(result.loss, loss, bound, name="loss")
    assert result.gradients.keys() == gradients.keys()
    for name, gradient in result.gradients.items():
        assert_close(gradient, gradients[name], bound, name=name)


def test_case_10_recomputation_draws_the_same_mask(tmp_path: Path) -> None:
    """unsloth#10744: dropout 0.5 against the reference, which stores its masks; then with every
    global generator used in between, and another mask in the next step."""
    folder = tiny_checkpoint(tmp_path / "model")
    model = model_with_factors(folder, "llama", 0.5, NumpyBackend(tiles=TILES))
    agree(model, "llama", 0.5)
    before = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(ROWS))

    def use_generators(layer: int, gradients: dict[str, np.ndarray]) -> None:
        np.random.random(7)
        mx.eval(mx.random.normal((7,)))
        kept.update(gradients)

    kept: dict[str, np.ndarray] = {}
    mesp.loss_and_gradients(model, mesp.Batch.from_sequences(ROWS), on_block=use_generators)
    assert kept.keys() == before.gradients.keys()
    for name, gradient in kept.items():
        np.testing.assert_array_equal(gradient, before.gradients[name])
    model.step += 1
    agree(model, "llama", 0.5)
    assert mesp.loss_and_gradients(model, mesp.Batch.from_sequences(ROWS)).loss != before.loss


def test_case_10_reordering_a_batch_changes_no_mask(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    model = model_with_factors(folder, "llama", 0.5, NumpyBackend(tiles=TILES))
    first = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(ROWS))
    turned = mesp.Batch.from_sequences(ROWS[::-1], numbers=[2, 1, 0])
    second = mesp.loss_and_gradients(model, turned)
    for name, gradient in first.gradients.items():
        assert_close(second.gradients[name], gradient, WHOLE_MODEL["float64"], name=name)


def test_case_16_biases_of_q_k_and_v_take_part(tmp_path: Path) -> None:
    """unsloth#803, axolotl#3025: qwen2's biases, which change every gradient."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    frozen = tiny_frozen("qwen2")
    assert np.abs(frozen["model.layers.0.self_attn.k_proj.bias"]).min() > 0.0
    agree(model_with_factors(folder, "qwen2", 0.0, NumpyBackend(tiles=TILES)), "qwen2", 0.0)


@pytest.mark.parametrize("bits", [0, 4])
def test_case_17_no_dense_weight_outlives_its_product(tmp_path: Path, bits: int) -> None:
    """bitsandbytes#1935: what a forward pass leaves behind, beside its output, is nothing; a
    whole step leaves nothing either."""
    sizes = {"hidden": 64, "ffn": 256, "head_dim": 16, "heads": 4, "kv_heads": 2, "vocab": 131}
    folder = tiny_checkpoint(tmp_path / "model", bits=bits, **sizes)
    model = mesp.load_model(folder, backend="mlx:cpu", lora=mesp.LoraConfig(rank=2))
    backend = model.backend
    smallest = 64 * 32 * 4
    batch = mesp.Batch.from_sequences([list(range(1, 12))])
    mesp.evaluate(model, [batch])
    held = backend.memory().active
    left: list[int] = []

    def look(layer: int, gradients: dict[str, mx.array]) -> None:
        left.append((backend.memory().active or 0) - sum(g.nbytes for g in gradients.values()))

    mesp.loss_and_gradients(model, batch, on_block=look)
    assert held is not None and len(left) == 2
    # Alive between blocks: the batch's tables, dx and block inputs, 11 tokens of 64 floats each.
    assert max(left) - held < 16 * 11 * 64 * 4 < 6 * smallest
    backend.reset_peak()
    assert abs((backend.memory().active or 0) - held) < 1024
