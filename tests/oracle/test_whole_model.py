"""Whole-model loss and LoRA gradients against transformers, PEFT and torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import mesp_core as mesp
from mesp_core.backend import Backend, TileSizes
from mesp_core.numpy_backend import NumpyBackend
from mesp_jax.jax_backend import JaxBackend
from mesp_mlx.mlx_backend import BLAS, MlxBackend
from mesp_reference.check.compare import assert_close, relative_error
from mesp_reference.check.tolerances import WHOLE_MODEL, bound
from mesp_torch.torch_backend import TorchBackend
from tests.oracle.huggingface_oracle import Oracle, OracleResult
from tests.oracle.tiny_models import (
    ALPHA,
    CASES,
    GROUPED_CASES,
    RANK,
    quantize_folder,
    random_adapter,
    save_random_model,
)

Saved = Callable[..., Path]
Rows = list[list[int]]

#: Tiles that divide nothing: every loop over tiles runs more than once and ends in a part.
SMALL_TILES = TileSizes(weights=800, query=4, key=3, tokens=5)


#: ``native``: what the backend does on a GPU, run on the CPU.
KINDS = ("mlx", "mlx-native", "torch", "torch-native", "jax")


@cache
def backend_of(kind: str) -> Backend:
    if kind.startswith("mlx"):
        return MlxBackend("cpu", BLAS, native=kind.endswith("native"))
    if kind.startswith("torch"):
        return TorchBackend("cpu", native=kind.endswith("native"), bf16_products=True)
    return JaxBackend("cpu")


def runs(cases: Iterable[str], compiled: Collection[str] = ()) -> list[tuple[str, str]]:
    """(kind, case), all of them, but for JAX only the cases in ``compiled`` when there are any:
    each compiles a model."""
    return [
        (kind, case)
        for kind in KINDS
        for case in cases
        if kind != "jax" or not compiled or case in compiled
    ]


def run_mesp(
    folder: Path,
    adapter: Mapping[str, np.ndarray],
    rows: Rows,
    prompts: list[int],
    *,
    backend: str | mesp.Backend = "numpy",
    dtype: str = "float64",
    lora_dtype: str | None = None,
    residency: str = "streamed",
) -> tuple[mesp.Model, mesp.Result]:
    """Our result, after a check that its gradients are exactly the parameters' names."""
    lora = mesp.LoraConfig(rank=RANK, alpha=ALPHA, dtype=lora_dtype or dtype)
    model = mesp.load_model(folder, backend=backend, lora=lora, dtype=dtype, residency=residency)
    assert model.parameters.keys() == adapter.keys()
    for name, value in adapter.items():
        model.parameters[name] = model.backend.from_numpy(value, lora.dtype)
    result = mesp.loss_and_gradients(model, mesp.Batch.from_sequences(rows, prompts))
    assert result.gradients.keys() == adapter.keys()
    return model, result


def check_against(
    expected: OracleResult, model: mesp.Model, result: mesp.Result, allowed: float
) -> None:
    assert result.tokens == expected.tokens
    assert_close(np.array(result.loss), np.array(expected.loss), allowed, name="loss")
    for name, gradient in expected.gradients.items():
        assert_close(result.gradients[name], gradient, allowed, backend=model.backend, name=name)


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize("tiles", [TileSizes(), SMALL_TILES], ids=["one_tile", "small_tiles"])
@pytest.mark.parametrize("case", CASES)
def test_numpy_float64(
    case: str, tiles: TileSizes, residency: str, saved: Saved, sequences: Rows, prompts: list[int]
) -> None:
    folder = saved(case)
    adapter = random_adapter(folder)
    expected = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    model, result = run_mesp(
        folder,
        adapter,
        sequences,
        prompts,
        backend=NumpyBackend(tiles=tiles),
        residency=residency,
    )
    check_against(expected, model, result, WHOLE_MODEL["float64"])


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize(("kind", "case"), runs(CASES))
def test_float32(
    case: str, kind: str, residency: str, saved: Saved, sequences: Rows, prompts: list[int]
) -> None:
    folder = saved(case)
    adapter = random_adapter(folder, "float32")
    expected = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    model, result = run_mesp(
        folder,
        adapter,
        sequences,
        prompts,
        backend=backend_of(kind),
        dtype="float32",
        residency=residency,
    )
    check_against(expected, model, result, WHOLE_MODEL["float32"])


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("case", ["llama", "qwen2_tied_upper_windows", "qwen3"])
def test_float64(case: str, kind: str, saved: Saved, sequences: Rows, prompts: list[int]) -> None:
    folder = saved(case)
    adapter = random_adapter(folder)
    expected = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    with jax.enable_x64(True):
        model, result = run_mesp(folder, adapter, sequences, prompts, backend=backend_of(kind))
        check_against(expected, model, result, WHOLE_MODEL["float64"])


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "case"), runs(CASES, ("llama", "qwen3_tied")))
def test_bfloat16_errs_no_more_than_peft_in_bfloat16(
    case: str, kind: str, lora_dtype: str, saved: Saved, sequences: Rows, prompts: list[int]
) -> None:
    """All three start from the same bfloat16 weights; the truth is float64 on them."""
    folder = saved(case, "bfloat16")
    adapter = random_adapter(folder, "bfloat16")
    exact = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    naive = Oracle(
        folder, adapter, dtype="bfloat16", lora_dtype=lora_dtype, lifted=False
    ).loss_and_gradients(sequences, prompts)
    model, result = run_mesp(
        folder,
        adapter,
        sequences,
        prompts,
        backend=backend_of(kind),
        dtype="bfloat16",
        lora_dtype=lora_dtype,
    )
    errors = {
        name: (
            relative_error(model.backend.to_numpy(result.gradients[name]), gradient),
            bound("bfloat16", relative_error(naive.gradients[name], gradient), WHOLE_MODEL),
        )
        for name, gradient in exact.gradients.items()
    }
    errors["loss"] = (
        abs(result.loss / exact.loss - 1.0),
        bound("bfloat16", abs(naive.loss / exact.loss - 1.0), WHOLE_MODEL),
    )
    assert {name: pair for name, pair in errors.items() if pair[0] > pair[1]} == {}


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A 4-bit folder and its dequantised copy, by the name of the case."""
    made: dict[str, tuple[Path, Path]] = {}

    def folders(case: str) -> tuple[Path, Path]:
        if case not in made:
            root = tmp_path_factory.mktemp(case)
            dense = save_random_model(GROUPED_CASES[case], root / "dense")
            quantize_folder(dense, root / "quantized", root / "dequantized")
            made[case] = root / "quantized", root / "dequantized"
        return made[case]

    return folders


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize("tiles", [TileSizes(), SMALL_TILES], ids=["one_tile", "small_tiles"])
@pytest.mark.parametrize("case", GROUPED_CASES)
def test_four_bit_base_on_numpy_float64(
    case: str,
    tiles: TileSizes,
    residency: str,
    four_bits: Callable[[str], tuple[Path, Path]],
    sequences: Rows,
    prompts: list[int],
) -> None:
    quantized, dequantized = four_bits(case)
    adapter = random_adapter(dequantized)
    expected = Oracle(dequantized, adapter).loss_and_gradients(sequences, prompts)
    model, result = run_mesp(
        quantized,
        adapter,
        sequences,
        prompts,
        backend=NumpyBackend(tiles=tiles),
        residency=residency,
    )
    check_against(expected, model, result, WHOLE_MODEL["float64"])


@pytest.mark.parametrize("residency", ["streamed", "resident"])
@pytest.mark.parametrize(("kind", "case"), runs(GROUPED_CASES))
def test_four_bit_base_in_float32(
    case: str,
    kind: str,
    residency: str,
    four_bits: Callable[[str], tuple[Path, Path]],
    sequences: Rows,
    prompts: list[int],
) -> None:
    quantized, dequantized = four_bits(case)
    adapter = random_adapter(dequantized, "float32")
    expected = Oracle(dequantized, adapter).loss_and_gradients(sequences, prompts)
    model, result = run_mesp(
        quantized,
        adapter,
        sequences,
        prompts,
        backend=backend_of(kind),
        dtype="float32",
        residency=residency,
    )
    check_against(expected, model, result, WHOLE_MODEL["float32"])


def test_the_order_of_the_sequences_does_not_matter(
    saved: Saved, sequences: Rows, prompts: list[int]
) -> None:
    folder = saved("qwen3")
    adapter = random_adapter(folder)
    expected = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    model, result = run_mesp(folder, adapter, sequences[::-1], prompts[::-1])
    check_against(expected, model, result, WHOLE_MODEL["float64"])


def test_a_wrong_scale_would_be_seen(saved: Saved, sequences: Rows, prompts: list[int]) -> None:
    """The comparison can fail: alpha off by one part in a million is far outside the bound."""
    folder = saved("llama")
    adapter = random_adapter(folder)
    expected = Oracle(folder, adapter).loss_and_gradients(sequences, prompts)
    nudged = {
        name: value * (1.0 + 1e-6) if name.endswith("lora_b") else value
        for name, value in adapter.items()
    }
    model, result = run_mesp(folder, nudged, sequences, prompts)
    with pytest.raises(AssertionError, match="loss: relative error"):
        check_against(expected, model, result, WHOLE_MODEL["float64"])
