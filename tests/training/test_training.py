"""The training loop: windows, both ways to apply, guards, reports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mesp_core import SGD, AdamW, Batch, MespError, Model, NonFiniteError, evaluate
from mesp_core import loss_and_gradients as true_loss_and_gradients
from mesp_core.callbacks import TrainingCallback
from mesp_core.data import Batches
from mesp_core.methods import Result
from mesp_core.schedule import Schedule
from mesp_core.training import Trainer, TrainingOptions
from tests.tiny import sequences

OpenTiny = Callable[..., Model]


class Recorder(TrainingCallback):
    """Everything that was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [info for told, info in self.told if told == kind]

    def on_iteration(self, info: Any) -> None:
        self.told.append(("iteration", dict(info)))

    def on_train_loss_report(self, info: Any) -> None:
        self.told.append(("train", dict(info)))

    def on_val_loss_report(self, info: Any) -> None:
        self.told.append(("val", dict(info)))

    def on_event(self, info: Any) -> None:
        self.told.append(("event", dict(info)))

    def on_save(self, info: Any) -> None:
        self.told.append(("save", dict(info)))


def train(
    model: Model, batches: list[Batch], optimizer: Any = None, **options: Any
) -> tuple[Trainer, Recorder]:
    """Trains on the given batches once, in order."""
    recorder = Recorder()
    outside = {
        key: options.pop(key)
        for key in ("validation", "save", "stop", "schedule")
        if key in options
    }
    trainer = Trainer(
        model,
        optimizer or SGD(0.5),
        TrainingOptions(**({"iterations": len(batches)} | options)),
        callback=recorder,
        **outside,
    )
    trainer.run(iter(batches))
    return trainer, recorder


def values(model: Model) -> dict[str, np.ndarray]:
    return {name: np.array(model.backend.to_numpy(p)) for name, p in model.parameters.items()}


def moved(before: dict[str, np.ndarray], model: Model) -> set[str]:
    return {name for name, now in values(model).items() if (now != before[name]).any()}


def poisoned(call: int, layer: int) -> Callable[..., Result]:
    """``loss_and_gradients`` whose given call (from 1) yields NaN from block ``layer`` down."""
    calls = itertools.count(1)

    def poison(number: int, gradients: dict[str, Any]) -> dict[str, Any]:
        def reached(name: str) -> bool:
            return number == call and int(name.split(".")[2]) <= layer

        return {name: g * math.nan if reached(name) else g for name, g in gradients.items()}

    def run(model: Model, batch: Batch, *, on_block: Any = None, **options: Any) -> Result:
        number = next(calls)
        taking = on_block and (lambda layer, g: on_block(layer, poison(number, g)))
        result = true_loss_and_gradients(model, batch, on_block=taking, **options)
        return Result(result.loss, result.tokens, poison(number, result.gradients))

    return run


def test_case_02_accumulated_gradients_are_those_of_the_joint_batch(open_tiny: OpenTiny) -> None:
    rows = [sequences(1, seed=1, shortest=4, longest=4)[0], *sequences(1, 2, 18, 18)]
    assert [len(row) - 1 for row in rows] == [3, 17]
    joint, apart = (open_tiny(filled=True, dtype="float64") for _ in range(2))
    train(joint, [Batch.from_sequences(rows)])
    parts = [Batch.from_sequences([row], numbers=[place]) for place, row in enumerate(rows)]
    trainer, _ = train(apart, parts, accumulation=2)
    assert trainer.summary.updates == 1 and trainer.summary.tokens == 20
    for name, expected in values(joint).items():
        np.testing.assert_allclose(values(apart)[name], expected, rtol=1e-12, atol=1e-14)


def test_case_02_dropout_is_that_of_the_joint_batch_too(open_tiny: OpenTiny) -> None:
    rows = sequences(3)
    joint, apart = (open_tiny(filled=True, dtype="float64", dropout=0.5) for _ in range(2))
    train(joint, [Batch.from_sequences(rows)])
    parts = [Batch.from_sequences([row], numbers=[place]) for place, row in enumerate(rows)]
    train(apart, parts, accumulation=3)
    for name, expected in values(joint).items():
        np.testing.assert_allclose(values(apart)[name], expected, rtol=1e-12, atol=1e-14)


def test_case_02_the_last_partial_window_is_applied(open_tiny: OpenTiny) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(5)]
    whole, last = open_tiny(filled=True), open_tiny(filled=True)
    trainer, recorder = train(whole, batches, accumulation=2)
    assert trainer.summary.updates == 3 and trainer.summary.iteration == 5
    assert [info["iterations"] for info in recorder.of("iteration")] == [2, 2, 1]
    # The third update is an ordinary one of the fifth batch alone.
    train(last, batches[:4], accumulation=2)
    train(last, batches[4:])
    for name, expected in values(whole).items():
        np.testing.assert_array_equal(values(last)[name], expected)


def test_case_03_every_label_masked(open_tiny: OpenTiny) -> None:
    row = sequences(1, shortest=6)[0]
    masked = Batch.from_sequences([row], prompt_lengths=[len(row)])
    model, optimizer = open_tiny(filled=True), AdamW(0.1)
    result = true_loss_and_gradients(model, masked)
    assert result.loss == 0.0 and result.tokens == 0
    assert all((model.backend.to_numpy(g) == 0.0).all() for g in result.gradients.values())
    before = values(model)
    trainer, recorder = train(model, [masked], optimizer)
    assert moved(before, model) == set() and optimizer.state == {}
    assert trainer.summary.updates == 0 and trainer.summary.tokens == 0
    (event,) = recorder.of("event")
    assert event["event"] == "all_masked" and "every target is masked" in event["message"]


@pytest.mark.parametrize("apply", ["step", "block"])
def test_case_04_a_batch_that_is_not_finite_changes_nothing(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch, apply: str
) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(3)]
    with_bad, without = open_tiny(filled=True), open_tiny(filled=True)
    one, two = AdamW(0.1), AdamW(0.1)
    train(without, [batches[0], batches[2]], one, apply=apply)
    monkeypatch.setattr("mesp_core.training.loss_and_gradients", poisoned(call=2, layer=2))
    trainer, recorder = train(with_bad, batches, two, apply=apply)
    for name, expected in values(without).items():
        np.testing.assert_array_equal(values(with_bad)[name], expected)
    for name, moment in one.state.items():
        np.testing.assert_array_equal(two.state[name], moment)
    (event,) = recorder.of("event")
    assert (event["event"], event["iteration"]) == ("not_finite", 2)
    assert "model.layers.2." in event["message"]
    assert trainer.summary.updates == 2 and trainer.summary.skipped["not_finite"] == 1


def test_case_04_a_loss_that_is_not_finite_changes_nothing(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(*args: Any, **options: Any) -> Result:
        result = true_loss_and_gradients(*args, **options)
        return Result(math.inf, result.tokens, result.gradients)

    monkeypatch.setattr("mesp_core.training.loss_and_gradients", overflowing)
    model = open_tiny(filled=True)
    before = values(model)
    _, recorder = train(model, [Batch.from_sequences(sequences(1))])
    assert moved(before, model) == set()
    assert "the loss is not finite" in recorder.of("event")[0]["message"]


def test_case_04_after_part_of_a_step_the_run_stops(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesp_core.training.loss_and_gradients", poisoned(call=1, layer=1))
    with pytest.raises(NonFiniteError, match=r"layers\.1\..* not finite in iteration 1, after 1"):
        train(open_tiny(filled=True), [Batch.from_sequences(sequences(2))], apply="block")


def test_case_04_gradients_are_clipped_by_global_norm(open_tiny: OpenTiny) -> None:
    batch = Batch.from_sequences(sequences(2))
    model = open_tiny(filled=True, dtype="float64")
    before = values(model)
    train(model, [batch], SGD(1.0), max_norm=1e-3)
    step = np.concatenate([(before[n] - now).ravel() for n, now in values(model).items()])
    assert np.linalg.norm(step) == pytest.approx(1e-3, rel=1e-9)


@pytest.mark.parametrize("apply", ["step", "block"])
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_case_09_every_lora_b_moves_in_the_first_step(
    open_tiny: OpenTiny, backend: str, apply: str
) -> None:
    model = open_tiny(backend)
    before = values(model)
    train(model, [Batch.from_sequences(sequences(2))], SGD(0.1), apply=apply)
    expected = {name for name in model.parameters if name.endswith("lora_b")}
    assert len(expected) == 3 * 7 and moved(before, model) == expected


def test_case_12_memory_is_flat_over_steps_of_varying_length(open_tiny: OpenTiny) -> None:
    model, held = open_tiny("mlx", filled=True), []

    class Watch(TrainingCallback):
        def on_iteration(self, info: Any) -> None:
            memory = model.backend.memory()
            held.append(memory.active + memory.cache)

    rows = sequences(50, shortest=3, longest=40)
    options = TrainingOptions(iterations=50)
    batches = Batches(rows, 1).stream()
    summary = Trainer(model, AdamW(1e-3), options, callback=Watch()).run(batches)
    # AdamW's moments appear in the first step; afterwards only the batch's own size varies.
    assert max(held[25:]) <= max(held[1:25]) * 1.1
    assert summary.peak_bytes is not None and summary.peak_bytes > 0
    assert summary.footprint_bytes is None or summary.footprint_bytes > 0


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_case_20_four_steps_equal_two_plus_two_bit_for_bit(
    open_tiny: OpenTiny, backend: str
) -> None:
    rows, schedule = sequences(5), Schedule(0.05, "cosine", warmup=1, decay=3)
    whole, first, second = (open_tiny(backend, filled=True, dropout=0.3) for _ in range(3))

    def go_on(model: Model, optimizer: AdamW, iterations: int, start: int) -> None:
        options = TrainingOptions(iterations=iterations, start=start)
        trainer = Trainer(model, optimizer, options, schedule=lambda n: schedule(start + n))
        trainer.run(Batches(rows, 2, seed=1).stream(start))

    go_on(whole, AdamW(0.05), 4, 0)
    optimizer = AdamW(0.05)
    go_on(first, optimizer, 2, 0)
    state = {name: first.backend.to_numpy(array) for name, array in optimizer.state.items()}
    for name, value in values(first).items():
        second.parameters[name] = second.backend.from_numpy(value, "float32")
    optimizer = AdamW(0.05)
    optimizer.load_state(second.backend, state)
    go_on(second, optimizer, 2, 2)
    for name, expected in values(whole).items():
        np.testing.assert_array_equal(values(second)[name], expected)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_block_and_step_end_in_the_same_bits(open_tiny: OpenTiny, backend: str) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(3)]
    by_step, by_block = open_tiny(backend, filled=True), open_tiny(backend, filled=True)
    train(by_step, batches, AdamW(0.05))
    train(by_block, batches, AdamW(0.05), apply="block")
    for name, expected in values(by_step).items():
        np.testing.assert_array_equal(values(by_block)[name], expected)


def test_bfloat16_parameters_are_trained(open_tiny: OpenTiny) -> None:
    model = open_tiny("mlx", filled=True, dtype="bfloat16")
    before = values(model)
    train(model, [Batch.from_sequences(sequences(2))] * 3, AdamW(0.02))
    assert moved(before, model) == set(model.parameters)
    assert {model.backend.dtype_name(p) for p in model.parameters.values()} == {"bfloat16"}


def test_training_lowers_the_loss(open_tiny: OpenTiny) -> None:
    batch = Batch.from_sequences(sequences(4))
    model = open_tiny()
    trainer, recorder = train(
        model, [batch] * 20, AdamW(0.03), validation=[batch], eval_every=8, report_every=5
    )
    told = recorder.of("val")
    assert [info["iteration"] for info in told] == [0, 8, 16, 20]
    assert told[-1]["val_loss"] < told[0]["val_loss"] - 0.3
    assert told[-1]["val_loss"] == pytest.approx(evaluate(model, [batch])[0], rel=1e-6)
    assert trainer.summary.validation[0] == (0, told[0]["val_loss"])


def test_reports_have_the_keys_of_mlx_lm_and_average_over_tokens(open_tiny: OpenTiny) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(5)]
    _, recorder = train(open_tiny("mlx"), batches, SGD(0.1), report_every=2)
    reports, single = recorder.of("train"), recorder.of("iteration")
    assert [info["iteration"] for info in reports] == [2, 4, 5]
    assert set(reports[0]) == {
        "iteration",
        "train_loss",
        "learning_rate",
        "iterations_per_second",
        "tokens_per_second",
        "trained_tokens",
        "peak_memory",
        "footprint",
    }
    weights = [info["tokens"] for info in single[:2]]
    mean = np.average([info["loss"] for info in single[:2]], weights=weights)
    assert reports[0]["train_loss"] == pytest.approx(mean, rel=1e-12)
    assert reports[0]["learning_rate"] == 0.1
    assert reports[-1]["trained_tokens"] == sum(batch.target_count for batch in batches)
    assert 0.0 < reports[0]["peak_memory"] < 0.1


def test_checkpoints_are_written_where_their_interval_ends(open_tiny: OpenTiny) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(7)]
    saved: list[int] = []
    _, recorder = train(
        open_tiny(), batches, accumulation=2, save_every=3, save=lambda n: saved.append(n) or n
    )
    # Between two updates only: iterations 3 and 6 lie in the windows that end at 4 and 6.
    assert saved == [4, 6]
    assert [info["iteration"] for info in recorder.of("save")] == [4, 6]


def test_a_request_to_stop_acts_between_steps(open_tiny: OpenTiny) -> None:
    batch = Batch.from_sequences(sequences(1))
    asked = itertools.count()
    model = open_tiny()
    trainer, recorder = train(model, [batch] * 9, validation=[batch], stop=lambda: next(asked) >= 4)
    summary = trainer.summary
    assert summary.interrupted and 0 < summary.updates < 9
    assert recorder.of("event")[-1]["event"] == "interrupted"
    # Whoever wants to leave does not wait for one more validation.
    assert [info["iteration"] for info in recorder.of("val")] == [0]


def test_a_request_to_stop_during_the_last_validation(open_tiny: OpenTiny) -> None:
    batch, asked = Batch.from_sequences(sequences(1)), []
    model = open_tiny()

    class Asking(Recorder):
        def on_train_loss_report(self, info: Any) -> None:
            asked.append(info)

    told, options = Asking(), TrainingOptions(iterations=2)
    trainer = Trainer(
        model, SGD(0.5), options, validation=[batch], callback=told, stop=lambda: bool(asked)
    )
    summary = trainer.run(iter([batch, batch]))
    assert summary.updates == 2 and summary.interrupted
    assert [info["iteration"] for info in told.of("val")] == [0]
    (event,) = told.of("event")
    assert event["event"] == "interrupted" and "validation" in event["message"]


def test_a_validation_loss_that_is_not_finite_before_training(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesp_core.training.evaluate", lambda model, batches: (math.nan, 3))
    batch, model = Batch.from_sequences(sequences(1)), open_tiny()
    before = values(model)
    with pytest.raises(NonFiniteError, match="before any training is nan"):
        train(model, [batch], validation=[batch])
    assert moved(before, model) == set()


@pytest.mark.parametrize("apply", ["step", "block"])
def test_an_update_that_overflows_stops_the_run_with_what_was_before(
    open_tiny: OpenTiny, apply: str
) -> None:
    class Diverging(SGD):
        def update(self, model: Any, gradients: Any) -> None:
            self.learning_rate = 0.1 if not kept else 1e39
            before = values(model)
            with np.errstate(all="ignore"):
                super().update(model, gradients)
            kept.update({name: p for name, p in values(model).items() if name in gradients})
            assert before.keys() == kept.keys() or apply == "block"

    kept: dict[str, np.ndarray] = {}
    model = open_tiny(filled=True)
    batch = Batch.from_sequences(sequences(2))
    with pytest.raises(NonFiniteError, match="this update would make parameter"):
        train(model, [batch] * 3, Diverging(0.1), apply=apply)
    for name, expected in kept.items():
        np.testing.assert_array_equal(values(model)[name], expected)
    assert all(np.isfinite(value).all() for value in values(model).values())


def test_the_schedule_counts_updates(open_tiny: OpenTiny) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(6)]
    rates: list[float] = []

    class Watching(SGD):
        def update(self, model: Any, gradients: Any) -> None:
            rates.append(self.learning_rate)
            super().update(model, gradients)

    schedule = Schedule(0.4, "cosine", warmup=1, decay=2, end=0.1)
    train(open_tiny(), batches, Watching(9.0), accumulation=2, schedule=schedule)
    assert rates == pytest.approx([0.2, 0.4, 0.25])


def test_the_schedule_of_a_resumed_run_starts_anew(open_tiny: OpenTiny) -> None:
    batches = [Batch.from_sequences([row]) for row in sequences(4)]
    _, recorder = train(
        open_tiny(),
        batches,
        accumulation=2,
        start=61,
        report_every=1,
        schedule=Schedule(0.4, "cosine", decay=2),
    )
    rates = [info["learning_rate"] for info in recorder.of("train")]
    assert rates == pytest.approx([0.4, 0.2])


def test_schedules() -> None:
    assert [Schedule(3.0)(n) for n in (0, 7)] == [3.0, 3.0]
    assert [Schedule(3.0, warmup=2)(n) for n in range(4)] == pytest.approx([1.0, 2.0, 3.0, 3.0])
    cosine = Schedule(1.0, "cosine", decay=4)
    assert [cosine(n) for n in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    with pytest.raises(MespError, match="schedule must be one of"):
        Schedule(1.0, "linear")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply": "block", "max_norm": 1.0}, "apply block cannot clip"),
        ({"apply": "block", "accumulation": 2}, "apply block cannot accumulate"),
        ({"apply": "sometimes"}, "apply must be one of step, block"),
        ({"accumulation": 0}, "accumulation takes at least 1"),
        ({"iterations": -1}, "iterations must be 0 or more"),
        ({"max_norm": 0.0}, "largest gradient norm must be above 0"),
        ({"save_every": -1}, "must be 0 or more"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MespError, match=message):
        TrainingOptions(**({"iterations": 1} | options))
