"""A step of MeSP beside the same step by transformers and PEFT with gradient checkpointing.

``python -m asv_bench.beside_peft [FOLDER]``: a Hugging Face folder of dense weights; without one,
the shapes of Qwen2.5-0.5B in random float32, written to a temporary folder (2 GB). Everything in
float32 on the CPU, weights in memory, LoRA of rank 8 on all seven projections, SGD. Needs the extra
``test``. Memory is the process's peak in a step over what it had with the model open, adapters
included; times are of steps in turn.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mesp_core.compare.presets import PRESETS
from mesp_core.compare.process import EXACT

TOKENS, RANK, ALPHA, RATE, TURNS = 256, 8, 16, 1e-2, 5
CONTENDERS = ("peft", "torch", "jax")

#: One step; gives the loss.
Step = Callable[[], float]


def write_model(folder: Path) -> None:
    """Random weights in the shapes of Qwen2.5-0.5B, as transformers saves them."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    dense = PRESETS["qwen2.5-0.5b"].configuration()
    del dense["quantization"], dense["torch_dtype"]
    AutoModelForCausalLM.from_config(Qwen2Config(**dense)).float().save_pretrained(folder)


def peft_step(folder: Path) -> Step:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Inputs have to need gradients, or the checkpoints of the blocks have none.
    base.enable_input_require_grads()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = get_peft_model(base, config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    ids = torch.tensor([_tokens(base.config.vocab_size)])

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def mesp_step(folder: Path, backend: str) -> Step:
    import mesp_core as mesp

    lora = mesp.LoraConfig(rank=RANK, alpha=ALPHA)
    model = mesp.load_model(
        folder, backend=f"{backend}:cpu", lora=lora, dtype="float32", residency="resident"
    )
    batch = mesp.Batch.from_sequences([_tokens(model.config.vocab)])
    optimizer = mesp.SGD(RATE)

    def step() -> float:
        result = mesp.loss_and_gradients(model, batch)
        optimizer.update(model, result.gradients)
        return result.loss

    return step


def _tokens(vocabulary: int) -> list[int]:
    return np.random.default_rng(0).integers(0, vocabulary, TOKENS).tolist()


def open_step(contender: str, folder: Path) -> Step:
    return peft_step(folder) if contender == "peft" else mesp_step(folder, contender)


def memory(contender: str, folder: Path) -> dict[str, float]:
    """In this process: peak bytes of a step over the open model's, and the first step's loss."""
    from mesp_core.footprint import FootprintMeter, process_footprint

    _warm_up(contender)
    step = open_step(contender, folder)
    gc.collect()
    before = process_footprint()
    loss = step()
    gc.collect()
    with FootprintMeter(0.0005) as meter:
        step()
        step()
    if before is None or meter.peak is None:
        raise SystemExit("this system does not tell the memory of a process")
    return {"loss": loss, "bytes": meter.peak - before}


def _warm_up(contender: str) -> None:
    """One product: what the libraries themselves take does not belong to a step."""
    if contender == "peft":
        import torch

        ones = torch.ones(512, 512, requires_grad=True)
        (ones @ ones).sum().backward()
    else:
        import mesp_core as mesp

        backend = mesp.get_backend(f"{contender}:cpu")
        ones = backend.from_numpy(np.ones((512, 512), np.float32), "float32")
        backend.stage(backend.xp.matmul(ones, ones))


def times(folder: Path) -> dict[str, list[float]]:
    """Seconds of steps in turn, in this process, after one of each that warms up."""
    steps = {name: open_step(name, folder) for name in CONTENDERS}
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return found


def report(folder: Path) -> None:
    found = {name: _child("memory", name, folder) for name in CONTENDERS}
    seconds = _child("times", folder)
    print(f"{TOKENS} tokens, float32, rank {RANK}")
    print(f"{'':20}  MB over the model  of PEFT's  step, s  of PEFT's     loss")
    for name, row in found.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds["peft"], strict=True)]
        title = "PEFT, checkpointing" if name == "peft" else f"MeSP on {name}"
        print(
            f"{title:20}  {row['bytes'] / 1e6:17,.1f}"
            f"  {row['bytes'] / found['peft']['bytes']:9.2f}"
            f"  {statistics.median(seconds[name]):7.2f}  {statistics.median(ratios):9.2f}"
            f"  {row['loss']:7.4f}"
        )


def _child(*arguments: str | Path) -> dict:
    """What this file prints as JSON when run with ``arguments`` in a process of its own."""
    command = [sys.executable, "-m", "asv_bench.beside_peft", "--child", *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | EXACT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--child"]:
        kind, *rest = arguments[1:]
        answer = memory(rest[0], Path(rest[1])) if kind == "memory" else times(Path(rest[0]))
        print(json.dumps(answer))
    elif arguments and not arguments[0].startswith("-"):
        report(Path(arguments[0]))
    elif arguments:
        print(__doc__)
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder))
            report(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
