"""One decoder block through ``Backend.run``, and whole models from a folder on the disk."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.batch import Batch
from mesp_core.decoder import Pass
from mesp_core.lora import LoraConfig
from mesp_core.methods.gradients import loss_and_gradients
from mesp_core.model import Model, load_model
from mesp_reference import block, decoder
from mesp_reference.check.case import DTYPES, WIDE_DTYPES, Case, Problem
from mesp_reference.check.rig import Packing, Ragged, Rig
from mesp_reference.check.tiny_models import NO_BIASES, Biases, in_memory, write_folder
from mesp_reference.check.tolerances import BLOCK, WHOLE_MODEL
from mesp_reference.config import DecoderConfig
from mesp_reference.ragged import RaggedBatch
from mesp_reference.random_decoder import random_lora

ALPHA, SEED, STEP = 2.1, 2**40 + 17, 5
TINY = DecoderConfig(
    hidden=13, layers=1, ffn=22, heads=6, kv_heads=2, head_dim=8, vocab=37, eps=1e-5
)
SMALL = DecoderConfig(
    hidden=576, layers=1, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=5, eps=1e-5
)
EVERY_OPTION = replace(
    TINY,
    activation="gelu_tanh",
    norm_plus_one=True,
    qk_norm=True,
    softcap=1.5,
    window=3,
    interleaved=True,
    partial_rotary=0.5,
)
ALL = block.PROJECTIONS
SHORT = {name.rpartition(".")[2].removesuffix("_proj"): name for name in ALL}


def _block(
    rig: Rig,
    *,
    config: DecoderConfig,
    biases: Biases = NO_BIASES,
    packing: Packing = None,
    rank: int = 3,
    dropout: float = 0.0,
    targets: tuple[str, ...] = ALL,
    lengths: tuple[int, ...] = (4, 3),
    input_gradient: bool = True,
) -> Problem:
    checkpoint, tensors = in_memory(rig, config, biases, packing)
    lora = LoraConfig(rank, ALPHA, dropout, targets, dtype=rig.wide)
    model = Model(checkpoint, rig.backend, lora, rig.dtype, "resident", SEED)
    parameters = _draw_parameters(rig, model, config, rank, targets)
    batch = rig.ragged(*lengths)
    run = Pass(model, _batch(rig, batch, config.vocab)[0], training=True)
    prefix = "model.layers.0."
    own = {name: value for name, value in tensors.items() if name.startswith(prefix)}
    size = (batch.tokens, config.hidden)
    inputs = {**own, **parameters, **rig.draw(x=size, dout=size)}
    reference_lora = decoder.Lora(lora.scale, dropout, SEED, STEP)

    def reference(**values: Any) -> dict[str, Any]:
        pair = batch.segment, batch.position
        weights = decoder.block_parameters(0, values, values, config, reference_lora, *pair)
        out, saved = block.block_forward(values["x"], weights, config, *pair)
        dx, gradients = block.block_backward(values["dout"], saved)
        return {"out": out, "dx": dx if input_gradient else None, **gradients}

    def compute() -> dict[str, Any]:
        out = run.forward(rig.array(inputs["x"]), 0)
        # The backward pass may overwrite both arrays.
        dout, x = rig.owned(inputs["dout"], rig.wide), rig.owned(inputs["x"])
        dx, pairs = run.backward(dout, x, 0, input_gradient=input_gradient)
        outputs = {"out": out, "dx": dx}
        for short, pair in pairs.items():
            if pair is not None:
                outputs[f"{SHORT[short]}.lora_a"] = pair.da
                outputs[f"{SHORT[short]}.lora_b"] = pair.db
        return outputs

    wide = ["dx", *(f"{name}.{factor}" for name in targets for factor in ("lora_a", "lora_b"))]
    return Problem(inputs, reference, compute, wide, after_narrow=wide, table=BLOCK)


def _model(
    rig: Rig,
    *,
    family: str,
    config: DecoderConfig,
    biases: Biases = NO_BIASES,
    layers: int = 0,
) -> Problem:
    """Loss and gradients by the product's own entry. layers: how many are adapted, 0 for all."""
    rank = 3
    lora = LoraConfig(rank, ALPHA, layers=layers, dtype=rig.wide)
    # On some systems a mapped file cannot be removed: what stays is a few kilobytes.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tensors = write_folder(rig, Path(folder), family, config, biases)
        model = load_model(folder, backend=rig.backend, lora=lora, dtype=rig.dtype, seed=SEED)
    parameters = _draw_parameters(rig, model, config, rank, ALL)
    ragged = rig.ragged(5, 1, 6)
    batch, ragged_batch = _batch(rig, ragged, config.vocab)
    inputs = {**tensors, **parameters}

    def reference(**values: Any) -> dict[str, Any]:
        loss, gradients = decoder.loss_and_gradients(
            ragged_batch, values, values, config, decoder.Lora(lora.scale)
        )
        return {"loss": loss, **{name: gradients[name] for name in parameters}}

    def compute() -> dict[str, Any]:
        result = loss_and_gradients(model, batch)
        model.close()
        return {"loss": result.loss, **result.gradients}

    wide = ["loss", *parameters]
    return Problem(inputs, reference, compute, wide, after_narrow=wide, table=WHOLE_MODEL)


def _draw_parameters(
    rig: Rig, model: Model, config: DecoderConfig, rank: int, targets: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Gives the model random parameters, both factors non-zero; returns their values."""
    drawn = random_lora(config, rank, rig.generator, targets)
    values = {name: rig.round(drawn[name]) for name in model.parameters}
    model.parameters = {name: rig.array(value, rig.wide) for name, value in values.items()}
    model.step = STEP
    return values


def _batch(rig: Rig, ragged: Ragged, vocabulary: int) -> tuple[Batch, RaggedBatch]:
    """Random ids, the first target of every sequence masked where it has more than one."""
    lengths = ragged.lengths
    rows = [rig.generator.integers(0, vocabulary, length + 1).tolist() for length in lengths]
    batch = Batch.from_sequences(rows, [2 if length > 1 else 0 for length in lengths])
    # The reference divides these by their sum, which in float32 would not be float64's quotient.
    weights = batch.weights.astype(np.float64)
    return batch, RaggedBatch(batch.tokens, batch.targets, weights, batch.starts)


def _block_case(name: str, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> Case:
    return Case("block", name, partial(_block, **options), dtypes)


def _model_case(name: str, dtypes: tuple[str, ...] = DTYPES, **options: Any) -> Case:
    return Case("model", name, partial(_model, **options), dtypes)


CASES = (
    _block_case(
        "every option",
        WIDE_DTYPES,
        config=EVERY_OPTION,
        biases=Biases(True, True, True),
        dropout=0.2,
    ),
    _block_case(
        "q and v alone, no input gradient",
        (*WIDE_DTYPES, "float16"),
        config=TINY,
        targets=(SHORT["q"], SHORT["v"]),
        input_gradient=False,
    ),
    _block_case(
        "SmolLM2-135M's, 4 bits",
        (*WIDE_DTYPES, "bfloat16"),
        config=SMALL,
        packing=(4, 64),
        rank=8,
        lengths=(131, 58),
    ),
    _model_case("llama, tied", family="llama", config=replace(TINY, layers=2, tied=True)),
    _model_case(
        "qwen3, biases, last block adapted",
        WIDE_DTYPES,
        family="qwen3",
        config=replace(TINY, layers=2, qk_norm=True),
        biases=Biases(True, True),
        layers=1,
    ),
)
