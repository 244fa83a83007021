"""``mesp finetune``: the main job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesp_core.adapters import adapter_files, adapter_tensors, save_adapter, save_tensors
from mesp_core.batch import Batch
from mesp_core.callbacks import Callbacks, MetricsFile
from mesp_core.cli import settings
from mesp_core.cli.display import Display
from mesp_core.cli.job import Job, open_corpus, open_job, open_model
from mesp_core.cli.output import (
    INTERRUPTED,
    check_report,
    environment,
    prepare_folder,
    say,
    write_report,
)
from mesp_core.cli.report import conclude, introduce, losses_of, report
from mesp_core.cli.resume import METRICS
from mesp_core.data import Batches
from mesp_core.decoder import evaluate
from mesp_core.errors import MespError, NonFiniteError
from mesp_core.files.safetensors_writer import check_targets
from mesp_core.generation import continuation
from mesp_core.interrupts import StopRequest
from mesp_core.model import Model
from mesp_core.optimizers import Optimizer
from mesp_core.schedule import Schedule
from mesp_core.training import Summary, Trainer, TrainingOptions

_SAMPLE_TOKENS = 24


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "finetune",
        help="train a LoRA adapter",
        description="Trains a LoRA adapter with exact gradients in little memory. With no "
        "arguments: SmolLM2-135M on Python's own documentation, in a few minutes on two cores. "
        "Flags are named as in mlx_lm.lora.",
    )
    settings.add_arguments(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    options = settings.complete(given)
    check_report(options.json)
    if options.test and not options.train:
        return _only_test(options)
    folder = Path(options.adapter_path)
    # Mistakes in these show before a model is opened.
    _plan(options, 0)
    optimizer = _optimizer(options)
    _schedule(options)
    new = prepare_folder(folder)
    try:
        _check_files(options, folder)
        job = open_job(options, folder)
        return _train(job, optimizer)
    finally:
        if new:
            # Whatever stopped us before anything was saved leaves no empty folder behind.
            with suppress(OSError):
                os.rmdir(folder)


def _check_files(options: argparse.Namespace, folder: Path) -> None:
    """Raises MespError for what would keep the adapter from being written, or overwrite it."""
    names = (*adapter_files(options.adapter_format), METRICS)
    check_targets(folder, names)
    if options.json is not None:
        json = Path(options.json).resolve()
        if json in [(folder / name).resolve() for name in names]:
            raise MespError(f"--json {options.json} is a file of the adapter; name another file")


def _optimizer(options: argparse.Namespace) -> Optimizer:
    make, _ = settings.OPTIMIZERS[options.optimizer]
    return make(options.learning_rate, **options.optimizer_config)


def _plan(options: argparse.Namespace, start: int) -> TrainingOptions:
    return TrainingOptions(
        iterations=options.iters,
        accumulation=options.grad_accumulation_steps,
        apply=options.apply,
        method=options.method,
        head=options.head,
        epsilon=options.mezo_epsilon,
        max_norm=options.grad_clip,
        start=start,
        report_every=options.steps_per_report,
        eval_every=options.steps_per_eval,
        save_every=options.save_every,
    )


def _schedule(options: argparse.Namespace) -> Schedule:
    updates = -(-options.iters // options.grad_accumulation_steps)
    return Schedule(
        options.learning_rate,
        options.lr_schedule,
        options.warmup,
        max(0, updates - options.warmup) if options.lr_decay is None else options.lr_decay,
        options.lr_end,
    )


def _train(job: Job, optimizer: Optimizer) -> int:
    options, model = job.options, job.model
    plan = _plan(options, job.start)
    batches = Batches(job.corpus.train, options.batch_size, options.seed)
    introduce(job)
    prompt = job.prompt
    before = _sample(job, prompt, "before")
    metrics = MetricsFile(job.folder / METRICS, append=job.start > 0)
    display = Display(plan.iterations, plan.start)
    request = StopRequest(lambda name: display.warn(_stopping(name)))
    trainer = Trainer(
        model,
        optimizer,
        plan,
        schedule=_schedule(options),
        validation=job.validation,
        callback=Callbacks(display, metrics),
        save=lambda iteration: _checkpoint(job, iteration),
        stop=lambda: request.requested,
    )
    try:
        with request:
            summary = _run(job, trainer, batches.stream(plan.start))
            saved = _save(job, summary)
    finally:
        display.close()
        metrics.close()
    after = None if summary.interrupted else _sample(job, prompt, "after")
    losses = losses_of(summary)
    test = None if summary.interrupted or not options.test else _test_loss(model, job.test)
    conclude(job, summary, losses, saved)
    write_report(
        options.json,
        report(job, summary)
        | {"before": losses[0], "after": losses[1], "test": test}
        | {"prompt": prompt, "sample_before": before, "sample_after": after},
    )
    return INTERRUPTED if summary.interrupted else 0


def _run(job: Job, trainer: Trainer, batches: Iterator[Batch]) -> Summary:
    """Trains. Whatever ends it before its time, what was trained until then is saved."""
    try:
        return trainer.run(batches)
    except BaseException:
        if trainer.summary.updates:
            _save_adapter(job)
            say(f"Ended early, after {trainer.summary.updates} updates: saved what they made.")
        raise


def _sample(job: Job, prompt: str, when: str) -> str | None:
    """Prints how the model goes on with ``prompt``; None when the prompt has no tokens, or when
    training has made the model one that cannot go on."""
    if not job.tokenizer.encode(prompt):
        return None
    try:
        text = continuation(job.model, job.tokenizer, prompt, _SAMPLE_TOKENS)
    except NonFiniteError as error:
        if when == "before":
            raise
        say(f"mesp: warning: after training, {error}", error=True)
        return None
    say(f"\nSample {when}: {prompt!r} →\n{text.strip()}\n")
    return text


def _stopping(name: str) -> str:
    return f"{name}: stopping after this step and saving; once more to stop at once"


def _save_adapter(job: Job) -> None:
    options = job.options
    save_adapter(job.model, job.folder, options.adapter_format, base_name=options.model)


def _checkpoint(job: Job, iteration: int) -> Path:
    """Saves the adapter, and a numbered copy beside it in the format's own layout."""
    options = job.options
    _save_adapter(job)
    if options.adapter_format == "peft":
        path = job.folder / f"checkpoint-{iteration}"
        prepare_folder(path)
        save_adapter(job.model, path, "peft", base_name=options.model)
        return path
    assert job.model.lora is not None
    path = job.folder / f"{iteration:07d}_adapters.safetensors"
    save_tensors(path, adapter_tensors(job.model), job.model.lora.stored_dtype)
    return path


def _save(job: Job, summary: Summary) -> bool:
    """Saves what was trained. Raises MespError when every step had to be skipped."""
    if summary.updates:
        _save_adapter(job)
        return True
    if summary.interrupted:
        return False
    if summary.skipped["not_finite"]:
        raise NonFiniteError(
            "nothing was trained or saved: the loss or a gradient was not finite in every step"
        )
    raise MespError("nothing was trained or saved: no target in any batch")


def _test_loss(model: Model, batches: list[Any]) -> float:
    loss, tokens = evaluate(model, batches)
    say(f"Test loss {loss:.4f} over {tokens} tokens")
    return loss


def _only_test(options: argparse.Namespace) -> int:
    """``--test`` without ``--train``: the loss of the saved adapter, as in mlx-lm."""
    model = open_model(options, None, options.adapter_path)
    tokenizer = model.checkpoint.tokenizer()
    corpus = open_corpus(options, model, tokenizer, ("test",))
    rows = Batches(corpus.test, options.batch_size).fixed(options.test_batches)
    loss = _test_loss(model, rows)
    write_report(
        options.json,
        {"command": "finetune", **environment(model.backend), "model": str(options.model)}
        | {"adapter_path": options.adapter_path, "test": loss},
    )
    return 0
