"""What is random must be the same bits everywhere: masks, first values, stochastic rounding."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np

from mesp_core.formulas.dropout import dropout_multiplier
from mesp_core.lora import LoraConfig, initial_factors, parameter_name
from mesp_core.model import Model
from mesp_core.optimizers import rounding_words
from mesp_reference.block import PROJECTIONS
from mesp_reference.check.case import Case, Problem
from mesp_reference.check.rig import Mask, Rig
from mesp_reference.check.tiny_models import NO_BIASES, in_memory
from mesp_reference.config import DecoderConfig
from mesp_reference.dropout import threefry2x32

#: SHA-256 of the float64 values that seed ``SEED`` gives one matrix, as first published.
INITIAL_VALUES = "de4a975c29e7d1ea1a9f2e0508bf607bda809b71f48fa80c36f8b397c864b18c"
SEED = 2**40 + 17
#: In the key of rounding words, so that they are not those of dropout.
ROUNDING = 0x524E4447
LOW = 0xFFFFFFFF


def _mask(rig: Rig) -> Problem:
    """Three sequences, an odd number of features, a tile from the middle."""
    batch, width, mask = rig.ragged(3, 1, 5), 13, Mask(projection=6)
    dropout = rig.dropout(mask, batch)
    backend, expected = rig.backend, mask.multiplier(batch, width)
    dtype = backend.dtype(rig.dtype)

    def reference() -> dict[str, Any]:
        return {"whole": expected, "tile": expected[:, 4:9]}

    def run() -> dict[str, Any]:
        options = {"dtype": dtype, "xp": backend.xp}
        return {
            "whole": dropout_multiplier(dropout, 0, width, **options),
            "tile": dropout_multiplier(dropout, 4, 5, **options),
        }

    return Problem({}, reference, run, exact=("whole", "tile"))


def _first_values(rig: Rig) -> Problem:
    """A fresh model's parameters: the recorded values, rounded to nearest."""
    config = DecoderConfig(hidden=13, layers=2, ffn=22, heads=6, kv_heads=2, head_dim=8, vocab=5)
    checkpoint, tensors = in_memory(rig, config, NO_BIASES, None)
    lora = LoraConfig(rank=3, dtype=rig.dtype)
    names = [
        (layer, projection, parameter_name(layer, projection, factor))
        for layer in range(config.layers)
        for projection in PROJECTIONS
        for factor in ("lora_a", "lora_b")
    ]

    def reference() -> dict[str, Any]:
        sample = initial_factors(SEED, 1, PROJECTIONS[0], 3, (48, 13))[0]
        digest = hashlib.sha256(sample.astype("<f8").tobytes()).hexdigest()
        assert digest == INITIAL_VALUES, f"first values have digest {digest[:16]}…, not the known"
        values = {}
        for layer, projection, name in names:
            shape = tensors[f"model.layers.{layer}.{projection}.weight"].shape
            pair = initial_factors(SEED, layer, projection, 3, (shape[0], shape[1]))
            values[name] = rig.round(pair[name.endswith("lora_b")])
        return values

    def run() -> dict[str, Any]:
        dtype = "float64" if rig.dtype == "float64" else "float32"
        return Model(checkpoint, rig.backend, lora, dtype, "resident", SEED).parameters

    return Problem({}, reference, run, exact=[name for _, _, name in names])


def _rounding(rig: Rig) -> Problem:
    """float32 values to bfloat16, up where the low half of the word carries the rest over."""
    shape, name, count = (19, 7), "model.layers.0.mlp.up_proj.lora_a", 11
    values = rig.generator.standard_normal(shape).astype(np.float32)
    x, backend = rig.array(values, "float32"), rig.backend

    def reference() -> dict[str, Any]:
        key = threefry2x32(
            (SEED & LOW, SEED >> 32 & LOW ^ ROUNDING), (count, zlib.crc32(name.encode()))
        )
        rows, columns = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
        words, _ = threefry2x32(key, (rows, columns))
        bits = values.view(np.uint32)
        rest, toward_zero = bits & 0xFFFF, bits & np.uint32(0xFFFF0000)
        carried = rest + (words & 0xFFFF) > 0xFFFF
        rounded = toward_zero + carried.astype(np.uint32) * np.uint32(0x10000)
        return {"words": words, "rounded": rounded.view(np.float32)}

    def run() -> dict[str, Any]:
        words = rounding_words(backend, SEED, count, name, shape)
        return {"words": words, "rounded": backend.round_stochastic(x, words, "bfloat16")}

    return Problem({}, reference, run, exact=("words", "rounded"))


CASES = (
    Case("dropout", "mask bits", _mask),
    Case("lora_init", "first values", _first_values, ("float64", "float32", "bfloat16")),
    Case("stochastic_rounding", "bits", _rounding, ("bfloat16",)),
)
