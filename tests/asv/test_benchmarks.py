"""The benchmarks themselves: what they take, what they skip, whether they measure what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asv.util import load_json
from benchmarks import synthetic
from benchmarks.accuracy import gradient_error, true_gradients
from benchmarks.common import BACKENDS, MemoryCase, where_it_exists
from benchmarks.products import products
from benchmarks.step import Step as StepCase
from benchmarks.work import WORK, Setting, Step, open_backend

from asv_bench import quick, suites
from asv_bench.measured import Run, Value, cell, cells
from mesp_core import load_model
from tests.asv.fabricate import HASH

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asv runs a benchmark in a folder of its own, where it writes its model."""
    monkeypatch.chdir(tmp_path)


def measured(benchmarks: dict[str, Any]) -> dict[str, Any]:
    return {name: benchmark for name, benchmark in benchmarks.items() if name != HASH}


def test_parameters_are_the_same_on_every_machine(benchmarks: dict[str, Any]) -> None:
    for name, benchmark in measured(benchmarks).items():
        assert benchmark["param_names"][:4] == ["backend", "tokens", "rank", "dtype"], name
        assert benchmark["params"][0] == [repr(backend) for backend in BACKENDS], name


def test_every_benchmark_is_named_for_people_and_has_a_unit(benchmarks: dict[str, Any]) -> None:
    names = {b["pretty_name"] for b in benchmarks.values()}
    assert len(names) == len(benchmarks) and None not in names
    for name, benchmark in benchmarks.items():
        kind = name.rpartition(".")[2]
        expected = {"time": "seconds", "peak": "bytes"}
        word = "time" if kind.startswith("time_") else "peak" if "peak_bytes" in kind else None
        assert word is None or benchmark["unit"] == expected[word], name
        assert benchmark["unit"] != "unit", name
        assert benchmark["version"] == "1", name


def test_asv_makes_its_environments_of_the_pinned_versions() -> None:
    settings = load_json(str(ROOT / "asv_bench" / "asv.conf.json"), js_comments=True)
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    asked = settings["matrix"]["req"]
    assert {"jax", "mlx", "torch", "numpy"} <= asked.keys()
    assert {name: [pinned[name]] for name in asked} == asked


def good_run(benchmarks: dict[str, Any]) -> Run:
    values = {
        cell: Value(1.0)
        for name, benchmark in benchmarks.items()
        for cell in cells(name, benchmark["params"])
    }
    return Run("c", 0, "m", "e", values, frozenset(), frozenset())


def test_a_quick_run_takes_every_benchmark_on_every_backend(benchmarks: dict[str, Any]) -> None:
    assert quick.complaints(benchmarks, [good_run(benchmarks)]) == []
    taken = {
        name: [c for c in cells(name, b["params"]) if any(re.search(p, c) for p in suites.QUICK)]
        for name, b in measured(benchmarks).items()
    }
    for name, chosen in taken.items():
        # Large models cost too much to run on all.
        backends = 1 if "real_model" in name else len(BACKENDS)
        assert len({cell.partition("(")[2].partition(",")[0] for cell in chosen}) == backends, name


def test_a_quick_run_complains(benchmarks: dict[str, Any]) -> None:
    good = good_run(benchmarks)
    one = cell("step.Step.time_step", "jax", 256, 8, "float32")
    values = {name: value for name, value in good.values.items() if name != one}
    failed = Run("c", 0, "m", "e", values, frozenset([one]), frozenset())
    assert quick.complaints(benchmarks, [failed]) == [f"{one} failed"]
    skipped = Run("c", 0, "m", "e", values, frozenset(), frozenset([one]))
    (complaint,) = quick.complaints(benchmarks, [skipped])
    assert complaint.startswith(f"{one} was skipped")
    rotten = benchmarks | {"new.time_it": {"params": [["'mlx'"], ["7"]]}}
    (complaint,) = quick.complaints(rotten, [good])
    assert complaint.startswith("new.time_it has no cell")
    many = {f"a{n}": {"params": [["'mlx'"], ["256"], ["8"], ["'float32'"]]} for n in range(99)}
    assert any("more than" in line for line in quick.complaints(many, [good_run(many)]))


def test_each_suite_has_cells_of_benchmarks_that_exist(benchmarks: dict[str, Any]) -> None:
    every = [c for name, b in benchmarks.items() for c in cells(name, b["params"])]
    for name, patterns in suites.SUITES.items():
        for pattern in patterns:
            assert any(re.search(pattern, cell) for cell in every), (name, pattern)
        assert any(re.search(pattern, HASH) for pattern in patterns), name
    assert suites.patterns("only_this") == (suites.SOURCE, "only_this")


def test_a_backend_that_cannot_run_is_skipped() -> None:
    with pytest.raises(NotImplementedError, match="no backend is called 'abacus'"):
        StepCase().setup("abacus", 256, 8, "float32")


@pytest.mark.parametrize("error", [AttributeError, ImportError, TypeError])
def test_what_an_older_commit_lacks_is_skipped(error: type[Exception]) -> None:
    with pytest.raises(NotImplementedError, match="lacking"), where_it_exists():
        raise error("lacking")


def test_another_error_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError), where_it_exists():
        _ = 1 / 0


def test_what_is_ready_stays_ready() -> None:
    """asv calls ``setup`` before every sample; a program is compiled once."""
    case = StepCase()
    case.setup("numpy", 8, 2, "float32")
    work = case.work
    case.setup("numpy", 8, 2, "float32")
    assert case.work is work
    case.setup("numpy", 9, 2, "float32")
    assert case.work is not work


@pytest.mark.parametrize("what", WORK)
def test_every_kind_of_work_runs_again_and_again(what: str) -> None:
    work = WORK[what](Setting("numpy", 9, 2, "float32", what), open_backend("numpy"))
    work.run()
    work.run()


def test_a_step_trains() -> None:
    step = Step(Setting("numpy", 9, 2, "float32"), open_backend("numpy"))
    before = {name: np.array(value) for name, value in step.model.parameters.items()}
    step.run()
    assert all((before[name] != step.model.parameters[name]).any() for name in before)


def test_the_synthetic_model_has_the_weights_it_tells(tmp_path: Path) -> None:
    values = synthetic.write_model(tmp_path / "model")
    model = load_model(tmp_path / "model", backend="numpy")
    assert values.keys() == synthetic.shapes().keys()
    for name, value in values.items():
        if value.ndim == 2:
            stored = model.checkpoint.matrix(name).decode()
            np.testing.assert_allclose(stored, value, rtol=1e-6, atol=1e-7)
            assert abs(value.mean()) < 0.01 and value.std() == pytest.approx(
                value.shape[1] ** -0.5, rel=0.02
            )
    model.close()


def test_the_error_of_the_gradients_is_the_error_of_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(Setting("numpy", 9, 2, "float32"), open_backend("numpy"))
    exact = gradient_error(step)
    assert 1e-9 < exact < 1e-5
    found = step.gradients()
    true = true_gradients(step)
    size = np.sqrt(sum(np.sum(value**2) for value in true.values()))
    name = max(true, key=lambda name: np.linalg.norm(true[name]))
    wrong = found | {name: found[name] * 1.5}
    monkeypatch.setattr(step, "gradients", lambda: wrong)
    expected = 0.5 * np.linalg.norm(found[name]) / size
    assert gradient_error(step) == pytest.approx(expected, rel=1e-3)
    monkeypatch.setattr(step, "gradients", dict)
    with pytest.raises(ValueError, match="other parameters"):
        gradient_error(step)


def test_the_bare_products_are_those_of_a_step() -> None:
    """2 · tokens · weights for each pass over a matrix; see DESIGN's arithmetic."""
    step = Step(Setting("numpy", 9, 2, "float32"), open_backend("numpy"))
    work = sum(count * n * a * b for (n, a, b), count in products(step).items())
    shapes = synthetic.shapes()
    weights = {name: int(np.prod(shape)) for name, shape in shapes.items() if len(shape) == 2}
    passes = {name: 2 if "embed" in name or "down_proj" in name else 3 for name in weights}
    assert work == 9 * sum(passes[name] * weights[name] for name in weights)


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """NumPy has no allocator that counts: what is told is the process's, without its start."""
    peaks = []
    for tokens in (32, 256):
        case = MemoryCase()
        case.setup("numpy", tokens, 8, "float32")
        peaks.append(case.peak_bytes)
    # A checkpoint a block, at the least; the process itself has more than 30 MB when it starts.
    assert peaks[1] - peaks[0] > 4 * (256 - 32) * synthetic.HIDDEN * synthetic.LAYERS
    assert peaks[0] < 2e7


def test_a_measuring_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="abacus"):
        MemoryCase().setup("abacus", 8, 2, "float32")
    monkeypatch.setattr(MemoryCase, "what", "nothing")
    with pytest.raises(RuntimeError, match="KeyError"):
        MemoryCase().setup("numpy", 8, 2, "float32")


def test_cells_are_named_as_asv_names_them() -> None:
    assert cells("a.b", []) == ["a.b"]
    assert cells("a.b", [["'mlx'", "'jax'"], ["8"]]) == ["a.b('mlx', 8)", "a.b('jax', 8)"]
    assert cell("a.b", "jax", 8) == "a.b('jax', 8)"
