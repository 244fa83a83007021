"""How the footprint of a fresh process grows with the tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_reference import tiny_checkpoint

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the footprint is read from Linux's /proc"
)

#: Defines ``peaks(run, sizes)``: what each ``run(size)`` adds to the process's footprint at most.
PRELUDE = """
import json, sys, threading
import numpy as np
import torch
import mesp_core as mesp
from mesp_core.backend import TileSizes
from mesp_core.footprint import process_footprint
from mesp_core.formulas.attention import AttentionPlan
from mesp_torch.torch_backend import TorchBackend

torch.set_num_threads(1)

def peaks(run, sizes):
    run(sizes[0])
    found = []
    for size in sizes:
        before = most = process_footprint()
        done = threading.Event()
        def watch():
            nonlocal most
            while not done.wait(0.0005):
                most = max(most, process_footprint())
        thread = threading.Thread(target=watch)
        thread.start()
        run(size)
        done.set()
        thread.join()
        found.append(most - before)
    print(json.dumps(found))
"""


def measure(code: str, *arguments: str) -> list[int]:
    """What ``code`` prints as JSON in a new process, whose allocator gives back what is freed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "backends"))),
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ATTENTION = """
backend = TorchBackend.on("cpu")

def run(tokens):
    plan = AttentionPlan(torch.zeros(tokens, dtype=torch.int32), [], 0.25)
    q, k, v, do = (torch.ones(tokens, heads, 16) for heads in (4, 2, 2, 4))
    o, saved = backend.ops.attention.forward(q, k, v, plan=plan)
    backend.ops.attention.backward(do, saved, q, k, v, o, plan=plan)

peaks(run, (2048, 8192))
"""


def test_the_flash_pair_never_forms_the_scores() -> None:
    """Inputs and results are 2.8 KB a token; [H, T, T] alone would be 1074 MB at 8192."""
    short, long = measure(ATTENTION)
    a_token = 4 * 16 * (4 * 4 + 4 * 2) + 4 * 4
    assert 0 < (long - short) / (8192 - 2048) <= 1.2 * a_token


STEP = """
backend = TorchBackend(
    "cpu", native=False, tiles=TileSizes(weights=1, query=32, key=32, tokens=64)
)
model = mesp.load_model(sys.argv[1], backend=backend, lora=mesp.LoraConfig(rank=2))

def run(tokens):
    ids = np.random.default_rng(0).integers(0, 131, tokens + 1).tolist()
    mesp.loss_and_gradients(model, mesp.Batch.from_sequences([ids]), on_block=lambda *_: None)

peaks(run, (1024, 6144))
"""


def test_a_step_takes_a_checkpoint_a_block_and_ten_rows_more(tmp_path: Path) -> None:
    width, layers = 64, 3
    sizes = {"hidden": width, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 160}
    folder = tiny_checkpoint(tmp_path / "model", vocab=131, layers=layers, **sizes)
    short, long = measure(STEP, str(folder))
    assert 0 < (long - short) / (6144 - 1024) <= (layers + 10) * width * 4
