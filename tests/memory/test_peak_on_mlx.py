"""The peak of MLX's allocator over tokens, vocabulary and depth, and on a real model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mesp_core import Batch, LoraConfig, get_backend, load_model, loss_and_gradients
from mesp_core.backend import TileSizes
from tests.tiny_reference import tiny_checkpoint

D = 64
TILES = TileSizes(weights=1, query=32, key=32, tokens=64)
ROOT = Path(__file__).parents[2]


class Peak(NamedTuple):
    """Bytes of MLX's allocator over what was held before, and of NumPy's own arrays."""

    mlx: int
    numpy: int


def peak(
    folder: Path, tokens: int, *, vocab: int = 131, layers: int = 2, lazy: bool = False,
    keep: bool = False,
) -> Peak:  # fmt: skip
    """Of one loss_and_gradients on one sequence; each block's gradients dropped unless ``keep``.

    lazy: MLX's own products, evaluated when something asks for them, as with a system's BLAS.
    """
    from mesp_mlx.blas import Blas
    from mesp_mlx.mlx_backend import BLAS, MlxBackend

    get_backend("mlx:cpu")
    blas = Blas("MLX's own", False, "asked for") if lazy else BLAS
    backend = MlxBackend("cpu", blas, False, TILES)
    sizes = {"hidden": D, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 160}
    tiny_checkpoint(folder / f"{vocab}-{layers}", vocab=vocab, layers=layers, **sizes)
    model = load_model(folder / f"{vocab}-{layers}", backend=backend, lora=LoraConfig(rank=2))
    ids = np.random.default_rng(0).integers(0, vocab, tokens + 1).tolist()
    batch = Batch.from_sequences([ids])
    # What Python makes on a first call (caches, lazy imports) is no array of ours.
    loss_and_gradients(model, Batch.from_sequences([ids[:9]]), on_block=lambda *_: None)
    backend.reset_peak()
    held = backend.memory().active
    tracemalloc.start()
    on_block = None if keep else lambda layer, gradients: None
    result = loss_and_gradients(model, batch, on_block=on_block)
    del result
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report = backend.memory()
    assert held is not None and report.peak is not None
    return Peak(report.peak - held, numpy_peak)


@pytest.mark.parametrize("lazy", [False, True])
def test_gradients_that_are_kept_keep_nothing_else(tmp_path: Path, lazy: bool) -> None:
    """A lazy gradient would hold the arrays it is made of, two of [N, D] a block: 570 kB more when
    only that of o is. The peak lies in the last block, before gradients add up: they cost nothing.
    """
    dropped = peak(tmp_path, 512, layers=5, lazy=lazy).mlx
    kept = peak(tmp_path, 512, layers=5, lazy=lazy, keep=True).mlx
    assert kept - dropped <= 1 << 17


@pytest.mark.parametrize("layers", [2, 5])
def test_the_peak_is_linear_in_tokens(tmp_path: Path, layers: int) -> None:
    """Case 7 on MLX: doubling T doubles the growth, where [T, T] would quadruple it; and the
    slope is a checkpoint a block and ten rows of D more, in float32."""
    peaks = {tokens: peak(tmp_path, tokens, layers=layers) for tokens in (256, 512, 1024)}
    first = peaks[512].mlx - peaks[256].mlx
    second = peaks[1024].mlx - peaks[512].mlx
    assert first > 0
    assert second < 2.4 * first
    assert second / 512 <= (layers + 10) * D * 4
    # Memory in NumPy's buffers counts: results made by NumPy are copied into MLX's one at a time.
    assert (peaks[1024].numpy - peaks[512].numpy) / 512 <= 3 * D * 4


def test_the_peak_does_not_depend_on_the_vocabulary(tmp_path: Path) -> None:
    small, large = (peak(tmp_path, 256, vocab=vocab) for vocab in (131, 16001))
    # The allocator counts whole pages of 16 KiB.
    assert abs(large.mlx - small.mlx) <= 16_384
    # More turns of a loop leave some Python objects to the garbage collector; the logits would
    # be 16 MB, the dense head 4 MB.
    assert abs(large.numpy - small.numpy) < 131_072


REAL = """
import json, os, sys
import numpy as np
import mesp_core as mesp

mode, lora_dtype = sys.argv[1:]
lora = mesp.LoraConfig(rank=8, dtype=lora_dtype)
model = mesp.load_model("smollm2-135m", backend="mlx:cpu", lora=lora, dtype="bfloat16")
optimizer = mesp.SGD(1e-4)
ids = np.random.default_rng(0).integers(0, model.config.vocab, 257).tolist()
batch = mesp.Batch.from_sequences([ids])

def apply(layer, gradients):
    optimizer.update(model, gradients)

result = mesp.loss_and_gradients(model, batch, on_block=apply if mode == "block" else None)
if mode == "step":
    optimizer.update(model, result.gradients)
print(json.dumps({
    "peak": model.backend.memory().peak,
    "weights": os.path.getsize(model.checkpoint.path),
    "loss": result.loss,
    "tokens": result.tokens,
    "moved": sum(bool((model.backend.to_numpy(p) != 0).any())
                 for n, p in model.parameters.items() if n.endswith("lora_b")),
}))
"""


@pytest.mark.parametrize(
    ("mode", "lora_dtype"), [("step", "float32"), ("step", "bfloat16"), ("block", "float32")]
)
def test_a_real_model_trains_in_40_megabytes(mode: str, lora_dtype: str) -> None:
    """smollm2-135m streamed, 256 tokens, rank 8, bfloat16, SGD: everything that MLX's allocator
    held at most, from the start of the process through an update."""
    paths = [str(ROOT), str(ROOT / "backends"), str(ROOT / "reference")]
    # One thread: OpenBLAS's threads wait by spinning, which beside other tests costs tenfold.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", REAL, mode, lora_dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tokens"] == 256
    assert report["moved"] == 30 * 7
    assert math.isfinite(report["loss"])
    assert report["peak"] <= 40e6
    assert report["peak"] < report["weights"]
