"""The training loop: windows of batches, exact accumulation, guarded updates, reports."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mesp_core.batch import Batch
from mesp_core.callbacks import TrainingCallback
from mesp_core.decoder import evaluate
from mesp_core.errors import MespError, NonFiniteError
from mesp_core.footprint import FootprintMeter
from mesp_core.methods import EPSILON, loss_and_gradients
from mesp_core.model import Model
from mesp_core.optimizers import Optimizer, clip_gradients, first_not_finite
from mesp_core.schedule import Schedule

Array = Any

APPLY = ("step", "block")


@dataclass(frozen=True)
class TrainingOptions:
    """iterations: batches to train on, counted on from ``start``. accumulation: batches that
    share one update; the last update takes what is left. apply: ``step`` holds a step's gradients
    and updates all parameters or none, ``block`` updates each block as soon as its gradients are
    there and drops them. method, head, epsilon: as in ``loss_and_gradients``. max_norm: clip
    gradients to this global norm. report_every, eval_every, save_every: iterations between reports,
    validations on the way, checkpoints; 0 for none."""

    iterations: int
    accumulation: int = 1
    apply: str = "step"
    method: str = "mesp"
    head: str | None = None
    epsilon: float = EPSILON
    max_norm: float | None = None
    start: int = 0
    report_every: int = 10
    eval_every: int = 0
    save_every: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 0 or self.start < 0:
            raise MespError("the number of iterations must be 0 or more")
        if self.accumulation < 1:
            raise MespError(f"accumulation takes at least 1 batch, not {self.accumulation}")
        if min(self.report_every, self.eval_every, self.save_every) < 0:
            raise MespError("the steps between reports, validations and saves must be 0 or more")
        if self.apply not in APPLY:
            raise MespError(f"apply must be one of {', '.join(APPLY)}, not {self.apply!r}")
        if self.max_norm is not None and not 0.0 < self.max_norm < math.inf:
            raise MespError(f"the largest gradient norm must be above 0, not {self.max_norm}")
        if self.apply == "block":
            remedy = "parameters move before the whole step is known; use apply step"
            if self.max_norm is not None:
                raise MespError(f"apply block cannot clip gradients: {remedy}")
            if self.accumulation > 1:
                raise MespError(f"apply block cannot accumulate gradients: {remedy}")


@dataclass
class Summary:
    """What a run did. iteration: the last one finished; updates, tokens: of this run alone;
    skipped: windows of batches that led to no update, by event (``not_finite``, ``all_masked``);
    interrupted: ended early, or without the last validation; validation: (iteration, loss)."""

    iteration: int = 0
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False
    peak_bytes: int | None = None
    footprint_bytes: int | None = None
    validation: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class _Tally:
    """Sums since the last report."""

    loss: float = 0.0
    tokens: int = 0
    iterations: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Outcome:
    """loss: Σ weight · cross-entropy over a window / its sum of weights; problem: the event that
    kept it from an update, or None."""

    loss: float
    tokens: int
    problem: str | None = None
    message: str = ""


class Trainer:
    """Trains ``model.parameters`` on batches.

    schedule: the learning rate of each update of this run, counted from 0 whatever
    ``options.start`` is. validation: batches whose loss is reported. save: called with the
    iteration to write a checkpoint; returns its path. stop: asked between steps whether to end
    early.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        options: TrainingOptions,
        *,
        schedule: Callable[[int], float] | None = None,
        validation: Sequence[Batch] = (),
        callback: TrainingCallback | None = None,
        save: Callable[[int], Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.options = options
        self.summary = Summary(iteration=options.start)
        self._schedule = schedule or Schedule(optimizer.learning_rate)
        self._validation = validation
        self._callback = callback or TrainingCallback()
        self._save = save
        self._stop = stop
        self._method: dict[str, Any] = {
            "method": options.method,
            "head": options.head,
            "epsilon": options.epsilon,
        }
        self._tally = _Tally()
        self._meter = FootprintMeter()

    def run(self, batches: Iterator[Batch]) -> Summary:
        """Takes ``options.iterations`` batches and returns what was done with them; validates
        before and after, too.

        A window of batches with no target, or whose loss or gradients are not finite, changes
        neither parameters nor moments, and is reported as an event.
        Raises NonFiniteError when frozen weights or the first validation loss are not finite, when
        an update would make a parameter not finite (which then stays as it was), or, with apply
        block, when a gradient turns out not finite after part of the step was applied.
        """
        options, summary = self.options, self.summary
        last = options.start + options.iterations
        self.model.backend.reset_peak()
        with self._meter:
            self._check_first(self.validate())
            while summary.iteration < last and not summary.interrupted:
                if self._stop():
                    self._interrupted("stopped between two steps")
                    break
                count = min(options.accumulation, last - summary.iteration)
                window = list(islice(batches, count))
                if not window:
                    break
                before = summary.iteration
                self._window(window)
                self._now_and_then(before, last)
            self.validate()
            summary.peak_bytes = self.model.backend.memory().peak
        summary.footprint_bytes = self._meter.peak
        return summary

    def validate(self) -> float | None:
        """The validation loss of the model as it is, reported once an iteration; None without
        validation data or when interrupted."""
        summary = self.summary
        if not self._validation or summary.interrupted:
            return None
        if summary.validation and summary.validation[-1][0] == summary.iteration:
            return summary.validation[-1][1]
        begun = time.perf_counter()
        loss, _ = evaluate(self.model, self._until_stopped())
        if self._stop():
            self._interrupted("stopped during a validation, which was cut short")
            return None
        summary.validation.append((summary.iteration, loss))
        self._callback.on_val_loss_report(
            {
                "iteration": summary.iteration,
                "val_loss": loss,
                "val_time": time.perf_counter() - begun,
            }
        )
        return loss

    def _check_first(self, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            self.model.check_weights()
            raise NonFiniteError(
                f"the validation loss before any training is {loss}: this model overflows on this "
                "text, and cannot be trained"
            )

    def _until_stopped(self) -> Iterator[Batch]:
        for batch in self._validation:
            if self._stop():
                return
            yield batch

    def _window(self, window: list[Batch]) -> None:
        """One update from the batches of ``window``, or the reason why there is none."""
        summary = self.summary
        begun = time.perf_counter()
        # Both count updates tried, so that a skipped one shifts nothing: dropout those of earlier
        # runs too, for masks of its own, and the schedule those of this run.
        start, size = self.options.start, self.options.accumulation
        self.model.step = summary.iteration // size
        self.optimizer.learning_rate = self._schedule((summary.iteration - start) // size)
        weight = sum(float(batch.weights.sum()) for batch in window)
        if not weight:
            outcome = _Outcome(0.0, 0, "all_masked", "every target is masked: no update")
        elif self.options.apply == "block":
            outcome = self._by_block(window[0])
        else:
            outcome = self._by_step(window, weight)
        summary.iteration += len(window)
        self._count(outcome, len(window), time.perf_counter() - begun)

    def _count(self, outcome: _Outcome, iterations: int, seconds: float) -> None:
        summary, tally = self.summary, self._tally
        summary.seconds += seconds
        tally.seconds += seconds
        tally.iterations += iterations
        if outcome.problem is None:
            summary.updates += 1
            summary.tokens += outcome.tokens
            tally.tokens += outcome.tokens
            tally.loss += outcome.loss * outcome.tokens
        else:
            summary.skipped[outcome.problem] += 1
            self._event(outcome.problem, outcome.message)
        self._callback.on_iteration(
            {
                "iteration": summary.iteration,
                "iterations": iterations,
                "updates": summary.updates,
                "loss": outcome.loss,
                "tokens": outcome.tokens,
                "tokens_per_second": outcome.tokens / seconds,
                "peak_memory": _gigabytes(self.model.backend.memory().peak),
                "footprint": _gigabytes(self._meter.peak),
            }
        )

    def _by_step(self, window: list[Batch], weight: float) -> _Outcome:
        """Sums the gradients over the window, all divided by its joint sum of weights, so that
        they are exactly those of one joint batch; then updates everything, or nothing."""
        backend = self.model.backend
        loss, tokens = 0.0, 0
        gradients: dict[str, Array] = {}
        for batch in window:
            if not batch.target_count:
                continue
            result = loss_and_gradients(self.model, batch, normalizer=weight, **self._method)
            loss += result.loss
            tokens += result.tokens
            if not gradients:
                gradients = result.gradients
                continue
            for name, gradient in result.gradients.items():
                gradients[name] = gradients[name] + gradient
                backend.stage(gradients[name])
        bad = first_not_finite(gradients, backend)
        if bad is not None or not math.isfinite(loss):
            what = "the loss" if bad is None else f"the gradient of {bad}"
            return _Outcome(loss, tokens, "not_finite", f"{what} is not finite: no update")
        if self.options.max_norm is not None:
            gradients, _ = clip_gradients(gradients, self.options.max_norm, backend)
        self.optimizer.update(self.model, gradients)
        return _Outcome(loss, tokens)

    def _by_block(self, batch: Batch) -> _Outcome:
        applied = 0
        bad: str | None = None

        def update(layer: int, gradients: dict[str, Array]) -> None:
            nonlocal applied, bad
            bad = bad or first_not_finite(gradients, self.model.backend)
            if bad is None:
                self.optimizer.update(self.model, gradients)
                applied += 1
            elif applied:
                raise NonFiniteError(
                    f"the gradient of {bad} is not finite in iteration "
                    f"{self.summary.iteration + 1}, after {applied} block(s) had been updated; "
                    "go on from the last checkpoint, with apply step or a lower learning rate"
                )

        result = loss_and_gradients(self.model, batch, on_block=update, **self._method)
        if bad is not None:
            message = f"the gradient of {bad} is not finite: no update"
            return _Outcome(result.loss, result.tokens, "not_finite", message)
        return _Outcome(result.loss, result.tokens)

    def _now_and_then(self, before: int, last: int) -> None:
        """Reports, validates and saves where a multiple of their interval was passed."""
        now, options = self.summary.iteration, self.options
        if _passed(before, now, options.report_every) or (now == last and options.report_every):
            self._report()
        if now < last and _passed(before, now, options.eval_every):
            self.validate()
        if self._save is not None and _passed(before, now, options.save_every):
            self._callback.on_save({"iteration": now, "path": str(self._save(now))})

    def _report(self) -> None:
        tally = self._tally
        self._callback.on_train_loss_report(
            {
                "iteration": self.summary.iteration,
                "train_loss": tally.loss / tally.tokens if tally.tokens else math.nan,
                "learning_rate": self.optimizer.learning_rate,
                "iterations_per_second": tally.iterations / tally.seconds,
                "tokens_per_second": tally.tokens / tally.seconds,
                "trained_tokens": self.summary.tokens,
                "peak_memory": _gigabytes(self.model.backend.memory().peak),
                "footprint": _gigabytes(self._meter.peak),
            }
        )
        self._tally = _Tally()

    def _interrupted(self, message: str) -> None:
        self.summary.interrupted = True
        self._event("interrupted", message)

    def _event(self, event: str, message: str) -> None:
        self._callback.on_event(
            {"iteration": self.summary.iteration, "event": event, "message": message}
        )


def _passed(before: int, now: int, every: int) -> bool:
    return every > 0 and before // every < now // every


def _gigabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e9
