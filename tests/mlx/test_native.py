"""The choices made for a GPU, run on MLX's CPU device: right here, fast only where Metal is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.backend import Backend
from mesp_core.formulas.activation import FORMULA
from mesp_core.lora import LoraConfig
from mesp_mlx.activations import compiled_activations, host_activations
from mesp_mlx.mlx_backend import BLAS, MlxBackend
from mesp_mlx.namespace import MlxNamespace
from mesp_reference.check import run as check
from mesp_reference.check.compare import assert_close
from mesp_reference.check.tolerances import WHOLE_MODEL, bound
from tests.tiny_reference import tiny_checkpoint

SEQUENCES = [[3, 1, 4, 1, 5, 9], [2, 6, 5], [35, 8, 9, 7, 9, 3, 2, 3]]


def native_backend() -> MlxBackend:
    return MlxBackend("cpu", BLAS, native=True)


def gradients(folder: Path, backend: Backend, **options: Any) -> mesp.Result:
    """Loss and gradients, as NumPy, of a tiny model with non-zero lora_b."""
    wide = "float64" if options.get("dtype") == "float64" else "float32"
    lora = LoraConfig(rank=3, alpha=7.0, dtype=wide)
    model = mesp.load_model(folder, backend=backend, lora=lora, **options)
    generator = np.random.default_rng(4)
    for name, value in model.parameters.items():
        if name.endswith("lora_b"):
            noise = 0.1 * generator.normal(size=tuple(value.shape))
            noise = noise.astype(np.float32)
            model.parameters[name] = backend.from_numpy(noise, wide)
        else:
            rounded = backend.to_numpy(value).astype(np.float32)
            model.parameters[name] = backend.from_numpy(rounded, wide)
    result = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(SEQUENCES))
    arrays = {name: backend.to_numpy(value) for name, value in result.gradients.items()}
    return mesp.Result(result.loss, result.tokens, arrays)


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize("bits", [0, 3, 4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_native_products_give_the_gradients_of_float64(
    tmp_path: Path, family: str, bits: int, residency: str
) -> None:
    sizes = {"hidden": 64, "ffn": 192, "head_dim": 16} if bits else {}
    if bits:
        sizes |= {"heads": 4, "kv_heads": 2}
    folder = tiny_checkpoint(tmp_path / "model", family, bits=bits, **sizes)
    truth = gradients(folder, mesp.get_backend("numpy"), dtype="float64")
    result = gradients(folder, native_backend(), dtype="float32", residency=residency)
    limit = bound("float32", table=WHOLE_MODEL)
    assert_close(result.loss, truth.loss, limit, name="loss")
    assert result.gradients.keys() == truth.gradients.keys()
    for name, gradient in result.gradients.items():
        assert_close(gradient, truth.gradients[name], limit, name=name)


def test_the_check_holds_for_a_gpus_choices() -> None:
    """What ``mesp check`` will run on a Mac, on products of every stored form."""
    report = check(native_backend(), components=["embedding", "frozen_linear", "lora_linear"])
    assert report.ok, report.misses
    assert {row.dtype for row in report.rows} == {"float32", "bfloat16", "float16"}
    assert {cell.reason for cell in report.not_applicable} == {"MLX has no float64 on a GPU"}


def test_a_streamed_matrix_reads_no_more_than_is_asked(tmp_path: Path) -> None:
    """The embedding's rows and the head's tiles, not the whole table, become MLX arrays."""
    sizes = {"hidden": 64, "ffn": 192, "head_dim": 16, "heads": 4, "kv_heads": 2, "vocab": 40009}
    folder = tiny_checkpoint(tmp_path / "model", bits=4, **sizes)
    backend = native_backend()
    model = mesp.load_model(folder, backend=backend, lora=LoraConfig(rank=3))
    rows = model.embedding.take(mx.array([5, 40008, 5]))
    whole = model.embedding.matmul(mx.eye(64))
    assert mx.allclose(rows, whole.T[mx.array([5, 40008, 5])], atol=1e-6)
    table = 40009 * 64 // 2
    del rows, whole
    backend.reset_peak()
    before = backend.memory().active or 0
    mx.eval(model.embedding.take(mx.array([5, 40008, 5])))
    assert (backend.memory().peak or 0) - before < table / 100


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("make", [compiled_activations, host_activations])
def test_activations_are_the_formula(make: Any, kind: str) -> None:
    xp = MlxNamespace()
    g = mx.array(np.linspace(-200.0, 30.0, 371, dtype=np.float32).reshape(7, 53))
    ours = make()
    act, slope = ours.with_slope(g, kind, xp=xp)
    true_act, true_slope = FORMULA.with_slope(g, kind, xp=xp)
    for actual, true in (
        (ours.value(g, kind, xp=xp), true_act),
        (act, true_act),
        (slope, true_slope),
    ):
        assert_close(np.array(actual), np.array(true), 1e-6, dtype="float32")


def test_explain_names_what_ran(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    backend = native_backend()
    gradients(folder, backend, dtype="float32")
    rows = {row.component: row for row in backend.explain()}
    assert rows["rms_norm"].name == "mx.fast.rms_norm"
    assert rows["rms_norm"].calls > 0
    assert rows["frozen_linear"].calls == 0
    assert all(row.reason for row in rows.values())


def test_stochastic_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    backend = mesp.get_backend("mlx:cpu")
    generator = np.random.default_rng(1)
    words = mx.array(generator.integers(0, 2**32, 20000, dtype=np.uint32))
    value = np.float32(1.0 + 0.3 * 2.0**-7)
    rounded = backend.round_stochastic(mx.full(20000, float(value)), words, "bfloat16")
    assert rounded.dtype == mx.bfloat16
    values = backend.to_numpy(rounded)
    assert set(np.unique(values)) == {1.0, np.float32(1.0 + 2.0**-7)}
    # The mean of n draws is off by about 0.46 ulp / √n; six of those is never seen by chance.
    assert abs(values.mean() - value) < 6 * 0.46 * 2.0**-7 / np.sqrt(20000)
    exact = mx.array([1.5, -2.0, 0.0] * 100)
    assert mx.array_equal(backend.round_stochastic(exact, words[:300], "bfloat16"), exact)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(mesp.BackendUnavailableError, match="tpu"):
        mesp.get_backend("mlx:tpu")
