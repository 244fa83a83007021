"""The decoder block, forward and backward, against the reference's block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mesp_core.block import Block, BlockPlan, block_backward, block_forward
from mesp_core.formulas import (
    AttentionPlan,
    MlpPlan,
    Projection,
    first_key_tiles,
    rope_tables,
)
from mesp_core.formulas.loops import arrays_in
from mesp_core.numpy_backend import NumpyBackend
from mesp_reference import block as reference
from mesp_reference.check.naive import round_to
from mesp_reference.check.tolerances import BLOCK
from mesp_reference.config import DecoderConfig
from mesp_reference.decoder import Lora, block_parameters
from mesp_reference.random_decoder import random_frozen, random_lora
from mesp_reference.rope import rope_frequencies
from tests.conformance.agreement import check
from tests.conformance.masks import POSITION, SEGMENT, Mask
from tests.conformance.subjects import Subject

SHORT = ("q", "k", "v", "o", "gate", "up", "down")
NAMES = dict(zip(SHORT, reference.PROJECTIONS, strict=True))
SHAPE = {
    "hidden": 13, "layers": 1, "ffn": 22, "heads": 6, "kv_heads": 2, "head_dim": 8, "vocab": 5,
    "eps": 1e-5,
}  # fmt: skip
N, D, R = len(SEGMENT), SHAPE["hidden"], 3
QUERY_TILE, KEY_TILE = 3, 2
LORA = Lora(scale=0.7, dropout=0.5, seed=2**40 + 17, step=5)
LAYER = 0


@dataclass(frozen=True)
class Case:
    config: DecoderConfig
    biases: bool = False
    dropout: bool = False
    targets: tuple[str, ...] = reference.PROJECTIONS


CASES = {
    "llama": Case(DecoderConfig(**SHAPE)),
    "qwen2": Case(DecoderConfig(**SHAPE), biases=True),
    "qwen3": Case(DecoderConfig(**SHAPE, qk_norm=True)),
    "mistral": Case(DecoderConfig(**SHAPE, window=2)),
    "dropout": Case(DecoderConfig(**SHAPE, qk_norm=True), biases=True, dropout=True),
    "gemma_like": Case(
        DecoderConfig(
            **SHAPE,
            activation="gelu_tanh",
            norm_plus_one=True,
            qk_norm=True,
            softcap=1.5,
            interleaved=True,
            partial_rotary=0.5,
        )
    ),
    "attention_only": Case(DecoderConfig(**SHAPE), targets=(NAMES["q"], NAMES["v"])),
    "mlp_only": Case(DecoderConfig(**SHAPE), dropout=True, targets=(NAMES["down"],)),
}


@pytest.mark.parametrize("input_gradient", [True, False], ids=["dx", "no_dx"])
@pytest.mark.parametrize("name", CASES)
def test_block(subject: Subject, name: str, input_gradient: bool) -> None:
    case = CASES[name]
    generator = np.random.default_rng(20)
    tensors = random_frozen(case.config, generator, biases=case.biases)
    tensors |= random_lora(case.config, R, generator, case.targets)
    tensors |= {key: generator.standard_normal((N, D)) for key in ("x", "dout")}
    values = {
        key: round_to(value, subject.dtype)
        for key, value in tensors.items()
        if key in ("x", "dout") or f"layers.{LAYER}." in key
    }
    lora = LORA if case.dropout else Lora(LORA.scale)

    def expected(**inputs: Any) -> dict[str, Any]:
        tensors = {key: value for key, value in inputs.items() if key not in ("x", "dout")}
        parameters = block_parameters(LAYER, tensors, tensors, case.config, lora, SEGMENT, POSITION)
        out, saved = reference.block_forward(
            inputs["x"], parameters, case.config, SEGMENT, POSITION
        )
        dx, gradients = reference.block_backward(inputs["dout"], saved)
        return {"out": out, "dx": dx if input_gradient else None, **gradients}

    block, plan = _block(subject, case, values), _plan(subject, case)
    x = subject.array(values["x"])
    out = subject.run(block_forward, x, block, plan)
    # The gradient handed over may be overwritten, so it is not among what must stay as it was.
    dout = subject.backend.from_numpy(values["dout"], subject.wide)
    dx, gradients = subject.run(block_backward, dout, x, block, plan, input_gradient=input_gradient)
    assert gradients.keys() == set(SHORT)
    outputs = {"out": out, "dx": dx}
    for short, pair in gradients.items():
        assert (pair is not None) == (NAMES[short] in case.targets)
        if pair is not None:
            outputs |= {f"{NAMES[short]}.lora_a": pair.da, f"{NAMES[short]}.lora_b": pair.db}
    wide = [key for key in outputs if key != "out"]
    check(subject, outputs, expected, values, wide=wide, through_narrow=True, table=BLOCK)


def _arguments(name: str, dtype: str = "float64") -> tuple[Subject, Any, Any, Block, BlockPlan]:
    """The subject, dout, x, block and plan of a case on NumPy."""
    case, generator = CASES[name], np.random.default_rng(20)
    subject = Subject("numpy", dtype)
    tensors = random_frozen(case.config, generator, biases=case.biases)
    tensors |= random_lora(case.config, R, generator, case.targets)
    dout, x = generator.standard_normal((2, N, D))
    return (
        subject,
        dout.astype(subject.wide),
        x.astype(dtype),
        _block(subject, case, tensors),
        _plan(subject, case),
    )


def test_products_that_are_kept_are_those_that_would_be_made_again() -> None:
    subject, dout, x, block, plan = _arguments("dropout")
    dx, gradients = subject.run(block_backward, dout, x, block, plan)
    assert dx is not None
    low_rank: list[bool] = []
    ops = subject.ops

    def backward(*args: Any, **options: Any) -> Any:
        low_rank.append(args[1].h is not None)
        return ops.lora_linear.run_backward(*args, **options)

    component = replace(ops.lora_linear, run_backward=backward)
    for store_h in (True, False):
        kept, found = block_backward(
            dout,
            x,
            block,
            plan,
            store_h=store_h,
            ops=ops.with_component(component),
            backend=subject.backend,
        )
        assert low_rank == [store_h] * 4
        low_rank.clear()
        np.testing.assert_array_equal(kept, dx)
        for name, pair in gradients.items():
            np.testing.assert_array_equal(found[name].da, pair.da)
            np.testing.assert_array_equal(found[name].db, pair.db)


class Staged(NumpyBackend):
    """Writes down the shapes of what a lazy library would compute, call by call, and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[tuple[int, ...]]] = []
        self.dtypes: list[np.dtype] = []

    def stage(self, *trees: Any) -> None:
        self.shapes.append([array.shape for array in arrays_in(trees)])
        self.dtypes += [array.dtype for array in arrays_in(trees)]


def test_between_its_ends_a_block_is_wide() -> None:
    """A 16-bit model rounds once a block."""
    subject, dout, x, block, plan = _arguments("qwen3", "float16")
    backend = Staged()
    out = block_forward(x, block, plan, ops=subject.ops, backend=backend)
    assert out.dtype == backend.dtypes.pop() == np.float16
    block_backward(dout, x, block, plan, ops=subject.ops, backend=backend)
    assert set(backend.dtypes) == {np.dtype(np.float32)}


def test_a_lazy_library_computes_step_by_step() -> None:
    """So that it can drop each step's inputs: the order of deaths in docs/block.md."""
    subject, dout, x, block, plan = _arguments("qwen3")
    rows, q, k = (N, D), (N, SHAPE["heads"], 8), (N, SHAPE["kv_heads"], 8)

    def pairs(*names: str) -> list[tuple[int, ...]]:
        weights = (getattr(block, name).weight.shape for name in names)
        return [shape for out, width in weights for shape in ((width, R), (R, out))]

    backend = Staged()
    block_forward(x, block, plan, ops=subject.ops, backend=backend)
    heads = [[rows], [q], [k], [k], [q, k]]
    assert backend.shapes == [*heads, [q], [rows], [rows]]
    for input_gradient in (True, False):
        backend = Staged()
        block_backward(
            dout, x, block, plan, input_gradient=input_gradient, ops=subject.ops, backend=backend
        )
        summed = [rows] if input_gradient else []
        assert backend.shapes == [
            *heads,
            [q, q[:2]],
            [rows],
            [rows, *pairs("gate", "up", "down")],
            [rows],
            [q, *pairs("o")],
            [q, k, k],
            [(N, q[1] * 8), (N, k[1] * 8), (N, k[1] * 8)],
            [rows, (N, 1)],
            *([*summed, *pairs(name)] for name in ("q", "k", "v")),
            *([summed] if input_gradient else []),
        ]


def _block(subject: Subject, case: Case, values: dict[str, np.ndarray]) -> Block:
    prefix = f"model.layers.{LAYER}."

    def vector(key: str) -> Any:
        value = values.get(prefix + key)
        return None if value is None else subject.array(value, subject.wide)

    projections = {
        short: Projection(
            subject.dense(values[f"{prefix}{name}.weight"]),
            vector(f"{name}.bias"),
            vector(f"{name}.lora_a"),
            vector(f"{name}.lora_b"),
            LORA.scale,
        )
        for short, name in NAMES.items()
    }
    return Block(
        input_norm=vector("input_layernorm.weight"),
        post_norm=vector("post_attention_layernorm.weight"),
        q_norm=vector("self_attn.q_norm.weight"),
        k_norm=vector("self_attn.k_norm.weight"),
        **projections,
    )


def _plan(subject: Subject, case: Case) -> BlockPlan:
    config = case.config
    inv_freq, factor = rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, config.partial_rotary
    )
    cos, sin = rope_tables(POSITION.astype(np.float64), inv_freq, factor, xp=np)
    drops = [
        Mask(number, LORA.dropout, LORA.seed, LORA.step, LAYER).dropout(subject)
        if case.dropout
        else None
        for number in range(7)
    ]
    return BlockPlan(
        heads=config.heads,
        kv_heads=config.kv_heads,
        eps=config.eps,
        norm_plus_one=config.norm_plus_one,
        interleaved=config.interleaved,
        cos=subject.array(cos, subject.wide),
        sin=subject.array(sin, subject.wide),
        attention=AttentionPlan(
            segment=subject.array(SEGMENT.astype(np.int32), "int32"),
            first_key_tile=first_key_tiles(SEGMENT.tolist(), QUERY_TILE, KEY_TILE, config.window),
            scale=config.head_dim**-0.5,
            window=config.window,
            softcap=config.softcap,
            query_tile=QUERY_TILE,
            key_tile=KEY_TILE,
        ),
        mlp=MlpPlan(config.activation, 8, 3, (drops[4], drops[5], drops[6])),
        dropouts=(drops[0], drops[1], drops[2], drops[3]),
    )
