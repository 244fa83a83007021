"""What a fine-tuning run says at its start and end, to people and to machines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from mesp_core.cli.job import Job
from mesp_core.cli.output import environment, readable_bytes, say
from mesp_core.training import Summary


def introduce(job: Job) -> None:
    model, options, lora = job.model, job.options, job.model.lora
    assert lora is not None
    trained = sum(int(np.prod(array.shape)) for array in model.parameters.values())
    layers = len(lora.adapted_layers(model.config.layers))
    chosen = " (chosen for this machine)" if options.backend == "auto" else ""
    say(
        f"{options.model} ({model.config.model_type}, {model.config.layers} layers) on "
        f"{model.backend.name} {model.backend.device}{chosen}, {model.dtype}; "
        f"LoRA rank {lora.rank}, scale {lora.scale:g}, on {len(lora.targets)} projections of "
        f"{layers} layers: {trained:,} parameters"
    )
    say(
        f"{options.data or 'Python documentation topics'}: {len(job.corpus.train)} rows to train "
        f"on, {len(job.corpus.valid)} to validate, of at most {options.max_seq_length} tokens"
    )


def losses_of(summary: Summary) -> tuple[float | None, float | None]:
    """Validation loss before, and of what is saved; None where it was not measured."""
    measured = summary.validation
    before = measured[0][1] if measured else None
    current = len(measured) > 1 and measured[-1][0] == summary.iteration
    return before, measured[-1][1] if current else None


def conclude(
    job: Job, summary: Summary, losses: tuple[float | None, float | None], saved: bool
) -> None:
    if losses[0] is not None and losses[1] is not None:
        fall = losses[0] - losses[1]
        say(f"Validation loss {losses[0]:.4f} → {losses[1]:.4f} ({-fall:+.4f})")
    known = summary.peak_bytes is not None
    arrays = f"{readable_bytes(summary.peak_bytes)} of arrays, " if known else ""
    say(
        f"{summary.updates} updates, {summary.tokens} tokens in {summary.seconds:.0f} s; peak "
        f"memory {arrays}{readable_bytes(summary.footprint_bytes)} of the process"
    )
    for event, count in summary.skipped.items():
        say(f"{count} step(s) skipped: {event.replace('_', ' ')}")
    if not saved:
        say("Interrupted before the first update: nothing to save.")
        return
    done = f"Interrupted after iteration {summary.iteration}. " if summary.interrupted else ""
    say(f"{done}Saved the adapter in {job.folder}.")
    for line in _next_commands(job):
        say(line)


def _next_commands(job: Job) -> list[str]:
    """What to type to use the adapter with other tools."""
    options = job.options
    adapter, prompt = shlex.quote(str(job.folder)), shlex.quote(job.prompt.split("\n")[0])
    lines, base = ["", "Next:"], str(options.model)
    if not Path(options.model).is_dir():
        base = "base"
        lines.append(f"  mesp export-base {shlex.quote(str(options.model))} {base}")
    if options.adapter_format == "peft":
        code = (
            "from transformers import AutoModelForCausalLM as M; from peft import PeftModel; "
            f"model = PeftModel.from_pretrained(M.from_pretrained({base!r}), {str(job.folder)!r})"
        )
        return [*lines, f"  python -i -c {shlex.quote(code)}"]
    command = f"mlx_lm.generate --model {shlex.quote(base)} --adapter-path {adapter}"
    return [*lines, f"  {command} --prompt {prompt} --ignore-chat-template"]


def report(job: Job, summary: Summary) -> dict[str, Any]:
    options, lora = job.options, job.model.lora
    assert lora is not None
    return {
        "command": "finetune",
        **environment(job.model.backend),
        "model": str(options.model),
        "data": options.data,
        "method": options.method,
        "head": options.head,
        "optimizer": options.optimizer,
        "apply": options.apply,
        "dtype": job.model.dtype,
        "rank": lora.rank,
        "scale": lora.scale,
        "seed": options.seed,
        "iterations": summary.iteration,
        "updates": summary.updates,
        "skipped": dict(summary.skipped),
        "interrupted": summary.interrupted,
        "trained_tokens": summary.tokens,
        "seconds": summary.seconds,
        "tokens_per_second": summary.tokens / summary.seconds if summary.seconds else None,
        "peak_bytes": summary.peak_bytes,
        "footprint_bytes": summary.footprint_bytes,
        "validation": [list(entry) for entry in summary.validation],
        "adapter_path": str(job.folder),
        "adapter_format": options.adapter_format,
    }
