"""What is compiled, how often, and how much memory it takes."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mesp_core as mesp
from mesp_core.formulas import AttentionPlan, DenseMatrix, Dropout, dropout_key
from mesp_core.formulas.lora_linear import Projection
from mesp_jax.jax_backend import JaxBackend
from tests.jax.conftest import SMALL
from tests.jax.models import opened
from tests.tiny_reference import tiny_checkpoint

TOKENS, D, HEADS, E, F, V = 256, 32, 4, 16, 16384, 8192
SIZES = {"hidden": D, "heads": HEADS, "kv_heads": 2, "head_dim": E, "ffn": F, "vocab": V}


def test_new_data_compiles_nothing(tmp_path: Path) -> None:
    """Other boundaries, another length in the bucket, another step, normalizer and parameters."""
    backend = JaxBackend("cpu", tiles=SMALL)
    folder = tiny_checkpoint(tmp_path / "model", layers=3)
    # A mask on one projection of each kind: masks take most of the time to compile.
    options = {"dropout": 0.3, "targets": ("k_proj", "down_proj")}
    model = opened(folder, backend, dtype="float32", **options)
    generator = np.random.default_rng(0)

    def run(lengths: list[int], normalizer: float | None = None) -> None:
        rows = [generator.integers(0, 37, n).tolist() for n in lengths]
        mesp.loss_and_gradients(model, mesp.Batch.from_sequences(rows), normalizer=normalizer)

    run([70, 13])
    programs = backend.compiled()
    assert [p.name for p in programs] == ["block_forward", "head_loss", "block_backward"]
    model.step += 2**33
    run([3, 60, 22], normalizer=17.0)
    run([96])
    assert backend.compiled() == programs
    assert backend.bucket(96 + 5) != backend.bucket(96)


def test_components_compile_once_for_a_signature() -> None:
    backend = JaxBackend("cpu", tiles=SMALL)
    lora = backend.ops.lora_linear
    generator = np.random.default_rng(0)
    weight = backend.from_numpy(generator.normal(size=(7, 5)), "float32")
    matrix = DenseMatrix(weight, backend.xp, backend.loops)
    projection = Projection(matrix, None, jnp.ones((5, 2)), jnp.ones((2, 7)), 2.0)
    counter = jnp.arange(3, dtype=jnp.uint32)
    for step in range(3):
        dropout = Dropout(0.5, dropout_key(1, step, 0, 0), counter, counter, backend.words)
        lora.forward(jnp.full((3, 5), 1.0 + step), projection, dropout=dropout)
    attention = backend.ops.attention
    q = jnp.ones((9, 2, 4))
    for segment in ([0] * 9, [0] * 4 + [1] * 5):
        first = backend.first_key_tiles(np.asarray(segment), None)
        plan = AttentionPlan(jnp.asarray(segment), first, 0.5, query_tile=4, key_tile=4)
        attention.forward(q, q, q, plan=plan)
    assert [p.name for p in backend.compiled()] == ["lora_linear_forward", "attention_forward"]
    assert lora.calls == 3 and attention.calls == 2


def test_explain_counts_what_ran_not_what_was_traced(tmp_path: Path, backend: JaxBackend) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    model = opened(folder, backend, dtype="float32")
    batch = mesp.Batch.from_sequences([[1, 2, 3]])
    counts = []
    for _ in range(3):
        before = {row.component: row.calls for row in backend.explain()}
        mesp.loss_and_gradients(model, batch)
        counts.append(
            {row.component: row.calls - before[row.component] for row in backend.explain()}
        )
    # Two blocks: attention forward in each pass, and backward; the head once.
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["attention"] == 6 and counts[0]["gated_mlp"] == 4
    assert counts[0]["linear_cross_entropy"] == 2 and counts[0]["embedding"] == 1


def temporaries(folder: Path, tokens: int) -> dict[str, int]:
    """Temporary bytes of each stage for one sequence."""
    backend = JaxBackend("cpu", tiles=SMALL)
    model = opened(folder, backend, dtype="float32")
    mesp.loss_and_gradients(model, mesp.Batch.from_sequences([[1] * (tokens + 1)]))
    stages = ("block_forward", "block_backward", "head_loss")
    return {stage: backend.compiled(stage)[0].temporary_bytes for stage in stages}


def round_to_bfloat16(path: Path) -> None:
    tensors = {
        name: value.astype(jnp.bfloat16) if value.ndim == 2 else value
        for name, value in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("storage", ["bf16", "4bit", "8bit"])
def test_no_stage_holds_a_dense_matrix_scores_or_logits(tmp_path: Path, storage: str) -> None:
    """A few activations, a few tiles and the sums of F features by R; and twice the tokens take no
    more than a few activations more."""
    bits = {"bf16": 0, "4bit": 4, "8bit": 8}[storage]
    folder = tiny_checkpoint(tmp_path / "model", layers=1, bits=bits, **SIZES)
    if storage == "bf16":
        round_to_bfloat16(folder / "model.safetensors")
    found = temporaries(folder, TOKENS)
    activation, tile, sums = 4 * TOKENS * HEADS * E, 4 * 128 * D, 3 * 4 * F * 3
    dense, logits = 4 * F * D, 4 * TOKENS * V
    scores = 4 * HEADS * TOKENS**2
    assert found["block_forward"] <= 8 * activation + 4 * tile < min(dense, scores)
    assert found["block_backward"] <= 12 * activation + 4 * tile + sums < dense
    assert found["head_loss"] <= 4 * activation + 8 * tile < min(4 * V * D, logits)
    if storage == "4bit":
        for stage, size in temporaries(folder, 2 * TOKENS).items():
            assert size - found[stage] <= 8 * activation < 3 * scores / 4, stage
