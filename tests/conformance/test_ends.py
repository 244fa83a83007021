"""Both ends of the decoder against the reference: embedding and linear cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mesp_core.formulas import DenseMatrix
from mesp_core.formulas.loops import arrays_in
from mesp_core.head import Head, HeadPlan, head_logits, head_loss
from mesp_core.numpy_backend import NumpyBackend
from mesp_reference import cross_entropy as reference_loss
from mesp_reference import embedding as reference_embedding
from mesp_reference import rms_norm as reference_norm
from mesp_reference.check.compare import assert_close
from mesp_reference.check.naive import round_to
from mesp_reference.check.tolerances import TOLERANCES
from mesp_reference.quantization import dequantize, quantize
from tests.conformance.agreement import check, draw
from tests.conformance.subjects import Subject

N, V, D = 9, 37, 11
TOKENS = np.array([3, 36, 0, 3, 17, 3, 36, 5, 1])
TARGETS = np.array([36, 0, 7, 7, 31, 32, 8, 16, 24])


@pytest.mark.parametrize("tile", [8, 37, 64])
def test_embedding(subject: Subject, tile: int) -> None:
    values = draw(16, subject.dtype, table=(V, D), dout=(N, D))

    def expected(table: Any, dout: Any) -> dict[str, Any]:
        out, saved = reference_embedding.embedding_forward(TOKENS, table)
        return {"out": out, "dtable": reference_embedding.embedding_backward(dout, saved)}

    tokens = subject.array(TOKENS, "int32")
    dtype = subject.native_dtype(subject.dtype)
    embedding = subject.ops.embedding
    out, saved = embedding.forward(tokens, subject.dense(values["table"]), dtype=dtype)
    assert saved is None
    dtable = embedding.backward(subject.array(values["dout"]), saved, tokens, V, tile=tile)
    check(subject, {"out": out, "dtable": dtable}, expected, values, wide=("dtable",))


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "quantised"])
@pytest.mark.parametrize("gradient", [True, False], ids=["gradient", "loss_only"])
@pytest.mark.parametrize(("vocabulary_tile", "token_tile"), [(8, 4), (5, 9), (64, 64), (12, 1)])
def test_linear_cross_entropy(
    subject: Subject, quantized: bool, gradient: bool, vocabulary_tile: int, token_tile: int
) -> None:
    """The vocabulary is not a multiple of its tile; targets lie in the first, the last and a
    short tile; some weights are zero."""
    values, weight = _case(subject, quantized)

    def expected(x: Any, weight: Any, weights: Any) -> dict[str, Any]:
        loss, saved = reference_loss.linear_cross_entropy_forward(x, weight, TARGETS, weights, 3.3)
        dx, _ = reference_loss.linear_cross_entropy_backward(0.6, saved)
        return {"loss": np.array(loss), "dx": dx if gradient else None}

    loss, saved = subject.ops.linear_cross_entropy.forward(
        subject.array(values["x"]),
        weight,
        subject.array(TARGETS, "int32"),
        subject.array(values["weights"], subject.wide),
        normalizer=3.3,
        gradient=gradient,
        vocabulary_tile=vocabulary_tile,
        token_tile=token_tile,
    )
    subject.keep(saved)
    assert loss.shape == ()
    dx = subject.ops.linear_cross_entropy.backward(0.6, saved) if gradient else saved.dx
    check(subject, {"loss": loss, "dx": dx}, expected, values, wide=("loss",))
    if gradient:
        masked = np.flatnonzero(values["weights"] == 0.0)
        assert len(masked) == 2
        assert not subject.numpy(dx)[masked].any()
    else:
        with pytest.raises(ValueError, match="gradient=False"):
            subject.ops.linear_cross_entropy.backward(0.6, saved)


class Staged(NumpyBackend):
    """Writes down the shapes of what a lazy library would compute, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[tuple[int, ...]]] = []

    def stage(self, *trees: Any) -> None:
        self.shapes.append([array.shape for array in arrays_in(trees)])


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_head(dtype: str, gradient: bool) -> None:
    """The last norm, the products and the loss, step by step and in the accumulation dtype."""
    backend, wide = Staged(), "float64" if dtype == "float64" else "float32"
    values = draw(20, dtype, x=(N, D), norm=(D,), weight=(V, D))
    weights = np.linspace(0.5, 1.5, N)
    head = Head(values["norm"].astype(wide), DenseMatrix(values["weight"].astype(dtype), np))
    plan = HeadPlan(eps=1e-5, norm_plus_one=True, vocabulary_tile=8, token_tile=4)
    tools: dict[str, Any] = {"plan": plan, "ops": backend.ops, "backend": backend}
    x = values["x"].astype(dtype)
    loss, dx = head_loss(x, head, TARGETS, weights.astype(wide), 3.3, gradient=gradient, **tools)
    # NumPy's float64 scalar is a Python float, no array.
    scalar = [] if wide == "float64" else [()]
    grown = [(N, D)] if gradient else []
    assert backend.shapes == [[(N, D), (N, 1)], scalar + grown, *([grown] if gradient else [])]
    backend.shapes.clear()
    logits = head_logits(x, head, **tools)
    assert backend.shapes == [[(N, V)]]

    normed, norm = reference_norm.rms_norm_forward(values["x"], 1.0 + values["norm"], 1e-5)
    expected, saved = reference_loss.linear_cross_entropy_forward(
        normed, values["weight"], TARGETS, weights, 3.3
    )
    assert_close(logits, normed @ values["weight"].T, TOLERANCES[wide], dtype=wide)
    assert_close(loss, np.array(expected), TOLERANCES[wide], dtype=wide)
    assert (dx is not None) == gradient
    if gradient:
        dnormed, _ = reference_loss.linear_cross_entropy_backward(1.0, saved)
        true, _ = reference_norm.rms_norm_backward(dnormed, norm)
        assert_close(dx, true, 4 * TOLERANCES[wide], dtype=wide)


def _case(subject: Subject, quantized: bool) -> tuple[dict[str, np.ndarray], Any]:
    weights = np.array([1.0, 0.0, 0.5, 2.0, 1.0, 0.0, 0.25, 1.0, 1.5])
    width = 32 if quantized else D
    values = draw(17, subject.dtype, x=(N, width), weight=(V, width)) | {"weights": weights}
    if not quantized:
        return values, subject.dense(values["weight"])
    packed, scales, biases = quantize(values["weight"], 32, 4)
    scales, biases = (round_to(part, subject.dtype) for part in (scales, biases))
    values["weight"] = dequantize(packed, scales, biases, 32, 4)
    return values, subject.quantized(packed, scales, biases, 4, 32)


def test_every_target_masked(subject: Subject) -> None:
    """Loss 0 and a gradient of zeros, with the normalizer 1 that an empty batch gets."""
    values = draw(18, subject.dtype, x=(N, D), weight=(V, D))
    loss, saved = subject.ops.linear_cross_entropy.forward(
        subject.array(values["x"]),
        subject.dense(values["weight"]),
        subject.array(TARGETS, "int32"),
        subject.array(np.zeros(N), subject.wide),
        normalizer=1.0,
        vocabulary_tile=8,
        token_tile=4,
    )
    assert float(loss) == 0.0
    assert not subject.numpy(subject.ops.linear_cross_entropy.backward(1.0, saved)).any()


def test_far_apart_logits(subject: Subject) -> None:
    """Logits of ± hundreds, whose exponentials overflow every dtype but float64."""
    values = draw(19, subject.dtype, x=(N, D), weight=(V, D))
    values["x"] = values["x"] * 32.0

    def expected(x: Any, weight: Any) -> dict[str, Any]:
        loss, _ = reference_loss.linear_cross_entropy_forward(x, weight, TARGETS, np.ones(N))
        return {"loss": np.array(loss)}

    loss, _ = subject.ops.linear_cross_entropy.forward(
        subject.array(values["x"]),
        subject.dense(values["weight"]),
        subject.array(TARGETS, "int32"),
        subject.array(np.ones(N), subject.wide),
        normalizer=float(N),
        vocabulary_tile=8,
        token_tile=4,
    )
    check(subject, {"loss": loss}, expected, values, wide=("loss",))
