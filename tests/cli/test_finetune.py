"""``mesp finetune`` from beginning to end on a tiny model, and the commands around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mesp_core
from mesp_core import Batch, evaluate, load_model
from mesp_core.adapters import read_adapter
from mesp_core.cli.main import main
from tests.tiny import EOS, counting, write_data, write_model

Run = Callable[..., Any]


def test_a_run_leaves_an_adapter_metrics_and_a_report(
    finetune: Run, tiny: Path, tmp_path: Path
) -> None:
    outcome = finetune(json=tmp_path / "report.json", iters=6, save_every=4)
    assert outcome.status == 0, outcome.err
    folder = tmp_path / "adapters"
    assert sorted(path.name for path in folder.iterdir()) == [
        "0000004_adapters.safetensors",
        "adapter_config.json",
        "adapters.safetensors",
        "metrics.jsonl",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["mesp"] == mesp_core.__version__
    assert (report["backend"], report["device"]) == ("numpy", "cpu")
    assert report["updates"] == 6 and report["interrupted"] is False
    assert report["before"] > report["after"]
    # The numbers are those of the adapter that was saved.
    rows = [[*row, EOS] for row in counting(3, seed=6)]
    model = load_model(tiny, backend="numpy", adapter=folder)
    assert evaluate(model, [Batch.from_sequences(rows)])[0] == pytest.approx(report["after"], 1e-6)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["iteration"] for m in metrics if "train_loss" in m] == [2, 4, 6]
    assert [m["val_loss"] for m in metrics if "val_loss" in m] == [
        report["before"],
        report["after"],
    ]


def test_what_a_person_reads(finetune: Run, tmp_path: Path, tiny: Path) -> None:
    outcome = finetune()
    for words in (
        "Sample before",
        "Sample after",
        "Iter 0: val loss",
        "Iter 6: train loss",
        "tokens/s",
        "peak memory",
        "Validation loss",
        f"Saved the adapter in {tmp_path / 'adapters'}",
        f"mlx_lm.generate --model {tiny} --adapter-path {tmp_path / 'adapters'}",
    ):
        assert words in outcome.out
    for words in ("training: 100%", "loss ", "tokens/s", "peak "):
        assert words in outcome.err


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_the_same_seed_gives_the_same_bits(finetune: Run, tmp_path: Path, backend: str) -> None:
    def run(name: str, seed: int) -> bytes:
        folder = tmp_path / name
        outcome = finetune(backend=backend, adapter_path=folder, seed=seed, dropout=0.2, iters=3)
        assert outcome.status == 0, outcome.err
        return (folder / "adapters.safetensors").read_bytes()

    assert run("one", 5) == run("two", 5)
    assert run("one", 5) != run("three", 6)


def test_the_adapter_changes_what_is_generated(
    mesp: Run, finetune: Run, tiny: Path, tmp_path: Path
) -> None:
    """The data count upwards, and after training so does the model."""
    many = write_data(tmp_path / "many", train=counting(40))
    assert finetune(data=many, iters=120, learning_rate=0.015, batch_size=8).status == 0
    common = ("generate", "--model", tiny, "--backend", "numpy", "--prompt", "w12 w13")
    plain = mesp(*common, "--max-tokens", 2)
    adapted = mesp(*common, "--max-tokens", 2, "--adapter-path", tmp_path / "adapters")
    assert plain.status == adapted.status == 0
    assert plain.out.startswith("w12 w13") and "w14" not in plain.out
    assert adapted.out == "w12 w13 w14 w15\n"


def test_peft_layout_with_checkpoints_of_its_own(finetune: Run, tmp_path: Path) -> None:
    outcome = finetune(adapter_format="peft", save_every=4)
    assert outcome.status == 0, outcome.err
    folder = tmp_path / "adapters"
    assert (folder / "adapter_model.safetensors").exists()
    assert read_adapter(folder / "checkpoint-4").config.rank == 8
    assert "PeftModel.from_pretrained" in outcome.out


@pytest.mark.parametrize("apply", ["step", "block"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_and_way_to_apply(
    finetune: Run, tmp_path: Path, optimizer: str, apply: str
) -> None:
    outcome = finetune(
        optimizer=optimizer, apply=apply, iters=4, json=tmp_path / "r.json", learning_rate=0.02
    )
    assert outcome.status == 0, outcome.err
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["after"] < report["before"]


@pytest.mark.parametrize("method", ["mesp-store-h", "mebp", "autodiff", "mezo"])
def test_every_method(finetune: Run, tmp_path: Path, method: str) -> None:
    json_file = tmp_path / "r.json"
    rate = 1e-3 if method == "mezo" else 0.02
    flags = {"backend": "torch", "iters": 4, "learning_rate": rate, "json": json_file}
    outcome = finetune(method=method, **flags)
    assert outcome.status == 0, outcome.err
    report = json.loads(json_file.read_text())
    assert report["method"] == method
    assert report["optimizer"] == ("sgd" if method == "mezo" else "adamw")
    if method == "mezo":
        # Two rows and one direction a step prove nothing but that something moved.
        assert report["after"] != report["before"]
        return
    assert report["after"] < report["before"]
    assert finetune(method="mesp", **flags).status == 0
    assert report["after"] == pytest.approx(json.loads(json_file.read_text())["after"], rel=1e-5)


def test_lora_flags_reach_the_adapter(finetune: Run, tmp_path: Path) -> None:
    flags = {"rank": 2, "alpha": 3.0, "num_layers": 2, "dropout": 0.1}
    outcome = finetune("--target-modules", "q_proj", "down_proj", **flags)
    assert outcome.status == 0, outcome.err
    config = read_adapter(tmp_path / "adapters").config
    assert (config.rank, config.scale, config.layers, config.dropout) == (2, 1.5, 2, 0.1)
    assert config.targets == ("self_attn.q_proj", "mlp.down_proj")


def test_accepted_flags_of_mlx_lm(finetune: Run) -> None:
    assert finetune("--train", "--grad-checkpoint", fine_tune_type="lora", iters=1).status == 0


def test_the_test_set(finetune: Run, tmp_path: Path) -> None:
    trained = finetune("--train", "--test", json=tmp_path / "both.json")
    assert trained.status == 0 and "Test loss" in trained.out
    saved = (tmp_path / "adapters" / "adapters.safetensors").read_bytes()
    only = finetune("--test", json=tmp_path / "only.json")
    assert only.status == 0 and "Iter" not in only.out
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("both", "only"))
    assert two["test"] == pytest.approx(one["test"], rel=1e-6)
    assert (tmp_path / "adapters" / "adapters.safetensors").read_bytes() == saved


def test_case_20_going_on_keeps_numbers_and_numbered_files(finetune: Run, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    assert finetune(rank=2, save_every=3).status == 0
    first = {path.name: path.read_bytes() for path in folder.glob("0*")}
    assert sorted(first) == ["0000003_adapters.safetensors", "0000006_adapters.safetensors"]
    resume = folder / "0000006_adapters.safetensors"
    outcome = finetune(save_every=3, resume_adapter_file=resume)
    assert outcome.status == 0, outcome.err
    assert "its weights, a new optimizer" in outcome.out
    names = sorted(path.name for path in folder.glob("0*"))
    assert names == [f"{number:07d}_adapters.safetensors" for number in (3, 6, 9, 12)]
    for name, content in first.items():
        assert (folder / name).read_bytes() == content
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["iteration"] for m in metrics if "train_loss" in m] == [2, 4, 6, 8, 10, 12]
    # The second run started where the first one ended.
    losses = {m["iteration"]: [] for m in metrics if "val_loss" in m}
    for entry in metrics:
        if "val_loss" in entry:
            losses[entry["iteration"]].append(entry["val_loss"])
    assert losses[6][0] == pytest.approx(losses[6][1], rel=1e-6)


@pytest.mark.parametrize("format", ["mlx-lm", "peft"])
def test_going_on_from_a_folder_of_either_format(
    finetune: Run, tmp_path: Path, format: str
) -> None:
    assert finetune(rank=2, adapter_format=format).status == 0
    folder = tmp_path / "adapters"
    tensors = read_adapter(folder).tensors
    outcome = finetune(
        resume_adapter_file=folder, adapter_path=tmp_path / "more", learning_rate=0.0, iters=1
    )
    assert outcome.status == 0, outcome.err
    after = load_file(tmp_path / "more" / "adapters.safetensors")
    assert after.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(after[name], value)


def test_going_on_with_what_the_adapter_has_anyway(finetune: Run, tmp_path: Path) -> None:
    """Asking for the same in other words is no mismatch."""
    assert finetune(rank=2).status == 0
    config = tmp_path / "lora.yaml"
    flags = {"resume_adapter_file": tmp_path / "adapters", "adapter_path": tmp_path / "more"}
    config.write_text("lora_parameters: {scale: 8.0}\n")
    assert finetune(num_layers=3, iters=1, **flags).status == 0
    saved = read_adapter(tmp_path / "more").config
    assert (saved.rank, saved.scale, saved.layers) == (2, 8.0, 0)
    assert finetune(config=config, iters=1, **flags).status == 0
    config.write_text("lora_parameters: {scale: 9.0}\n")
    outcome = finetune(config=config, **flags)
    assert outcome.status == 2 and "scale 9.0 asked for, but" in outcome.err
    outcome = finetune(num_layers=2, **flags)
    assert outcome.status == 2 and "layers 2 asked for, but" in outcome.err
    outcome = finetune(alpha=3, **flags)
    assert outcome.status == 2 and "alpha 3.0 asked for, but" in outcome.err


def test_a_scale_without_a_rank_is_one_of_the_default_rank(finetune: Run, tmp_path: Path) -> None:
    config = tmp_path / "lora.yaml"
    config.write_text("lora_parameters: {scale: 5.0}\n")
    assert finetune(config=config, iters=1).status == 0
    saved = read_adapter(tmp_path / "adapters").config
    assert (saved.rank, saved.scale) == (8, 5.0)


def test_going_on_after_the_last_checkpoint_repeats_no_number(
    finetune: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    assert finetune(iters=5, save_every=3, steps_per_report=1).status == 0
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": true}\n[1]\nnot JSON\n' + "9" * 5000 + "\n")
    flags = {"resume_adapter_file": folder, "iters": 2, "save_every": 3, "steps_per_report": 1}
    outcome = finetune(**flags)
    assert outcome.status == 0, outcome.err
    told = [line.split(":")[0] for line in outcome.out.splitlines() if "train loss" in line]
    assert told == ["Iter 6", "Iter 7"]
    assert (folder / "0000006_adapters.safetensors").exists()


def test_a_resumed_cosine_learns(finetune: Run, tmp_path: Path) -> None:
    flags = {"lr_schedule": "cosine", "steps_per_report": 1, "iters": 2}
    assert finetune(**flags).status == 0
    outcome = finetune(resume_adapter_file=tmp_path / "adapters", **flags)
    assert "Iter 3: train loss" in outcome.out
    assert outcome.out.count("learning rate 1.00e-02") == 1


@pytest.mark.parametrize("formats", [("mlx-lm", "peft"), ("peft", "mlx-lm")])
def test_no_file_of_the_other_format_stays_beside_a_new_adapter(
    finetune: Run, tmp_path: Path, formats: tuple[str, str]
) -> None:
    for rank, format in enumerate(formats, start=2):
        assert finetune(adapter_format=format, rank=rank, iters=1).status == 0
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    kept = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}[formats[1]]
    assert names == {kept, "adapter_config.json", "metrics.jsonl"}
    assert read_adapter(tmp_path / "adapters").config.rank == 3


def test_rows_longer_than_the_model_was_made_for(finetune: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "short", max_position_embeddings=4)
    outcome = finetune(model=model, iters=1)
    assert outcome.status == 0
    assert "rows of 9 tokens, and the model was made for 4" in outcome.err
    assert "the model was made for" not in finetune(model=model, max_seq_length=4, iters=1).err


def test_options_from_a_file_of_mlx_lms_kind(finetune: Run, tmp_path: Path) -> None:
    config = tmp_path / "lora.yaml"
    config.write_text(
        "optimizer: sgd\noptimizer_config:\n  sgd: {momentum: 0.5}\n  adamw: {eps: 1e-6}\n"
        "iters: 3\nlearning_rate: 1e-3\nsteps_per_report: 1\nwandb: null\nreport_to: ''\n"
        "lora_parameters: {rank: 2, scale: 10.0, dropout: 0.0, keys: [mlp.up_proj]}\n"
        "lr_schedule: {name: cosine_decay, warmup: 1, arguments: [2e-3, 2, 1e-4]}\n"
    )
    outcome = finetune(config=config, iters=None, learning_rate=None, steps_per_report=None, rank=4)
    assert outcome.status == 0, outcome.err
    saved = read_adapter(tmp_path / "adapters").config
    # Flags win over the file.
    assert (saved.rank, saved.scale, saved.targets) == (4, 10.0, ("mlp.up_proj",))
    metrics = (tmp_path / "adapters" / "metrics.jsonl").read_text().splitlines()
    rates = [m["learning_rate"] for m in map(json.loads, metrics) if "learning_rate" in m]
    assert rates == pytest.approx([1e-3, 2e-3, 1.05e-3])


def test_notes_about_the_data_are_told_once(finetune: Run, tmp_path: Path) -> None:
    data = write_data(tmp_path / "short", train=[[3, 4], [], [5, 6]])
    outcome = finetune(data=data, iters=1)
    assert outcome.status == 0
    assert outcome.err.count("1 record(s) of fewer than 2 tokens left out") == 1
    assert outcome.err.count("training without validation") == 1


def test_export_base_and_info(mesp: Run, tiny: Path, tmp_path: Path) -> None:
    outcome = mesp("export-base", tiny, tmp_path / "base", "--dtype", "bfloat16")
    assert outcome.status == 0 and str(tmp_path / "base") in outcome.out
    assert (tmp_path / "base" / "config.json").exists()
    report = tmp_path / "info.json"
    outcome = mesp("info", "--model", tiny, "--backend", "numpy", "--json", report)
    assert outcome.status == 0
    info = json.loads(report.read_text())
    assert info["backends"]["numpy"] is None
    assert info["model"]["family"] == "llama" and info["model"]["layers"] == 3
    assert "numpy: can run" in outcome.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"mesp {mesp_core.__version__}\n"
