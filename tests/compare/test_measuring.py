"""One measurement: what a process finds out about a setting; steps taken in turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mesp_core import MespError, get_backend, load_model
from mesp_core.compare import sampler as sampling
from mesp_core.compare import timing
from mesp_core.compare.presets import Preset, write_preset
from mesp_core.compare.process import _ending, run_child
from mesp_core.compare.sampler import Sampler
from mesp_core.compare.setting import Setting, parse_method
from mesp_core.compare.timing import step_times, time_settings
from mesp_core.compare.workload import Workload, open_backend, open_model, stored_bytes, token_ids
from mesp_core.files.checkpoint import open_checkpoint
from mesp_core.lora import LoraConfig
from tests.compare.conftest import in_process, methods
from tests.tiny import write_model

IDS = [3, 9, 4, 1, 8, 11, 5, 6, 3, 2, 30, 12]


def memory_request(setting: Setting, **own: object) -> dict[str, object]:
    request = {"task": "memory", "settings": [setting.as_json()], "ids": IDS}
    return request | {"gradients": None, "timeline": False} | own


def test_a_setting_survives_json_and_its_row(setting: Setting) -> None:
    for method in ("mesp", "mebp"):
        one = replace(setting, method=method, head=None, tiled=False, seed=5)
        assert Setting.from_json(json.loads(json.dumps(one.as_json()))) == one
        assert Setting.from_row(json.loads(json.dumps(one.row()))) == one
    assert one.head == "dense" and one.title == "mebp untiled"
    assert replace(one, head="tiled", tiled=True).title == "mebp:tiled"


@pytest.mark.parametrize(
    ("text", "expected"), [("mesp", ("mesp", None)), (" mebp:tiled ", ("mebp", "tiled"))]
)
def test_a_method_may_carry_its_head(text: str, expected: tuple[str, str | None]) -> None:
    assert parse_method(text) == expected


@pytest.mark.parametrize("text", ["adam", "mesp:", "mesp:sparse", ""])
def test_other_methods_and_heads_are_refused(text: str) -> None:
    with pytest.raises(MespError, match="unknown"):
        parse_method(text)


def test_every_lora_b_has_small_values_that_depend_on_the_seed_alone(setting: Setting) -> None:
    models = [
        open_model(replace(setting, seed=seed, method=method), get_backend("numpy"))
        for seed, method in ((0, "mesp"), (0, "mezo"), (1, "mesp"))
    ]
    for name, value in models[0].parameters.items():
        assert (models[1].parameters[name] == value).all()
        assert not (models[2].parameters[name] == value).any()
        if name.endswith("lora_b"):
            assert 0.005 < np.std(value) < 0.05


def test_tokens_are_text_where_there_is_a_tokenizer_and_random_elsewhere(
    tiny: Path, tmp_path: Path
) -> None:
    random = open_checkpoint(tiny)
    assert len(set(token_ids(random, 50, 0))) > 10
    assert token_ids(random, 50, 0) == token_ids(random, 50, 0) != token_ids(random, 50, 1)
    # Every word of Python's documentation is unknown to this tokenizer but for the text's end.
    text = token_ids(open_checkpoint(write_model(tmp_path / "words")), 3000, 0)
    assert len(text) == 3001 and set(text) == {0, 2}


def test_the_size_of_stored_weights_is_that_of_the_file(tiny: Path) -> None:
    header = 2000
    size = (tiny / "model.safetensors").stat().st_size
    assert size - 3 * header < stored_bytes(open_checkpoint(tiny)) < size


def test_the_loss_is_that_of_the_first_step_and_both_steps_update(setting: Setting) -> None:
    model = open_model(setting, get_backend("numpy"))
    before = {name: np.array(value) for name, value in model.parameters.items()}
    first = Workload(setting, model, IDS).step()
    assert first.gradients == {}
    assert all((model.parameters[name] != before[name]).any() for name in before)
    found = in_process(memory_request(setting))
    assert found["loss"] == first.loss
    assert found["trained"] == sum(value.size for value in before.values())
    assert found["gradients"] is None and found["timeline"] is None
    assert found["peak_bytes"] is None and found["compiled_bytes"] is None
    assert found["footprint_bytes"] > 0


def test_compiled_memory_is_told_where_a_step_is_compiled(setting: Setting) -> None:
    base = replace(setting, backend="jax:cpu")
    assert in_process(memory_request(base))["compiled_bytes"] > 0
    assert in_process(memory_request(replace(base, method="autodiff")))["compiled_bytes"] is None


def test_mlx_tells_its_allocator_and_a_timeline_of_it(setting: Setting) -> None:
    found = in_process(memory_request(replace(setting, backend="mlx:cpu"), timeline=True))
    assert found["peak_bytes"] > 4 * found["trained"]
    line = found["timeline"]
    assert line["measure"] == "peak_bytes"
    assert len(line["seconds"]) == len(line["bytes"]) >= 2
    assert [name for _, name in line["phases"]] == ["forward", "head", "backward"]
    assert max(line["bytes"]) <= found["peak_bytes"]


def test_a_method_that_cannot_run_says_why(setting: Setting) -> None:
    found = in_process(memory_request(replace(setting, method="autodiff", head=None)))
    assert "numpy has no automatic differentiation" in found["unavailable"]


def test_the_sampler_sees_what_was_there_between_two_samples() -> None:
    with Sampler() as sampler:
        before = sampler.peak or 0
        held = np.ones(4_000_000)
        sampler.phase("large")
        del held
    assert (sampler.peak or 0) - before > 25_000_000
    assert sampler.timeline(0) is None


def test_a_long_timeline_keeps_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "POINTS", 5)
    values = iter([*range(40), 1000, *([7] * 100_000)])
    with Sampler(lambda: next(values)) as sampler:
        for place in range(60):
            sampler.phase(f"phase {place}")
    line = sampler.timeline(3)
    assert line is not None and line["measure"] == "peak_bytes"
    assert len(line["bytes"]) <= 5 and max(line["bytes"]) == 1000
    assert len(line["phases"]) == 60


def test_a_timeline_without_an_allocator_is_of_the_footprint_over_the_baseline() -> None:
    with Sampler(lambda: None) as sampler:
        pass
    line, peak = sampler.timeline(1000), sampler.peak
    assert line is not None and peak is not None
    assert line["measure"] == "footprint_bytes" and max(line["bytes"]) == peak - 1000


def test_steps_are_taken_in_turn_and_one_that_fails_leaves_the_others(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    step = Workload.step

    def recorded(self: Workload) -> object:
        taken.append(self.setting.title)
        return step(self)

    monkeypatch.setattr(timing.Workload, "step", recorded)
    settings = methods(setting, "mesp", "mebp", "mezo")
    found = time_settings(settings, IDS, 2)
    assert taken == ["mesp", "mebp", "mezo", "mesp", "mezo", "mesp", "mezo"]
    assert [len(times) for times in found["seconds"]] == [2, 0, 2]
    assert [error is None for error in found["errors"]] == [True, False, True]


def test_medians_and_ratios_are_those_of_each_turn() -> None:
    found = step_times([[], [2.0, 4.0, 3.0], [3.0, 2.0, 6.0]])
    assert found == [(None, None), (3.0, 1.0), (3.0, 1.5)]
    assert step_times([[], []]) == [(None, None)] * 2


@pytest.mark.parametrize("method", ["mesp", "mesp-store-h"])
def test_an_untiled_block_has_the_same_gradients(
    setting: Setting, tmp_path: Path, method: str
) -> None:
    found = []
    one = replace(setting, dtype="float64", lora_dtype="float64", method=method)
    for tiled in (True, False):
        path = tmp_path / str(tiled)
        request = memory_request(replace(one, tiled=tiled), gradients=str(path))
        found.append((in_process(request)["loss"], np.fromfile(path)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-13)
    error = np.linalg.norm(found[0][1] - found[1][1]) / np.linalg.norm(found[0][1])
    assert 0 < error < 1e-12


def test_an_untiled_block_drops_the_same_features(setting: Setting) -> None:
    losses = []
    for tiled in (True, False):
        backend = open_backend(replace(setting, tiled=tiled))
        lora = LoraConfig(rank=2, dropout=0.5, dtype="float64")
        model = load_model(setting.model, backend=backend, lora=lora, dtype="float64")
        work = Workload(replace(setting, tiled=tiled), model, IDS)
        # The first update moves lora_b from 0, so that the second loss sees every mask.
        losses.append([work.step().loss for _ in range(3)])
        names = {row.component: row.name for row in backend.explain()}
        assert names["gated_mlp"] == ("formula" if tiled else "untiled")
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert len(set(losses[0])) == 3


def test_a_process_of_its_own_answers_in_json_and_tells_mistakes(setting: Setting) -> None:
    found = run_child(memory_request(setting), exact=True)
    assert found["loss"] == in_process(memory_request(setting))["loss"]
    told = run_child(memory_request(replace(setting, model="nowhere")))
    assert told == {"error": "no model at nowhere; give a folder, a .gguf file, or a name: "
                    "smollm2-135m"}  # fmt: skip


def test_a_process_that_fails_tells_its_last_line() -> None:
    assert run_child({"task": "memory"}) == {"error": "the process failed: KeyError: 'settings'"}


@pytest.mark.parametrize(
    ("status", "err", "words"),
    [
        (-9, "", "ended by SIGKILL: perhaps the system was out of memory"),
        (-11, "noise", "ended by SIGSEGV"),
        (1, "Traceback\n  line\nRuntimeError: no\n\n", "failed: RuntimeError: no"),
        (3, "", "failed: exit status 3"),
    ],
)
def test_how_a_process_ended(status: int, err: str, words: str) -> None:
    assert _ending(status, err).endswith(words)


def test_two_measurements_of_memory_agree_to_two_percent(tmp_path: Path) -> None:
    write_preset(Preset(256, 3, 704, 4, 2, 4099), tmp_path)
    one = Setting(str(tmp_path), "small", "mlx:cpu", dtype="float32", tokens=700, rank=8)
    ids = np.random.default_rng(2).integers(0, 4099, 701).tolist()
    first, second = (run_child(memory_request(one, ids=ids), exact=True) for _ in range(2))
    for figure in ("peak_bytes", "footprint_bytes"):
        assert first[figure] == pytest.approx(second[figure], rel=0.02)
    # Three checkpoints at the least.
    assert first["peak_bytes"] > 3 * 700 * 256 * 4
