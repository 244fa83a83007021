"""Mistakes of a user: one clear line, exit status 2, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import Tensors, counting, sequences, text, write_data, write_model

Run = Callable[..., Any]


def check(outcome: Any, *words: str) -> None:
    """Status 2 and one line on stderr with these words."""
    assert outcome.status == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("mesp: error: ")
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


def put_nan(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan


def put_nan_into_a_norm(tensors: Tensors) -> None:
    tensors["model.layers.1.input_layernorm.weight"][3] = np.nan


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}} | index))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def set_config(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), ["safetensors"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
        (lose_a_shard, ["model-00002-of-00002.safetensors"]),
        (truncate, ["model.safetensors", "truncated"]),
        (set_config(model_type="mamba"), ["architecture 'mamba' is not supported"]),
        (set_config(quantization={"bits": 7, "group_size": 64}), ["7"]),
        (set_config(quantization_config={"quant_method": "gptq", "bits": 4}), ["gptq"]),
        (set_config(hidden_size=24), ["shape"]),
    ],
)
def test_damaged_and_unknown_models(
    finetune: Run, tmp_path: Path, break_it: Callable[[Path], Any], words: list[str]
) -> None:
    model = write_model(tmp_path / "broken")
    break_it(model)
    check(finetune(model=model), *words)
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (put_nan, "model.layers.1.mlp.up_proj.weight"),
        (put_nan_into_a_norm, "model.layers.1.input_layernorm.weight"),
    ],
)
def test_weights_that_are_not_numbers(
    finetune: Run, tmp_path: Path, change: Callable[[Tensors], None], name: str
) -> None:
    model = write_model(tmp_path / "broken", change=change)
    check(finetune(model=model), name, "NaN")


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_token_beyond_the_vocabulary(finetune: Run, tmp_path: Path, split: str) -> None:
    """Told before anything is trained, wherever it is."""
    model = write_model(tmp_path / "small", words=40)
    rows = {"train": counting(30), "valid": counting(2), "test": counting(2)}
    data = write_data(tmp_path / "data", **(rows | {split: [*rows[split], [3, 35, 4]]}))
    outcome = finetune("--train", "--test", model=model, data=data)
    check(outcome, "id 35", "vocabulary size 31")
    assert "Iter" not in outcome.out and not (tmp_path / "adapters").exists()


def test_a_broken_test_set_stops_only_who_asks_for_it(finetune: Run, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=counting(3), valid=counting(2))
    (data / "test.jsonl").write_text("{bad\n")
    check(finetune("--train", "--test", data=data), "test.jsonl:1: not valid JSON")
    assert finetune(data=data).status == 0
    write_data(data, test=counting(2))
    (data / "train.jsonl").write_text("{bad\n")
    assert finetune("--test", data=data).status == 0


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", ["train.jsonl has no records"]),
        ('{"text": ""}\n', ["train.jsonl:1", "1 token(s)", "needs"]),
        ('{"text": "w3 w4"}\n{"text: 3}\n', ["train.jsonl:2: not valid JSON"]),
        ('{"text": "w3 \\ud800 w4"}\n', ["train.jsonl:1", "not valid Unicode"]),
        ('{"messages": []}\n', ["'messages' are not read yet"]),
        ('{"prompt": "a", "completion": "b"}\n', ["'prompt' are not read yet"]),
    ],
)
def test_data_that_cannot_be_trained_on(
    finetune: Run, tmp_path: Path, lines: str, words: list[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(lines)
    check(finetune(data=data), *words)


def test_data_that_is_missing(finetune: Run, tmp_path: Path, data: Path) -> None:
    check(finetune(data=tmp_path / "nowhere"), "no data at", "nowhere")
    check(finetune("--test", data=tmp_path), "no adapter folder")
    empty = write_data(tmp_path / "no-test", train=sequences(2))
    check(finetune("--train", "--test", data=empty), "--test needs a test set", "test.jsonl")
    check(finetune("--train", "--test", data=None), "--test needs a test set", "--data")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": "nowhere"}, ["no model at nowhere"]),
        ({"rank": 0}, ["rank must be at least 1, not 0"]),
        ({"target_modules": "router"}, ["'router' does not exist", "self_attn.q_proj"]),
        ({"num_layers": 9}, ["9 layers", "has 3"]),
        ({"backend": "abacus"}, ["no backend is called 'abacus'", "numpy"]),
        ({"backend": "numpy:gpu"}, ["CPU only"]),
        ({"dtype": "float8"}, ["float8"]),
        ({"dropout": 1.0}, ["dropout must be in [0, 1)"]),
        ({"optimizer": "adafactor"}, ["'adafactor' is not supported", "adamw"]),
        ({"fine_tune_type": "dora"}, ["'dora' is not supported"]),
        ({"iters": 0}, ["--iters must be at least 1"]),
        ({"iters": "many"}, ["--iters", "invalid int value: 'many'"]),
        ({"batch_size": -1}, ["--batch-size must be at least 1"]),
        ({"num_layers": -7}, ["--num-layers must be -1 for all, or at least 1"]),
        ({"num_layers": 0}, ["--num-layers must be -1 for all, or at least 1"]),
        ({"val_batches": -5}, ["--val-batches must be -1 for all, or at least 0"]),
        ({"test_batches": 0}, ["--test-batches must be -1 for all, or at least 1"]),
        ({"learning_rate": "nan"}, ["--learning-rate"]),
        ({"learning_rate": -1}, ["--learning-rate"]),
        ({"grad_clip": 0}, ["gradient norm must be above 0"]),
        ({"warmup": -1}, ["warm-up"]),
        ({"apply": "block", "grad_clip": 1}, ["apply block cannot clip"]),
        ({"apply": "block", "grad_accumulation_steps": 2}, ["apply block cannot accumulate"]),
        ({"method": "magic"}, ["--method", "'magic'", "mesp"]),
        ({"method": "mebp", "backend": "numpy"}, ["mebp", "numpy", "automatic differentiation"]),
        ({"head": "dense", "backend": "numpy"}, ["dense head", "numpy"]),
        ({"method": "mezo", "mezo_epsilon": 0}, ["--mezo-epsilon", "above 0"]),
        ({"resume_adapter_file": "nowhere.safetensors"}, ["no adapter at nowhere"]),
        ({"rank": 10**30}, ["rank must be at most 65536"]),
        ({"dropout": 0.9999999999}, ["dropout must be in [0, 1)"]),
        ({"config": "nowhere.yaml"}, ["cannot read nowhere.yaml"]),
        ({"no_such_flag": 1}, ["unrecognized arguments: --no-such-flag"]),
    ],
)
def test_options_that_make_no_sense(
    finetune: Run, tmp_path: Path, flags: dict[str, Any], words: list[str]
) -> None:
    check(finetune(**flags), *words)
    assert not (tmp_path / "adapters").exists()


def test_masking_prompts_of_text(finetune: Run) -> None:
    check(finetune("--mask-prompt"), "--mask-prompt needs prompts")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- a\n- b\n", ["must hold options"]),
        ("iters: [1", ["not valid YAML"]),
        ("iters: soon\n", ["iters must be of type int", "'soon'"]),
        ("iters: 2.5\n", ["iters must be of type int"]),
        ("train: yes please\n", ["train must be of type bool"]),
        ("hf_dataset: {path: x}\n", ["hf_dataset is not an option"]),
        ("lora_parameters: {rank: 4, scale: 2.0, alpha: 8.0}\n", ["scale or alpha, not both"]),
        ("lora_parameters: {size: 4}\n", ["lora_parameters.size is not an option"]),
        ("lora_parameters: 8\n", ["must hold options"]),
        ("lr_schedule: {name: step_decay, arguments: [1]}\n", ["cosine_decay"]),
        ("lr_schedule: {name: cosine_decay, arguments: 3}\n", ["needs arguments"]),
        ("apply: never\n", ["apply must be one of step, block"]),
        ("lora_parameters: {keys: [1]}\n", ["keys must be of type list of names", "[1]"]),
        ("target_modules: [1]\n", ["target_modules must be of type list of names"]),
        ("lr_schedule: {name: cosine_decay, arguments: [1e-3, .inf]}\n", ["arguments must be"]),
        ("lr_schedule: {name: cosine_decay, arguments: [1e-3, .nan]}\n", ["arguments must be"]),
        ("lr_schedule: {name: cosine_decay, arguments: [1e-3, 2.5]}\n", ["arguments must be"]),
        ("lr_schedule: {name: cosine_decay, arguments: [1e-3, 5, .nan]}\n", ["last learning rate"]),
        ("seed: " + "9" * 5000 + "\n", ["not valid YAML", "5000 digits"]),
        ("optimizer_config: {adamw: {nesterov: true}}\n", ["no option 'nesterov'"]),
        ("optimizer_config: {adamw: {betas: 0.9}}\n", ["betas must be two numbers"]),
    ],
)
def test_configuration_files_that_make_no_sense(
    finetune: Run, tmp_path: Path, content: str, words: list[str]
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    flags = {"config": path, "iters": None if "iters" in content else 1}
    check(finetune(**flags), *words)


def test_folders_and_files_that_cannot_be_written(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was opened before the output folder was checked")

    monkeypatch.setattr("mesp_core.cli.job.load_model", computed)
    (tmp_path / "file").write_text("x")
    check(finetune(adapter_path=tmp_path / "file"), "cannot write to the folder", "file")
    check(finetune(adapter_path=tmp_path / "file" / "below"), "cannot write to the folder")
    check(finetune(json=tmp_path), "it is a folder")
    check(finetune(json=tmp_path / "nowhere" / "r.json"), "no folder")
    check(finetune(json="/dev/full"), "not a regular file")


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json", "metrics.jsonl"])
def test_a_folder_where_a_file_must_go(finetune: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "adapters" / name).mkdir(parents=True)
    outcome = finetune()
    check(outcome, name, "not a regular file")
    assert "Sample" not in outcome.out
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [name]


def test_a_report_overwrites_nothing_but_a_report(
    mesp: Run, finetune: Run, tiny: Path, tmp_path: Path
) -> None:
    config = (tiny / "config.json").read_bytes()
    check(finetune(json=tiny / "config.json"), "is not a report of mesp")
    check(mesp("generate", "--prompt", "w3", "--json", tiny / "model.safetensors"), "not a report")
    assert (tiny / "config.json").read_bytes() == config
    check(finetune(json=tmp_path / "adapters" / "adapter_config.json"), "no folder")
    (tmp_path / "adapters").mkdir()
    check(finetune(json=tmp_path / "adapters" / "adapter_config.json"), "is a file of the adapter")
    (tmp_path / "r.json").touch()
    for _ in range(2):
        assert finetune(json=tmp_path / "r.json", iters=1).status == 0


def test_a_full_disk_while_saving(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "adapters"))

    monkeypatch.setattr("mesp_core.cli.finetune.save_adapter", full)
    outcome = finetune()
    assert outcome.status == 2 and "Traceback" not in outcome.err
    assert "No space left on device" in outcome.err.splitlines()[-1]


def test_an_adapter_that_is_there_survives_a_failed_run(finetune: Run, tmp_path: Path) -> None:
    assert finetune().status == 0
    folder = tmp_path / "adapters"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    broken = write_model(tmp_path / "broken", change=put_nan)
    check(finetune(model=broken), "NaN")
    check(finetune(rank=0), "rank")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_nothing_to_save_when_every_step_is_skipped(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesp_core.training.first_not_finite", lambda gradients, backend: "g")
    outcome = finetune(iters=3)
    assert outcome.status == 2 and not (tmp_path / "adapters" / "adapters.safetensors").exists()
    assert "nothing was trained or saved" in outcome.err.splitlines()[-1]
    assert outcome.err.count("is not finite: no update") == 1


def test_going_on_with_other_shapes(finetune: Run, tmp_path: Path) -> None:
    assert finetune(rank=2).status == 0
    resume = tmp_path / "adapters"
    flags = {"resume_adapter_file": resume, "adapter_path": tmp_path / "more"}
    check(finetune(rank=3, **flags), "rank 3 asked for", "has 2")
    check(finetune(target_modules="q_proj", **flags), "targets")
    (tmp_path / "adapters" / "adapter_config.json").unlink()
    flags["resume_adapter_file"] = resume / "adapters.safetensors"
    check(finetune(rank=3, **flags), "has shape", "lora_a")
    check(finetune(rank=2, target_modules="q_proj", **flags), "is not a parameter")
    assert finetune(rank=2, **flags).status == 0


def without_unknown_word(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "none"
    path.write_text(json.dumps(content))


def set_tokenizer_config(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (without_unknown_word, ["cannot encode the text", "UNK"]),
        (set_tokenizer_config(eos_token="\ud800"), ["eos_token is not valid Unicode"]),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), ["not UTF-8"]),
        (set_config(rope_theta=10**400), ["rope_theta must be a positive number"]),
        (set_config(rms_norm_eps=10**400), ["rms_norm_eps must be a positive number"]),
        (set_config(partial_rotary_factor=1e308), ["partial_rotary_factor must be at most 1"]),
        (set_config(layer_types=[["x"]] * 3), ["layer type ['x'] is not supported"]),
    ],
)
def test_odd_values_in_the_files_of_a_model(
    mesp: Run, tmp_path: Path, break_it: Callable[[Path], Any], words: list[str]
) -> None:
    model = write_model(tmp_path / "broken")
    break_it(model)
    check(mesp("generate", "--model", model, "--backend", "numpy", "--prompt", "w3 house"), *words)


def test_a_chat_template_of_an_odd_shape_is_passed_over(mesp: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "odd")
    set_tokenizer_config(chat_template=[{"name": []}, {"name": "default", "template": 3}])(model)
    arguments = ("--model", model, "--backend", "numpy", "--prompt", "w3", "--max-tokens", 1)
    assert mesp("generate", *arguments).status == 0


def test_a_prompt_that_is_not_unicode(mesp: Run, tiny: Path) -> None:
    check(
        mesp("generate", "--model", tiny, "--backend", "numpy", "--prompt", "w3 \udcff"),
        "not valid Unicode",
    )


def test_memory_that_runs_out(mesp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str) -> None:
        raise MemoryError("Unable to allocate 8 EiB")

    monkeypatch.setattr("mesp_core.cli.info.get_backend", full)
    check(mesp("info", "--backend", "numpy"), "out of memory: Unable to allocate 8 EiB")


def test_mistakes_of_the_other_commands(mesp: Run, tiny: Path, tmp_path: Path) -> None:
    check(mesp(), "give a command")
    check(mesp("fly"), "'fly'")
    check(mesp("generate", "--model", tiny), "--prompt")
    check(mesp("generate", "--model", tiny, "--backend", "numpy", "--prompt", ""), "no tokens")
    check(
        mesp("generate", "--model", tiny, "--prompt", "w3", "--adapter-path", tmp_path), "adapter"
    )
    check(mesp("export-base", tmp_path / "nowhere", tmp_path / "base"), "nowhere")
    check(mesp("export-base", tiny, tiny), "source itself")
    check(mesp("info", "--backend", "abacus"), "abacus")


def test_as_a_process_too(tiny: Path, tmp_path: Path) -> None:
    """Through the interpreter's own end: no traceback appears there either."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = ["finetune", "--model", str(tiny), "--rank", "0", "--adapter-path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mesp_core.cli.main", *command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "mesp: error: LoRA rank must be at least 1, not 0\n"


def test_a_long_text_is_not_lost(finetune: Run, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(text([3 + place % 20 for place in range(150)]))
    outcome = finetune(data=path, max_seq_length=16, iters=1, json=tmp_path / "r.json")
    assert outcome.status == 0, outcome.err
    assert "9 rows to train on, 1 to validate, of at most 16 tokens" in outcome.out
