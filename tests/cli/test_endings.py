"""How a run can end before its time, and what it leaves then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesp_core.adapters import read_adapter
from mesp_core.callbacks import MetricsFile

Run = Callable[..., Any]

#: A shell starts what runs in its background with Ctrl-C ignored, and nohup with SIGHUP.
_MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
from mesp_core.cli.main import main
sys.exit(main())
"""


def start(tiny: Path, data: Path, folder: Path, iterations: int) -> subprocess.Popen[str]:
    """A run as a process that Ctrl-C reaches, wherever the tests were started."""
    command = (
        f"finetune --model {tiny} --data {data} --backend numpy --adapter-path {folder} "
        f"--iters {iterations} --batch-size 2 --steps-per-report 1 --save-every 0 "
        f"--steps-per-eval 0 --json {folder.parent / 'report.json'}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def wait_for_updates(process: subprocess.Popen[str], metrics: Path) -> None:
    deadline = time.monotonic() + 60
    while not (metrics.exists() and "train_loss" in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_saves_what_is_trained(
    tiny: Path, data: Path, tmp_path: Path, name: str
) -> None:
    folder, metrics = tmp_path / "adapters", tmp_path / "adapters" / "metrics.jsonl"
    process = start(tiny, data, folder, 1000000)
    wait_for_updates(process, metrics)
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"{name}: stopping after this step" in err and "Traceback" not in err
    assert f"Saved the adapter in {folder}" in out and "Interrupted after iteration" in out
    adapter = read_adapter(folder)
    assert any((t != 0).any() for n, t in adapter.tensors.items() if n.endswith("lora_b"))
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["event"] == "interrupted"
    report = json.loads((tmp_path / "report.json").read_text())
    # Nobody waited for a validation of what was saved.
    assert report["interrupted"] and report["before"] > 0 and report["after"] is None


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_leaves_does_not_end_the_run(tiny: Path, data: Path, tmp_path: Path) -> None:
    """``mesp finetune | sed 5q`` trains to its end."""
    folder = tmp_path / "adapters"
    process = start(tiny, data, folder, 40)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert "rank 8" in process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0, err
    assert "Traceback" not in err and "Broken pipe" not in err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["updates"] == 40 and read_adapter(folder).config.rank == 8


def test_an_error_during_training_saves_what_is_trained(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under metrics.jsonl is one of them."""
    put = MetricsFile._put

    def full(metrics: MetricsFile, text: str) -> None:
        if '"iteration": 4' in text:
            raise OSError(28, "No space left on device", str(metrics.path))
        put(metrics, text)

    monkeypatch.setattr(MetricsFile, "_put", full)
    outcome = finetune()
    assert outcome.status == 2 and "Traceback" not in outcome.err
    assert "metrics.jsonl: No space left" in outcome.err.splitlines()[-1]
    assert "after 4 updates: saved" in outcome.out
    saved = read_adapter(tmp_path / "adapters").tensors
    assert any((t != 0).any() for n, t in saved.items() if n.endswith("lora_b"))


def test_a_learning_rate_without_bounds(finetune: Run, tmp_path: Path) -> None:
    outcome = finetune(learning_rate=1e38)
    assert outcome.status == 2 and "Warning" not in outcome.err
    assert "lower the learning rate" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "adapters").exists()


def test_a_validation_loss_that_is_no_number(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After training it is told, as null for machines; before, there is nothing to train."""
    losses = iter([(3.5, 9), (float("nan"), 9), (float("inf"), 9)])
    monkeypatch.setattr("mesp_core.training.evaluate", lambda model, batches: next(losses))
    assert finetune(iters=2, json=tmp_path / "r.json").status == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["after"] is None and report["validation"] == [[0, 3.5], [2, None]]
    before = (tmp_path / "adapters" / "metrics.jsonl").read_bytes()
    outcome = finetune(iters=2)
    assert outcome.status == 2
    assert "before any training is inf" in outcome.err.splitlines()[-1]
    assert (tmp_path / "adapters" / "metrics.jsonl").read_bytes() == before


def test_an_interrupt_during_the_last_validation(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def interrupted(model: Any, batches: Any) -> tuple[float, int]:
        measured.append(sum(1 for _ in batches))
        if len(measured) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return 3.5, 9

    monkeypatch.setattr("mesp_core.training.evaluate", interrupted)
    outcome = finetune(json=tmp_path / "r.json")
    assert outcome.status == 130 and len(measured) == 2
    assert "cut short" in outcome.err and "Interrupted after iteration 6. Saved" in outcome.out
    read_adapter(tmp_path / "adapters")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"] and report["after"] is None


def test_a_trained_model_that_can_no_longer_go_on(finetune: Run, tmp_path: Path) -> None:
    """One huge finite step: told, and the report is there."""
    outcome = finetune(optimizer="sgd", learning_rate=1e30, iters=3, json=tmp_path / "r.json")
    assert outcome.status == 0, outcome.err
    assert "warning: after training, the model's logits are NaN" in outcome.err
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["after"] is None and report["sample_after"] is None


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", ">/dev/full"])
def test_streams_that_are_closed_or_full(
    tiny: Path, data: Path, tmp_path: Path, streams: str
) -> None:
    """Training goes on; a command that only prints needs its stdout."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["PYTHONIOENCODING"] = "ascii"
    command = (
        f"{sys.executable} -m mesp_core.cli.main finetune --model {tiny} --data {data} "
        f"--backend numpy --iters 2 --adapter-path {tmp_path / 'adapters'}"
    )
    done = subprocess.run(
        ["sh", "-c", f"{command} {streams}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert (tmp_path / "adapters" / "adapters.safetensors").exists()
    if streams == "2>&-":
        assert "\\u2192" in done.stdout and "Validation loss" in done.stdout
