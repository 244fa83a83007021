"""A training run repeated on another backend: the same values to start from, the same masks, the
same losses."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np

import mesp_core as mesp

#: Four rows, five times each. Three blocks are trained: drawing masks for all thirty takes minutes
#: where every mask is a hundred passes over small arrays.
ROUNDS, ROWS, TOKENS, LAYERS = 5, 4, 16, 3
BACKENDS = ("mlx:cpu", "jax:cpu", "torch:cpu")


def losses(backend: str, rows: list[list[int]]) -> list[float]:
    """Of 20 updates, dropout included."""
    lora = mesp.LoraConfig(rank=8, dropout=0.1, layers=LAYERS)
    model = mesp.load_model("smollm2-135m", backend=backend, lora=lora, seed=7)
    optimizer = mesp.AdamW(1e-3)
    found = []
    for row in rows:
        result = mesp.loss_and_gradients(model, mesp.Batch.from_sequences([row]))
        optimizer.update(model, result.gradients)
        model.step += 1
        found.append(result.loss)
    return found


def test_twenty_updates_follow_the_same_curve_on_every_backend() -> None:
    tokenizer = mesp.load_model("smollm2-135m", backend="numpy").checkpoint.tokenizer()
    ids = tokenizer.encode(topics["with"])
    rows = [ids[TOKENS * i : TOKENS * (i + 1) + 1] for i in range(ROWS)] * ROUNDS
    assert len(rows) == 20 and all(len(row) == TOKENS + 1 for row in rows)
    curves = np.array([losses(backend, rows) for backend in BACKENDS])
    assert np.abs(curves - curves[0]).max() <= 1e-3
    # They learn, and do not agree because nothing moves.
    assert curves[0][-ROWS:].mean() < curves[0][:ROWS].mean() - 0.3
