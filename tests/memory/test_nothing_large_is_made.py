"""By mechanism: [T, T], [N, V] and dense copies of frozen matrices are never made, on NumPy."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mesp_core import Batch, LoraConfig, Model, load_model, logits, loss_and_gradients
from mesp_core.backend import TileSizes
from mesp_core.block import Block
from mesp_core.numpy_backend import NumpyBackend
from tests.memory.recorder import Recorder
from tests.tiny_reference import tiny_checkpoint

D, F, V, H, K, E = 32, 352, 1009, 6, 2, 8
T = 211
#: The smallest dense tile is 128 rows.
TILES = TileSizes(weights=1, query=16, key=24, tokens=48)
ROWS = 128
#: Matrices of more rows than a tile, (out, in).
LARGE = {(F, D), (V, D)}


@pytest.fixture(params=[0, 4], ids=["dense", "4bit"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    sizes = {"hidden": D, "ffn": F, "vocab": V, "heads": H, "kv_heads": K, "head_dim": E}
    if request.param:
        # o_proj reads H · E columns, which must be whole groups.
        sizes |= {"head_dim": 16}
    return tiny_checkpoint(tmp_path / "model", bits=request.param, **sizes)


def opened(folder: Path, recorder: Recorder | None = None, dropout: float = 0.5) -> Model:
    backend = NumpyBackend(xp=recorder or np, tiles=TILES)
    return load_model(folder, backend=backend, lora=LoraConfig(rank=3, dropout=dropout))


def batch() -> Batch:
    return Batch.from_sequences([np.random.default_rng(5).integers(0, V, T + 1).tolist()])


def test_no_scores_no_logits_no_dense_copy(folder: Path) -> None:
    recorder = Recorder()
    model = opened(folder, recorder)
    result = loss_and_gradients(model, batch())
    assert result.tokens == T and len(result.gradients) == 28

    width = H * model.config.head_dim
    assert {(T, D), (T, H, model.config.head_dim), (ROWS, D)} <= recorder.shapes
    assert recorder.square(T // 2) == []
    assert recorder.largest() <= T * width < min(T * T, T * V, V * D)
    for out, inner in LARGE:
        assert not {(out, inner), (inner, out)} & recorder.shapes


def test_the_recorder_sees_what_must_not_be_made(folder: Path) -> None:
    """Scores, logits and a dense head, made on purpose by a function, an operator and a matrix."""
    recorder = Recorder()
    model = opened(folder, recorder)
    q = recorder.ones((T, E))
    scores = recorder.matmul(q, recorder.matrix_transpose(q))
    assert (T, T) in recorder.shapes and recorder.square(T // 2) == [(T, T)]

    recorder.shapes.clear()
    doubled = scores * 2.0
    assert recorder.square(T // 2) == [(T, T)]
    recorder.shapes.clear()
    assert doubled[1:].shape in recorder.shapes

    recorder.shapes.clear()
    logits(model, batch())
    assert (T, V) in recorder.shapes and recorder.largest() >= T * V

    recorder.shapes.clear()
    model.head.weight.dense()
    assert (V, D) in recorder.shapes


def test_bytes_alive_at_once(folder: Path) -> None:
    """What Python's own allocation tracing counts, temporaries of the decoding included: less
    than the logits, and less than the dense weights of one block and the head."""
    model = opened(folder, dropout=0.0)
    rows = batch()
    loss_and_gradients(model, rows)  # imports and caches of the first call do not count
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    loss_and_gradients(model, rows, on_block=lambda layer, gradients: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 4 * T * V
    # Per token: the checkpoints and the live intermediates of one block.
    width = H * model.config.head_dim
    allowed = 4 * T * (model.config.layers * D + 12 * max(D, width)) + 4 * 8 * ROWS * D
    assert peak - before < allowed


def test_a_block_holds_no_dense_matrix(folder: Path) -> None:
    """What outlives the forward pass of a block are views of the file, not decoded values."""
    model = opened(folder)
    block: Block = model.block(0)
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        stored = getattr(block, name).weight.stored
        parts = [part for part in (stored.values, stored.codes) if part is not None]
        assert parts and not any(part.flags.owndata for part in parts)
