"""Argument parsing whose every complaint is one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mesp_core.errors import MespError

DEFAULT_MODEL = "smollm2-135m"


class Parser(argparse.ArgumentParser):
    """Raises MespError instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise MespError(f"{message} (see {self.prog} --help)")


def add_model_arguments(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """--model, --backend, --dtype, --residency, --seed. default: None where a configuration file
    may still fill the values in."""
    known = default is not None
    parser.add_argument(
        "--model",
        default=default,
        help="Hugging Face or MLX folder, .gguf file, or smollm2-135m (the default)",
    )
    parser.add_argument(
        "--backend",
        default="auto" if known else None,
        help="auto (the default: a fast one of those installed), mlx, jax, torch, numpy; a device "
        "can follow: torch:cuda",
    )
    parser.add_argument(
        "--dtype",
        default="auto" if known else None,
        help="of the activations: auto (the checkpoint's on a GPU, float32 on a CPU), float32, "
        "bfloat16, float16, float64",
    )
    parser.add_argument(
        "--residency",
        default="streamed" if known else None,
        choices=("streamed", "resident"),
        help="streamed (the default) reads weights from the mapped file when they are needed, "
        "resident holds them in memory",
    )
    parser.add_argument("--seed", type=int, default=0 if known else None, help="default 0")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the results as one JSON object")
