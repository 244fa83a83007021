"""Settings of ``mesp finetune``: flags, then the YAML file, then defaults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mesp_core.adapters import FORMATS
from mesp_core.cli.arguments import DEFAULT_MODEL, add_json_argument, add_model_arguments
from mesp_core.cli.config_file import Kind, read_config
from mesp_core.errors import MespError, UnsupportedError
from mesp_core.methods import EPSILON, HEADS, METHODS
from mesp_core.optimizers import SGD, AdamW, Optimizer
from mesp_core.training import APPLY

#: As in mlx-lm, but for: all layers (its 16 suit the 7B models of its time), AdamW, and ten times
#: its learning rate, because its adapters multiply by scale 20 and ours by alpha / rank = 2.
_DEFAULTS: Mapping[str, Any] = {
    "model": DEFAULT_MODEL,
    "backend": "auto",
    "dtype": "auto",
    "residency": "streamed",
    "seed": 0,
    "train": False,
    "test": False,
    "fine_tune_type": "lora",
    "optimizer": "adamw",
    "mask_prompt": False,
    "num_layers": -1,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-4,
    "lr_schedule": "constant",
    "warmup": 0,
    "lr_decay": None,
    "lr_end": 0.0,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "grad_accumulation_steps": 1,
    "grad_clip": None,
    "grad_checkpoint": False,
    "resume_adapter_file": None,
    "adapter_path": "adapters",
    "adapter_format": "mlx-lm",
    "save_every": 100,
    "test_batches": 500,
    "max_seq_length": 2048,
    "method": "mesp",
    "head": None,
    "mezo_epsilon": EPSILON,
    "apply": "step",
}

#: MeZO is SGD in its paper: on an estimate this noisy, moments follow the noise.
_OF_METHOD: Mapping[str, Mapping[str, Any]] = {"mezo": {"optimizer": "sgd"}}

#: Without --data: a run on Python's documentation that ends in a few minutes on two cores.
_SHORT_RUN: Mapping[str, Any] = {
    "batch_size": 1,
    "iters": 60,
    "val_batches": -1,
    "learning_rate": 1e-3,
    "lr_schedule": "cosine",
    "warmup": 4,
    "steps_per_eval": 0,
    "max_seq_length": 256,
}

_LORA_KEYS = ("rank", "alpha", "scale", "dropout", "target_modules", "lora_dtype")

#: What makes each optimizer from a learning rate, and its options.
OPTIMIZERS: Mapping[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "adamw": (AdamW, ("betas", "eps", "weight_decay")),
    "adam": (partial(AdamW, weight_decay=0.0), ("betas", "eps")),
    "sgd": (SGD, ("momentum", "weight_decay")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag defaults to None, so that a configuration file can fill in what is not given."""
    add_model_arguments(parser, default=None)
    _add_data_arguments(parser)
    _add_training_arguments(parser)
    _add_adapter_arguments(parser)
    parser.add_argument("-c", "--config", metavar="YAML", help="options from a file; flags win")
    add_json_argument(parser)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        help=".txt file or folder of {train,valid,test}.jsonl with text records; "
        "default: Python's own documentation topics, and settings for a short run",
    )
    add(
        "--max-seq-length",
        type=int,
        help="longer texts are cut into rows (2048; 256 by default without --data)",
    )
    add("--batch-size", type=int, help="sequences in a batch (4; 1 without --data)")
    add(
        "--val-batches",
        type=int,
        help="batches to validate on, -1 for all (25; all without --data)",
    )
    add(
        "--test",
        action="store_true",
        default=None,
        help="evaluate on the test set; without --train, only that",
    )
    add("--test-batches", type=int, help="batches to test on, -1 for all (500)")
    add("--mask-prompt", action="store_true", default=None, help="not for text records")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--train", action="store_true", default=None, help="train (the default without --test)")
    add(
        "--method",
        choices=tuple(METHODS),
        help="how gradients are obtained: mesp (the default), mesp-store-h, mebp, autodiff, or "
        "mezo, an estimate from two forward passes",
    )
    add(
        "--head",
        choices=HEADS,
        help="whether the loss works in tiles or makes all logits (dense for mebp and autodiff, "
        "otherwise tiled)",
    )
    add("--mezo-epsilon", type=float, help=f"how far mezo steps ({EPSILON:g})")
    add("--iters", type=int, help="batches to train on (1000; 60 without --data)")
    add(
        "--optimizer",
        help="adamw (the default), adam (adamw without weight decay) or sgd (the default of mezo)",
    )
    add(
        "--learning-rate",
        type=float,
        help="1e-4; 1e-3 without --data. mlx-lm's 1e-5 goes with "
        "its scale of 20, where ours is alpha / rank = 2",
    )
    add(
        "--lr-schedule",
        choices=("constant", "cosine"),
        help="constant (the default; cosine without --data) or cosine",
    )
    add("--warmup", type=int, help="updates of linear warm-up (0; 4 without --data)")
    add("--grad-accumulation-steps", type=int, help="batches that share one update (1)")
    add("--grad-clip", type=float, help="largest global norm of the gradients (not clipped)")
    add(
        "--grad-checkpoint",
        action="store_true",
        default=None,
        help="accepted and without effect: MeSP always recomputes",
    )
    add(
        "--apply",
        choices=APPLY,
        help="step (the default): a step's gradients are held, all "
        "parameters are updated or none; block: each block at once, least memory",
    )
    add("--steps-per-report", type=int, help="iterations between reports (10)")
    add(
        "--steps-per-eval",
        type=int,
        help="iterations between validations, 0: only before and after (200; 0 without --data)",
    )


def _add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("adapter").add_argument
    add("--fine-tune-type", help="lora, the only one here")
    add("--rank", type=int, help="rank of the LoRA factors (8)")
    add("--alpha", type=float, help="the adapter adds alpha / rank · (xA)B (16)")
    add("--dropout", type=float, help="on the low-rank path in training (0)")
    add(
        "--target-modules",
        nargs="+",
        metavar="NAME",
        help="q_proj k_proj v_proj o_proj gate_proj up_proj down_proj (all)",
    )
    add("--lora-dtype", help="float32 (the default), bfloat16 or float64")
    add("--num-layers", type=int, help="blocks to adapt, counted from the last; -1: all (-1)")
    add("--adapter-path", help="folder to save in (adapters)")
    add("--adapter-format", choices=FORMATS, help="mlx-lm (the default) or peft")
    add("--save-every", type=int, help="iterations between numbered checkpoints, 0: none (100)")
    add(
        "--resume-adapter-file",
        metavar="PATH",
        help="adapter file or folder to start from; weights only: the optimizer starts anew",
    )


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """The options with everything filled in, checked as far as that needs no model.

    Adds ``optimizer_config`` and ``lora``: keywords of the optimizer and of LoraConfig (or
    ``scale``), only those that were asked for; and ``lr_decay`` and ``lr_end``, which only a file
    can set: updates of the cosine (None: the whole run after the warm-up) and its last rate.
    Raises MespError for what cannot be done.
    """
    values = {key: value for key, value in vars(options).items() if value is not None}
    if options.config is not None:
        for key, value in read_config(options.config, _kinds()).items():
            values.setdefault(key, value)
    short = {} if "data" in values else _SHORT_RUN
    of_method = _OF_METHOD.get(values.get("method", "mesp"), {})
    values = {"data": None, "json": None, **_DEFAULTS, **short, **of_method, **values}
    values["lora"] = {key: values.pop(key) for key in _LORA_KEYS if key in values}
    if "alpha" in values["lora"]:
        # Together with a file's scale it can only be a flag, and flags win.
        values["lora"].pop("scale", None)
    completed = argparse.Namespace(**values)
    _check(completed)
    completed.optimizer_config = _optimizer_config(
        values.get("optimizer_config", {}), completed.optimizer
    )
    return completed


def _kinds() -> dict[str, Kind]:
    """How each option's value in a file is read: by its flag's type and choices."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    kinds: dict[str, Kind] = {}
    for action in parser._actions:
        if action.dest not in ("config", "json"):
            type_ = bool if action.nargs == 0 else list if action.nargs == "+" else action.type
            kinds[action.dest] = Kind(type_ or str, tuple(action.choices or ()))
    return kinds


def _optimizer_config(given: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    """The chosen optimizer's part of ``optimizer_config``."""
    config = given.get(chosen) or {}
    if not isinstance(config, Mapping):
        raise MespError(f"optimizer_config of {chosen} must hold options, not {config!r}")
    read = {}
    for key, value in config.items():
        if key not in OPTIMIZERS[chosen][1]:
            raise UnsupportedError(f"optimizer_config of {chosen} has no option {key!r} here")
        where = f"optimizer_config.{key}"
        if key != "betas":
            read[key] = Kind(float).read(value, where)
            continue
        if not isinstance(value, list) or len(value) != 2:
            raise MespError(f"{where} must be two numbers, not {value!r}")
        read[key] = tuple(Kind(float).read(beta, where) for beta in value)
    return read


def _check(options: argparse.Namespace) -> None:
    if options.fine_tune_type != "lora":
        raise UnsupportedError(
            f"fine-tune type {options.fine_tune_type!r} is not supported; use lora"
        )
    if options.optimizer not in OPTIMIZERS:
        raise UnsupportedError(
            f"optimizer {options.optimizer!r} is not supported; use one of {', '.join(OPTIMIZERS)}"
        )
    if options.mask_prompt:
        raise UnsupportedError("--mask-prompt needs prompts in the data; text records have none")
    for name in ("batch_size", "iters", "max_seq_length", "grad_accumulation_steps"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise MespError(f"--{flag} must be at least 1, not {getattr(options, name)}")
    for name, least in (("num_layers", 1), ("val_batches", 0), ("test_batches", 1)):
        if getattr(options, name) < least and getattr(options, name) != -1:
            flag = name.replace("_", "-")
            raise MespError(
                f"--{flag} must be -1 for all, or at least {least}, not {getattr(options, name)}"
            )
    if not 0.0 < options.mezo_epsilon < math.inf:
        raise MespError(f"--mezo-epsilon must be above 0, not {options.mezo_epsilon}")
    if not (math.isfinite(options.learning_rate) and options.learning_rate >= 0.0):
        raise MespError(f"--learning-rate must be 0 or more, not {options.learning_rate}")
