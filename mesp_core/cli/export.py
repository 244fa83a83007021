"""``mesp export-base``: a base model as a Hugging Face folder."""

from __future__ import annotations

import argparse
from typing import Any

from mesp_core.export import export_base


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "export-base",
        help="write a base model as a folder that mlx-lm and transformers open",
        description="Writes the model, dequantised, as a Hugging Face folder, so that an adapter "
        "trained on a GGUF file can be used with mlx-lm and PEFT.",
    )
    parser.add_argument("model", help="folder, .gguf file, or smollm2-135m")
    parser.add_argument("folder", help="where to write; made when missing")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32 (the default: exact), bfloat16 or float16",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model that is already in the folder"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    folder = export_base(options.model, options.folder, options.dtype, overwrite=options.overwrite)
    print(f"Wrote {options.model} to {folder} in {options.dtype}.")
    return 0
