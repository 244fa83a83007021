"""Generation, footprint, metrics and signals."""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mesp_core import Batch, MespError, Model, NonFiniteError, logits
from mesp_core.callbacks import Callbacks, MetricsFile, finite
from mesp_core.footprint import FootprintMeter, process_footprint
from mesp_core.generation import continuation, greedy
from mesp_core.interrupts import StopRequest

OpenTiny = Callable[..., Model]


def test_greedy_takes_the_most_likely_id_each_time(open_tiny: OpenTiny) -> None:
    model = open_tiny(filled=True)
    ids = [5, 9, 4]
    found = list(greedy(model, ids, 4))
    grown = list(ids)
    for chosen in found:
        whole = model.backend.to_numpy(logits(model, Batch.from_sequences([[*grown, 0]])))
        assert chosen == int(np.argmax(whole[-1]))
        grown.append(chosen)
    assert len(found) == 4


def test_greedy_ends_at_the_end_of_sequence(open_tiny: OpenTiny) -> None:
    model = open_tiny(filled=True)
    found = list(greedy(model, [5, 9, 4], 6))
    assert list(greedy(model, [5, 9, 4], 6, eos_id=found[2])) == found[: found.index(found[2])]


def test_a_continuation_is_text(open_tiny: OpenTiny) -> None:
    model = open_tiny(filled=True)
    tokenizer = model.checkpoint.tokenizer()
    ids = list(greedy(model, [5, 9], 3, tokenizer.eos_id))
    assert ids and continuation(model, tokenizer, "w5 w9", 3) == " " + tokenizer.decode(ids)
    with pytest.raises(MespError, match="prompt has no tokens"):
        continuation(model, tokenizer, "", 3)
    with pytest.raises(MespError, match="at least 1, not 0"):
        continuation(model, tokenizer, "w5", 0)


def test_logits_that_are_not_numbers_are_an_error(open_tiny: OpenTiny) -> None:
    model = open_tiny(filled=True)
    name = "model.layers.1.mlp.up_proj.lora_a"
    model.parameters[name] = model.parameters[name] * math.nan
    with pytest.raises(NonFiniteError, match="logits are NaN or infinite"):
        list(greedy(model, [5], 1))


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no footprint is known here")
def test_the_footprint_counts_touched_memory_and_remembers_its_peak() -> None:
    before = process_footprint()
    assert before is not None and before > 1 << 20
    with FootprintMeter(interval=0.005) as meter:
        # Mapped afresh, because the heap may already hold pages that an array would reuse.
        block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(block, dtype=np.uint8)[:] = 1
        meter.sample()
        held = process_footprint()
        block.close()
    assert held is not None and held - before >= 60 << 20
    assert meter.peak is not None and meter.peak - before >= 60 << 20


def test_metrics_are_valid_json_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    told = Callbacks(metrics, metrics)
    told.on_iteration({"updates": 1})
    told.on_train_loss_report({"iteration": 1, "train_loss": math.nan, "peak_memory": None})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"iteration": 1, "train_loss": None, "peak_memory": None}] * 2
    metrics.close()
    more = MetricsFile(path, append=True)
    more.on_iteration({"updates": 1})
    more.on_val_loss_report({"iteration": 2, "val_loss": 0.5})
    more.close()
    assert len(path.read_text().splitlines()) == 3


def test_metrics_of_an_earlier_run_stay_until_something_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("earlier\n")
    metrics = MetricsFile(path)
    metrics.on_val_loss_report({"iteration": 0, "val_loss": 1.5})
    metrics.on_iteration({"updates": 0})
    assert path.read_text() == "earlier\n"
    metrics.on_iteration({"updates": 1})
    metrics.on_event({"iteration": 1, "event": "interrupted"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"iteration": 0, "val_loss": 1.5}, {"iteration": 1, "event": "interrupted"}]
    metrics.close()
    # A run that trains nothing needs no file at all.
    MetricsFile(tmp_path / "missing" / "metrics.jsonl").close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_metrics_that_cannot_be_written_are_a_mistake_in_words(tmp_path: Path) -> None:
    nowhere = MetricsFile(tmp_path / "missing" / "metrics.jsonl")
    with pytest.raises(MespError, match=r"cannot write .*metrics\.jsonl: No such"):
        nowhere.on_iteration({"updates": 1})
    full = MetricsFile(Path("/dev/full"))
    full.on_val_loss_report({"iteration": 0, "val_loss": 1.5})
    with pytest.raises(MespError, match="cannot write /dev/full: No space"):
        full.on_iteration({"updates": 1})
    full.close()


def test_numbers_that_json_lacks_become_none_at_any_depth() -> None:
    report = {"a": [[0, math.nan], (1, math.inf)], "b": {"c": -math.inf, "d": 2.5}, "e": "nan"}
    assert finite(report) == {"a": [[0, None], [1, None]], "b": {"c": None, "d": 2.5}, "e": "nan"}


def test_the_first_signal_is_a_request_and_the_second_acts() -> None:
    announced: list[str] = []
    with StopRequest(announced.append) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.requested and announced == ["SIGINT"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_terminal_is_a_request_too_unless_it_is_ignored() -> None:
    # nohup would have it ignored from the start.
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopRequest(lambda name: None) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.requested
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest(lambda name: None) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_a_stop_request_in_another_thread_leaves_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopRequest(lambda name: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
