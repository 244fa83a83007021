"""The pieces of a block that each framework's baseline is made of, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mesp_core.formulas.dropout import Dropout, dropout_key
from mesp_core.formulas.lora_linear import Projection
from mesp_core.stored_matrix import StoredMatrix
from mesp_reference.activation import activation_backward, activation_forward
from mesp_reference.attention import attention_backward, attention_forward, visible_keys
from mesp_reference.check.compare import assert_close
from mesp_reference.cross_entropy import (
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)
from mesp_reference.dropout import dropout_multiplier, dropout_words
from mesp_reference.lora_linear import lora_linear_backward, lora_linear_forward
from mesp_reference.rms_norm import rms_norm_backward, rms_norm_forward
from mesp_reference.rope import rope_backward, rope_forward
from tests.methods.models import DIFFERENTIATING, backend_of

N, D, F, R, H, K, E, V = 7, 6, 5, 2, 4, 2, 8, 9

#: A framework's own float32 functions, some of which approximate, by a wide margin.
ALLOWED = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 2e-2}


def normal(seed: int, *shape: int) -> np.ndarray:
    """float64 values that bfloat16 holds too."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


class Pieces:
    """One framework's pieces, in and out of NumPy."""

    def __init__(self, kind: str) -> None:
        self.backend = backend_of(kind)
        self.autodiff = self.backend.autodiff()
        if kind == "mlx":
            from mesp_mlx.autodiff import MlxAutodiff

            # Frozen products by tiles of 128 rows.
            self.autodiff = MlxAutodiff(self.backend.xp, native=False, tile_weights=1)

    def array(self, values: Any, dtype: str = "float32") -> Any:
        return self.backend.from_numpy(np.asarray(values), dtype)

    def frozen(self, weight: np.ndarray) -> Any:
        stored = StoredMatrix(values=weight.astype(np.float32))
        return self.backend.frozen(stored, "float32", "resident")

    def dropout(self, rate: float, *, seed: int, step: int) -> Dropout:
        """Of N tokens of one sequence."""
        words, key = self.backend.words, dropout_key(seed, step, 0, 0)
        sequence, position = (
            self.backend.xp.astype(self.array(part, "int32"), words.dtype)
            for part in (np.zeros(N), np.arange(N))
        )
        return Dropout(rate, key, sequence, position, words)

    def agree(
        self, function: Callable[..., Any], inputs: list[np.ndarray], truth: np.ndarray,
        backward: Callable[[np.ndarray], Any], *, dtype: str = "float32", out: str | None = None,
    ) -> None:  # fmt: skip
        """The value, in ``out`` or the dtype of the inputs, and the gradient of every input."""
        dout = normal(90, *truth.shape)
        arrays = [self.array(values, dtype) for values in inputs]
        value, gradients = self.autodiff.gradients(function, arrays, lambda value: self.array(dout))
        dtypes = [out or dtype, *[dtype] * len(inputs)]
        exact, found = [truth, *backward(dout)], [value, *gradients]
        for place, (array, true, kind) in enumerate(zip(found, exact, dtypes, strict=True)):
            name = f"place {place}"
            assert_close(array, true, ALLOWED[dtype], dtype=kind, backend=self.backend, name=name)


@pytest.fixture(scope="module", params=DIFFERENTIATING)
def pieces(request: pytest.FixtureRequest) -> Pieces:
    return Pieces(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(pieces: Pieces, plus_one: bool, dtype: str) -> None:
    """Of every head's features. The weight is wide, the norm in the dtype of x."""
    x, weight = normal(1, N, H, D), normal(2, D)
    y, saved = rms_norm_forward(x, weight, 0.3, plus_one=plus_one)
    gain = pieces.array(weight)
    pieces.agree(
        lambda x: pieces.autodiff.rms_norm(x, gain, eps=0.3, plus_one=plus_one),
        [x],
        y,
        lambda dy: rms_norm_backward(dy, saved)[:1],
        dtype=dtype,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(pieces: Pieces, interleaved: bool) -> None:
    x, position, frequencies = normal(1, N, H, E), np.arange(N), normal(2, E // 2)
    y, saved = rope_forward(x, position, frequencies, interleaved=interleaved)
    cos, sin = pieces.array(saved.cosine[:, 0]), pieces.array(saved.sine[:, 0])
    pieces.agree(
        lambda x: pieces.autodiff.rope(x, cos, sin, interleaved=interleaved),
        [x],
        y,
        lambda dy: [rope_backward(dy, saved)],
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attention(pieces: Pieces, softcap: float | None, masked: bool) -> None:
    check_attention(pieces, softcap, masked, "float32")


def test_attention_in_float64_on_jax() -> None:
    """JAX's own has a softmax in float32."""
    with jax.enable_x64(True):
        check_attention(Pieces("jax"), None, True, "float64")


def check_attention(pieces: Pieces, softcap: float | None, masked: bool, dtype: str) -> None:
    q, k, v = normal(1, N, H, E), normal(2, N, K, E), normal(3, N, K, E)
    segment = np.array([0, 0, 0, 1, 1, 2, 2] if masked else [0] * N)
    position = np.array([0, 1, 2, 0, 1, 0, 1] if masked else range(N))
    o, saved = attention_forward(q, k, v, segment, position, scale=0.6, softcap=softcap)
    seen = visible_keys(segment, position)
    plan: Any = SimpleNamespace(
        attention=SimpleNamespace(scale=0.6, softcap=softcap),
        mask=pieces.array(seen, "bool") if masked else None,
    )
    pieces.agree(
        lambda *qkv: pieces.autodiff.attention(*qkv, plan),
        [q, k, v],
        o,
        lambda do: attention_backward(do, saved),
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_linear(pieces: Pieces, dtype: str) -> None:
    """In the accumulation dtype, differentiated or not; rows that fill more than two tiles."""
    x, weight = normal(1, N, D), normal(2, 300, D)
    matrix = pieces.frozen(weight)
    plain = pieces.autodiff.frozen_linear(pieces.array(x, dtype), matrix)
    assert_close(plain, x @ weight.T, ALLOWED["float32"], dtype="float32", backend=pieces.backend)
    pieces.agree(
        lambda x: pieces.autodiff.frozen_linear(x, matrix),
        [x],
        x @ weight.T,
        lambda dy: [dy @ weight],
        dtype=dtype,
        out="float32",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["frozen", "biased", "adapted", "dropped"])
def test_lora_linear(pieces: Pieces, form: str, dtype: str) -> None:
    """Bias and factors are wide, the result is in the dtype of x."""
    x, weight, bias = normal(1, N, D), normal(2, F, D), normal(3, F)
    a, b = normal(4, D, R), normal(5, R, F)
    given: dict[str, Any] = {"bias": None if form == "frozen" else bias}
    if form in ("adapted", "dropped"):
        given |= {"lora_a": a, "lora_b": b, "scale": 1.7}
    exact, dropout = dict(given), None
    if form == "dropped":
        words = dropout_words(3, 1, 0, 0, np.zeros(N, np.int64), np.arange(N), D)
        exact["multiplier"] = dropout_multiplier(0.4, words)
        dropout = pieces.dropout(0.4, seed=3, step=1)
    y, saved = lora_linear_forward(x, weight, **exact)
    wide = {n: pieces.array(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    parts = {"bias": None, "lora_a": None, "lora_b": None, "scale": 1.0} | wide
    projection = Projection(pieces.frozen(weight), **parts)
    pieces.agree(
        lambda x: pieces.autodiff.lora_linear(x, projection, dropout),
        [x],
        y,
        lambda dy: lora_linear_backward(dy, saved)[:1],
        dtype=dtype,
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation(pieces: Pieces, kind: str) -> None:
    gate = normal(1, N, F)
    y, saved = activation_forward(gate, kind)
    pieces.agree(
        lambda gate: pieces.autodiff.activation(gate, kind),
        [gate],
        y,
        lambda dy: [activation_backward(dy, saved, kind)],
    )


def test_cross_entropy(pieces: Pieces) -> None:
    """Of a frozen head."""
    x, weight, targets = normal(1, N, D), normal(2, V, D), np.arange(N) * 4 % V
    weights = np.array([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 3.0])
    loss, saved = linear_cross_entropy_forward(x, weight, targets, weights, 1.0)
    chosen, weighed = pieces.array(targets, "int32"), pieces.array(weights)
    head = pieces.frozen(weight)
    pieces.agree(
        lambda x: pieces.autodiff.cross_entropy(
            pieces.autodiff.frozen_linear(x, head), chosen, weighed
        ),
        [x],
        np.asarray(loss),
        lambda dloss: linear_cross_entropy_backward(dloss, saved)[:1],
    )
